"""What surrounds every piece of model code: no gradients, and errors that say whose fault they are."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from triptych.accel.shortage import free_memory, is_out_of_memory
from triptych.errors import OutOfMemory, StageError, TriptychError
from triptych.ids import Role

_ADVICE = {
    Role.ENCODER: "lower max_sequence_length, or have the encoder started with --offload or on a larger device",
    Role.DENOISER: "lower height, width, num_frames or n, or have the denoiser started with --offload, with fewer "
    "--max-running-requests or on a larger device",
    Role.DECODER: "lower height, width, num_frames or n, or have the decoder started with --vae-tiling, with --offload "
    "or on a larger device",
}


@contextmanager
def guarded(role: Role) -> Generator[None]:
    """Run model code of ``role``: gradients off in this thread for good, foreign exceptions as `StageError`.

    Grad mode belongs to the thread, so it is switched off here and not scoped: interleaved runs would restore each
    other's. Retryable is what another device, or a later moment, may do better.
    """
    torch.set_grad_enabled(False)
    try:
        yield
    except TriptychError:
        raise
    except Exception as error:
        told = stage_error(role, error)
        try:
            raise told from (None if isinstance(told, OutOfMemory) else error)
        finally:
            del told  # held by the frame that it is raised in, it would be kept, and all tensors of the request


def stage_error(role: Role, error: Exception) -> StageError:
    """What a foreign ``error`` in the stage of ``role`` is called. Where it was for want of memory, what filled that
    is let go."""
    if is_out_of_memory(error):
        message = f"the {role} ran out of memory: {_ADVICE[role]} ({_first_line(error)})"
        free_memory(error)
        return OutOfMemory(message, retryable=True)
    retryable = isinstance(error, (torch.AcceleratorError, OSError))
    return StageError(f"the {role} failed: {type(error).__name__}: {_first_line(error)}", retryable=retryable)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:500]
