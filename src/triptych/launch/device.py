"""Which device a process computes on when nobody said so."""

from __future__ import annotations

import logging

from triptych.config import DeviceType

log = logging.getLogger(__name__)


def detect_device() -> DeviceType:
    """``cuda`` where torch sees a GPU, else ``cpu``; logged, for it decides how fast everything is."""
    import torch

    if torch.cuda.is_available():
        log.info("computing on cuda: torch sees %d GPU(s)", torch.cuda.device_count())
        return "cuda"
    log.warning("computing on cpu: torch %s sees no GPU", torch.__version__)
    return "cpu"
