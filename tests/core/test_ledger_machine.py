"""The lease ledger under every order of events: the books add up after each, and every request ends exactly once."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from triptych.core.events import (
    InstanceExited,
    MigrateRequest,
    PauseRequest,
    Received,
    Restore,
    ResumeRequest,
    SendWork,
    StoreFailed,
    StoreFiles,
)
from triptych.core.states import TERMINAL
from triptych.ids import ROLES, CopyId, InstanceId, RequestId, Role
from triptych.wire.manifest import Manifest
from triptych.wire.messages import (
    Checkpointed,
    Draining,
    Dropped,
    ErrorInfo,
    Goodbye,
    Keep,
    Kept,
    Lease,
    RunStage,
    Stopped,
)

from .harness import Bench, manifest

NAMES = ("encoder-0", "denoiser-0", "denoiser-1", "decoder-0", "any-0")


class LedgerMachine(RuleBasedStateMachine):
    """Clients, instances that tell the truth late or twice, instances that die, and time."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.submitted: list[RequestId] = []
        self.given: list[tuple[str, Lease]] = []
        """Every lease ever given, with its holder: reports of those that are over must change nothing."""
        self.storing: list[Lease] = []
        self.keeps: list[tuple[str, Keep]] = []
        """Whom the router asked to keep what."""
        self.copies = 0
        self.restored: list[Lease] = []
        """Leases of an earlier life of the server, which instances may bring back."""

    def _note(self) -> None:
        """Take down what the router gave out; called after each rule."""
        for action in self.bench.out:
            if isinstance(action, SendWork) and isinstance(action.message, RunStage):
                assert (action.instance, action.message.lease) not in self.given, "a lease was given twice"
                self.given.append((action.instance, action.message.lease))
            elif isinstance(action, SendWork) and isinstance(action.message, Keep):
                self.keeps.append((action.instance, action.message))
            elif isinstance(action, StoreFiles):
                self.storing.append(action.lease)

    def _join(self, name: str, life: int, **held: object) -> None:
        roles: tuple[Role, ...] = ROLES if name.startswith("any") else ()
        self.bench.join(name, *roles, life=life, slots=2, pool_bytes=400, **held)
        self._note()

    def _new_copy(self, name: str, lease: Lease) -> Manifest:
        self.copies += 1
        return manifest(f"spare-{self.copies}", lease.request, name, life=self.bench.lives.get(name, 1))

    # -- clients -----------------------------------------------------------------------------------------------------

    @rule(patient=st.booleans())
    def submit(self, patient: bool) -> None:
        name = f"r{len(self.submitted)}"
        self.submitted.append(self.bench.submit(name, queue_timeout=600.0 if patient else 2.0))
        self._note()

    @rule(role=st.sampled_from(ROLES), holder=st.sampled_from((None, *NAMES)))
    def restore(self, role: Role, holder: str | None) -> None:
        """A request of an earlier life of the server: nothing of it was done, or its first stage was leased."""
        name = f"r{len(self.submitted)}"
        self.submitted.append(RequestId(name))
        if holder is not None:
            self.restored.append(Lease(RequestId(name), role, 1))
        self.bench.feed(
            Restore(
                request=RequestId(name),
                params={},
                queue_timeout=600.0,
                run_timeout=600.0,
                holder=None if holder is None else InstanceId(holder),
            )
        )
        self._note()

    @precondition(lambda self: self.submitted)
    @rule(data=st.data(), kind=st.sampled_from(("cancel", "pause", "resume", "migrate")))
    def wish(self, data: st.DataObject, kind: str) -> None:
        request = data.draw(st.sampled_from(self.submitted))
        match kind:
            case "cancel":
                self.bench.cancel(request)
            case "pause":
                self.bench.feed(PauseRequest(request=request))
            case "resume":
                self.bench.feed(ResumeRequest(request=request))
            case _:
                self.bench.feed(MigrateRequest(request=request))
        self._note()

    # -- instances ---------------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES))
    def start(self, name: str) -> None:
        self._join(name, self.bench.lives.get(name, 0) + 1)

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def come_back(self, name: str, data: st.DataObject) -> None:
        """The same life once more, after a restart of the server or a cut network, with leases that it may hold."""
        mine = [lease for holder, lease in self.given[-8:] if holder == name] + self.restored
        leases = data.draw(st.lists(st.sampled_from(mine), unique=True)) if mine else []
        for lease in leases:
            if (name, lease) not in self.given:
                self.given.append((name, lease))
        self._join(name, self.bench.lives.get(name, 1), leases=tuple(leases))

    @rule(name=st.sampled_from(NAMES))
    def drain(self, name: str) -> None:
        self.bench.receive(Draining(**self.bench._signed(name), seconds=5.0))
        self._note()

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def tell_otherwise(self, name: str, data: st.DataObject) -> None:
        """A heartbeat that lists other leases and copies than the router has booked."""
        leases = [lease for _, lease in self.given[-8:]]
        copies = [*self.bench.copies_at(name), CopyId("unknown")]
        self.bench.beat(
            name,
            tuple(data.draw(st.lists(st.sampled_from(leases), unique=True)) if leases else ()),
            copies=tuple(data.draw(st.lists(st.sampled_from(copies), unique=True))),
        )
        self._note()

    @precondition(lambda self: self.keeps)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        """Answer a `Keep`, whatever became of the request meanwhile; perhaps once more."""
        name, keep = data.draw(st.sampled_from(self.keeps))
        mine = manifest(f"{keep.manifest.copy}@{name}", keep.manifest.request, name, life=self.bench.lives[name])
        self.bench.receive(Kept(**self.bench._signed(name), copy=keep.manifest.copy, manifest=mine))
        self._note()

    @rule(name=st.sampled_from(NAMES), exited=st.booleans())
    def die(self, name: str, exited: bool) -> None:
        if exited:
            self.bench.feed(InstanceExited(instance=InstanceId(name)))
        else:
            self.bench.receive(Goodbye(**self.bench._signed(name), reason="asked to stop"))
        self._note()

    @precondition(lambda self: self.given)
    @rule(
        data=st.data(),
        what=st.sampled_from(
            ("fetch", "start", "step", "save", "end", "end", "end", "fail", "lose", "stop", "suspend")
        ),
        retryable=st.booleans(),
    )
    def report(self, data: st.DataObject, what: str, retryable: bool) -> None:
        """Of any lease ever given: most are over, and some are told in the name of a later life."""
        name, lease = data.draw(st.sampled_from(self.given[-8:]))
        bench = self.bench
        match what:
            case "fetch":
                bench.fetched(name, lease)
            case "start":
                bench.started(name, lease)
            case "step":
                bench.progress(name, lease, data.draw(st.integers(0, 10)))
            case "save" | "suspend":
                spare, step = self._new_copy(name, lease), data.draw(st.integers(0, 10))
                told = bench._signed(name) | {"lease": lease, "step": step, "steps": 10}
                if what == "save":
                    bench.receive(Checkpointed(**told, manifest=spare))
                else:
                    bench.receive(Stopped(**told, checkpoint=spare))
            case "end" if lease.role is Role.DECODER:
                bench.finished(name, lease)
            case "end":
                life = bench.lives[name]
                bench.staged(name, lease, (f"{lease.request}/{lease.role}.{lease.attempt}@{life}", lease.role.next))
            case "fail":
                bench.failed(name, lease, retryable=retryable)
            case "lose":
                bench.failed(name, lease, *(copy for other in NAMES for copy in bench.copies_at(other)))
            case _:
                bench.stopped(name, lease)
        self._note()

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def drop(self, name: str, data: st.DataObject) -> None:
        copies = self.bench.copies_at(name)
        gone = tuple(data.draw(st.lists(st.sampled_from(copies), unique=True))) if copies else (CopyId("unknown"),)
        self.bench.feed(Received(message=Dropped(**self.bench._signed(name), copies=gone)))
        self._note()

    # -- the shell ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.storing)
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        self.bench.stored(data.draw(st.sampled_from(self.storing)))
        self._note()

    @precondition(lambda self: self.storing)
    @rule(data=st.data(), retryable=st.booleans())
    def fail_to_store(self, data: st.DataObject, retryable: bool) -> None:
        lease = data.draw(st.sampled_from(self.storing))
        error = ErrorInfo(code="storage_full", message="no room", blame="operator", retryable=retryable)
        self.bench.feed(StoreFailed(request=lease.request, attempt=lease.attempt, error=error))
        self._note()

    @rule(seconds=st.sampled_from((0.5, 1.0, 4.0)), alive=st.booleans())
    def wait(self, seconds: float, alive: bool) -> None:
        end = self.bench.now + seconds
        while self.bench.now < end:
            self.bench.wait(0.5, alive=alive)
            self._note()

    # -- what holds --------------------------------------------------------------------------------------------------

    @invariant()
    def every_request_is_live_or_has_ended_once(self) -> None:
        live = {view.request for view in self.bench.router.views()}
        for request in self.submitted:
            ends = [view.state for view in self.bench.updates[request] if view.state in TERMINAL]
            assert len(ends) == (0 if request in live else 1), f"{request} ended {len(ends)} times"

    @invariant()
    def slots_are_conserved(self) -> None:
        for view in self.bench.router.instances():
            assert len(view.leases) + view.free_slots == view.slots
        held = [lease for view in self.bench.router.instances() for lease in view.leases]
        assert len(held) == len(set(held)), "two instances hold the same lease"

    def teardown(self) -> None:
        """When all that can be cancelled is, nothing is left anywhere."""
        for request in self.submitted:
            self.bench.cancel(request)
        assert self.bench.router.views() == ()
        assert not any(view.copies for view in self.bench.router.instances())


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase
