"""Compiled graphs: where they are kept between lives of a process, and how a compilation is noticed.

A server compiles at start-up (`--warmup`) and never again as long as requests have a declared shape. When one has not,
the step that compiles takes minutes, so that must be seen: every compilation is counted in the `Tally`.
"""

# torch has no public way to hear of compilations.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import Final

from triptych.accel.tally import Tally
from triptych.errors import ConfigError

_FOLDERS: Final = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def default_folder() -> Path:
    """Where graphs and measurements are kept when the operator says nothing: below the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "triptych"


def keep_graphs_in(folder: Path) -> None:
    """Have compiled graphs and kernels of this process kept in ``folder`` and found there again.

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


def count_compilations(tally: Tally) -> None:
    """Count every compilation of this process, on whatever thread, in ``tally`` from now on."""
    from torch._dynamo.callback import callback_handler

    begun = 0.0

    def start(_: object) -> None:
        nonlocal begun
        begun = time.perf_counter()

    def end(_: object) -> None:
        tally.compilations += 1
        tally.compile_seconds += time.perf_counter() - begun

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
