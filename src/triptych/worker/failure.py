"""From an exception to what the client is told: one request's failure, with its blame and whether to try again."""

from __future__ import annotations

import logging
from typing import Final

from triptych.errors import BadRequest, StageError, TooLarge, TransferError, TriptychError
from triptych.ids import Role
from triptych.wire.messages import ErrorInfo, Lease, StageFailed, Stopped
from triptych.worker.jobs import Identity

log = logging.getLogger(__name__)

_SHOWN: Final = 500
"""Characters of a foreign exception's text that a client gets to see."""


def error_info(role: Role, error: Exception) -> ErrorInfo:
    """What to tell about ``error``: its own words if it is one of ours, its type and first line otherwise."""
    match error:
        case BadRequest():
            return ErrorInfo(code=error.error_code, message=error.message, blame="caller")
        case StageError():
            return ErrorInfo(code=error.code, message=error.message, blame=error.blame.value, retryable=error.retryable)
        case TooLarge():
            return ErrorInfo(code=error.code, message=error.message, blame=error.blame.value)
        case TransferError():
            return ErrorInfo(code=error.code, message=error.message, blame=error.blame.value, retryable=True)
        case TriptychError():
            return ErrorInfo(code=error.code, message=error.message, blame=error.blame.value)
        case _:
            return ErrorInfo(
                code="stage_failed",
                message=f"the {role} failed: {type(error).__name__}: {_first_line(error)}",
                blame="instance",
            )


def failed(identity: Identity, lease: Lease, error: Exception) -> StageFailed:
    """The outcome of a lease that ended in ``error``; where foreign code is behind it, its traceback is logged."""
    if not isinstance(error, TriptychError) or error.__cause__ is not None:
        log.error("the %s stage of %s failed", lease.role, lease.request, exc_info=error)
    return StageFailed(
        instance=identity.instance,
        epoch=identity.epoch,
        server_epoch=None,
        lease=lease,
        error=error_info(lease.role, error),
    )


def stopped(identity: Identity, lease: Lease) -> Stopped:
    """The outcome of a lease that was cancelled."""
    return Stopped(instance=identity.instance, epoch=identity.epoch, server_epoch=None, lease=lease)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:_SHOWN] if text else "no further words"
