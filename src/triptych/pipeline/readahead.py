"""Weights on their way from the disk into the system's cache while a process still builds what they go to."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import psutil

from triptych.pipeline.variants import weight_files

log = logging.getLogger(__name__)

_PART: Final = 64 << 20
"""Bytes that are asked for at a time."""
_SHARE: Final = 0.5
"""Of the memory that is available; more than this would push out what was read first."""


def read_ahead(folder: Path, names: Iterable[str]) -> threading.Thread | None:
    """Have the system read the safetensors files of components ``names`` of ``folder``, in that order; None where there
    are none, or more than memory has room for. Returns at once, and what it does costs no memory of this process."""
    files = [file for name in names for file in weight_files(folder / name)]
    nbytes = sum(file.stat().st_size for file in files)
    if not files or nbytes > _SHARE * psutil.virtual_memory().available:
        return None
    thread = threading.Thread(target=_read, args=(files, nbytes), name="read-ahead", daemon=True)
    thread.start()
    return thread


def _read(files: list[Path], nbytes: int) -> None:
    begun = time.perf_counter()
    for file in files:
        try:
            with file.open("rb", buffering=0) as opened:
                for offset in range(0, file.stat().st_size, _PART):
                    os.posix_fadvise(opened.fileno(), offset, _PART, os.POSIX_FADV_WILLNEED)
        except OSError as error:  # whoever loads the file will say so
            log.debug("%s is not read ahead: %s", file, error)
    log.debug("asked for %d bytes of weights in %.2f s", nbytes, time.perf_counter() - begun)
