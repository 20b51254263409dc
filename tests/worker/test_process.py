"""A real role process with the embedded model, driven over real sockets by the real router."""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import pytest
import xxhash

from tests.e2e.nursery import Forked
from tests.freezing import freeze
from triptych.config import RouterConfig
from triptych.core.events import (
    CancelRequest,
    Connect,
    Count,
    Disconnect,
    FilesStored,
    InstanceExited,
    JobState,
    JobView,
    Received,
    RouterAction,
    RouterEvent,
    SendMember,
    SendWork,
    StoreFiles,
    Submit,
    Tick,
    Update,
)
from triptych.core.router import Router
from triptych.ids import ROLES, Epoch, RequestId, Role
from triptych.launch.ports import free_ports
from triptych.transport.control.server import ServerControl
from triptych.wire.messages import (
    Fetched,
    FromInstance,
    Goodbye,
    Heartbeat,
    Lease,
    MediaFile,
    Progress,
    Started,
    Stopped,
)
from triptych.worker.lifecycle import EXIT_OPERATOR

WAIT = 180.0
"""Seconds; generous, because a loaded machine may take most of a minute to import torch."""
SMALL = {"prompt": "a red circle on a blue background", "seed": 7, "height": 64, "width": 64, "num_frames": 5}
LARGE = {"height": 128, "width": 128, "num_frames": 33}
"""A step of it takes longer than a word between processes."""
ENDED = (JobState.DONE, JobState.FAILED, JobState.CANCELLED, JobState.TIMED_OUT)


class Desk:
    """The server's part, turned by the test: the router over real sockets, and a list of all that was said."""

    def __init__(self) -> None:
        self.port = free_ports(4)[0]
        urls = {role: f"tcp://127.0.0.1:{self.port + n}" for n, role in enumerate(ROLES, 1)}
        self.control = ServerControl("127.0.0.1", self.port)
        self.router = Router(RouterConfig(lease_timeout=10), Epoch("server"), urls)
        self.heard: list[FromInstance] = []
        self.views: dict[RequestId, JobView] = {}
        self.files: dict[RequestId, list[tuple[MediaFile, bytes]]] = {}

    def feed(self, event: RouterEvent, blobs: tuple[bytes, ...] = ()) -> None:
        for action in self.router.handle(event, time.monotonic()):
            self._do(action, blobs)

    def _do(self, action: RouterAction, blobs: tuple[bytes, ...]) -> None:
        match action:
            case SendMember():
                self.control.send_member(action.instance, action.message)
            case SendWork():
                self.control.send_work(action.work_url, action.message)
            case StoreFiles(lease=lease):
                self.files[lease.request] = [(file, blobs[file.blob]) for file in action.files]
                self.feed(FilesStored(request=lease.request, attempt=lease.attempt))
            case Update(view=view):
                self.views[view.request] = view
            case Connect():
                self.control.connect(action.work_url)
            case Disconnect():
                self.control.disconnect(action.work_url)
            case Count():
                pass

    def until(self, condition: Callable[[], bool]) -> None:
        """Serve until the condition holds."""
        deadline = time.monotonic() + WAIT
        while not condition():
            assert time.monotonic() < deadline, f"{self.views}\n{self.heard[-10:]}"
            for inbound in self.control.receive():
                self.heard.append(inbound.message)
                self.feed(Received(message=inbound.message), inbound.blobs)
            self.feed(Tick())
            self.control.flush()
            time.sleep(0.002)

    def listen(self, seconds: float) -> None:
        """Serve for so long."""
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= end)

    def step(self, request: RequestId) -> int:
        """The latest step of a request that was told."""
        return max(m.step for m in self.heard if isinstance(m, Progress) and m.lease.request == request)

    def submit(self, name: str, **params: Any) -> RequestId:
        request = RequestId(name)
        self.feed(Submit(request=request, params=SMALL | params, queue_timeout=WAIT, run_timeout=WAIT))
        return request

    def result(self, request: RequestId) -> JobView:
        """The request once it has ended."""
        self.until(lambda: request in self.views and self.views[request].state in ENDED)
        return self.views[request]

    def said(self, kind: type[FromInstance], request: str, role: Role) -> list[int]:
        """Where in all that was said the messages of that kind about that stage stand."""
        return [
            at
            for at, message in enumerate(self.heard)
            if isinstance(message, kind)
            and isinstance(lease := getattr(message, "lease", None), Lease)
            and (lease.request, lease.role) == (request, role)
        ]

    def miss_all(self) -> None:
        """Nobody listens at the work ports any more."""
        for view in self.router.instances():
            self.feed(InstanceExited(instance=view.instance))

    def last_heartbeat(self) -> Heartbeat:
        return next(m for m in reversed(self.heard) if isinstance(m, Heartbeat))


class Instance:
    """One role process."""

    def __init__(self, desk: Desk, *roles: Role, log: Path, **options: Any) -> None:
        self.port = free_ports(1)[0]
        self.log = log
        config = {
            "slots": 2,
            "max_running": 1,
            "model": "tiny",
            "transfer": "shm",
            "gpu_ids": (0,),
            "drain_timeout": 30.0,
            "first": "",
        } | options
        code = (
            "from triptych.config import *\n"
            "from triptych.ids import Role\n"
            "from triptych.worker.process import run_instance\n"
            f"{config['first']}\n"
            "raise SystemExit(run_instance(InstanceConfig(\n"
            f"    roles=tuple(map(Role, {[str(r) for r in roles]})), server_addr='tcp://127.0.0.1:{desk.port}',\n"
            f"    work_port={self.port}, transfer=TransferConfig(kind={config['transfer']!r}),\n"
            f"    model=ModelConfig(path={config['model']!r}, device='cpu'), gpu_ids={config['gpu_ids']},\n"
            f"    slots={config['slots']}, max_running={config['max_running']},\n"
            f"    drain_timeout={config['drain_timeout']})))\n"
        )
        with log.open("w") as stderr:
            self.process = Forked(["-c", code], os.environ | {"OMP_NUM_THREADS": "1"}, Path.cwd(), stderr.fileno())

    def until_logged(self, words: str) -> None:
        deadline = time.monotonic() + WAIT
        while words not in self.log.read_text():
            assert time.monotonic() < deadline, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.01)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT)


@pytest.fixture(scope="module")
def shared_memory() -> Iterator[None]:
    """Whatever these processes do and however they end, nothing of theirs stays in shared memory."""
    before = set(os.listdir("/dev/shm"))  # noqa: PTH208
    yield
    left = set(os.listdir("/dev/shm")) - before  # noqa: PTH208
    assert not [name for name in left if "triptych" in name or name.startswith(("psm_", "torch_"))]


@pytest.fixture(scope="module")
def universal(shared_memory: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Desk, Instance]]:
    """One instance with all three roles."""
    desk = Desk()
    instance = Instance(
        desk, *ROLES, log=tmp_path_factory.mktemp("universal") / "log", transfer="local", slots=3, max_running=2
    )
    yield desk, instance
    instance.end()
    desk.control.close()


@pytest.fixture(scope="module")
def split(shared_memory: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Desk, Instance, Instance]]:
    """The denoiser in a process of its own."""
    desk = Desk()
    folder = tmp_path_factory.mktemp("split")
    ends = Instance(desk, Role.ENCODER, Role.DECODER, log=folder / "ends", drain_timeout=10 * WAIT)
    middle = Instance(desk, Role.DENOISER, log=folder / "middle", drain_timeout=10 * WAIT)
    yield desk, ends, middle
    ends.end()
    middle.end()
    desk.control.close()


def frames_of(data: bytes) -> int:
    with av.open(io.BytesIO(data)) as container:
        return sum(1 for _ in container.decode(video=0))


def test_a_prompt_becomes_an_mp4(universal: tuple[Desk, Instance]) -> None:
    desk, instance = universal
    request = desk.submit("prompt", num_inference_steps=3)
    view = desk.result(request)
    assert view.state is JobState.DONE, view.error
    assert max((m.step, m.steps) for m in desk.heard if isinstance(m, Progress)) == (3, 3)
    assert [t.role for t in view.timings] == list(ROLES)
    ((file, data),) = desk.files[request]
    assert (file.mime, file.width, file.height, file.frames) == ("video/mp4", 64, 64, 5)
    assert file.checksum == xxhash.xxh3_64_intdigest(data)
    assert frames_of(data) == 5
    log = instance.log.read_text()
    for words in ("staged role=encoder", "staged role=denoiser", "finished role=decoder"):
        (line,) = [line for line in log.splitlines() if words in line]
        assert f"request={request} attempt=1" in line
        assert "compute_seconds=" in line


def test_two_processes_give_the_same_bytes_as_one(
    universal: tuple[Desk, Instance], split: tuple[Desk, Instance, Instance]
) -> None:
    results: list[bytes] = []
    for desk in (universal[0], split[0]):
        request = desk.submit("same", num_inference_steps=2)
        view = desk.result(request)
        assert view.state is JobState.DONE, view.error
        results.append(desk.files[request][0][1])
    assert {t.plane for t in split[0].views[RequestId("same")].timings} == {"", "shm"}
    assert results[0] == results[1]


def test_the_next_inputs_are_pulled_while_the_first_request_computes(split: tuple[Desk, Instance, Instance]) -> None:
    desk = split[0]
    first = desk.submit("first", num_inference_steps=100, **LARGE)
    desk.until(lambda: bool(desk.said(Progress, first, Role.DENOISER)))
    second = desk.submit("second", num_inference_steps=2)
    desk.until(lambda: bool(desk.said(Fetched, second, Role.DENOISER)) or desk.views[first].state in ENDED)
    assert desk.views[first].state not in ENDED
    desk.feed(CancelRequest(request=first))
    assert desk.result(second).state is JobState.DONE
    (fetched,) = desk.said(Fetched, second, Role.DENOISER)
    (started,) = desk.said(Started, second, Role.DENOISER)
    assert fetched < started


def test_cancelling_stops_the_steps_and_frees_slot_and_pool(universal: tuple[Desk, Instance]) -> None:
    desk, instance = universal
    request = desk.submit("cancelled", num_inference_steps=100, **LARGE)
    desk.until(lambda: bool(desk.said(Progress, request, Role.DENOISER)))
    freeze(instance.process.pid)  # or it would get further while nobody here is at work
    desk.listen(0.5)
    reached = desk.step(request)
    desk.feed(CancelRequest(request=request))
    desk.listen(0.5)
    instance.process.send_signal(signal.SIGCONT)
    assert desk.result(request).state is JobState.CANCELLED
    desk.until(lambda: bool(desk.said(Stopped, request, Role.DENOISER)))
    # One step was done and not told when it was stopped, perhaps, one is finished, and one more for a slow machine.
    assert desk.step(request) <= reached + 3
    beat = desk.last_heartbeat().sequence
    desk.until(lambda: desk.last_heartbeat().sequence > beat + 3)
    assert (desk.last_heartbeat().leases, desk.last_heartbeat().pool_used) == ((), 0)
    assert desk.result(desk.submit("after", num_inference_steps=2)).state is JobState.DONE
    desk.router.check_integrity()


def test_a_poisoned_request_fails_alone(universal: tuple[Desk, Instance]) -> None:
    desk = universal[0]
    good = desk.submit("good", num_inference_steps=8)
    bad = [desk.submit("bad size", height=7), desk.submit("bad type", num_inference_steps="many")]
    bad_end = desk.submit("bad format", num_inference_steps=1, output_format="png")
    for request in (*bad, bad_end):
        view = desk.result(request)
        assert view.state is JobState.FAILED
        assert view.error is not None
        assert view.error.blame == "caller", view.error
    assert desk.result(good).state is JobState.DONE


def test_several_outputs_are_several_files(universal: tuple[Desk, Instance]) -> None:
    desk = universal[0]
    request = desk.submit("pictures", num_inference_steps=1, num_frames=1, n=2, output_format="jpeg")
    assert desk.result(request).state is JobState.DONE
    assert [(f.mime, f.frames) for f, _ in desk.files[request]] == [("image/jpeg", 1)] * 2
    assert all(data.startswith(b"\xff\xd8") for _, data in desk.files[request])


def test_sigterm_says_goodbye_and_ends_at_once_also_while_computing(split: tuple[Desk, Instance, Instance]) -> None:
    desk, ends, middle = split
    request = desk.submit("interrupted", num_inference_steps=100)
    desk.until(lambda: bool(desk.said(Progress, request, Role.DENOISER)))
    for instance in (middle, ends):
        instance.process.send_signal(signal.SIGTERM)
    assert [i.process.wait(WAIT) for i in (middle, ends)] == [0, 0]  # they might stay far longer, but nobody answers
    desk.until(lambda: sum(isinstance(m, Goodbye) for m in desk.heard) == 2)
    assert not desk.router.instances()


def test_kill_9_leaves_nothing_behind(universal: tuple[Desk, Instance], shared_memory: None) -> None:
    desk, instance = universal
    request = desk.submit("killed", num_inference_steps=100)
    desk.until(lambda: bool(desk.said(Progress, request, Role.DENOISER)))
    instance.process.kill()
    assert instance.process.wait(WAIT) == -signal.SIGKILL


SCARCE = """
import torch
from diffusers import WanTransformer3DModel
from triptych.transport.data import local

def full(tensor):
    activations = torch.ones(400 << 20, dtype=torch.uint8)
    raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {len(activations)} bytes.")

forward, clone = WanTransformer3DModel.forward, local._clone
WanTransformer3DModel.forward = lambda self, hidden_states, *args, **more: (
    full(hidden_states) if hidden_states.shape[2] > 2 else forward(self, hidden_states, *args, **more)
)
local._clone = lambda tensors: full(tensors) if any(t.shape[-1:] == (10,) for t in tensors) else clone(tensors)
"""
"""Memory runs out over the steps of more than 5 frames, and over copies of what is 80 pixels wide."""


@pytest.mark.parametrize("transfer", ["local", "shm"])
def test_an_instance_whose_memory_runs_out_fails_that_request_with_advice_and_goes_on(
    shared_memory: None, tmp_path: Path, transfer: str
) -> None:
    desk = Desk()
    instance = Instance(desk, *ROLES, log=tmp_path / "log", transfer=transfer, max_running=2, first=SCARCE)
    try:
        assert desk.result(desk.submit("first", num_inference_steps=2)).state is JobState.DONE
        before = desk.last_heartbeat().resident_bytes
        large = desk.submit("steps", num_inference_steps=2, num_frames=13)
        wide = desk.submit("copies", num_inference_steps=2, width=80)
        good = desk.submit("good", num_inference_steps=2)
        view = desk.result(large)
        assert view.state is JobState.FAILED
        assert view.error is not None
        assert "the denoiser ran out of memory: lower height, width, num_frames or n" in view.error.message
        view = desk.result(wide)
        if transfer == "local":
            assert view.state is JobState.FAILED
            assert view.error is not None
            assert "ran out of memory: lower" in view.error.message
        assert desk.result(good).state is JobState.DONE
        beat = desk.last_heartbeat().sequence
        desk.until(lambda: desk.last_heartbeat().sequence > beat + 3)
        last = desk.last_heartbeat()
        assert (last.leases, last.pool_used) == ((), 0)
        assert last.resident_bytes < before + (300 << 20)
        assert instance.process.poll() is None
    finally:
        instance.end()
        desk.control.close()


DEADLY = """
import os
from diffusers import WanTransformer3DModel

class Deadly(BaseException):
    pass

def die():
    raise Deadly("the device is beyond use")

WanTransformer3DModel.forward = lambda self, *args, **more: {death}
"""
"""Every step ends the compute thread, or the process."""
SILENT = "os._exit(1)"


@pytest.mark.parametrize(
    ("death", "evidence"),
    [
        pytest.param("die()", "the compute thread died: Deadly: the device is beyond use", id="thread"),
        pytest.param(SILENT, "instance lost: process exited", id="process"),
    ],
)
def test_a_request_that_every_instance_it_meets_dies_of_is_poison(
    shared_memory: None, tmp_path: Path, death: str, evidence: str
) -> None:
    desk = Desk()
    request = desk.submit("deadly", num_inference_steps=2)
    instances: list[Instance] = []
    try:
        for number in (1, 2):
            first = DEADLY.format(death=death)
            instances.append(Instance(desk, *ROLES, log=tmp_path / f"log-{number}", transfer="local", first=first))
            process = instances[-1].process
            desk.until(lambda process=process: process.poll() is not None)
            assert process.poll() == 1
            if death == SILENT:
                desk.miss_all()
            desk.until(lambda: not desk.router.instances())
        view = desk.views[request]
        assert view.state is JobState.FAILED
        assert view.error is not None
        assert view.error.code == "poison"
        assert view.error.message.count(evidence) == 2
    finally:
        for instance in instances:
            instance.end()
        desk.control.close()


def test_a_model_that_cannot_be_loaded_ends_the_process_with_a_reason(tmp_path: Path) -> None:
    desk = Desk()
    instance = Instance(desk, Role.DENOISER, log=tmp_path / "log", model=str(tmp_path / "nothing"))
    try:
        assert instance.process.wait(WAIT) == EXIT_OPERATOR
        assert "nothing" in instance.log.read_text()
        assert "Traceback" not in instance.log.read_text()
    finally:
        instance.end()
        desk.control.close()


def test_sigterm_while_the_model_loads_ends_the_process_at_once(tmp_path: Path) -> None:
    desk = Desk()
    instance = Instance(desk, *ROLES, log=tmp_path / "log")
    try:
        instance.until_logged("starting roles=")
        instance.process.send_signal(signal.SIGTERM)
        assert instance.process.wait(WAIT) == 0
    finally:
        instance.end()
        desk.control.close()
