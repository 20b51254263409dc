"""What those who run a model's forwards say of recording them as CUDA graphs."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

_ALONE: ContextVar[bool] = ContextVar("alone", default=True)
_EARLY: ContextVar[bool] = ContextVar("early", default=False)


@contextmanager
def launched_one_by_one() -> Generator[None]:
    """Have forwards of now neither recorded nor replayed, as others have a part in them."""
    before = _ALONE.set(False)
    try:
        yield
    finally:
        _ALONE.reset(before)


def is_alone() -> bool:
    """Whether the present forward may be recorded, for nobody else has a part in it."""
    return _ALONE.get()


@contextmanager
def recorded_early() -> Generator[None]:
    """Have forwards of now recorded as soon as they are seen to gain, for it is to be measured what they take then."""
    before = _EARLY.set(True)
    try:
        yield
    finally:
        _EARLY.reset(before)


def is_early() -> bool:
    """Whether the present forward is recorded without waiting for more of its kind."""
    return _EARLY.get()
