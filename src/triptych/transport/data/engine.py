"""The Mooncake Transfer Engine: loading it, starting the one of this process, and reading from peers through it.

Facts that shape this file, all seen with the wheels 0.3.13 and 0.3.14:

- The engine takes its settings from the environment when it is first imported, and ignores the protocol that it is
  given: it uses RDMA if it finds an adapter and TCP if not, without a word. So TCP and RDMA are forced by variables,
  and what was installed is checked.
- It needs libibverbs, also for TCP.
- Asking a frozen peer for what it has registered blocks the caller for up to a minute. So a thread of ours per peer
  makes the calls about it, and whoever waits for a transfer does so with a deadline. With 0.3.13 the *first* such call
  holds up the calls about all other peers too: pull only from peers with a fresh heartbeat.
- What the engine has learnt about a peer it keeps, so that one restarted on its old port is not found again. It is
  told to keep nothing and to ask each time, which costs a fraction of a millisecond.
- A transfer cannot be called off: until it is over its destination may still be written.
- GPU memory it registers by the kernel module nvidia_peermem or, with WITH_NVIDIA_PEERMEM=0, as DMA-BUF. With that it
  opens no adapter beside a GPU that exports none, also for host memory.
- It listens on all interfaces and asks nobody for credentials: whoever reaches its ports can read and write the pool.
- A process in which a transfer is not over must end by `os._exit`: on the normal way out its threads abort it.
"""

from __future__ import annotations

import enum
import importlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from triptych.config import host_port
from triptych.errors import ConfigError, TransferError
from triptych.transport.data.settings import EngineSettings, Transport

TRANSFER_TIMEOUT_S = 30
"""Seconds after which the engine reports a transfer as failed although it goes on."""

_SETTINGS = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_SLICE_SIZE": str(1 << 20),
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
    "MC_TRANSFER_TIMEOUT": str(TRANSFER_TIMEOUT_S),
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "2",
    "MC_DISABLE_METACACHE": "1",
}
"""Set unless the operator has set them already."""

_FAST_NAP = 5e-5
_SLOW_NAP = 2e-4
_IDLE_SECONDS = 30.0
_CLOSE_SECONDS = 2.0


class Outcome(enum.Enum):
    """How a transfer ended."""

    DONE = "done"
    FAILED = "failed"
    """Failed and over: the destination may be used again."""
    LOST = "lost"
    """Given up by the engine without being over: the destination may never be used again."""


@dataclass(eq=False, slots=True)
class Transfer:
    """One read of ``nbytes`` from ``remote`` in the peer's address space to ``local`` in ours."""

    session: str
    remote: int
    local: int
    nbytes: int
    on_late: Callable[[Outcome], None]
    """Called on a thread of the engine when a transfer that was abandoned ends after all."""
    outcome: Outcome | None = None
    started: float = 0.0
    submitted: bool = False
    abandoned: bool = False
    ended: threading.Event = field(default_factory=threading.Event)


class _Handle(Protocol):
    def poll(self) -> Outcome | None: ...


class _Batch:
    """A transfer by the interface of 0.3.13: a batch id that is freed when its end has been told."""

    def __init__(self, engine: Any, transfer: Transfer) -> None:
        self._engine = engine
        self._started = time.monotonic()
        self._id: int = engine.batch_transfer_async_read(
            transfer.session, [transfer.local], [transfer.remote], [transfer.nbytes]
        )

    def poll(self) -> Outcome | None:
        if self._id == 0:  # refused; asking after id 0 would crash the process
            return Outcome.FAILED
        match self._engine.transfer_check_status(self._id):
            case 1:
                return Outcome.DONE
            case 0:
                return None
            case _:
                timed_out = time.monotonic() - self._started > TRANSFER_TIMEOUT_S - 1
                return Outcome.LOST if timed_out else Outcome.FAILED


class _Ticket:
    """A transfer by the interface of 0.3.14: a ticket that says whether the destination is at rest."""

    def __init__(self, engine: Any, transfer: Transfer) -> None:
        self._ticket = engine.submit_scatter_read(
            transfer.session,
            [transfer.local],
            [transfer.nbytes],
            [transfer.remote],
            [transfer.nbytes],
            [[0]],
            [[0]],
            [[transfer.nbytes]],
        )

    def poll(self) -> Outcome | None:
        if not self._ticket.drained:
            self._ticket.drain(0)
        if not self._ticket.drained:
            return None
        return Outcome.DONE if self._ticket.status.name == "COMPLETED" else Outcome.FAILED


_open_lock = threading.Lock()
_in_use = False
_loaded: tuple[Transport, Any] | None = None


def load(settings: EngineSettings) -> Any:
    """The module ``mooncake.engine``, set up for the transport and the kind of address that ``settings`` name. Raises
    `ConfigError` that says how to mend it."""
    global _loaded
    transport = settings.transport
    if _loaded is not None:
        if _loaded[0] != transport:
            raise ConfigError(f"Mooncake runs over {_loaded[0]} in this process and cannot change to {transport}")
        return _loaded[1]
    if transport == "rdma" and os.environ.get("MC_FORCE_TCP"):
        raise ConfigError("MC_FORCE_TCP is set in the environment: unset it, or do not ask for RDMA")
    if "mooncake.engine" in sys.modules:
        raise ConfigError("mooncake.engine was imported before its settings were made; leave importing it to Triptych")
    os.environ["MC_FORCE_TCP" if transport == "tcp" else "MC_FORCE_HCA"] = "1"
    for name, value in {**_SETTINGS, "WITH_NVIDIA_PEERMEM": str(int(not settings.dma_buf))}.items():
        os.environ.setdefault(name, value)
    if ":" in settings.hostname:
        os.environ.setdefault("MC_USE_IPV6", "1")  # without it the engine listens there and finds nobody
    try:
        module = importlib.import_module("mooncake.engine")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--disagg-transfer mooncake needs the Mooncake Transfer Engine: install triptych[cpu], triptych[cuda12] or "
            "triptych[cuda13]"
        ) from error
    except ImportError as error:
        raise ConfigError(f"the Mooncake Transfer Engine does not load: {_mend(str(error))}") from error
    _loaded = transport, module
    return module


def _mend(problem: str) -> str:
    remedies = {
        "libibverbs": "apt-get install libibverbs1",
        "libmlx5": "apt-get install ibverbs-providers",
        "libnuma": "apt-get install libnuma1",
        "libcurl": "apt-get install libcurl4",
        "libcudart": "install the CUDA runtime that this build was made for, or the build triptych[cpu]",
        "libcuda": "install the NVIDIA driver, or the build triptych[cpu]",
    }
    for library, remedy in remedies.items():
        if library + "." in problem:
            return f"{problem} ({remedy})"
    return problem


def _check_adapters(engine: Any, settings: EngineSettings) -> None:
    """Raise `ConfigError` unless the engine has every adapter that was asked for: it takes any other without a word."""
    if settings.transport == "tcp":
        return  # MC_FORCE_TCP leaves no choice
    topology: dict[str, list[list[str]]] = json.loads(str(engine.get_local_topology()))
    found = {name for groups in topology.values() for group in groups for name in group}
    if not found:
        raise ConfigError("RDMA was asked for, but Mooncake found no adapter")
    for wanted in settings.devices.split(",") if settings.devices else ():
        if wanted not in found:
            raise ConfigError(f"RDMA device {wanted}: Mooncake found {', '.join(sorted(found))}")


class _Lane:
    """The thread that makes the engine's calls about one peer; it ends when nothing was asked of it for a while."""

    def __init__(
        self, begin: Callable[[Transfer], _Handle], lock: threading.Lock, forget: Callable[[], object]
    ) -> None:
        self._begin = begin
        self._lock = lock
        self._forget = forget
        # No SimpleQueue: before Python 3.13 its get never ends when the timeout passes before it begins to wait.
        self.jobs: queue.Queue[Transfer | None] = queue.Queue()
        """Transfers to begin; None: end when those that have begun are over. Put under the lock."""
        self.thread = threading.Thread(target=self._run, name="triptych-mooncake", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        active: dict[Transfer, _Handle] = {}
        closing = False
        nap = _FAST_NAP
        while active or not closing:
            try:
                job = self.jobs.get(timeout=nap if active else _IDLE_SECONDS)
            except queue.Empty:
                nap = min(_SLOW_NAP, nap * 1.3)
                if not active and self._idle():
                    return
            else:
                nap = _FAST_NAP
                closing = closing or job is None
                if job is not None and self._claim(job):
                    active[job] = self._begin(job)
            for transfer, handle in list(active.items()):
                outcome = handle.poll()
                if outcome is not None:
                    del active[transfer]
                    self._end(transfer, outcome)

    def _idle(self) -> bool:
        with self._lock:
            if not self.jobs.empty():
                return False
            self._forget()
            return True

    def _claim(self, transfer: Transfer) -> bool:
        with self._lock:
            transfer.submitted = not transfer.abandoned
            return transfer.submitted

    def _end(self, transfer: Transfer, outcome: Outcome) -> None:
        with self._lock:
            transfer.outcome = outcome
            late = transfer.abandoned
        transfer.ended.set()
        if late:
            transfer.on_late(outcome)


class Engine:
    """The transfer engine of this process, with ``memory``, uint8 [n] on the CPU, registered for peers to read.

    Peers reach it as ``session``. Raises `ConfigError` when that cannot be had, or when the process has an engine
    already.
    """

    def __init__(self, settings: EngineSettings, memory: torch.Tensor) -> None:
        global _in_use
        hostname, transport, devices = settings.hostname, settings.transport, settings.devices
        module = load(settings)
        with _open_lock:
            if _in_use:
                raise ConfigError("this process runs a Mooncake Transfer Engine already; there can be one")
            _in_use = True
        self._memory = memory  # kept: while a transfer may still write to it, it must stay mapped
        self._registered = [memory.data_ptr()]
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane] = {}
        try:
            self._engine = module.TransferEngine()
            if self._engine.initialize(hostname, "P2PHANDSHAKE", transport, devices or "") != 0:
                what = "no free port, or no such host"
                if transport == "rdma":
                    what = f"no RDMA adapter {devices}" if devices else "no RDMA adapter"
                raise ConfigError(f"Mooncake does not start on {hostname} over {transport}: {what}")
            _check_adapters(self._engine, settings)
            if self._engine.register_memory(memory.data_ptr(), memory.numel()) != 0:
                raise ConfigError(f"disagg-transfer-pool-size={memory.numel()}: Mooncake cannot register the pool")
        except ConfigError:
            _in_use = False
            raise
        self.session = host_port(hostname, self._engine.get_rpc_port())
        self._handle = _Ticket if hasattr(self._engine, "submit_scatter_read") else _Batch

    def register(self, address: int, nbytes: int) -> bool:
        """Let peers read, and transfers write, further memory of this process; whether it could be done."""
        if self._engine.register_memory(address, nbytes) != 0:
            return False
        self._registered.append(address)
        return True

    def start(self, transfer: Transfer) -> None:
        """Begin a transfer; `wait` for it."""
        session = transfer.session
        with self._lock:
            if session not in self._lanes:
                self._lanes[session] = _Lane(self._begin, self._lock, lambda: self._lanes.pop(session))
            self._lanes[session].jobs.put(transfer)

    def _begin(self, transfer: Transfer) -> _Handle:
        return self._handle(self._engine, transfer)

    def wait(self, transfer: Transfer, *, deadline: float, cancelled: Callable[[], bool], what: str) -> None:
        """Until the transfer is done. Raises `TransferError`, after which `abandon` must be called."""
        while not transfer.ended.wait(min(0.02, max(0.0, deadline - time.monotonic()))):
            if cancelled():
                raise TransferError(f"{what}: the pull was cancelled")
            if time.monotonic() >= deadline:
                raise TransferError(f"{what}: the deadline passed; the sender may be dead or frozen")
        if transfer.outcome is not Outcome.DONE:
            raise TransferError(f"{what}: the sender cannot be reached, or refused: it may be dead or restarted")

    def abandon(self, transfer: Transfer) -> Outcome | None:
        """Stop waiting. The outcome when the transfer is over or never began (then FAILED); None when it goes on, and
        ``on_late`` will be called."""
        with self._lock:
            if transfer.outcome is not None:
                return transfer.outcome
            transfer.abandoned = True
            return None if transfer.submitted else Outcome.FAILED

    def close(self) -> bool:
        """Stop the threads and unregister all memory; whether no transfer writes to it any more.

        When one is not over in two seconds the memory stays registered, and must stay allocated, and the process must
        end by `os._exit`; a worker always does.
        """
        global _in_use
        with self._lock:
            lanes = list(self._lanes.values())
            for lane in lanes:
                lane.jobs.put(None)
        end = time.monotonic() + _CLOSE_SECONDS
        for lane in lanes:
            lane.thread.join(max(0.0, end - time.monotonic()))
        if any(lane.thread.is_alive() for lane in lanes):
            return False
        for address in self._registered:
            self._engine.unregister_memory(address)
        _in_use = False
        return True
