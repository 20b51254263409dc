"""The control loop between real sockets, a real pool and its threads' posts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import zmq

from triptych.accel.tally import Tally
from triptych.config import InstanceConfig, ModelConfig, TransferConfig
from triptych.core.instance import InstanceMachine
from triptych.core.instance_events import Ended, Stop, Usage
from triptych.errors import ConfigError, TransferError
from triptych.ids import ROLES, CopyId, Epoch, InstanceId, RequestId, Role
from triptych.launch.ports import free_ports
from triptych.pipeline.stage import RolePipeline
from triptych.transport.control.instance import InstanceControl
from triptych.transport.control.server import ServerControl
from triptych.transport.data.local import LocalPlane
from triptych.transport.data.protocol import Payload, Pull
from triptych.wire.manifest import Manifest
from triptych.wire.messages import (
    PROTOCOL_VERSION,
    Ack,
    Cancel,
    Fetched,
    Finished,
    FromInstance,
    Goodbye,
    Heartbeat,
    Hello,
    Keep,
    Lease,
    MediaFile,
    Refused,
    Release,
    RunStage,
    StageFailed,
    Stopped,
    ToInstance,
    Unknown,
    Welcome,
    replace,
)
from triptych.wire.schema import RequestSchema
from triptych.worker.control import ControlLoop
from triptych.worker.crew import Crew
from triptych.worker.jobs import Identity, MediaReady, ThreadDied
from triptych.worker.lifecycle import EXIT_OPERATOR
from triptych.worker.metrics import InstanceMetrics
from triptych.worker.standing import Standing
from triptych.worker.threads import Mailbox

WAIT = 60.0
ME, LIFE, SERVER = InstanceId("i"), Epoch("e"), Epoch("server")
SCHEMA = RequestSchema(model="m", pipeline="P", split="modular", task="text-to-video", output="video", params=())


def _server() -> tuple[ServerControl, int]:
    """A server on four ports in a row; others may take one of them between the asking and the binding."""
    while True:
        port = free_ports(1)[0]
        try:
            return ServerControl("127.0.0.1", port), port
        except ConfigError:
            continue


class Stand:
    """A loop in a thread, with a server before it. Its compute thread takes no jobs: it never finishes loading."""

    def __init__(self) -> None:
        self.loading = threading.Event()
        self.server, self.port = _server()
        self.work_url = f"tcp://127.0.0.1:{(work_port := free_ports(1)[0])}"
        self.control = InstanceControl(
            bind_host="127.0.0.1", work_port=work_port, server_addr=f"tcp://127.0.0.1:{self.port}"
        )
        self.plane = LocalPlane(instance=ME, epoch=LIFE, pool_bytes=1 << 20)
        self.mailbox = Mailbox()
        self.mailbox.attach(self.control.wake)
        identity = Identity(instance=ME, epoch=LIFE)
        config = InstanceConfig(
            roles=ROLES, server_addr=f"tcp://127.0.0.1:{self.port}", work_port=work_port, transfer=TransferConfig(),
            model=ModelConfig(path="tiny", device="cpu"),
        )  # fmt: skip
        self.standing = Standing(config.server_addr)
        self.metrics = InstanceMetrics(
            identity=identity, config=config, figures=lambda: self.plane.figures, tally=Tally(), standing=self.standing
        )
        self.crew = Crew(
            load=self._load, device="cpu", slots=2, max_running=1, tally=Tally(), plane=self.plane, identity=identity,
            post=self.mailbox.post,
        )  # fmt: skip
        hello = Hello(
            instance=ME, epoch=LIFE, server_epoch=None, protocol=PROTOCOL_VERSION, roles=ROLES, work_url=self.work_url,
            host="h", slots=2, pool_bytes=1 << 20, planes=("local",), schema=SCHEMA, fingerprint="f", device="cpu",
        )  # fmt: skip
        self.loop = ControlLoop(
            control=self.control, machine=InstanceMachine(hello), plane=self.plane, crew=self.crew,
            mailbox=self.mailbox, identity=identity,
            usage=lambda: Usage(pool_used=self.plane.used_bytes, resident_bytes=1, device_bytes=0),
            metrics=self.metrics, standing=self.standing,
        )  # fmt: skip
        self.exit_code: int | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.crew.start()
        self.thread.start()
        assert isinstance(self.hear(Hello)[0], Hello)

    def welcome(self) -> None:
        urls = {role: f"tcp://127.0.0.1:{self.port + n}" for n, role in enumerate(ROLES, 1)}
        self.server.send_member(ME, Welcome(server_epoch=SERVER, epoch=LIFE, result_urls=urls, heartbeat_interval=0.2))
        self.server.flush()

    def _load(self) -> RolePipeline:
        self.loading.wait(WAIT)
        raise AssertionError("this model is not there")

    def _run(self) -> None:
        self.exit_code = self.loop.run()

    def work(self, message: ToInstance) -> None:
        self.server.send_work(self.work_url, message)
        self.server.flush()

    def hear(self, kind: type[FromInstance]) -> tuple[FromInstance, tuple[bytes, ...]]:
        """The next message of that kind, with its raw frames."""
        deadline = time.monotonic() + WAIT
        while time.monotonic() < deadline:
            for inbound in self.server.receive():
                if isinstance(inbound.message, kind):
                    return inbound.message, inbound.blobs
            time.sleep(0.002)
        raise AssertionError(f"no {kind.__name__} came")

    def end(self) -> int | None:
        self.thread.join(WAIT)
        assert not self.thread.is_alive()
        self.control.close()
        return self.exit_code


@pytest.fixture
def new() -> Iterator[Stand]:
    """One that has said hello."""
    stand = Stand()
    yield stand
    stand.mailbox.post(Stop(reason="the test is over"))
    stand.end()
    stand.mailbox.attach(None)
    stand.loading.set()
    stand.crew.close(WAIT)
    stand.plane.check_integrity()
    stand.plane.close()
    stand.server.close()


@pytest.fixture
def stand(new: Stand) -> Stand:
    """One that was welcomed."""
    new.welcome()
    return new


def lease(role: Role, request: str = "r") -> Lease:
    return Lease(RequestId(request), role, 1)


def test_whether_the_server_has_the_instance_is_known(stand: Stand) -> None:
    def wait_for(welcomed: bool) -> None:
        deadline = time.monotonic() + WAIT
        while stand.standing.welcomed is not welcomed:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    wait_for(True)
    stand.server.send_member(ME, Unknown(server_epoch=SERVER, epoch=LIFE))
    stand.server.flush()
    wait_for(False)


def test_a_stop_is_told_to_the_server_and_ends_well(stand: Stand) -> None:
    stand.mailbox.post(Stop(reason="SIGTERM"))
    assert stand.end() == 0
    message, _ = stand.hear(Goodbye)
    assert isinstance(message, Goodbye)
    assert (message.reason, message.failed) == ("SIGTERM", False)


REFUSED = Refused(server_epoch=SERVER, epoch=LIFE, reason="model='a': this server is for 'b'")


def test_an_instance_that_is_refused_ends_as_one_that_its_operator_must_mend_something_for(new: Stand) -> None:
    """Symptom: whoever supervised it started it again for ever."""
    new.server.send_member(ME, REFUSED)
    new.server.flush()
    assert new.end() == EXIT_OPERATOR


def test_an_instance_that_has_served_before_it_is_refused_is_worth_another_start(stand: Stand) -> None:
    """Symptom: whoever supervised it gave it up, and all that it supervised with it."""
    stand.server.send_member(ME, Unknown(server_epoch=SERVER, epoch=LIFE))
    stand.server.flush()
    stand.hear(Hello)
    stand.server.send_member(ME, REFUSED)
    stand.server.flush()
    assert stand.end() == 1


def test_a_dead_thread_is_told_to_the_server_and_ends_badly(stand: Stand) -> None:
    stand.mailbox.post(ThreadDied(thread="media", reason="MemoryError: no room"))
    assert stand.end() == 1
    message, _ = stand.hear(Goodbye)
    assert isinstance(message, Goodbye)
    assert (message.reason, message.failed) == ("the media thread died: MemoryError: no room", True)


def staged(stand: Stand, nbytes: int = 1000) -> RunStage:
    manifest = stand.plane.stage(RequestId("r"), Payload(tree=b"", tensors=(torch.zeros(nbytes, dtype=torch.uint8),)))
    return RunStage(
        server_epoch=SERVER, epoch=LIFE, lease=lease(Role.DENOISER), params={}, inputs=(manifest,), budget_seconds=60
    )


def test_inputs_are_pulled_at_once_and_a_released_copy_frees_the_pool(stand: Stand) -> None:
    message = staged(stand)
    stand.work(message)
    fetched, _ = stand.hear(Fetched)
    assert isinstance(fetched, Fetched)
    assert (fetched.lease, fetched.nbytes, fetched.plane) == (message.lease, message.inputs[0].nbytes, "local")
    stand.work(Release(server_epoch=SERVER, epoch=LIFE, copies=(message.inputs[0].copy,)))
    deadline = time.monotonic() + WAIT
    while stand.plane.used_bytes:
        assert time.monotonic() < deadline


def test_copies_that_are_to_be_kept_hold_up_no_request_and_are_given_up_when_they_are_released(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull, hung = stand.plane.pull, threading.Semaphore(0)
    given_up: list[str] = []
    theirs = [replace(staged(stand).inputs[0], copy=CopyId(f"theirs-{number}")) for number in range(4)]

    def slow(manifest: Manifest, *, deadline: float, cancelled: Callable[[], bool]) -> Pull:
        if manifest not in theirs:
            return pull(manifest, deadline=deadline, cancelled=cancelled)
        hung.release()
        while not cancelled():
            time.sleep(0.001)
        given_up.append(manifest.copy)
        raise TransferError("the pull was cancelled")

    monkeypatch.setattr(stand.plane, "pull", slow)
    for manifest in theirs:
        stand.work(Keep(server_epoch=SERVER, epoch=LIFE, manifest=manifest, spare=True))
    assert hung.acquire(timeout=WAIT)
    message = staged(stand)
    stand.work(message)
    fetched, _ = stand.hear(Fetched)
    assert isinstance(fetched, Fetched)
    assert fetched.lease == message.lease
    assert not given_up
    for manifest in reversed(theirs):
        stand.work(Release(server_epoch=SERVER, epoch=LIFE, copies=(manifest.copy,)))
    deadline = time.monotonic() + WAIT
    while given_up != ["theirs-0"]:  # the others had not been begun
        assert time.monotonic() < deadline


def test_an_input_that_is_gone_is_reported_by_name(stand: Stand) -> None:
    message = staged(stand)
    stand.plane.release([message.inputs[0].copy])
    stand.work(message)
    failed, _ = stand.hear(StageFailed)
    assert isinstance(failed, StageFailed)
    assert failed.lost_copies == (message.inputs[0].copy,)


def test_cancelling_what_was_never_begun_is_answered(stand: Stand) -> None:
    stand.work(Cancel(server_epoch=SERVER, epoch=LIFE, lease=lease(Role.DECODER)))
    stopped, _ = stand.hear(Stopped)
    assert isinstance(stopped, Stopped)
    assert stopped.lease == lease(Role.DECODER)


def test_a_file_is_sent_again_until_the_server_has_stored_it(stand: Stand) -> None:
    run = RunStage(server_epoch=SERVER, epoch=LIFE, lease=lease(Role.DECODER), params={}, inputs=(), budget_seconds=60)
    stand.work(run)
    while run.lease not in stand.hear(Heartbeat)[0].leases:
        pass  # the machine knows the lease once a heartbeat lists it
    file = MediaFile(blob=0, mime="image/png", suffix=".png", width=1, height=1, frames=1, fps=0, checksum=5)
    outcome = Finished(
        instance=ME, epoch=LIFE, server_epoch=None, lease=run.lease, files=(file,), compute_seconds=1, encode_seconds=1
    )
    stand.mailbox.post(MediaReady(outcome=outcome, files=(b"picture",)))
    for _ in range(2):
        message, blobs = stand.hear(Finished)
        assert isinstance(message, Finished)
        assert (message.lease, message.files, blobs) == (run.lease, (file,), (b"picture",))
    stand.work(Ack(server_epoch=SERVER, epoch=LIFE, leases=(run.lease,)))
    deadline = time.monotonic() + WAIT
    while stand.loop._files:
        assert time.monotonic() < deadline


def test_what_is_dropped_at_the_work_port_and_what_is_odd_shows_in_the_metrics(stand: Stand) -> None:
    def figure(metric: str, **labels: str) -> float:
        return stand.metrics.registry.get_sample_value(f"triptych_instance_{metric}_total", labels) or 0.0

    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.connect(stand.work_url)
        for _ in range(2):
            stranger.send(b"nonsense")
        run = RunStage(
            server_epoch=SERVER, epoch=LIFE, lease=lease(Role.DECODER), params={}, inputs=(), budget_seconds=60
        )
        for _ in range(2):
            stand.work(run)
        deadline = time.monotonic() + WAIT
        while (figure("dropped_frames", socket="work"), figure("events", name="repeated_lease")) != (2, 1):
            assert time.monotonic() < deadline


def test_an_outcome_of_a_lease_that_is_over_is_harmless(stand: Stand) -> None:
    outcome = Stopped(instance=ME, epoch=LIFE, server_epoch=None, lease=lease(Role.ENCODER, "unknown"))
    stand.mailbox.post(Ended(outcome=outcome))
    stand.work(Cancel(server_epoch=SERVER, epoch=LIFE, lease=lease(Role.DECODER)))
    stand.hear(Stopped)


def test_an_idle_instance_whose_pool_lost_track_of_its_bytes_ends(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise AssertionError("bytes 0 to 64 have two owners")

    monkeypatch.setattr(stand.plane, "check_integrity", broken)
    goodbye, _ = stand.hear(Goodbye)
    assert isinstance(goodbye, Goodbye)
    assert "bytes 0 to 64 have two owners" in goodbye.reason
    assert goodbye.failed
    assert stand.end() == 1
