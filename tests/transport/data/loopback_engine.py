"""Stands in for the Mooncake engine where its adapters do: peers are this process, and a read is done when it begins.

Memory that ``hang`` names is never read to the end; memory beyond the first that is registered may be refused.
"""

from __future__ import annotations

import ctypes
import json
from types import SimpleNamespace
from typing import Any


class LoopbackEngine:
    """The interface of 0.3.13."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.registered: dict[int, int] = {}
        self.hang: range = range(0)
        self.reads: list[int] = []
        """Addresses that were read from."""
        self._hanging: set[int] = set()

    @property
    def module(self) -> Any:
        """What an import of ``mooncake.engine`` gives, with this engine."""
        return SimpleNamespace(TransferEngine=lambda: self)

    def initialize(self, *_: object) -> int:
        return 0

    def get_local_topology(self) -> str:
        return json.dumps({"cpu:0": [["mlx5_0"], []]})

    def get_rpc_port(self) -> int:
        return 15000

    def register_memory(self, address: int, nbytes: int) -> int:
        if self.refuses and self.registered:
            return -14
        self.registered[address] = nbytes
        return 0

    def unregister_memory(self, address: int) -> int:
        del self.registered[address]
        return 0

    def batch_transfer_async_read(self, _: str, ours: list[int], theirs: list[int], sizes: list[int]) -> int:
        self.reads.append(theirs[0])
        batch = len(self.reads)
        if theirs[0] in self.hang:
            self._hanging.add(batch)
        elif all(any(a <= place < a + n for a, n in self.registered.items()) for place in (ours[0], theirs[0])):
            ctypes.memmove(ours[0], theirs[0], sizes[0])
        else:
            return 0
        return batch

    def transfer_check_status(self, batch: int) -> int:
        return int(batch not in self._hanging)

    def let_go(self) -> None:
        """Have what hangs be over."""
        self.hang = range(0)
        self._hanging.clear()
