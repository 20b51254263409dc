"""The ranks of one instance as one process group, and the device meshes of their layouts; each is created once.

Everything is made at start, by all ranks in the same order, so that no request ever waits for a group. What they do
together has a bound, so while they load, which takes one of them as long as it takes, they meet before each such thing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from triptych.accel.parallel.degrees import Layout
from triptych.parallelism import Parallelism

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}
"""Ranks are processes of one host: their unauthenticated sockets stay on its loopback. NVLink multicast, which hosts
often lack the rights for, would fail at the first collective instead of being left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Team:
    """This process among the ranks of its instance, which have joined."""

    rank: int
    size: int
    device: torch.device
    wish: Parallelism
    """How the ranks were asked to share the work."""
    meet: Callable[[Mapping[str, str]], None]
    """Returns once every rank has come so far, however long the slowest takes. What a rank says there by name must be
    what rank 0 says, or the ranks are apart."""

    @classmethod
    def join(
        cls,
        rank: int,
        size: int,
        device: torch.device,
        *,
        wish: Parallelism,
        store: Path,
        seconds: float,
        meet: Callable[[Mapping[str, str]], None],
    ) -> Team:
        """Connect with the other ranks through the file ``store``, which no one else may write.

        ``seconds`` bounds that and the collectives of all ranks; those of a mesh have torch's own bounds of some
        minutes. One that takes longer ends this process (NCCL) or raises RuntimeError (gloo).
        """
        meet({"at": "the start"})
        for name, value in LOOPBACK.items():
            os.environ.setdefault(name, value)
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(device)
            torch.cuda.init()  # a mesh would choose another device where none is in use
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=dist.FileStore(str(store), size),  # pyright: ignore[reportPrivateImportUsage]  # documented
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=seconds),
        )
        _connect(device)
        return cls(rank=rank, size=size, device=device, wish=wish, meet=meet)

    def mesh(self, layout: Layout, tp: int) -> DeviceMesh:
        """Groups for a layout: dimensions ``cfg`` (or groups that compute the same), ``ring``, ``ulysses``, ``tp``."""
        shape = (self.size // (layout.sp * tp), layout.ring, layout.ulysses, tp)
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("cfg", "ring", "ulysses", "tp"))
        for name, size in zip(("cfg", "ring", "ulysses", "tp"), shape, strict=True):
            if size > 1:
                _connect(self.device, mesh.get_group(name))
        return mesh

    def everyone(self) -> DeviceMesh:
        """All ranks in one dimension."""
        return init_device_mesh(self.device.type, (self.size,), mesh_dim_names=("ranks",))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's values of a tensor in host memory, whatever its dtype, to all ranks, in place. No GPU takes part, so
        it waits for none and passes none of the exchanges that one is busy with."""
        if tensor.numel():
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=0)

    def agree(self, word: str) -> str:
        """Rank 0's word, which is at most 64 bytes long. For the time in which the ranks load."""
        self.meet({"at": "a choice"})
        data = torch.zeros(64, dtype=torch.uint8)
        encoded = torch.frombuffer(bytearray(word.encode()), dtype=torch.uint8)
        data[: len(encoded)] = encoded
        self.broadcast(data)
        return bytes(data.tolist()).rstrip(b"\0").decode()


def _connect(device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Have a group, which is that of all ranks where none is named, connect now: it would when it is first used, which
    should not be in a request."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)
