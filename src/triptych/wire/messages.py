"""The closed union of control-plane messages between the server and its instances.

Delivery is at least once for outcomes (resent until acknowledged) and at most once for the rest; every handler is
idempotent by lease. A message from another epoch than the receiver knows is stale: counted and ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec.structs import replace as replace

from triptych.ids import CopyId, Epoch, InstanceId, RequestId, Role
from triptych.wire.manifest import Manifest
from triptych.wire.schema import RequestSchema

MAX_PREVIEW_BYTES = 32 << 10

PROTOCOL_VERSION = 6

ID_LENGTH = 256
"""Characters of the longest id. Ids of strangers are echoed in answers, which wait for whoever does not read them."""

_ID = msgspec.Meta(max_length=ID_LENGTH)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of immutable records that never leave the process; ten times cheaper to make than a frozen dataclass."""


class Lease(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The right of one instance to run one attempt of one stage. Hashable: it is the key of all bookkeeping."""

    request: Annotated[RequestId, _ID]
    role: Role
    attempt: int


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why something failed, fit to be shown to a client."""

    code: str
    message: str
    blame: Literal["caller", "instance", "operator", "us"]
    retryable: bool = False


class _FromInstance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    instance: Annotated[InstanceId, _ID]
    epoch: Annotated[Epoch, _ID]
    """The sender's own life."""
    server_epoch: Annotated[Epoch, _ID] | None
    """The server life that the sender was last welcomed by; None before the first welcome."""


class _ToInstance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    server_epoch: Annotated[Epoch, _ID]
    """The sender's own life."""
    epoch: Annotated[Epoch, _ID]
    """The instance life that this is meant for."""


# -- membership: instance DEALER -> frontend ROUTER ---------------------------------------------------------------


class Hello(_FromInstance, frozen=True, tag="hello"):
    """An instance says what it is. Sent at start and whenever the server does not know it."""

    protocol: int
    roles: tuple[Role, ...]
    work_url: str
    """Where the server pushes this instance's work, e.g. ``tcp://127.0.0.1:19000``."""
    host: str
    """Boot id of its machine."""
    slots: int
    """Leases it holds at once, over all its roles: those computing and those whose inputs are being pulled."""
    pool_bytes: int
    planes: tuple[str, ...]
    """Data planes it can be pulled from, best first."""
    schema: RequestSchema
    fingerprint: str
    """Versions, dtype, attention backend, quantisation: equal fingerprints compute equal bytes."""
    device: str
    sharing: str = ""
    """How its GPUs share the work, for operators; empty when it has one."""
    leases: tuple[Lease, ...] = ()
    """What it is still working on, so that a restarted server continues instead of repeating."""
    copies: tuple[Manifest, ...] = ()
    """Outputs that it still keeps."""


class Counts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the models of an instance have done since its process began."""

    compilations: int = 0
    """Graphs compiled, warm-up included."""
    compile_seconds: float = 0.0
    uncompiled: int = 0
    """Calls of compiled parts computed without a graph, for there were too many."""
    prompt_hits: int = 0
    """Prompts whose embeddings were there already."""
    prompt_misses: int = 0
    steps_skipped: int = 0
    """Denoiser forwards that step caching made short."""
    unshared_forwards: int = 0
    """Denoiser forwards that each GPU of the instance computed whole, for their tokens do not divide."""
    turnovers: int = 0
    """Stages that began when the one before was over, and were known of by then."""
    turnover_seconds: float = 0.0
    """Time that passed in between, until the model itself computed."""


class Heartbeat(_FromInstance, frozen=True, tag="heartbeat"):
    """About once a second. ``leases`` lets the server notice work that was lost on the way."""

    sequence: int
    leases: tuple[Lease, ...]
    pool_used: int
    resident_bytes: int
    """Resident memory of the process."""
    device_bytes: int = 0
    """GPU memory allocated; 0 on CPU."""
    counts: Counts = Counts()
    copies: tuple[CopyId, ...] = ()
    """Outputs it keeps whose `Staged` was acknowledged: shows a lost `Release` or `Dropped` to the server."""


class Goodbye(_FromInstance, frozen=True, tag="goodbye"):
    """The instance stops; its work and its copies are gone after this."""

    reason: str
    failed: bool = False
    """It does not stop of its own will: something in it broke, perhaps over what it was computing."""


class Draining(_FromInstance, frozen=True, tag="draining"):
    """The instance was asked to stop: it takes no new work and leaves once it is not needed, at the latest in
    ``seconds``. Repeated with each heartbeat; the answer is `DrainStatus`."""

    seconds: float


class Kept(_FromInstance, frozen=True, tag="kept"):
    """Answer to `Keep`: the instance has a copy of its own of what ``copy`` holds."""

    copy: CopyId
    manifest: Manifest


# -- stage reports: instance PUSH -> result port of the stage's role ------------------------------------------------


class Fetched(_FromInstance, frozen=True, tag="fetched"):
    """A stage's inputs are in the receiver's memory and verified; the sender's copy need not be pinned any more."""

    lease: Lease
    seconds: float
    nbytes: int
    plane: str


class Pull(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a stage's inputs were fetched, in the words of `Fetched`."""

    seconds: float
    nbytes: int
    plane: str


class Started(_FromInstance, frozen=True, tag="started"):
    """The compute thread took up the stage: waiting time ends, running time begins."""

    lease: Lease


class Progress(_FromInstance, frozen=True, tag="progress"):
    """``step`` of ``steps`` denoising steps are done."""

    lease: Lease
    step: int
    steps: int
    preview: Annotated[bytes, msgspec.Meta(max_length=MAX_PREVIEW_BYTES)] = b""
    """A small picture (WebP) of the result so far; empty when there is none that is new."""


class Checkpointed(_FromInstance, frozen=True, tag="checkpointed"):
    """A running stage has put what it did so far into its pool: another attempt may go on after ``step`` of
    ``steps``."""

    lease: Lease
    manifest: Manifest
    step: int
    steps: int


class Output(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One staged copy and the role that reads it."""

    consumer: Role
    manifest: Manifest


class Staged(_FromInstance, frozen=True, tag="staged"):
    """A stage is done and its outputs can be pulled. An outcome: resent until acknowledged."""

    lease: Lease
    outputs: tuple[Output, ...]
    compute_seconds: float
    stage_seconds: float
    pull: Pull | None = None
    """Said once more, because an outcome takes the place of earlier reports that have not left yet."""


class MediaFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A finished media file; its bytes are the raw frame ``blob`` of the ZMQ message."""

    blob: int
    mime: str
    suffix: str
    """File name extension with the dot, e.g. ``.mp4``."""
    width: int
    height: int
    frames: int
    fps: float
    """0 for an image."""
    checksum: int
    """xxh3-64 of the bytes."""


class Finished(_FromInstance, frozen=True, tag="finished"):
    """The last stage is done. An outcome: kept and resent until the server has stored the files."""

    lease: Lease
    files: tuple[MediaFile, ...]
    compute_seconds: float
    encode_seconds: float
    pull: Pull | None = None
    """As of `Staged`."""


class StageFailed(_FromInstance, frozen=True, tag="stage_failed"):
    """A stage could not be done. An outcome."""

    lease: Lease
    error: ErrorInfo
    lost_copies: tuple[CopyId, ...] = ()
    """Inputs that could not be pulled: their sender may be dead or have dropped them."""


class Stopped(_FromInstance, frozen=True, tag="stopped"):
    """A cancelled lease is over and its memory is free. An outcome."""

    lease: Lease
    checkpoint: Manifest | None = None
    """What it did so far, when that was to be kept and can be continued."""
    step: int = 0
    """Denoising steps in the checkpoint."""
    steps: int = 0


class Dropped(_FromInstance, frozen=True, tag="dropped"):
    """Retained copies that were dropped because the pool needed the room."""

    copies: tuple[CopyId, ...]


FromInstance: TypeAlias = (
    Hello
    | Heartbeat
    | Goodbye
    | Draining
    | Kept
    | Fetched
    | Started
    | Progress
    | Checkpointed
    | Staged
    | Finished
    | StageFailed
    | Stopped
    | Dropped
)

Outcome: TypeAlias = Staged | Finished | StageFailed | Stopped
"""Reports that end a lease; the instance resends them until it gets an `Ack`."""


# -- server -> instance -----------------------------------------------------------------------------------------


class Welcome(_ToInstance, frozen=True, tag="welcome"):
    """Answer to a hello, on the frontend ROUTER."""

    result_urls: dict[Role, str]
    """Where the instance pushes reports of a stage of that role."""
    heartbeat_interval: float
    """Seconds."""


class Refused(_ToInstance, frozen=True, tag="refused", omit_defaults=True):
    """A hello that cannot be accepted: another protocol version, or another model than the others serve.

    What a default says is left out, so that an instance of an earlier version can read why it is refused."""

    reason: str
    passing: bool = False
    """It is because of the instances that are there, and may be over when they are not: say hello again."""


class Unknown(_ToInstance, frozen=True, tag="unknown"):
    """The server does not know this instance (it restarted): say hello again."""


class RunStage(_ToInstance, frozen=True, tag="run_stage"):
    """A lease, on the instance's work port."""

    lease: Lease
    params: dict[str, Any]
    """The request's validated parameters under the pipeline's names: plain values only. Images are
    ``{"blob": i}`` and their encoded bytes travel as raw frame i (encoder stage only)."""
    inputs: tuple[Manifest, ...]
    """Copies to pull; empty for the encoder."""
    budget_seconds: float
    """Running time that is left to the request."""
    resume: Manifest | None = None
    """Checkpoint to go on from, to be pulled like the inputs."""


class Cancel(_ToInstance, frozen=True, tag="cancel"):
    """Stop this lease within one step, answer `Stopped`. Of an unknown lease: answer `Stopped` all the same."""

    lease: Lease
    keep: bool = False
    """Keep what was done: a stage between two steps leaves a checkpoint, one without steps is finished instead."""


class Keep(_ToInstance, frozen=True, tag="keep"):
    """Pull this copy of another instance and keep it, so that it outlives its maker; answer `Kept`. Does not count as
    a lease; when there is no room, or the maker is gone, nothing happens."""

    manifest: Manifest
    spare: bool
    """It only saves time (a checkpoint): the first to be dropped when the pool needs room."""


class DrainStatus(_ToInstance, frozen=True, tag="drain_status"):
    """Answer to `Draining`: whether requests still need what the instance computes or keeps."""

    needed: bool


class Release(_ToInstance, frozen=True, tag="release"):
    """Copies that nobody will read again; of another instance's, one that is not to be kept any more."""

    copies: tuple[CopyId, ...]


class Ack(_ToInstance, frozen=True, tag="ack"):
    """Outcomes that arrived (files: that are stored); the instance forgets them."""

    leases: tuple[Lease, ...]


ToInstance: TypeAlias = Welcome | Refused | Unknown | DrainStatus | RunStage | Cancel | Keep | Release | Ack
