"""What those who run a model's forwards say of recording them as CUDA graphs."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

_ALONE: ContextVar[bool] = ContextVar("alone", default=True)
_EARLY: ContextVar[bool] = ContextVar("early", default=False)


@contextmanager
def _saying(variable: ContextVar[bool], value: bool) -> Generator[None]:
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


def launched_one_by_one() -> AbstractContextManager[None]:
    """Have forwards of now neither recorded nor replayed, as others have a part in them."""
    return _saying(_ALONE, False)


def is_alone() -> bool:
    """Whether the present forward may be recorded, for nobody else has a part in it."""
    return _ALONE.get()


def recorded_early() -> AbstractContextManager[None]:
    """Have forwards of now recorded as soon as they are seen to gain, for it is to be measured what they take then."""
    return _saying(_EARLY, True)


def is_early() -> bool:
    """Whether the present forward is recorded without waiting for more of its kind."""
    return _EARLY.get()
