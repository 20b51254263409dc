"""What surrounds every piece of model code: no gradients, and errors that say whose fault they are."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from triptych.errors import StageError, TriptychError
from triptych.ids import Role

_ADVICE = {
    Role.ENCODER: "shorten the prompt (max_sequence_length) or give the encoder a larger device",
    Role.DENOISER: "lower height, width, num_frames or n, run fewer requests at once, or give it a larger device",
    Role.DECODER: "lower height, width, num_frames or n, or give the decoder a larger device",
}


@contextmanager
def guarded(role: Role) -> Iterator[None]:
    """Run model code of ``role``: gradients off in this thread for good, foreign exceptions as `StageError`.

    Grad mode belongs to the thread, so it is switched off here and not scoped: interleaved runs would restore each
    other's. Retryable is what another device, or a later moment, may do better.
    """
    torch.set_grad_enabled(False)
    try:
        yield
    except TriptychError:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        message = f"the {role} ran out of memory: {_ADVICE[role]} ({_first_line(error)})"
        _drop_frames(error)
        _free_memory()
        raise StageError(message, retryable=True) from None
    except (torch.AcceleratorError, OSError) as error:
        raise StageError(f"the {role}'s device failed: {_first_line(error)}", retryable=True) from error
    except Exception as error:
        raise StageError(f"the {role} failed: {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:500]


def _drop_frames(error: BaseException) -> None:
    """Frames of the traceback hold the activations that filled the memory."""
    error.__traceback__ = None
    error.__context__ = None


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
