"""One request's books: its state and clocks, the lease that it runs under, and the copies that it still needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any

from triptych.core.cost import Size, staged_bytes
from triptych.core.events import JobState, JobView, StageTiming
from triptych.core.health import Health
from triptych.core.states import COUNTS_AS_RUNNING, COUNTS_AS_WAITING, transition
from triptych.ids import ROLES, CopyId, Epoch, InstanceId, RequestId, Role
from triptych.wire.manifest import Manifest
from triptych.wire.messages import ErrorInfo, Lease
from triptych.wire.schema import RequestSchema

_BACKWARDS: tuple[Role, ...] = tuple(reversed(ROLES))


@dataclass(kw_only=True, slots=True, eq=False)
class Grant:
    """One lease as the router knows it, from the dispatch until its outcome arrives."""

    lease: Lease
    instance: InstanceId
    granted: float
    job: Job | None
    """None: the request ended or moved on, and the slot is taken only until the instance says that it stopped."""
    fetched: bool = False
    started: float | None = None
    storing: bool = False
    """Its files are being stored; the instance keeps them until then."""
    resumed: bool = False
    """Granted by an earlier life of the server and brought back by the instance."""
    resume: Copy | None = None
    """The checkpoint that it goes on from."""
    suspending: bool = False
    """It was asked to stop between two steps and keep what it has done."""
    missed: int = 0
    """Successive heartbeats that did not know of it."""
    pull_seconds: float = 0.0
    pulled_bytes: int = 0
    plane: str = ""


@dataclass(kw_only=True, slots=True, eq=False)
class Copy:
    """A staged output that some later stage of its request will read."""

    manifest: Manifest
    lease: Lease
    """The lease that made it."""
    consumer: Role
    instance: InstanceId
    job: Job
    staged: float
    missed: int = 0
    failures: int = 0
    """Failed pulls."""
    failed_at: set[InstanceId] = field(default_factory=set[InstanceId])
    """Who failed to pull it."""
    buddy: InstanceId | None = None
    """Who was asked to keep it too."""
    step: int = 0
    """Denoising steps in it, when it is a checkpoint."""
    steps: int = 0
    origin: tuple[str, str] = ("", "")
    """Fingerprints of the encoder and the denoiser that made a checkpoint: only on equal ones it leads to the same
    result."""

    @property
    def spare(self) -> bool:
        """Whether it is a checkpoint, without which its stage only takes longer."""
        return self.step > 0

    def moved(self, manifest: Manifest, instance: InstanceId, now: float) -> Copy:
        """The same content in another pool."""
        return Copy(
            manifest=manifest,
            lease=self.lease,
            consumer=self.consumer,
            instance=instance,
            job=self.job,
            staged=now,
            step=self.step,
            steps=self.steps,
            origin=self.origin,
        )

    @property
    def producer(self) -> Role:
        """The stage that made it."""
        return self.lease.role


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Evidence of one failed attempt."""

    role: Role
    attempt: int
    instance: InstanceId
    reason: str
    killed: Epoch | None = None
    """The life of the instance that ended with it."""
    silent: Epoch | None = None
    """The life of the instance that was lost with it, but had said its last word before it got the stage."""
    saved: int = 0
    """Denoising steps that were not lost by it."""

    def __str__(self) -> str:
        return f"attempt {self.attempt} on {self.instance}: {self.reason}"


@dataclass(kw_only=True, slots=True, eq=False)
class Storing:
    """Files on their way from the decoder, which keeps and repeats them until they are stored."""

    writing: bool = True
    """Whether the shell is at it."""
    tries: int = 1
    error: ErrorInfo | None = None
    """What the last try failed with."""


@dataclass(kw_only=True, slots=True, eq=False)
class Awaited:
    """What the instances may bring back of a request that an earlier life of the server had under way."""

    holder: InstanceId | None
    """Who held its lease."""
    copies: dict[CopyId, Copy]
    """Outputs that are kept for it, as far as the journal knows."""
    until: float
    """When the waiting ends."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Accused:
    """An instance that was blamed for a failure of a request."""

    role: Role
    instance: InstanceId
    health: Health
    sound: bool
    """Nothing else was held against it, and it had shown that it can serve."""


@dataclass(kw_only=True, slots=True, eq=False)
class Job:
    """A live request."""

    request: RequestId
    number: int
    """Order of acceptance."""
    params: dict[str, Any]
    queue_timeout: float
    run_timeout: float
    since: float
    """When the present state began."""
    state: JobState = JobState.PENDING
    role: Role = Role.ENCODER
    """The stage that it waits for or runs."""
    attempt: int = 1
    """Grows with every step back, so that no lease is ever granted twice."""
    waited: float = 0.0
    ran: float = 0.0
    """Seconds of earlier states; `clocks` adds the present one."""
    ready: float = 0.0
    """When it was last lined up for its stage."""
    queued: bool = False
    """Whether it stands in the queue of its role; kept by the queue."""
    grant: Grant | None = None
    storing: Storing | None = None
    """Its files have arrived and are not stored yet."""
    awaited: Awaited | None = None
    """Until it is None, the request stands in no queue."""
    size: Size | None = None
    """What its cost depends on; None until somebody asks."""
    stages: dict[Role, int] = field(default_factory=dict[Role, int])
    """Bytes that its stages will put into their pools; see `staged_bytes`."""
    step: int = 0
    steps: int = 0
    outputs: dict[Role, tuple[tuple[CopyId, Role], ...]] = field(
        default_factory=dict[Role, tuple[tuple[CopyId, Role], ...]],
    )
    """Stages that are done: which copies each made, and for whom."""
    copies: dict[CopyId, Copy] = field(default_factory=dict[CopyId, Copy])
    """Copies that still exist and will be read."""
    keeping: dict[CopyId, Copy] = field(default_factory=dict[CopyId, Copy])
    """Copies that another instance was asked to keep too."""
    encoded_by: str = ""
    """Fingerprint of the encoder."""
    resumed_from: int = 0
    """Steps that the latest denoising attempt took over."""
    preview: bytes = b""
    """The latest picture of what is denoised."""
    paused: bool = False
    parked: bool = False
    """Paused, and standing nowhere else: its clocks stand still."""
    faults: list[Fault] = field(default_factory=list[Fault])
    avoid: set[InstanceId] = field(default_factory=set[InstanceId])
    """Instances that failed the present stage."""
    accused: list[Accused] = field(default_factory=list["Accused"])
    """Instances that were blamed for failing the present stage."""
    moved_from: InstanceId | None = None
    """The instance that a client had the present stage leave, unless it failed since: others are preferred."""
    timings: list[StageTiming] = field(default_factory=list[StageTiming])

    def staged_bytes(self, schema: RequestSchema | None, role: Role) -> int:
        """Bytes that its stage of ``role`` will put into its pool, as far as ``schema`` tells before; else 0."""
        if role not in self.stages and schema is not None:
            self.stages[role] = staged_bytes(schema, self.params, role)
        return self.stages.get(role, 0)

    def move(self, state: JobState, now: float) -> None:
        """Enter ``state``, closing the clock of the old one. Raises `IllegalTransition` and changes nothing."""
        new = transition(self.state, state)
        if self.state in COUNTS_AS_RUNNING:
            self.ran += now - self.since
        elif self.state in COUNTS_AS_WAITING:
            self.waited += now - self.since
        self.state = new
        self.since = now

    def clocks(self, now: float) -> tuple[float, float]:
        """Seconds spent waiting and running so far."""
        if self.parked:
            return self.waited, self.ran
        if self.state in COUNTS_AS_RUNNING:
            return self.waited, self.ran + now - self.since
        if self.state in COUNTS_AS_WAITING:
            return self.waited + now - self.since, self.ran
        return self.waited, self.ran

    @property
    def deadline(self) -> float:
        """When the timeout of the present state strikes if nothing changes."""
        if self.parked:
            return inf
        if self.state in COUNTS_AS_RUNNING:
            return self.since + self.run_timeout - self.ran
        return self.since + self.queue_timeout - self.waited

    @property
    def held(self) -> bool:
        """Whether it waits for what instances may bring back, and for nothing else."""
        return self.awaited is not None and self.grant is None and self.storing is None

    def inputs(self, role: Role) -> tuple[Manifest, ...]:
        """What a stage of ``role`` reads, in the order of the stages that made it."""
        copies = self.copies
        # One of the functions that every request passes several times: plain loops cost half of a generator.
        manifests: list[Manifest] = []
        for producer in ROLES:
            for copy, consumer in self.outputs.get(producer, ()):
                if consumer is role:
                    manifests.append(copies[copy].manifest)
        return tuple(manifests)

    def park(self, now: float) -> None:
        """Stop the clocks."""
        self.waited, self.ran = self.clocks(now)
        self.parked = True

    def unpark(self, now: float) -> None:
        """Let the clocks go on."""
        self.since = now
        self.parked = False

    def checkpoints(self) -> list[Copy]:
        """The checkpoints of its denoising stage that exist, the most advanced ones last."""
        spare = [copy for copy in self.copies.values() if copy.step]
        return sorted(spare, key=lambda copy: copy.step) if len(spare) > 1 else spare

    def checkpoint(self, fingerprint: str) -> Copy | None:
        """The most advanced one that a denoiser of this fingerprint can go on from."""
        for copy in reversed(self.checkpoints()):
            if copy.origin == (self.encoded_by, fingerprint):
                return copy
        return None

    def exchange(self, old: Copy, new: Copy) -> None:
        """Have later stages read ``new`` in place of ``old``."""
        if (made := self.outputs.get(old.producer)) is not None:
            ids = {old.manifest.copy: new.manifest.copy}
            self.outputs[old.producer] = tuple((ids.get(copy, copy), consumer) for copy, consumer in made)

    def settle(self) -> list[Copy]:
        """Strike out the stages whose outputs are gone although somebody has yet to read them.

        Returns the copies that these stages will make anew; they are of no use any more. Edges lead forward only, so
        one walk from the last stage to the first also finds the stages that must be repeated for a repeated one.
        """
        useless: list[Copy] = []
        outputs, copies = self.outputs, self.copies
        if not outputs:
            return useless
        for producer in _BACKWARDS:
            for copy, consumer in outputs.get(producer, ()):
                if copy not in copies and consumer not in outputs:
                    useless += [copies[copy] for copy, _ in outputs.pop(producer) if copy in copies]
                    break
        return useless

    def next_role(self) -> Role:
        """The earliest stage that is not done; call `settle` before."""
        for role in ROLES:
            if role not in self.outputs:
                return role
        raise AssertionError(f"request {self.request} has no stage left to do")

    def charge(
        self, role: Role, instance: InstanceId, reason: str, killed: Epoch | None, silent: Epoch | None
    ) -> list[Fault]:
        """Book a failure of the present attempt, of which an instance may have died; returns those of this stage."""
        self.faults.append(
            Fault(
                role=role,
                attempt=self.attempt,
                instance=instance,
                reason=reason,
                killed=killed,
                silent=silent,
                saved=self._saved(role),
            )
        )
        self.avoid.add(instance)
        self.moved_from = None
        return self.failures(role)

    def failures(self, role: Role) -> list[Fault]:
        """What is booked of failed attempts of the stage of ``role``."""
        return [fault for fault in self.faults if fault.role is role]

    def acquit(self, epoch: Epoch) -> None:
        """That life of an instance has not ended after all."""
        self.faults = [fault for fault in self.faults if epoch not in (fault.killed, fault.silent)]

    @property
    def kills(self) -> list[Fault]:
        """The failures of the present stage of which instances died since it last got further."""
        saved = self._saved(self.role)
        return [f for f in self.faults if f.killed is not None and f.role is self.role and f.saved >= saved]

    def _saved(self, role: Role) -> int:
        return max((copy.step for copy in self.checkpoints()), default=0) if role is Role.DENOISER else 0

    def view(
        self, now: float, position: int | None, error: ErrorInfo | None = None, ended_in: JobState | None = None
    ) -> JobView:
        """A snapshot for whoever watches the request."""
        waited, ran = self.clocks(now)
        return JobView(
            request=self.request,
            state=self.state,
            attempt=self.attempt,
            step=self.step,
            steps=self.steps,
            position=position,
            waiting_seconds=waited,
            running_seconds=ran,
            error=error,
            timings=tuple(self.timings),
            resumed_from_step=self.resumed_from,
            paused=self.paused,
            preview=self.preview if self.state is JobState.DENOISING_RUNNING else b"",
            ended_in=ended_in,
        )
