"""Which carriers a pooled plane has, and what several of them share: the pool in GPU memory and the engine."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
from typing import Final

from triptych.config import TransferConfig, TransferKind
from triptych.errors import ConfigError
from triptych.ids import Epoch
from triptych.transport.adapters import gpu_reach
from triptych.transport.data.carrier import Carrier, GpuCarrier, HostCarrier
from triptych.transport.data.chunked import Landing
from triptych.transport.data.cuda_ipc import CudaIpcCarrier
from triptych.transport.data.engine import Engine
from triptych.transport.data.gpu_memory import GpuMemory
from triptych.transport.data.gpu_pool import GpuPool
from triptych.transport.data.gpudirect import GpuDirectCarrier
from triptych.transport.data.mooncake import MooncakeCarrier
from triptych.transport.data.own import OwnCarrier
from triptych.transport.data.pool import Pool
from triptych.transport.data.settings import EngineSettings
from triptych.transport.data.shm import Segment, ShmCarrier

WAYS: Final[Mapping[TransferKind, tuple[str, ...]]] = {
    "auto": ("cuda-ipc", "local", "shm", "gpudirect", "mooncake"),
    "shm": ("shm",),
    "cuda-ipc": ("cuda-ipc", "shm"),
    "gpudirect": ("gpudirect", "mooncake"),
    "mooncake": ("gpudirect", "mooncake"),
}
"""Best first, those of one host before those between hosts; without what a way needs the plane goes without it."""

_log = logging.getLogger(__name__)


class Carriers:
    """The ways of one plane over ``segment``, of which ``pool`` keeps the books under ``lock``.

    With ``shared`` the plane has a pool in that GPU memory, with ``between_hosts`` an engine of these settings. Raises
    `ConfigError` when they cannot be had.
    """

    def __init__(
        self,
        config: TransferConfig,
        epoch: Epoch,
        *,
        pool: Pool,
        lock: threading.Lock,
        segment: Segment,
        shared: GpuMemory | None,
        between_hosts: EngineSettings | None,
    ) -> None:
        self.all: list[Carrier] = []
        """Best first."""
        self.of_gpu: list[GpuCarrier] = []
        self.of_host: list[HostCarrier] = []
        self.gpu_pool: GpuPool | None = None
        self._engine: Engine | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            if between_hosts is not None:
                self._engine = Engine(between_hosts, segment.memory)
            if shared is not None:
                self.gpu_pool = self._open_gpu_pool(shared, config, segment, between_hosts)
            for way in WAYS[config.kind]:
                match way:
                    case "cuda-ipc" if self.gpu_pool is not None:
                        self._add_of_gpu(CudaIpcCarrier(self.gpu_pool))
                    case "gpudirect" if self._engine is not None and self.gpu_pool and self.gpu_pool.registered:
                        self._add_of_gpu(GpuDirectCarrier(self._engine, self.gpu_pool))
                    case "local":
                        self._add_of_host(OwnCarrier(pool, lock, segment, epoch))
                    case "shm":
                        self._add_of_host(ShmCarrier(segment))
                    case "mooncake" if self._engine is not None:
                        landing = Landing(pool, lock, segment.memory.data_ptr())
                        self._add_of_host(MooncakeCarrier(self._engine, landing, segment))
                    case _:
                        pass
            undo.pop_all()

    def _add_of_gpu(self, carrier: GpuCarrier) -> None:
        self.all.append(carrier)
        self.of_gpu.append(carrier)

    def _add_of_host(self, carrier: HostCarrier) -> None:
        self.all.append(carrier)
        self.of_host.append(carrier)

    def _open_gpu_pool(
        self, memory: GpuMemory, config: TransferConfig, segment: Segment, settings: EngineSettings | None
    ) -> GpuPool | None:
        """The pool in GPU memory, if any of the plane's ways uses one."""
        ways = WAYS[config.kind]
        direct = (
            "gpudirect" in ways
            and settings is not None
            and (settings.transport == "rdma" or config.kind == "gpudirect")  # by TCP host memory is faster
        )
        if not direct and "cuda-ipc" not in ways:
            return None
        register = self._engine.register if self._engine is not None and direct else None
        pool = GpuPool(memory, config.gpu_pool_bytes, segment, register)
        if pool.registered or not direct:
            return pool
        assert settings is not None
        why = gpu_reach(dma_buf=settings.dma_buf).found if settings.transport == "rdma" else "it takes none"
        refused = f"Mooncake cannot register GPU memory over {settings.transport}: {why}"
        if config.kind == "gpudirect":
            pool.close()
            raise ConfigError(f"disagg-transfer='gpudirect': {refused}")
        _log.warning("%s; handoffs between hosts go through host memory", refused)
        if "cuda-ipc" in ways:
            return pool
        pool.close()
        return None

    def close(self) -> None:
        """Let go of everything. Memory that a transfer may still write to stays, until the process ends."""
        for carrier in self.all:
            carrier.close()
        drained = self._engine is None or self._engine.close()
        if self.gpu_pool is not None and (drained or not self.gpu_pool.registered):
            self.gpu_pool.close()
