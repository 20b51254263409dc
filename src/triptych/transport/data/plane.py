"""Opens the data plane of an instance."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import torch

from triptych.config import LOOPBACK, TransferConfig
from triptych.errors import ConfigError
from triptych.ids import Epoch, InstanceId
from triptych.transport.adapters import active_adapters, peer_memory
from triptych.transport.data import engine
from triptych.transport.data.carriers import WAYS
from triptych.transport.data.gpu_memory import CudaMemory, GpuMemory
from triptych.transport.data.local import LocalPlane
from triptych.transport.data.pooled import PooledPlane
from triptych.transport.data.protocol import DataPlane
from triptych.transport.data.settings import EngineSettings, engine_settings

_log = logging.getLogger(__name__)


def open_plane(config: TransferConfig, instance: InstanceId, epoch: Epoch, device: str) -> DataPlane:
    """The data plane that ``config`` asks for, for one life (``epoch``) of an instance that computes on ``device``.

    ``local`` hands over inside the process only. ``shm`` and ``mooncake`` force that plane, also for a handoff to
    oneself. ``auto`` reads its own pool directly, other processes of the host by shared memory, and other hosts by
    Mooncake, whose engine is started only when peers of other hosts could reach ``hostname``. With a GPU and a pool
    there, ``auto`` takes ``cuda-ipc`` before all others, and so does ``cuda-ipc``, which has shared memory besides; and
    ``auto`` and ``mooncake`` take ``gpudirect`` before ``mooncake`` where its engine runs over RDMA. ``gpudirect`` does
    over TCP too.

    Raises `ConfigError` when the plane cannot be had.
    """
    if config.kind == "local":
        return LocalPlane(instance=instance, epoch=epoch, pool_bytes=config.pool_bytes)
    where = torch.device(device)
    gpu = where if where.type == "cuda" else None
    shared = CudaMemory(where) if gpu is not None and config.gpu_pool_bytes else None
    if config.kind in ("cuda-ipc", "gpudirect") and shared is None:
        raise ConfigError(f"disagg-transfer={config.kind!r} needs a GPU and a disagg-transfer-gpu-pool-size above 0")
    between_hosts = settings_between_hosts(config, shared)
    return PooledPlane(config, instance, epoch, gpu=gpu, shared=shared, between_hosts=between_hosts)


def settings_between_hosts(config: TransferConfig, shared: GpuMemory | None) -> EngineSettings | None:
    """How the Mooncake engine is to be started, also for GPU memory that is to be ``shared``; None when it is not to
    be."""
    if "mooncake" not in WAYS[config.kind]:
        return None
    settings = engine_settings(config, os.environ)
    if settings.transport == "rdma" and shared is not None and peer_memory() is None:
        settings = replace(settings, dma_buf=shared.exports_dma_buf())
    if config.kind != "auto" or config.ib_device is not None:
        return settings
    if settings.hostname in LOOPBACK:
        return None
    try:
        engine.load(settings)
    except ConfigError as error:
        _log.warning("only peers of this host can pull from %s: %s", settings.hostname, error)
        return None
    if settings.transport == "tcp" and (adapters := active_adapters()):
        _log.info("tensors go to other hosts by TCP: RDMA takes --disagg-ib-device, here %s", ",".join(adapters))
    return settings
