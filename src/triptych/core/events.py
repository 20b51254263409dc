"""What goes into the router and instance machines, and what comes out.

Both machines have the same form: ``handle(event, now) -> list[action]`` with ``now`` in seconds of any monotonic clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, TypeAlias

from triptych.ids import CopyId, Epoch, InstanceId, RequestId, Role
from triptych.wire.manifest import Manifest
from triptych.wire.messages import ErrorInfo, FromInstance, Lease, MediaFile, Outcome, ToInstance


class JobState(enum.StrEnum):
    """The states of a request. `triptych.core.states` holds the table of legal transitions."""

    PENDING = "pending"
    ENCODER_WAITING = "encoder_waiting"
    ENCODER_RUNNING = "encoder_running"
    ENCODER_DONE = "encoder_done"
    DENOISING_WAITING = "denoising_waiting"
    DENOISING_RUNNING = "denoising_running"
    DENOISING_DONE = "denoising_done"
    DECODER_WAITING = "decoder_waiting"
    DECODER_RUNNING = "decoder_running"
    DONE = "done"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTiming:
    """One finished stage of a request, in seconds."""

    role: Role
    instance: InstanceId
    attempt: int
    waiting: float
    """From being ready for this stage to the compute thread taking it up."""
    pulling: float
    pulled_bytes: int
    plane: str
    """Data plane of the handoff into this stage; empty for the encoder."""
    running: float
    """From compute start to the outcome's arrival at the server."""
    compute: float
    """As the instance measured it."""
    staging: float
    """Staging its output, or encoding its media file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    """A snapshot of one request for whoever watches it."""

    request: RequestId
    state: JobState
    attempt: int
    step: int
    steps: int
    position: int | None
    """Place in its queue while waiting for an instance, from 0."""
    waiting_seconds: float
    running_seconds: float
    error: ErrorInfo | None
    timings: tuple[StageTiming, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceView:
    """A snapshot of one live instance for operators."""

    instance: InstanceId
    epoch: Epoch
    roles: tuple[Role, ...]
    work_url: str
    device: str
    fingerprint: str
    slots: int
    free_slots: int
    leases: tuple[Lease, ...]
    """What holds its slots: stages waiting there, computing, stopping, or having their files stored."""
    copies: int
    """Staged outputs that later stages will read from it."""
    pool_bytes: int
    pool_used: int
    resident_bytes: int
    device_bytes: int
    heartbeat_age: float
    """Seconds between its last sign of life and the router's last event."""


# -- router: events ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Submit:
    """A validated request enters. Queue and run timeouts are in seconds."""

    request: RequestId
    params: dict[str, Any]
    queue_timeout: float
    run_timeout: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """A decoded message of an instance."""

    message: FromInstance


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelRequest:
    """A client wants this request stopped. Unknown or ended requests: nothing happens."""

    request: RequestId


@dataclass(frozen=True, kw_only=True, slots=True)
class FilesStored:
    """The shell has stored the files of a `StoreFiles` action: the request may end as DONE."""

    request: RequestId
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreFailed:
    """The shell could not store the files (disk full): the request fails with this error."""

    request: RequestId
    attempt: int
    error: ErrorInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceExited:
    """The shell knows that an instance's process is gone (its child exited); no need to wait for the lease."""

    instance: InstanceId


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """Time passed. The shell sends one whenever `Router.next_deadline` is reached, at least once a second."""


RouterEvent: TypeAlias = Submit | Received | CancelRequest | FilesStored | StoreFailed | InstanceExited | Tick


# -- router: actions ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class SendMember:
    """Send on the frontend ROUTER to the peer that said hello as this instance (Welcome, Refused, Unknown)."""

    instance: InstanceId
    message: ToInstance


@dataclass(frozen=True, kw_only=True, slots=True)
class SendWork:
    """Push to an instance's work port. ``with_blobs``: attach the raw frames (images) of the request."""

    instance: InstanceId
    work_url: str
    message: ToInstance
    with_blobs: RequestId | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreFiles:
    """Store the files whose bytes came with the `Finished` message of this lease, then feed `FilesStored`."""

    lease: Lease
    files: tuple[MediaFile, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """A request changed; shown to whoever watches it. Terminal states come exactly once per request."""

    view: JobView


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """Something worth a counter and a log line, e.g. ``stale_message``, ``instance_lost``, ``requeued``."""

    name: str
    detail: str
    instance: InstanceId | None = None
    request: RequestId | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Disconnect:
    """An instance is gone: close the connection to its work port."""

    instance: InstanceId
    work_url: str


RouterAction: TypeAlias = SendMember | SendWork | StoreFiles | Update | Count | Disconnect


# -- instance: events --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class FromServer:
    """A decoded message of the server; ``blobs`` are the raw frames that came with it."""

    message: ToInstance
    blobs: tuple[bytes, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulled:
    """The transfer thread has this lease's inputs in memory."""

    lease: Lease
    seconds: float
    nbytes: int
    plane: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PullFailed:
    """An input could not be pulled."""

    lease: Lease
    copy: CopyId
    error: ErrorInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeStarted:
    """The compute thread took the lease up."""

    lease: Lease


@dataclass(frozen=True, kw_only=True, slots=True)
class Stepped:
    """One denoising step is done."""

    lease: Lease
    step: int
    steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """The worker's threads are finished with a lease; ``outcome`` is what to report."""

    outcome: Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiesDropped:
    """The pool dropped retained copies for room."""

    copies: tuple[CopyId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Memory figures for the next heartbeat, bytes."""

    pool_used: int
    resident_bytes: int
    device_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """The process is asked to end (signal)."""

    reason: str


InstanceEvent: TypeAlias = (
    FromServer | Pulled | PullFailed | ComputeStarted | Stepped | Ended | CopiesDropped | Usage | Stop | Tick
)


# -- instance: actions -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Say:
    """Send on the membership DEALER (hello, heartbeat, goodbye)."""

    message: FromInstance


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Push to the server's result port of this role. `Finished` goes with the blobs that the worker keeps for it."""

    role: Role
    message: FromInstance


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectResults:
    """The server's result ports, as welcomed; replaces any earlier ones."""

    urls: dict[Role, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class StartPull:
    """Give the transfer thread this lease's inputs to pull; answer with `Pulled` or `PullFailed`."""

    lease: Lease
    inputs: tuple[Manifest, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StartCompute:
    """Give the compute thread this stage, whose inputs are in memory. It may queue behind others."""

    lease: Lease
    params: dict[str, Any]
    blobs: tuple[bytes, ...]
    budget_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Abort:
    """Stop a lease wherever it is; its pulled inputs are freed; answer `Ended` with `Stopped`."""

    lease: Lease


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseCopies:
    """Free staged outputs."""

    copies: tuple[CopyId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Forget:
    """The outcome of this lease is acknowledged: free what was kept to resend it (media bytes)."""

    lease: Lease


@dataclass(frozen=True, kw_only=True, slots=True)
class Halt:
    """The machine is done; the process may exit. ``error`` is a reason to exit with failure."""

    error: str | None = None


InstanceAction: TypeAlias = (
    Say | Report | ConnectResults | StartPull | StartCompute | Abort | ReleaseCopies | Forget | Halt | Count
)
