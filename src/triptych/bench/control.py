"""Measures the control plane: requests through three no-op stages, with the real router, sockets and processes.

The server (router, shell, records, metrics) runs in this process together with a closed loop of clients; each role is a
no-op instance in a process of its own. What is left out is what HTTP, models, tensors and media files cost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from triptych.config import ServerConfig
from triptych.core.events import JobState
from triptych.errors import StageError
from triptych.ids import ROLES
from triptych.launch.ports import free_ports
from triptych.server.service import DiffusionService

SLOTS = 256
"""Leases of each no-op instance: enough that the control plane is measured and not the size of the pool."""
WARM_UP_SECONDS = 0.5
READY_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One load level. Latency is from submission to the final state, and all of it is added by the control plane."""

    outstanding: int
    requests: int
    seconds: float
    p50_ms: float
    p99_ms: float
    server_cpu_us: float
    """CPU time of the server process per request, its clients included."""
    all_cpu_us: float
    """CPU time of all four processes per request."""

    @property
    def requests_per_second(self) -> float:
        """Requests that ended DONE per second of wall time."""
        return self.requests / self.seconds


def run_control_bench(
    outstanding: Sequence[int] = (1, 64, 1024), *, seconds: float = 5.0, slots: int = SLOTS, journal: bool = False
) -> list[Row]:
    """One row for each number of outstanding requests, each measured for ``seconds``; the server keeps its journal on
    the disk of the temporary folder if ``journal`` says so, and in no place otherwise.

    Raises `StageError` when a request ends otherwise than DONE, or when the instances do not come up.
    """
    return uvloop.run(_bench(outstanding, seconds, slots, journal))


async def _bench(outstanding: Sequence[int], seconds: float, slots: int, journal: bool) -> list[Row]:
    base, *_ = free_ports(5 + len(ROLES))
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as folder:
        state = Path(folder) / "state" if journal else None
        config = ServerConfig(port=base, scheduler_port=base + 1, output_dir=Path(folder), state_dir=state)
        service = DiffusionService(config)
        await service.start()
        try:
            with _instances(base + 1, base + 5, slots) as children:
                await _ready(service, children)
                processes = [psutil.Process(child.pid) for child in children]
                return [await _measure(service, processes, count, seconds) for count in outstanding]
        finally:
            await service.close()


@contextlib.contextmanager
def _instances(scheduler_port: int, first_port: int, slots: int) -> Generator[list[subprocess.Popen[bytes]]]:
    """One process for each role; each ends when its standard input does, so none outlives this process."""
    children: list[subprocess.Popen[bytes]] = []
    try:
        for offset, role in enumerate(ROLES):
            addresses = (f"tcp://127.0.0.1:{scheduler_port}", f"tcp://127.0.0.1:{first_port + offset}")
            command = [sys.executable, "-m", "triptych.bench.noop", *addresses, role.value, str(slots)]
            children.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        yield children
    finally:
        for child in children:
            if child.stdin is not None:
                child.stdin.close()
        for child in children:
            try:
                child.wait(timeout=5)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


async def _ready(service: DiffusionService, children: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not service.readiness().ready:
        if any(child.poll() is not None for child in children) or time.monotonic() > deadline:
            raise StageError(f"the no-op instances did not come up: {'; '.join(service.readiness().reasons)}")
        await asyncio.sleep(0.02)


async def _measure(service: DiffusionService, instances: list[psutil.Process], outstanding: int, seconds: float) -> Row:
    await _load(service, outstanding, WARM_UP_SECONDS)
    server_before, all_before = _cpu_seconds(instances)
    began = time.perf_counter()
    latencies = await _load(service, outstanding, seconds)
    elapsed = time.perf_counter() - began
    server_after, all_after = _cpu_seconds(instances)
    latencies.sort()
    return Row(
        outstanding=outstanding,
        requests=len(latencies),
        seconds=elapsed,
        p50_ms=_percentile(latencies, 0.50) * 1e3,
        p99_ms=_percentile(latencies, 0.99) * 1e3,
        server_cpu_us=(server_after - server_before) / len(latencies) * 1e6,
        all_cpu_us=(all_after - all_before) / len(latencies) * 1e6,
    )


async def _load(service: DiffusionService, outstanding: int, seconds: float) -> list[float]:
    """Closed loop: every client submits its next request when the one before has ended. Returns all latencies."""
    latencies: list[float] = []
    until = time.perf_counter() + seconds

    async def client() -> None:
        while (began := time.perf_counter()) < until:
            accepted = await service.submit({"prompt": "nothing"}, output="video")
            record = await service.wait(accepted.id)
            if record.view.state is not JobState.DONE:
                raise StageError(f"{record.id} ended {record.view.state}: {record.view.error}")
            latencies.append(time.perf_counter() - began)

    async with asyncio.TaskGroup() as clients:
        for _ in range(outstanding):
            clients.create_task(client())
    return latencies


def _cpu_seconds(instances: Sequence[psutil.Process]) -> tuple[float, float]:
    """User and system time so far: of this process, and of this process and all instances."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    server = own.ru_utime + own.ru_stime
    others = sum(times.user + times.system for times in (process.cpu_times() for process in instances))
    return server, server + others


def _percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all are not above."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def show(rows: Sequence[Row], console: Console, *, journal: bool = False) -> None:
    """Print the rows as a table."""
    kept = "with the journal" if journal else "without a journal"
    title = f"Control plane, three no-op stages, {kept}: every request ended DONE; us: CPU time per request"
    table = Table(title=title)
    for heading in ("in flight", "requests", "per second", "p50 ms", "p99 ms", "server us", "all us"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row.outstanding:,}",
            f"{row.requests:,}",
            f"{row.requests_per_second:,.0f}",
            f"{row.p50_ms:.2f}",
            f"{row.p99_ms:.2f}",
            f"{row.server_cpu_us:.0f}",
            f"{row.all_cpu_us:.0f}",
        )
    console.print(table)


def main(arguments: Sequence[str]) -> int:
    """``triptych bench control``: measure and print."""
    parser = argparse.ArgumentParser(prog="triptych bench control", description=__doc__)
    parser.add_argument("--outstanding", type=int, nargs="+", default=[1, 64, 1024], help="requests in flight")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each load level is measured")
    parser.add_argument("--slots", type=int, default=SLOTS, help="leases that each no-op instance holds at once")
    parser.add_argument("--journal", action="store_true", help="write every accepted request to disk first")
    options = parser.parse_args(arguments)
    rows = run_control_bench(options.outstanding, seconds=options.seconds, slots=options.slots, journal=options.journal)
    show(rows, Console(), journal=options.journal)
    return 0
