"""The compute thread: who gets the next step, who is stopped, and whose failure is whose."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from triptych.accel.companions import Companions
from triptych.accel.tally import Tally
from triptych.core.instance_events import ComputeStarted, Ended, Stepped
from triptych.errors import BadRequest, ModelError, StageError
from triptych.ids import Epoch, InstanceId, RequestId, Role
from triptych.pipeline.frames import FrameStream
from triptych.pipeline.stage import Clip, StageOutput, StageResult
from triptych.transport.data.protocol import Payload
from triptych.wire.messages import ErrorInfo, Lease, StageFailed, Stopped
from triptych.wire.schema import RequestSchema
from triptych.worker.compute import ComputeThread
from triptych.worker.jobs import (
    CheckpointJob,
    ComputeJob,
    Identity,
    Loaded,
    MediaJob,
    Post,
    StageJob,
    ThreadDied,
    Ticket,
)
from triptych.worker.preview import PreviewThread

IDENTITY = Identity(instance=InstanceId("i"), epoch=Epoch("e"))
SCHEMA = RequestSchema(model="m", pipeline="P", split="modular", task="text-to-video", output="video", params=())
WAIT = 60.0
T = TypeVar("T")


class Run:
    """A stage whose steps are the script's: a step waits for the script's gate, and may raise what the script says."""

    def __init__(self, params: Mapping[str, Any], pipeline: ScriptedPipeline) -> None:
        self.name: str = params["name"]
        self.step = 0
        self.steps: int = params.get("steps", 3)
        self._streams: str | None = params.get("streams")
        self._compiles: int = params.get("compiles", 0)
        self._raises: Exception | None = params.get("raises")
        self._prepares: Callable[[Callable[[], None]], None] | None = params.get("prepares")
        self._told: Callable[[], None] = lambda: None
        self._unprepared: bool = params.get("unprepared", False)
        self._pipeline = pipeline
        self.memory: torch.Tensor | None = torch.zeros(8)
        pipeline.memory[self.name] = weakref.ref(self.memory)

    def prepare(self) -> None:
        self._pipeline.turns.append(f"prepare {self.name}")
        self._pipeline.gate(f"prepare {self.name}")
        if self._unprepared:
            raise StageError("cannot be prepared")

    def announce(self, told: Callable[[], None]) -> None:
        self._told = told

    def advance(self) -> StageResult | None:
        assert not torch.is_grad_enabled()
        if self._prepares is not None:
            self._prepares(self._told)
            self._prepares = None
        elif self.step == 0:
            self._told()
        self._pipeline.turns.append(self.name)
        self._pipeline.gate(self.name)
        for _ in range(self._compiles):
            assert self._pipeline.tally.compiling is not None
            self._pipeline.tally.compiling()
            self._pipeline.tally.compilations += 1
        if self._raises is not None:
            raise self._raises
        if self._streams is not None:
            frames = FrameStream((2, 4, 4, 3))
            frames.put(torch.zeros(1, 4, 4, 3, dtype=torch.uint8))
            self._deliver((Clip(frames=frames, fps=8.0),))
            if self._streams == "fails":
                raise StageError("the decoder ran out of memory")
            frames.put(torch.ones(1, 4, 4, 3, dtype=torch.uint8))
            return StageResult(clips=(Clip(frames=np.zeros((2, 4, 4, 3), np.uint8), fps=8.0),))
        self.step += 1
        if self.step < self.steps:
            return None
        return StageResult(outputs=(StageOutput(consumer=Role.DECODER, tree=b"", tensors=()),))

    def stream_to(self, deliver: Callable[[tuple[Clip, ...]], None]) -> None:
        self._deliver = deliver

    def cancel(self) -> None:
        self.memory = None
        self._pipeline.cancelled.append(self.name)


class ScriptedPipeline:
    """The `RolePipeline` of a script."""

    prepares = True

    roles = (Role.DENOISER,)
    schema = SCHEMA
    fingerprint = "f"

    def __init__(self, gate: Callable[[str], None] = lambda name: None) -> None:
        self.gate = gate
        self.turns: list[str] = []
        self.cancelled: list[str] = []
        self.started: list[str] = []
        self.tally = Tally()
        self.memory: dict[str, weakref.ref[torch.Tensor]] = {}

    def start(
        self,
        role: Role,
        params: Mapping[str, Any],
        inputs: Sequence[tuple[bytes, Sequence[torch.Tensor]]],
        images: Sequence[bytes],
    ) -> Run:
        if "refuse" in params:
            raise params["refuse"]
        self.started.append(params["name"])
        return Run(params, self)


class Bench:
    """A running compute thread and what it says."""

    def __init__(self, pipeline: ScriptedPipeline, max_running: int = 1, checkpoint_interval: float = 0.0) -> None:
        self.posts: SimpleQueue[Post] = SimpleQueue()
        self.staged: SimpleQueue[StageJob | CheckpointJob] = SimpleQueue()
        self.encoded: SimpleQueue[MediaJob] = SimpleQueue()
        self.thread = ComputeThread(
            load=lambda: pipeline,
            device="cpu",
            max_running=max_running,
            checkpoint_interval=checkpoint_interval,
            tally=pipeline.tally,
            identity=IDENTITY,
            post=self.posts.put,
            stage=self.staged.put,
            encode=self.encoded.put,
            show=PreviewThread(device="cpu", post=self.posts.put),
        )
        self.thread.start()
        assert isinstance(self.posts.get(timeout=WAIT), Loaded)

    def begin(self, name: str, role: Role = Role.DENOISER, **params: Any) -> Ticket:
        ticket = Ticket(Lease(RequestId(name), role, 1))
        self.thread.put(ComputeJob(ticket=ticket, params={"name": name, **params}, inputs=(), images=()))
        return ticket

    def until(self, kind: type[T]) -> T:
        """The next post of that kind; what comes before it is passed over."""
        while not isinstance(post := self.posts.get(timeout=WAIT), kind):
            assert not isinstance(post, ThreadDied), post
        return post


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(pipeline: ScriptedPipeline, max_running: int = 1, checkpoint_interval: float = 0.0) -> Bench:
        benches.append(Bench(pipeline, max_running, checkpoint_interval))
        return benches[-1]

    yield make
    for one in benches:
        one.thread.close()
        one.thread.join(WAIT)
        assert not one.thread.is_alive()


def stepped(pipeline: ScriptedPipeline) -> list[str]:
    """Whose steps were computed, one after the other."""
    return [turn for turn in pipeline.turns if not turn.startswith("prepare ")]


def failure(post: Ended) -> ErrorInfo:
    assert isinstance(post.outcome, StageFailed)
    return post.outcome.error


class Gate:
    """Holds one named run in its step until it is opened."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, name: str) -> None:
        if name == self._name:
            self.reached.set()
            assert self.open.wait(WAIT)


def test_a_stage_reports_its_start_each_step_and_hands_its_output_on(bench: Callable[..., Bench]) -> None:
    at = bench(ScriptedPipeline())
    ticket = at.begin("a", steps=3)
    assert at.posts.get(timeout=WAIT) == ComputeStarted(lease=ticket.lease)
    assert [at.posts.get(timeout=WAIT) for _ in range(3)] == [
        Stepped(lease=ticket.lease, step=n, steps=3) for n in (1, 2, 3)
    ]
    job = at.staged.get(timeout=WAIT)
    assert job.ticket is ticket
    assert [o.consumer for o in job.outputs] == [Role.DECODER]


def test_two_requests_take_turns_step_by_step_and_a_third_waits(bench: Callable[..., Bench]) -> None:
    gate = Gate("a")
    pipeline = ScriptedPipeline(gate)
    at = bench(pipeline, max_running=2)
    at.begin("a", steps=3)
    assert gate.reached.wait(WAIT)
    at.begin("b", steps=2)
    at.begin("c", steps=1)
    gate.open.set()
    done = [at.staged.get(timeout=WAIT).ticket.lease.request for _ in range(3)]
    assert stepped(pipeline) == ["a", "b", "a", "b", "c", "a"]
    assert done == ["b", "c", "a"]


def test_time_between_a_stage_and_one_that_waited_for_it_is_counted(bench: Callable[..., Bench]) -> None:
    gate = Gate("a")
    pipeline = ScriptedPipeline(gate)
    at = bench(pipeline)
    at.begin("a", steps=1)
    assert gate.reached.wait(WAIT)
    at.begin("b", steps=1)
    gate.open.set()
    for _ in range(2):
        at.staged.get(timeout=WAIT)
    at.begin("c", steps=1)  # nobody could have begun it any sooner
    at.staged.get(timeout=WAIT)
    assert pipeline.tally.turnovers == 1
    assert 0 < pipeline.tally.turnover_seconds < WAIT


def test_what_is_prepared_before_the_first_step_is_time_in_between(bench: Callable[..., Bench]) -> None:
    """The loop's own preparations: the second stage comes to its first step only when the test says so."""
    gate = Gate("a")
    pipeline = ScriptedPipeline(gate)
    at = bench(pipeline)
    at.begin("a", steps=1)
    assert gate.reached.wait(WAIT)
    counts: list[int] = []
    prepared = threading.Event()

    def prepare(computes: Callable[[], None]) -> None:
        counts.append(pipeline.tally.turnovers)
        time.sleep(0.05)
        computes()
        counts.append(pipeline.tally.turnovers)
        prepared.set()

    at.begin("b", steps=2, prepares=prepare)
    gate.open.set()
    for _ in range(2):
        at.staged.get(timeout=WAIT)
    assert prepared.is_set()
    assert counts == [0, 1]
    assert 0.05 <= pipeline.tally.turnover_seconds < WAIT


@pytest.mark.parametrize("unprepared", [False, True])
def test_the_next_request_is_prepared_while_one_computes(bench: Callable[..., Bench], unprepared: bool) -> None:
    gate = Gate("a")
    pipeline = ScriptedPipeline(gate)
    at = bench(pipeline)
    at.begin("a", steps=2)
    assert gate.reached.wait(WAIT)
    at.begin("b", steps=1, unprepared=unprepared)
    at.begin("c", steps=1, role=Role.ENCODER)
    gate.open.set()
    for _ in range(3):
        at.staged.get(timeout=WAIT)
    assert pipeline.turns == ["a", "prepare b", "a", "b", "c"]
    assert pipeline.started == ["a", "b", *(["b"] if unprepared else []), "c"]


def test_a_request_that_joins_others_is_prepared_beside_their_step(bench: Callable[..., Bench]) -> None:
    """Symptom: it waited with its first copy from the GPU until the step in flight was done."""
    gate = Gate("a")
    pipeline = ScriptedPipeline(gate)
    at = bench(pipeline, max_running=2)
    at.begin("a", steps=2)
    assert gate.reached.wait(WAIT)
    at.begin("b", steps=1)
    gate.open.set()
    assert [at.staged.get(timeout=WAIT).ticket.lease.request for _ in range(2)] == ["b", "a"]
    assert pipeline.turns == ["a", "prepare b", "b", "a"]


def test_what_was_prepared_for_a_request_that_is_cancelled_is_let_go(bench: Callable[..., Bench]) -> None:
    gate, preparing = Gate("a"), Gate("prepare b")
    pipeline = ScriptedPipeline(lambda name: (gate(name), preparing(name)))
    at = bench(pipeline)
    at.begin("a", steps=3)
    assert gate.reached.wait(WAIT)
    ticket = at.begin("b", steps=1)
    gate.open.set()
    assert preparing.reached.wait(WAIT)
    ticket.cancelled.set()
    preparing.open.set()
    assert isinstance(at.until(Ended).outcome, Stopped)
    assert pipeline.memory["b"]() is None
    assert "b" not in pipeline.turns


def test_cancelling_stops_before_the_next_step_and_lets_go_of_the_memory(bench: Callable[..., Bench]) -> None:
    gate = Gate("a")
    pipeline = ScriptedPipeline(gate)
    at = bench(pipeline)
    ticket = at.begin("a", steps=100)
    assert gate.reached.wait(WAIT)
    ticket.cancelled.set()
    gate.open.set()
    assert isinstance(at.until(Ended).outcome, Stopped)
    assert pipeline.turns == ["a"]
    assert pipeline.memory["a"]() is None


def test_a_request_that_is_cancelled_while_it_queues_never_starts(bench: Callable[..., Bench]) -> None:
    gate = Gate("a")
    pipeline = ScriptedPipeline(gate)
    at = bench(pipeline)
    at.begin("a", steps=2)
    assert gate.reached.wait(WAIT)
    at.begin("b").cancelled.set()
    gate.open.set()
    ended = at.until(Ended)
    assert ended.outcome.lease.request == "b"
    assert at.staged.get(timeout=WAIT).ticket.lease.request == "a"
    assert pipeline.turns == ["a", "a"]


@pytest.mark.parametrize(
    ("error", "code", "blame", "retryable", "words"),
    [
        (BadRequest("height", "height=7: too small"), "invalid_value", "caller", False, "height=7: too small"),
        (StageError("out of memory", retryable=True), "stage_failed", "instance", True, "out of memory"),
        (ZeroDivisionError("division by zero"), "stage_failed", "instance", False, "ZeroDivisionError"),
        (torch.OutOfMemoryError("2 GiB"), "out_of_memory", "instance", True, "ran out of memory: lower height, width"),
    ],
)
@pytest.mark.parametrize("where", ["refuse", "raises"])
def test_a_failing_request_fails_alone(
    bench: Callable[..., Bench], where: str, error: Exception, code: str, blame: str, retryable: bool, words: str
) -> None:
    gate = Gate("good")
    at = bench(ScriptedPipeline(gate), max_running=2)
    at.begin("good")
    assert gate.reached.wait(WAIT)
    at.begin("bad", **{where: error})
    gate.open.set()
    info = failure(at.until(Ended))
    assert (info.code, info.blame, info.retryable) == (code, blame, retryable)
    assert words in info.message
    assert at.staged.get(timeout=WAIT).ticket.lease.request == "good"


class SharingPipeline(ScriptedPipeline):
    """A pipeline of two kinds of runs, by their names' first letters, of which ``fits`` at once pay off."""

    joins = True
    fits = 1

    def companions(self, runs: Sequence[Run], turn: int) -> Companions:
        alike = [number for number, run in enumerate(runs) if run.name[0] == runs[turn].name[0]]
        return Companions(advance=alike[: self.fits], wait=alike[self.fits :])

    def advance_together(self, runs: Sequence[Run]) -> list[StageResult | Exception | None]:
        return [run.advance() for run in runs]


def test_requests_that_gain_nothing_from_sharing_end_one_after_the_other_and_kinds_take_turns(
    bench: Callable[..., Bench],
) -> None:
    gate = Gate("a1")
    pipeline = SharingPipeline(gate)
    at = bench(pipeline, max_running=4)
    at.begin("a1", steps=3)
    assert gate.reached.wait(WAIT)
    for name in ("a2", "b1", "b2"):
        at.begin(name, steps=3)
    gate.open.set()
    done = [at.staged.get(timeout=WAIT).ticket.lease.request for _ in range(4)]
    assert {name: done.index(name) for name in done} == {"a1": 0, "b1": 1, "a2": 2, "b2": 3}


def test_a_short_request_does_not_wait_for_the_long_ones_of_its_kind(bench: Callable[..., Bench]) -> None:
    """Symptom: it ran into its run timeout, almost uncomputed, when those that were there before took that long."""
    gate = Gate("a1")
    pipeline = SharingPipeline(gate)
    at = bench(pipeline, max_running=4)
    at.begin("a1", steps=40)
    assert gate.reached.wait(WAIT)
    for name, steps in (("a2", 40), ("a3", 40), ("a4", 4)):
        at.begin(name, steps=steps)
    gate.open.set()
    done = [at.staged.get(timeout=WAIT).ticket.lease.request for _ in range(4)]
    assert done == ["a4", "a1", "a2", "a3"]
    turns = stepped(pipeline)
    assert turns.index("a4") < 4
    last = len(turns) - turns[::-1].index("a4")
    assert last <= 4 + 3 + 1, "once each, to see of which kind they are, then it alone"


def test_short_requests_that_keep_coming_do_not_hold_up_a_long_one_for_ever(bench: Callable[..., Bench]) -> None:
    gate = Gate("a-long")
    pipeline = SharingPipeline(gate)
    at = bench(pipeline, max_running=2)
    at.begin("a-long", steps=20)
    assert gate.reached.wait(WAIT)
    for number in range(60):
        at.begin(f"a{number}", steps=3)
    gate.open.set()
    done = [at.staged.get(timeout=WAIT).ticket.lease.request for _ in range(61)]
    assert 3 <= done.index(RequestId("a-long")) <= 20, "it lets some pass by, and has the rest wait"


def test_one_that_waits_for_others_of_its_kind_can_be_cancelled(bench: Callable[..., Bench]) -> None:
    gate = Gate("a1")
    pipeline = SharingPipeline(gate)
    at = bench(pipeline, max_running=2)
    at.begin("a1", steps=1000)
    assert gate.reached.wait(WAIT)
    second = at.begin("a2", steps=2000)
    gate.open.set()
    started = at.until(ComputeStarted)
    while started.lease != second.lease:
        started = at.until(ComputeStarted)
    second.cancelled.set()
    assert at.until(Ended).outcome.lease == second.lease
    assert pipeline.turns.count("a2") <= 1, "it waits after the step that shows of which kind it is"


class JoiningPipeline(SharingPipeline):
    """A pipeline whose groups fail."""

    fits = 2

    def advance_together(self, runs: Sequence[Run]) -> list[StageResult | Exception | None]:
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_group_that_cannot_be_advanced_fails_its_requests_and_nothing_else(bench: Callable[..., Bench]) -> None:
    gate = Gate("a")
    at = bench(JoiningPipeline(gate), max_running=2)
    at.begin("a")
    assert gate.reached.wait(WAIT)
    at.begin("another")
    gate.open.set()
    assert {failure(at.until(Ended)).code for _ in range(2)} == {"out_of_memory"}
    at.begin("c")
    assert at.staged.get(timeout=WAIT).ticket.lease.request == "c"


def test_the_thread_keeps_no_tensor_of_what_it_has_finished(bench: Callable[..., Bench]) -> None:
    at = bench(ScriptedPipeline())
    tensor = torch.zeros(8)
    gone = weakref.ref(tensor)
    ticket = Ticket(Lease(RequestId("a"), Role.DENOISER, 1))
    payload = Payload(tree=b"", tensors=(tensor,))
    at.thread.put(ComputeJob(ticket=ticket, params={"name": "a", "steps": 1}, inputs=(payload,), images=()))
    del tensor, payload
    at.staged.get(timeout=WAIT)
    at.begin("b", steps=1)  # once this one is through, the thread has returned from the first
    at.staged.get(timeout=WAIT)
    assert gone() is None


def test_a_model_that_cannot_be_loaded_is_heard_of() -> None:
    posts: SimpleQueue[Post] = SimpleQueue()

    def load() -> ScriptedPipeline:
        raise ModelError("component 'vae' cannot be loaded: no such file")

    thread = ComputeThread(
        load=load, device="cpu", max_running=1, tally=Tally(), identity=IDENTITY, post=posts.put,
        stage=lambda job: None, encode=lambda job: None,
    )  # fmt: skip
    thread.start()
    assert posts.get(timeout=WAIT) == ThreadDied(
        thread="compute", reason="component 'vae' cannot be loaded: no such file", mendable=True
    )
    thread.join(WAIT)


def test_frames_are_handed_on_before_the_last_is_decoded(bench: Callable[..., Bench]) -> None:
    at = bench(ScriptedPipeline())
    at.begin("a", Role.DECODER, streams="works")
    job = at.encoded.get(timeout=WAIT)
    (clip,) = job.clips
    assert [frame.max() for frame in clip.frames] == [0, 1]
    assert job.seconds() > 0
    at.begin("b", Role.DECODER)  # nothing more came of it
    assert at.encoded.get(timeout=WAIT).ticket.lease.request == "b"


def test_a_decoder_that_fails_after_its_first_frames_is_reported_by_who_writes_the_file(
    bench: Callable[..., Bench],
) -> None:
    at = bench(ScriptedPipeline())
    ticket = at.begin("a", Role.DECODER, streams="fails")
    (clip,) = at.encoded.get(timeout=WAIT).clips
    with pytest.raises(StageError, match="out of memory"):
        list(clip.frames)
    at.begin("b", Role.DECODER)
    at.encoded.get(timeout=WAIT)
    ended = [post for post in iter_posts(at.posts) if isinstance(post, Ended)]
    assert all(post.outcome.lease != ticket.lease for post in ended)


def iter_posts(posts: SimpleQueue[Post]) -> Iterator[Post]:
    while not posts.empty():
        yield posts.get()


def test_a_compilation_in_the_middle_of_serving_is_told(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    at = bench(ScriptedPipeline())
    at.begin("a", steps=1)
    at.staged.get(timeout=WAIT)
    assert not caplog.records
    at.begin("b", steps=1, compiles=3)
    at.staged.get(timeout=WAIT)
    assert "compiled 3 graphs" in caplog.text
    begun, done = (record.getMessage() for record in caplog.records)
    assert begun.startswith("compiling, which may take minutes"), "before it holds everything up, and once"
    assert "request=b: the model's own size was not declared (--warmup)" in begun
    assert done.endswith(begun.partition(": ")[2])


def test_closing_gives_up_what_is_running(bench: Callable[..., Bench]) -> None:
    gate = Gate("a")
    pipeline = ScriptedPipeline(gate)
    at = bench(pipeline)
    at.begin("a", steps=10**9)
    assert gate.reached.wait(WAIT)
    at.thread.close()
    gate.open.set()
    at.thread.join(WAIT)
    assert not at.thread.is_alive()
    assert pipeline.turns == ["a"]
    assert pipeline.memory["a"]() is None


# -- checkpoints -----------------------------------------------------------------------------------------------------


class ResumableRun(Run):
    """A run that can be continued; its checkpoint is its step."""

    unsaved: Exception | None = None

    def preview(self) -> Callable[[], bytes] | None:
        if self.unsaved is not None:
            raise self.unsaved
        return None

    def checkpoint(self) -> tuple[bytes, tuple[torch.Tensor, ...]] | None:
        if self.unsaved is not None:
            raise self.unsaved
        return str(self.step).encode(), (torch.tensor([self.step]),)

    def restore(self, tree: bytes, tensors: Sequence[torch.Tensor]) -> None:
        if tree == b"broken":
            raise StageError("not a checkpoint", retryable=True)
        self.step = int(tensors[0])


class ResumablePipeline(ScriptedPipeline):
    """A pipeline whose runs can be continued."""

    def start(
        self,
        role: Role,
        params: Mapping[str, Any],
        inputs: Sequence[tuple[bytes, Sequence[torch.Tensor]]],
        images: Sequence[bytes],
    ) -> Run:
        run = ResumableRun(params, self)
        run.unsaved = params.get("unsaved")
        return run


def resume_at(at: Bench, name: str, tree: bytes, step: int) -> Ticket:
    ticket = Ticket(Lease(RequestId(name), Role.DENOISER, 2))
    resume = Payload(tree=tree, tensors=(torch.tensor([step]),))
    at.thread.put(ComputeJob(ticket=ticket, params={"name": name, "steps": 4}, inputs=(), images=(), resume=resume))
    return ticket


def test_a_run_goes_on_from_its_checkpoint_and_counts_on(bench: Callable[..., Bench]) -> None:
    at = bench(ResumablePipeline())
    ticket = resume_at(at, "a", b"2", 2)
    assert at.posts.get(timeout=WAIT) == ComputeStarted(lease=ticket.lease)
    assert [at.posts.get(timeout=WAIT) for _ in range(2)] == [
        Stepped(lease=ticket.lease, step=n, steps=4) for n in (3, 4)
    ]


@pytest.mark.parametrize(("pipeline", "tree"), [(ResumablePipeline, b"broken"), (ScriptedPipeline, b"2")])
def test_a_run_that_cannot_go_on_from_a_checkpoint_may_be_tried_without(
    bench: Callable[..., Bench], pipeline: type[ScriptedPipeline], tree: bytes
) -> None:
    scripted = pipeline()
    at = bench(scripted)
    resume_at(at, "a", tree, 2)
    assert failure(at.until(Ended)).retryable
    assert scripted.cancelled == ["a"]  # further ranks of an instance would keep it


def test_checkpoints_are_made_at_the_interval_and_never_two_at_a_time(bench: Callable[..., Bench]) -> None:
    at = bench(ResumablePipeline(), checkpoint_interval=1e-6)
    ticket = at.begin("a", steps=5)
    first = at.staged.get(timeout=WAIT)
    assert isinstance(first, CheckpointJob)
    assert (first.ticket, first.step, first.steps, first.last) == (ticket, 1, 5, False)
    assert isinstance(at.staged.get(timeout=WAIT), StageJob)  # the first was not reported as saved meanwhile
    gate = Gate("b")
    at = bench(ResumablePipeline(gate), checkpoint_interval=1e-6)
    gate.open.set()
    at.begin("b", steps=200)
    steps = []
    while isinstance(job := at.staged.get(timeout=WAIT), CheckpointJob):
        steps.append(job.step)
        job.saved.set()
    assert steps == sorted(set(steps))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), KeyError("unforeseen")])
def test_a_run_of_which_no_checkpoint_and_no_picture_can_be_made_goes_on_without(
    bench: Callable[..., Bench], error: Exception
) -> None:
    at = bench(ResumablePipeline(), checkpoint_interval=1e-6)
    at.begin("a", steps=5, unsaved=error)
    assert isinstance(at.staged.get(timeout=WAIT), StageJob)


def test_without_an_interval_no_checkpoints_are_made(bench: Callable[..., Bench]) -> None:
    at = bench(ResumablePipeline(), checkpoint_interval=0.0)
    at.begin("a", steps=5)
    assert isinstance(at.staged.get(timeout=WAIT), StageJob)


def test_a_suspended_run_stops_between_two_steps_and_leaves_a_checkpoint(bench: Callable[..., Bench]) -> None:
    gate = Gate("a")
    pipeline = ResumablePipeline(gate)
    at = bench(pipeline)
    ticket = at.begin("a", steps=5)
    assert gate.reached.wait(WAIT)
    ticket.suspended.set()
    gate.open.set()
    job = at.staged.get(timeout=WAIT)
    assert isinstance(job, CheckpointJob)
    assert (job.step, job.last) == (1, True)
    at.begin("b", steps=1)
    at.staged.get(timeout=WAIT)
    assert pipeline.turns == ["a", "b"]
    assert pipeline.memory["a"]() is None


def test_a_suspended_run_that_cannot_be_continued_is_stopped(bench: Callable[..., Bench]) -> None:
    gate = Gate("a")
    at = bench(ScriptedPipeline(gate))
    ticket = at.begin("a", steps=5)
    waiting = at.begin("w", steps=1)
    assert gate.reached.wait(WAIT)
    ticket.suspended.set()
    waiting.suspended.set()
    gate.open.set()
    ended = [at.until(Ended).outcome for _ in range(2)]
    assert {outcome.lease for outcome in ended} == {ticket.lease, waiting.lease}
    assert all(isinstance(outcome, Stopped) and outcome.checkpoint is None for outcome in ended)


def test_a_suspended_run_that_is_at_its_end_is_finished(bench: Callable[..., Bench]) -> None:
    gate = Gate("a")
    at = bench(ResumablePipeline(gate))
    ticket = at.begin("a", steps=1)
    assert gate.reached.wait(WAIT)
    ticket.suspended.set()
    gate.open.set()
    assert isinstance(at.staged.get(timeout=WAIT), StageJob)
