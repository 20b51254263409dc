"""Compiled graphs: where they are kept between lives of a process, how many there may be, and how one is noticed.

A server compiles at start-up (`--warmup`) a graph for each size that is declared, and one for all others when the
first of these comes. The step that compiles takes minutes, so that must be seen: every compilation is counted in the
`Tally`. There is a limit to the graphs; a size past it is computed as it would be without compiling, which is seen too,
and so is what the compiler fails at.
"""

# torch has no public way to hear of compilations.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import logging
import os
import stat
import time
import types
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Final

import torch

from triptych.accel.sizes import Sizes, is_rehearsing, shapes_of
from triptych.accel.tally import Tally
from triptych.accel.unused import forget_unused
from triptych.errors import ConfigError

log = logging.getLogger(__name__)

_MOST_GRAPHS: Final = 1024
"""Graphs of one function. A decoder has about twenty for each size of video, one for each kind of block and chunk."""
_FOLDERS: Final = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def default_folder() -> Path:
    """Where graphs and measurements are kept when the operator says nothing: below the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "triptych"


def keep_graphs_in(folder: Path) -> None:
    """Have compiled graphs and kernels of this process kept in ``folder`` and found there again by whoever starts next.

    To be called before the first compilation. What lies in the folder is executed, so it must belong to this user and
    be writable by nobody else; raises `ConfigError` otherwise.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError as error:
        raise ConfigError(f"cache-dir={str(folder)!r}: cannot be used: {error}") from error
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"cache-dir={str(folder)!r}: compiled code is run from there, so it must belong to the user who serves and "
            "be writable by nobody else (chmod 700)"
        )
    for variable, name in _FOLDERS.items():
        os.environ[variable] = str(folder / name)
    forget_unused(*(folder / name for name in _FOLDERS.values()), now=time.time())


def count_compilations(tally: Tally) -> None:
    """Count every compilation of this process, on whatever thread, in ``tally`` from now on."""
    from torch._dynamo.callback import callback_handler

    begun = 0.0

    def start(_: object) -> None:
        nonlocal begun
        begun = time.perf_counter()
        if tally.compiling is not None:
            tally.compiling()

    def end(_: object) -> None:
        tally.compilations += 1
        tally.compile_seconds += time.perf_counter() - begun

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)


def allow_many_graphs() -> None:
    """A server meets many shapes: let each have its graph, instead of eight in all.

    In force in the calling thread only, and in greenlets that have its context.
    """
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, _MOST_GRAPHS)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4 * _MOST_GRAPHS)


class Overflow:
    """What becomes of shapes that a compiled part of a model has no graph for and gets none."""

    def __init__(self, name: str, tally: Tally) -> None:
        self._name = name
        self._tally = tally
        self._failed = False

    def compiled(self, plain: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """``plain`` compiled, one whole graph for each kind of call; `options` are those of `torch.compile`.

        Its graphs are its own, whatever else is compiled of the same function.
        """
        return self.guarded(torch.compile(_copy(plain), fullgraph=True, **options), plain)

    def compiled_for(
        self, plain: Callable[..., Any], sizes: Sizes, *, others: bool = True, tuned: bool = False
    ) -> Callable[..., Any]:
        """``plain`` compiled: a graph for each of the ``sizes`` that were rehearsed, with pointwise kernels ``tuned``
        one by one or not, and none for ``others``, or one for all of them. Where nothing was rehearsed, the first
        size of those has one too, for it is not known yet what changes with the size."""
        own = self.compiled(plain, dynamic=False, options={"coordinate_descent_tuning": tuned})
        # To have it made for a change of whatever is a size takes three times as long.
        free = self.compiled(plain, dynamic=None) if others else plain
        rehearsed: set[Hashable] = set()

        def run(*args: Any, **kwargs: Any) -> Any:
            if sizes.rehearsed:
                if is_rehearsing():
                    rehearsed.add(shapes_of(args, kwargs))
                return own(*args, **kwargs)
            # Blocks see of a video how many tokens it has: upright or across, they are as many.
            return (own if shapes_of(args, kwargs) in rehearsed else free)(*args, **kwargs)

        return run

    def guarded(self, graph: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        """``graph``, which is ``plain`` compiled as a whole, or ``plain`` itself where there are too many graphs or the
        compiler fails."""
        from torch._dynamo.exc import (
            BackendCompilerFailed,
            FailOnRecompileLimitHit,
            InternalTorchDynamoError,
            Unsupported,
        )

        without: set[Hashable] = set()  # of this graph: what others fail at may have one here

        def run(*args: Any, **kwargs: Any) -> Any:
            if not without or shapes_of(args, kwargs) not in without:
                try:
                    return graph(*args, **kwargs)
                except FailOnRecompileLimitHit:
                    self._note(shapes_of(args, kwargs))
                except (BackendCompilerFailed, InternalTorchDynamoError, Unsupported) as error:
                    self._fail(error)
                without.add(shapes_of(args, kwargs))
            self._tally.uncompiled += 1
            return plain(*args, **kwargs)

        return run

    def _fail(self, error: Exception) -> None:
        """The compiler failed: of what is missing on this machine, or at this shape."""
        cause: BaseException = getattr(error, "inner_exception", None) or error
        if isinstance(cause, torch.OutOfMemoryError):  # it measures on the GPU; with room it would not fail
            raise cause
        if not self._failed:
            log.warning(
                "%s: the compiler fails, so what it fails at is computed without it, which is slower: %s",
                self._name,
                f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}",
            )
        self._failed = True

    def _note(self, shapes: Hashable) -> None:
        log.warning(
            "%s: has as many graphs as it may: what has the shapes %s is computed without one, which is slower",
            self._name,
            shapes,
        )


def _copy(function: Any) -> Any:
    """The same function with a code object of its own, which is what the compiler keeps graphs by: a call is computed
    by the first one that fits."""
    code, defaults, closure = function.__code__.replace(), function.__defaults__, function.__closure__
    made = types.FunctionType(code, function.__globals__, function.__name__, defaults, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    return made
