"""From an exception to what the client is told: one request's failure, with its blame and whether to try again."""

from __future__ import annotations

import logging

from triptych.accel.shortage import free_memory, is_out_of_memory
from triptych.errors import BadRequest, StageError, TooLarge, TransferError, TriptychError
from triptych.ids import Role
from triptych.pipeline.guard import stage_error
from triptych.wire.messages import ErrorInfo, Lease, StageFailed, Stopped
from triptych.worker.jobs import Identity

log = logging.getLogger(__name__)


def error_info(role: Role, error: Exception) -> ErrorInfo:
    """What to tell about ``error``: its own words if it is one of ours, else its type and first line, or what would
    help against a want of memory, which is freed."""
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
            return error_info(role, stage_error(role, error))


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


def given_up(error: Exception) -> str:
    """Why something that no request waits for is not done, for the log; the memory that it filled is freed."""
    if isinstance(error, TriptychError):
        return error.message
    words = f"{type(error).__name__}: {error}"
    if is_out_of_memory(error):
        free_memory(error)
    else:
        log.error("not foreseen: %s", words, exc_info=error)
    return words
