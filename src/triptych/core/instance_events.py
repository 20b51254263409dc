"""What goes into the instance machine, and what comes out.

Its form is that of the router: ``handle(event, now) -> list[action]``.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from triptych.core.events import Count, Tick
from triptych.ids import CopyId, Role
from triptych.wire.manifest import Manifest
from triptych.wire.messages import Counts, ErrorInfo, FromInstance, Lease, Outcome, Record, ToInstance

# -- events -----------------------------------------------------------------------------------------------------------


class FromServer(Record, frozen=True, kw_only=True):
    """A decoded message of the server; ``blobs`` are the raw frames that came with it."""

    message: ToInstance
    blobs: tuple[bytes, ...] = ()


class Pulled(Record, frozen=True, kw_only=True):
    """The transfer thread has this lease's inputs in memory."""

    lease: Lease
    seconds: float
    nbytes: int
    plane: str


class PullFailed(Record, frozen=True, kw_only=True):
    """An input could not be pulled."""

    lease: Lease
    copy: CopyId
    error: ErrorInfo


class ComputeStarted(Record, frozen=True, kw_only=True):
    """The compute thread took the lease up."""

    lease: Lease


class CheckpointMade(Record, frozen=True, kw_only=True):
    """What a running lease did so far is staged; the lease goes on."""

    lease: Lease
    manifest: Manifest
    step: int
    steps: int


class CopyKept(Record, frozen=True, kw_only=True):
    """Another instance's copy was pulled and staged anew, as `KeepCopy` asked."""

    copy: CopyId
    manifest: Manifest


class Stepped(Record, frozen=True, kw_only=True):
    """One denoising step is done, or a picture of what an earlier one gave has been made."""

    lease: Lease
    step: int
    steps: int
    preview: bytes = b""


class Ended(Record, frozen=True, kw_only=True):
    """The worker's threads are finished with a lease; ``outcome`` is what to report."""

    outcome: Outcome


class CopiesDropped(Record, frozen=True, kw_only=True):
    """The pool dropped retained copies for room."""

    copies: tuple[CopyId, ...]


class Usage(Record, frozen=True, kw_only=True):
    """Figures for the next heartbeat: memory in bytes, and what the models have done."""

    pool_used: int
    resident_bytes: int
    device_bytes: int
    counts: Counts = Counts()


class Stop(Record, frozen=True, kw_only=True):
    """The process has to end (signal, or a dead thread): take no new work, finish or hand over what runs, then halt."""

    reason: str
    seconds: float = 0.0
    """How long that may take at most; 0: halt at once."""
    failed: bool = False
    """Nobody asks for it: something in the process broke. Goes with an end at once."""


InstanceEvent: TypeAlias = (
    FromServer
    | Pulled
    | PullFailed
    | ComputeStarted
    | Stepped
    | CheckpointMade
    | CopyKept
    | Ended
    | CopiesDropped
    | Usage
    | Stop
    | Tick
)


# -- actions ----------------------------------------------------------------------------------------------------------


class Say(Record, frozen=True, kw_only=True):
    """Send on the membership DEALER (hello, heartbeat, goodbye)."""

    message: FromInstance


class Report(Record, frozen=True, kw_only=True):
    """Push to the server's result port of this role. `Finished` goes with the blobs that the worker keeps for it."""

    role: Role
    message: FromInstance


class ConnectResults(Record, frozen=True, kw_only=True):
    """The server's result ports, as welcomed; replaces any earlier ones."""

    urls: dict[Role, str]


class StartPull(Record, frozen=True, kw_only=True):
    """Give the transfer thread this lease's inputs to pull; answer with `Pulled` or `PullFailed`."""

    lease: Lease
    inputs: tuple[Manifest, ...]
    resume: Manifest | None = None
    """Checkpoint that is pulled with them."""


class StartCompute(Record, frozen=True, kw_only=True):
    """Give the compute thread this stage, whose inputs are in memory. It may queue behind others."""

    lease: Lease
    params: dict[str, Any]
    blobs: tuple[bytes, ...]
    budget_seconds: float


class Abort(Record, frozen=True, kw_only=True):
    """Stop a lease wherever it is; its pulled inputs are freed; answer `Ended` with `Stopped`."""

    lease: Lease


class Suspend(Record, frozen=True, kw_only=True):
    """Stop a lease that is with the compute thread between two steps and stage a checkpoint of it; answer `Ended` with
    `Stopped`. One that has no further steps is finished instead."""

    lease: Lease


class KeepCopy(Record, frozen=True, kw_only=True):
    """Pull another instance's copy and stage it here; answer with `CopyKept`, or not at all when that fails."""

    manifest: Manifest
    spare: bool


class ReleaseCopies(Record, frozen=True, kw_only=True):
    """Free staged outputs, and give up keeping those of these that are another's and not here yet."""

    copies: tuple[CopyId, ...]


class Forget(Record, frozen=True, kw_only=True):
    """The outcome of this lease is acknowledged: free what was kept to resend it (media bytes)."""

    lease: Lease


class Halt(Record, frozen=True, kw_only=True):
    """The machine is done; the process may exit. ``error`` is a reason to exit with failure."""

    error: str | None = None


InstanceAction: TypeAlias = (
    Say
    | Report
    | ConnectResults
    | StartPull
    | StartCompute
    | Abort
    | Suspend
    | KeepCopy
    | ReleaseCopies
    | Forget
    | Halt
    | Count
)
