"""Video autoencoders that keep the last frames of what they work on: what of that is let go when the work breaks off.

Diffusers' own clear it when they begin and when they are done. In between it is a part of every layer's output, more
than the finished video takes, and would stay on the device until the next video, which a process that has nothing to do
may wait long for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

_METHODS = ("encode", "decode")


def install(autoencoder: nn.Module) -> None:
    """Have ``autoencoder`` clear what it keeps whenever encoding or decoding ends in an exception; of one that keeps
    nothing, nothing is changed."""
    if callable(getattr(autoencoder, "clear_cache", None)):
        for name in _METHODS:
            setattr(autoencoder, name, _clearing(autoencoder, getattr(autoencoder, name)))


def _clearing(autoencoder: Any, compute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compute)
    def computed(*args: Any, **kwargs: Any) -> Any:
        try:
            return compute(*args, **kwargs)
        except BaseException:
            autoencoder.clear_cache()
            raise

    return computed
