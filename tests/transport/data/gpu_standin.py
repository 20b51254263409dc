"""Planes with a pool in GPU memory: in a real GPU's where there is one, else in memory that stands in for it.

The stand-in is mapped by other processes like the real one, but copies are done at once: what depends on streams is
seen on a GPU only.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os

import torch

from triptych.config import TransferConfig
from triptych.ids import Epoch, InstanceId
from triptych.transport.data.gpu_memory import HANDLE_BYTES, GpuMemoryError
from triptych.transport.data.plane import open_plane, settings_between_hosts
from triptych.transport.data.pooled import PooledPlane

_numbers = itertools.count()
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
"""Where the pool of `open_gpu_plane` is."""


def open_gpu_plane(name: str, epoch: str, pool_bytes: int, gpu_pool_bytes: int, kind: str = "auto") -> PooledPlane:
    """A plane of an instance on `DEVICE`."""
    config = TransferConfig(kind=kind, pool_bytes=pool_bytes, gpu_pool_bytes=gpu_pool_bytes)  # type: ignore[arg-type]
    if DEVICE.type == "cuda":
        plane = open_plane(config, InstanceId(name), Epoch(epoch), str(DEVICE))
        assert isinstance(plane, PooledPlane)
        return plane
    between_hosts = settings_between_hosts(config, None)
    return PooledPlane(config, InstanceId(name), Epoch(epoch), gpu=None, shared=StandIn(), between_hosts=between_hosts)


class StandIn:
    """The "GPU" is the CPU; an allocation is an anonymous file, its handle says where others open it."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.files: dict[int, tuple[int, mmap.mmap]] = {}
        self.mapped: dict[int, mmap.mmap] = {}

    def allocate(self, nbytes: int) -> int:
        fd = os.memfd_create(f"gpu-standin-{next(_numbers)}")
        os.ftruncate(fd, nbytes)
        mapping = mmap.mmap(fd, nbytes)
        address = _address(mapping)
        self.files[address] = fd, mapping
        return address

    def free(self, address: int) -> None:
        fd, _ = self.files.pop(address)
        os.close(fd)

    def export(self, address: int) -> bytes:
        return f"{os.getpid()}/{self.files[address][0]}".encode().ljust(HANDLE_BYTES, b"\0")

    def map(self, handle: bytes) -> tuple[int, int]:
        pid, _, number = handle.rstrip(b"\0").decode(errors="replace").partition("/")
        try:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        except OSError as error:
            raise GpuMemoryError(f"map: {error.strerror}") from error
        mapping = mmap.mmap(fd, 0)
        os.close(fd)
        address = _address(mapping)
        self.mapped[address] = mapping
        return address, len(mapping)

    def unmap(self, address: int) -> None:
        del self.mapped[address]

    def copy(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def view(self, address: int, nbytes: int) -> torch.Tensor:
        return torch.frombuffer(self.files[address][1], dtype=torch.uint8)[:nbytes]

    def flush(self) -> None:
        pass

    def exports_dma_buf(self) -> bool:
        return False


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
