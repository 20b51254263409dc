"""Typed errors: each names who is to blame and carries the HTTP status that a client should see."""

from __future__ import annotations

import enum
from typing import ClassVar


class Blame(enum.StrEnum):
    """Whose fault an error is: the caller's request, the instance that ran it, the operator's set-up, or ours."""

    CALLER = "caller"
    INSTANCE = "instance"
    OPERATOR = "operator"
    US = "us"


class TriptychError(Exception):
    """Base of all errors that Triptych raises on purpose.

    ``message`` is fit to be shown to a client; ``code`` is a stable machine-readable word. ``detail`` is for logs and
    the operator alone: folders, addresses, what a library said. The error as text has both.
    """

    blame: ClassVar[Blame] = Blame.US
    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, detail: str = "") -> None:
        super().__init__(f"{message}: {detail}" if detail else message)
        self.message = message


class BadRequest(TriptychError):
    """A request that can never succeed as it stands. ``field`` is the client's own name for what is wrong."""

    blame = Blame.CALLER
    status = 400
    code = "invalid_value"

    def __init__(self, field: str | None, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.error_code = code or self.code


class NotFound(TriptychError):
    """Something named by the caller does not exist."""

    blame = Blame.CALLER
    status = 404
    code = "not_found"


class ConfigError(TriptychError):
    """The operator asked for something impossible; raised at launch, before anything is loaded."""

    blame = Blame.OPERATOR
    status = 500
    code = "config_error"


class ModelError(TriptychError):
    """A model folder that cannot be loaded or split; says which component and why."""

    blame = Blame.OPERATOR
    status = 500
    code = "model_error"


class ModelUnreachable(ModelError):
    """A model could not be fetched now, for reasons that may pass: trying again is worth it."""

    blame = Blame.US


class StageError(TriptychError):
    """A stage could not be computed. ``retryable`` says whether another attempt elsewhere may succeed."""

    blame = Blame.INSTANCE
    status = 500
    code = "stage_failed"

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class OutOfMemory(StageError):
    """A stage did not fit an instance's memory; the message names the sizes and what would help."""

    code = "out_of_memory"


class TransferError(TriptychError):
    """A handoff failed. ``drained`` says that the destination memory is certain to be written no more."""

    blame = Blame.INSTANCE
    status = 500
    code = "transfer_failed"

    def __init__(self, message: str, *, drained: bool = True) -> None:
        super().__init__(message)
        self.drained = drained


class PoolFull(TransferError):
    """No room in a pool at present; room may come when copies are released."""

    code = "pool_full"


class TooLarge(TransferError):
    """A copy that can never fit the pool; the message carries both sizes."""

    blame = Blame.CALLER
    status = 413
    code = "too_large"


class WireError(TriptychError):
    """A frame that is not a message of the protocol. Costs one counted drop, never the loop."""

    blame = Blame.CALLER
    status = 400
    code = "malformed_message"


class NotReady(TriptychError):
    """The server cannot take requests yet: no instance has told it what the model accepts."""

    blame = Blame.OPERATOR
    status = 503
    code = "not_ready"


class NotMovable(TriptychError):
    """A job that no other instance can go on with at present; the message says why."""

    blame = Blame.CALLER
    status = 409
    code = "not_movable"


class StorageFull(TriptychError):
    """There is no room to keep something; the detail names the folder."""

    blame = Blame.OPERATOR
    status = 507
    code = "storage_full"


class StorageFailed(TriptychError):
    """Something could not be kept, or read, for another reason than room; the message names the file.

    ``retryable`` says whether the same file may be kept another time.
    """

    blame = Blame.OPERATOR
    status = 500
    code = "storage_failed"

    def __init__(self, message: str, *, detail: str = "", retryable: bool = True) -> None:
        super().__init__(message, detail=detail)
        self.retryable = retryable
