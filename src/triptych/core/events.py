"""What goes into the router machine, and what comes out.

Its form is ``handle(event, now) -> list[action]`` with ``now`` in seconds of any monotonic clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from triptych.ids import Epoch, InstanceId, RequestId, Role
from triptych.wire.messages import Counts, ErrorInfo, FromInstance, Lease, MediaFile, Output, Record, ToInstance


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


class StageTiming(Record, frozen=True, kw_only=True):
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


class JobView(Record, frozen=True, kw_only=True):
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
    resumed_from_step: int = 0
    """Steps that the latest denoising attempt took over from an interrupted one."""
    paused: bool = False
    """Whether a client has it wait."""
    preview: bytes = b""
    """The latest picture of what is being denoised; empty before and after."""
    ended_in: JobState | None = None
    """Of an ended request: the state that it was in before."""


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
    draining: bool = False
    """Whether it was asked to stop and takes no new work."""
    counts: Counts = field(default_factory=Counts)
    """What its models have done since its process began."""
    quarantined: float = 0.0
    """Seconds for which it gets nothing while another instance serves its role; 0: it is trusted."""
    failures: str = ""
    """What it is in quarantine for."""
    sharing: str = ""
    """How its GPUs share the work; empty when it has one."""
    commit: str = ""
    """Of its model on the Hub; empty where that is a folder."""


# -- events -----------------------------------------------------------------------------------------------------------


class Submit(Record, frozen=True, kw_only=True):
    """A validated request enters. Queue and run timeouts are in seconds."""

    request: RequestId
    params: dict[str, Any]
    queue_timeout: float
    run_timeout: float


class Restore(Record, frozen=True, kw_only=True):
    """A request that an earlier life of the server accepted and did not end, as the journal knows it.

    What it had leased and staged is waited for: the instances may still hold it, and say so in their hello.
    """

    request: RequestId
    params: dict[str, Any]
    queue_timeout: float
    run_timeout: float
    attempt: int = 1
    """Of the last lease granted."""
    waited: float = 0.0
    ran: float = 0.0
    """Seconds used up so far; the time that the server was down counts for nothing."""
    holder: InstanceId | None = None
    """Who held its last lease, under which a stage may still be running."""
    done: tuple[StageDone, ...] = ()
    """Stages whose outputs may still be kept, in the order of the roles."""
    timings: tuple[StageTiming, ...] = ()


class Received(Record, frozen=True, kw_only=True):
    """A decoded message of an instance."""

    message: FromInstance


class CancelRequest(Record, frozen=True, kw_only=True):
    """A client wants this request stopped. Unknown or ended requests: nothing happens."""

    request: RequestId


class PauseRequest(Record, frozen=True, kw_only=True):
    """Have this request wait until `ResumeRequest`: a denoising stage stops between two steps, any other is finished
    first. Its clocks stand still meanwhile. Unknown or ended requests: nothing happens."""

    request: RequestId


class ResumeRequest(Record, frozen=True, kw_only=True):
    """Let a paused request go on, from its checkpoint if it has one. Others: nothing happens."""

    request: RequestId


class MigrateRequest(Record, frozen=True, kw_only=True):
    """Move a denoising stage to another instance between two steps, if there is another. Others: nothing happens."""

    request: RequestId


class FilesStored(Record, frozen=True, kw_only=True):
    """The shell has stored the files of a `StoreFiles` action: the request may end as DONE."""

    request: RequestId
    attempt: int


class StoreFailed(Record, frozen=True, kw_only=True):
    """The shell could not store the files (disk full). With a retryable error the decoder's copy is waited for and
    stored then, until the run timeout; with any other the request fails."""

    request: RequestId
    attempt: int
    error: ErrorInfo


class InstanceExited(Record, frozen=True, kw_only=True):
    """The shell sees that nobody listens at an instance's work port any more; no need to wait for the lease."""

    instance: InstanceId


class Tick(Record, frozen=True, kw_only=True):
    """Time passed. The shell sends one whenever `Router.next_deadline` is reached, at least once a second."""


RouterEvent: TypeAlias = (
    Submit
    | Restore
    | Received
    | CancelRequest
    | PauseRequest
    | ResumeRequest
    | MigrateRequest
    | FilesStored
    | StoreFailed
    | InstanceExited
    | Tick
)


# -- actions ----------------------------------------------------------------------------------------------------------


class SendMember(Record, frozen=True, kw_only=True):
    """Send on the frontend ROUTER to the peer that said hello as this instance (Welcome, Refused, Unknown)."""

    instance: InstanceId
    message: ToInstance


class SendWork(Record, frozen=True, kw_only=True):
    """Push to an instance's work port. ``with_blobs``: attach the raw frames (images) of the request."""

    instance: InstanceId
    work_url: str
    message: ToInstance
    with_blobs: RequestId | None = None


class StoreFiles(Record, frozen=True, kw_only=True):
    """Store the files whose bytes came with the `Finished` message of this lease, then feed `FilesStored`."""

    lease: Lease
    files: tuple[MediaFile, ...]


class Update(Record, frozen=True, kw_only=True):
    """A request changed; shown to whoever watches it. Terminal states come exactly once per request."""

    view: JobView


CountName: TypeAlias = Literal[
    "books_wrong",
    "checkpoint_lost",
    "copy_lost",
    "duplicate_submit",
    "fingerprint_differs",
    "instance_draining",
    "instance_joined",
    "instance_left",
    "instance_lost",
    "instance_quarantined",
    "instance_refused",
    "late_report",
    "lease_lost",
    "lease_resumed",
    "not_brought_back",
    "repeated_lease",
    "repeated_outcome",
    "requeued",
    "revision_differs",
    "slots_exceeded",
    "stale_message",
    "store_failed",
    "unknown_instance",
]
COUNT_NAMES: tuple[CountName, ...] = get_args(CountName)
"""All that the machines and their shells ever count."""


class Count(Record, frozen=True, kw_only=True):
    """Something worth a counter and a log line, e.g. ``stale_message``, ``instance_lost``, ``requeued``."""

    name: CountName
    detail: str
    instance: InstanceId | None = None
    request: RequestId | None = None


class LeaseGranted(Record, frozen=True, kw_only=True, tag="granted"):
    """For the journal: ``instance`` holds this lease from now on, by dispatch or by bringing it back."""

    lease: Lease
    instance: InstanceId
    waited: float
    ran: float
    """Seconds that the request has used up so far."""


class StageDone(Record, frozen=True, kw_only=True, tag="staged"):
    """For the journal: a stage is done, and ``instance`` keeps its outputs."""

    lease: Lease
    instance: InstanceId
    outputs: tuple[Output, ...]
    timing: StageTiming
    waited: float
    ran: float


class Clocks(Record, frozen=True, kw_only=True, tag="clocks"):
    """For the journal, now and then: seconds that a live request has used up so far."""

    request: RequestId
    waited: float
    ran: float


Note: TypeAlias = LeaseGranted | StageDone | Clocks
"""What a next life of the server needs to know of a live request."""


class Connect(Record, frozen=True, kw_only=True):
    """An instance has joined: open a connection to its work port, and feed `InstanceExited` when that is refused."""

    instance: InstanceId
    work_url: str


class Disconnect(Record, frozen=True, kw_only=True):
    """An instance is gone: close the connection to its work port."""

    instance: InstanceId
    work_url: str


RouterAction: TypeAlias = SendMember | SendWork | StoreFiles | Update | Count | Note | Connect | Disconnect
