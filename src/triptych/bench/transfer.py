"""Measures the data planes between two real processes, beside a plain copy in memory and a raw TCP socket.

A sending process (`triptych.bench.transfer_peer`) stages a tensor; this process pulls it again and again. A pull is
what a receiver waits for: it ends with the bytes verified, in fresh memory that it owns. The plane ``local`` hands over
within one process by nature. All rows of a size are measured in turns, so that they share the machine's mood.

With a device, such as cuda, whole handoffs are measured: from a tensor on the device of the sending process, which is
staged each time, by a pull to a tensor on that of this one.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import os
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from triptych.bench.transfer_peer import wait_for
from triptych.config import MIB, TransferConfig, TransferKind
from triptych.errors import ConfigError, StageError
from triptych.ids import Epoch, InstanceId, RequestId
from triptych.transport.data.plane import open_plane
from triptych.transport.data.protocol import Payload
from triptych.wire.manifest import Manifest

SIZES = (64 << 10, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
PLANES: tuple[TransferKind, ...] = ("local", "shm", "mooncake")
ON_GPUS: tuple[TransferKind, ...] = ("cuda-ipc", "gpudirect")
"""Planes between GPUs only, measured where they are asked for; gpudirect not together with mooncake, for a process has
one engine."""
MEMCPY = "memory copy"
TCP = "raw TCP"
COPIES = "two copies"

_WARM_UPS = 3
_PULL_SECONDS = 60.0
_POOL_BYTES = 512 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One way to move one size."""

    way: str
    nbytes: int
    median: float
    """Seconds."""
    p99: float
    """Seconds."""
    parts: tuple[float, ...] = ()
    """Medians of staging, pulling, and putting on the device, in seconds; of whole handoffs only."""

    @property
    def gigabytes_per_second(self) -> float:
        """Of the median, in units of 10^9 bytes."""
        return self.nbytes / self.median / 1e9


class Peer:
    """The sending process of one plane, or of the raw socket when ``kind`` is ``tcp``."""

    def __init__(self, kind: str, pool_bytes: int, device: str = "cpu") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "triptych.bench.transfer_peer", kind, str(pool_bytes), device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ready = self._answer()
        """What it said when it was ready: for ``tcp`` its port."""

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise StageError(f"the sending process ended with exit status {self._process.wait()}")
        return line

    def stage(self, nbytes: int) -> tuple[float, Manifest]:
        """Have it stage that many bytes in place of what it staged before; also the seconds that it took."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{nbytes}\n")
        self._process.stdin.flush()
        seconds, manifest = self._answer().split()
        return float(seconds), msgspec.msgpack.decode(bytes.fromhex(manifest), type=Manifest)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(_PULL_SECONDS)
        self._process.stdout.close()


Move = Callable[[], tuple[float, ...]]
"""Moves the bytes once and returns the seconds that its parts took."""
Way = Callable[[int], Move]
"""Prepares to move that many bytes."""


def run_transfer_bench(
    sizes: Sequence[int] = SIZES,
    planes: Sequence[TransferKind] = PLANES,
    *,
    rounds: int = 50,
    device: str | None = None,
    sender: str | None = None,
) -> list[Row]:
    """Measure every plane at every size, ``rounds`` times each; rows by size, the yardsticks first.

    With a ``device`` handoffs are whole ones to tensors there, from tensors on device ``sender`` (default: the same),
    and the yardstick is one copy to page-locked memory and one back.

    Raises `ConfigError` for a plane that this machine cannot have or a size that is not positive.
    """
    if not sizes or min(sizes) <= 0 or rounds <= 0:
        raise ConfigError(f"sizes={list(sizes)}, rounds={rounds}: must be greater than 0")
    if sender is not None and device is None:
        raise ConfigError(f"sender={sender!r}: needs a device to which handoffs go")
    if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}: this machine has no CUDA GPU")
    with contextlib.ExitStack() as stack:
        ways: dict[str, Way] = {}
        if device is None:
            ways |= {MEMCPY: _memory_copy, TCP: stack.enter_context(_raw_tcp())}
        else:
            ways[COPIES] = functools.partial(_copies, device)
        for kind in planes:
            ways[kind] = stack.enter_context(
                _plane(kind, max(_POOL_BYTES, 4 * max(sizes)), device, sender or device or "cpu")
            )
        return [row for nbytes in sizes for row in _measure(ways, nbytes, rounds)]


def _measure(ways: dict[str, Way], nbytes: int, rounds: int) -> Iterator[Row]:
    moves = {name: way(nbytes) for name, way in ways.items()}
    parts: dict[str, list[tuple[float, ...]]] = {name: [] for name in moves}
    for number, (name, move) in itertools.product(range(-_WARM_UPS, rounds), moves.items()):
        took = move()
        if number >= 0:
            parts[name].append(took)
    for name, taken in parts.items():
        ordered = sorted(map(sum, taken))
        p99 = ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)]
        each = tuple(statistics.median(part) for part in zip(*taken, strict=True))
        yield Row(
            way=name,
            nbytes=nbytes,
            median=statistics.median(ordered),
            p99=p99,
            parts=each if len(each) > 1 else (),
        )


def _memory_copy(nbytes: int) -> Move:
    source = torch.ones(nbytes, dtype=torch.uint8)

    def move() -> tuple[float, ...]:
        started = time.perf_counter()
        torch.empty(nbytes, dtype=torch.uint8).copy_(source)
        return (time.perf_counter() - started,)

    return move


def _copies(device: str, nbytes: int) -> Move:
    """What a handoff through host memory cannot do without."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    between = torch.empty(nbytes, dtype=torch.uint8, pin_memory=source.is_cuda)
    target = torch.empty_like(source)

    def move() -> tuple[float, ...]:
        wait_for(device)
        started = time.perf_counter()
        between.copy_(source, non_blocking=True)
        target.copy_(between, non_blocking=True)
        wait_for(device)
        return (time.perf_counter() - started,)

    return move


@contextlib.contextmanager
def _raw_tcp() -> Generator[Way]:
    peer = Peer("tcp", 0)
    connection = socket.create_connection(("127.0.0.1", int(peer.ready)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def way(nbytes: int) -> Move:
        def move() -> tuple[float, ...]:
            started = time.perf_counter()
            connection.sendall(nbytes.to_bytes(8, "little"))
            room = torch.empty(nbytes, dtype=torch.uint8).numpy().data
            while room:
                got = connection.recv_into(room)
                if not got:
                    raise StageError("the sending process of the raw TCP socket ended")
                room = room[got:]
            return (time.perf_counter() - started,)

        return move

    try:
        yield way
    finally:
        connection.close()
        peer.close()


@contextlib.contextmanager
def _plane(kind: TransferKind, pool_bytes: int, device: str | None, sender: str) -> Generator[Way]:
    epoch = Epoch(secrets.token_hex(8))
    # Only Mooncake receives into its pools; the others need none here, but a local handoff is staged in ours.
    own_bytes = MIB if kind in ("shm", "cuda-ipc") else pool_bytes
    config = TransferConfig(kind=kind, pool_bytes=own_bytes, gpu_pool_bytes=own_bytes if kind in ON_GPUS else 0)
    plane = open_plane(config, InstanceId("bench-receiver"), epoch, device or "cpu")
    peer = None if kind == "local" else Peer(kind, pool_bytes, sender)

    def way(nbytes: int) -> Move:
        own = torch.ones(nbytes if peer is None else 0, dtype=torch.uint8, device=device or "cpu")

        def stage() -> tuple[float, Manifest]:
            if peer is not None:
                return peer.stage(nbytes)
            plane.release([manifest.copy for manifest in plane.copies()])
            started = time.perf_counter()
            manifest = plane.stage(RequestId("bench"), Payload(tree=b"", tensors=(own,)))
            return time.perf_counter() - started, manifest

        def check(plane: str) -> None:
            if plane != kind:
                raise StageError(f"asked for {kind}, but the pull went by {plane}")

        _, manifest = stage()

        def whole() -> tuple[float, ...]:
            nonlocal manifest
            assert device is not None
            staging, manifest = stage()
            deadline = time.monotonic() + _PULL_SECONDS
            started = time.perf_counter()
            pulled = plane.pull(manifest, deadline=deadline, cancelled=lambda: False)
            there = time.perf_counter()
            check(pulled.plane)
            [tensor.to(device, non_blocking=True) for tensor in pulled.payload.tensors]
            wait_for(device)
            return staging, there - started, time.perf_counter() - there

        def move() -> tuple[float, ...]:
            deadline = time.monotonic() + _PULL_SECONDS
            started = time.perf_counter()
            pulled = plane.pull(manifest, deadline=deadline, cancelled=lambda: False)
            took = time.perf_counter() - started
            check(pulled.plane)
            return (took,)

        return move if device is None else whole

    try:
        yield way
    finally:
        if peer is not None:
            peer.close()
        plane.close()


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the rows as a table."""
    whole = any(row.parts for row in rows)
    table = Table(
        title="Handoffs: " + ("from device to device" if whole else "one pull, verified and in memory of its own")
    )
    table.add_column("size", justify="right")
    table.add_column("way")
    for title in ("median ms", "p99 ms", "GB/s", *(("staging ms", "pull ms", "to device ms") if whole else ())):
        table.add_column(title, justify="right")
    for nbytes, group in itertools.groupby(rows, key=lambda row: row.nbytes):
        size = f"{nbytes // MIB} MiB" if nbytes % MIB == 0 else f"{nbytes / 1024:g} KiB"
        for row in group:
            parts = [f"{part * 1e3:.3f}" for part in row.parts]
            table.add_row(
                size,
                row.way,
                *(f"{s * 1e3:.3f}" for s in (row.median, row.p99)),
                f"{row.gigabytes_per_second:.2f}",
                *parts,
            )
        table.add_section()
    console.print(table)


def main(arguments: Sequence[str]) -> int:
    """``triptych bench transfer``: measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="triptych bench transfer", description=__doc__)
    parser.add_argument("--planes", nargs="+", choices=PLANES + ON_GPUS, default=list(PLANES), help="planes to measure")
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), metavar="BYTES", help="sizes to move")
    parser.add_argument("--rounds", type=int, default=50, help="pulls of each size by each plane")
    parser.add_argument("--device", help="whole handoffs to tensors there, e.g. cuda (default: pulls in host memory)")
    parser.add_argument("--sender", metavar="DEVICE", help="where they come from, e.g. cuda:1 (default: as --device)")
    options = parser.parse_args(arguments)
    rows = run_transfer_bench(
        options.sizes, options.planes, rounds=options.rounds, device=options.device, sender=options.sender
    )
    show(rows, Console())
    if "mooncake" in options.planes or "gpudirect" in options.planes:
        sys.stdout.flush()
        os._exit(0)  # threads of the Mooncake engine abort the interpreter's own way out
    return 0
