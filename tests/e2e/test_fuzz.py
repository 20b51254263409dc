"""A server and an instance under fire: every socket gets malformed frames, and honest requests finish in between.

``TRIPTYCH_FUZZ_FRAMES`` sets how many frames are sent to each socket; the default suits a normal run.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
import zmq

from tests.e2e.fuzz import Fuzz, broken_zmtp, messages
from tests.e2e.harness import Api, Process, environment, until
from tests.freezing import freeze
from triptych.errors import WireError
from triptych.launch.ports import free_ports
from triptych.wire.codec import decode_from_instance
from triptych.wire.messages import PROTOCOL_VERSION, FromInstance, ToInstance

FRAMES = int(os.environ.get("TRIPTYCH_FUZZ_FRAMES", "10000"))
WARM_UP, PART = 2, 4
BURSTS = WARM_UP + 3 * PART
GROWTH = 32 << 20
"""Bytes by which a process may grow under fire. Its own books stay the same; this is room for what the queues hold at
one moment, and for what the allocator keeps of them."""

QUEUES = 128 << 20
"""The same where all sockets are under fire at once and other work may keep the process from reading them: four result
connections of 1024 messages are 20 MiB."""

LEAK = 1 << 20
"""Bytes by which memory grows in most bursts, and by which the least of one part of them lies above the least of the
part before, twice in a row. What the queues held at their fullest comes once; a leak comes with every frame: in 200,000
frames to each socket, one of 150 bytes a frame is found in either process, and one of 40 where all four sockets of the
server have it."""

API_KEY = "an-operator-sees-epochs"


class Target:
    """A server and an instance without a model, each a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.port, self.frontend, *_, self.work = free_ports(6)
        self.server = Process(
            "server",
            ["serve", "--disagg-role", "server", "--port", str(self.port), "--scheduler-port", str(self.frontend),
             "--output-dir", str(folder / "outputs"), "--api-key", API_KEY],
            folder,
        )  # fmt: skip
        self.log = folder / "instance.log"
        with self.log.open("wb") as log:
            self.instance = subprocess.Popen(
                [sys.executable, "-m", "triptych.bench.noop", f"tcp://127.0.0.1:{self.frontend}",
                 f"tcp://127.0.0.1:{self.work}", "encoder,denoiser,decoder", "4"],
                stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment(),
            )  # fmt: skip
        self.api = Api(f"http://127.0.0.1:{self.port}", key=API_KEY)
        self.ports = {name: self.frontend + n for n, name in enumerate(("frontend", "encoder", "denoiser", "decoder"))}

    def honest(self) -> None:
        """One request of a plain user, to its good end."""
        answer = self.api.post("/v1/videos", {"prompt": "a tree"})
        assert answer.status_code == 200, answer.text
        self.api.done(answer.json()["id"])

    def resident(self) -> dict[str, int]:
        return {
            "server": psutil.Process(self.server.pid).memory_info().rss,
            "instance": psutil.Process(self.instance.pid).memory_info().rss,
        }

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Both processes stand still meanwhile."""
        pids = (self.server.pid, self.instance.pid)
        try:
            for pid in pids:
                freeze(pid)
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def check_alive(self) -> None:
        assert self.server.status is None, self.server.output()[-3000:]
        assert self.instance.poll() is None, self.log.read_text()[-3000:]

    def close(self) -> None:
        self.api.close()
        assert self.instance.stdin is not None
        self.instance.stdin.close()
        ended = self.instance.wait(30)
        assert self.server.stop() == 0, self.server.output()[-3000:]
        assert ended == 0, self.log.read_text()[-3000:]
        assert "Traceback" not in self.server.output() + self.log.read_text()


@pytest.fixture
def target(folder: Path) -> Iterator[Target]:
    target = Target(folder)
    try:
        until(target.api.ready, "the server being ready")
        yield target
        target.close()
    finally:
        target.server.kill()
        target.instance.kill()
        target.instance.wait()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def malformed(frames: list[bytes]) -> bool:
    """Whether the server has to drop a message."""
    batch, *blobs = frames
    try:
        return len(decode_from_instance(batch)) != 1 and bool(blobs)
    except WireError:
        return True


class Attacker:
    """Sends what it is given to one port over several connections, and waits as long as it must."""

    def __init__(self, context: zmq.Context[Any], kind: int, port: int, connections: int) -> None:
        self.sent = 0
        self.malformed = 0
        """How many of them are to be dropped, without those under a name of which two connections drive each other out:
        such may be lost on the way."""
        self._context = context
        self._kind = kind
        self._port = port
        self._socks = [self._open(number) for number in range(connections)]

    def _open(self, number: int) -> zmq.Socket[Any]:
        sock = self._context.socket(self._kind)
        sock.linger = 5000
        sock.sndtimeo = 5000
        if self._kind == zmq.DEALER and number % 2:
            sock.routing_id = b"r%d" % (number // 4)  # some are taken twice
        sock.connect(f"tcp://127.0.0.1:{self._port}")
        return sock

    @property
    def room(self) -> int:
        """How many messages it can send where nobody reads them."""
        return sum(sock.sndhwm for sock in self._socks)

    def send(self, frames: list[bytes]) -> None:
        number = self.sent % len(self._socks)
        try:
            self._socks[number].send_multipart(frames)
        except zmq.Again:  # driven out by another of its name, and not read any more: it begins anew
            self._socks[number].close(linger=0)
            self._socks[number] = self._open(number)
            return
        self.sent += 1
        if self._kind == zmq.PUSH or number % 2 == 0:
            self.malformed += malformed(frames)

    def close(self) -> None:
        for sock in self._socks:
            sock.close()


def test_malformed_frames_cost_a_counted_drop_and_nothing_else(target: Target, context: zmq.Context[Any]) -> None:
    target.honest()
    rng = random.Random(7)
    attackers = {
        name: Attacker(context, zmq.PUSH, port, 4) for name, port in target.ports.items() if name != "frontend"
    }
    attackers["frontend"] = Attacker(context, zmq.DEALER, target.frontend, 32)
    attackers["work"] = Attacker(context, zmq.PUSH, target.work, 4)
    streams = {name: Fuzz(ToInstance if name == "work" else FromInstance, seed=n) for n, name in enumerate(attackers)}
    held: list[dict[str, int]] = []
    burst = ceil(FRAMES / BURSTS)
    for number in range(BURSTS):
        if number < WARM_UP:  # so that no queue grows later than in this burst
            with target.frozen():
                for name, attacker in attackers.items():
                    for _ in range(min(burst, attacker.room)):
                        attacker.send(streams[name]())
        for name, attacker in attackers.items():
            for _ in range(burst):
                attacker.send(streams[name]())
        for port in (*target.ports.values(), target.work):
            for _ in range(4):
                broken_zmtp(port, rng)
        target.honest()
        target.check_alive()
        held.append(target.resident())

    def dropped(name: str) -> int:
        return target.api.info()["dropped"].get(name, 0)

    for name in target.ports:
        count = attackers[name].malformed
        assert count > FRAMES // 4
        until(lambda where=name, least=count: dropped(where) >= least, f"{count} frames to {name} to be dropped")
    until(lambda: "message(s) at work" in target.log.read_text(), "the instance to tell of dropped frames")
    for attacker in attackers.values():
        attacker.close()
    target.honest()
    for name in held[0]:
        sizes = [one[name] for one in held[WARM_UP:]]
        told = f"{name}, MiB: {[round(size / (1 << 20), 1) for size in sizes]}"
        assert not leaks(sizes), told
        assert sizes[-1] - sizes[0] < QUEUES, told


def leaks(sizes: list[int]) -> bool:
    """Whether memory grows from part to part."""
    least = [min(sizes[first : first + PART]) for first in range(0, len(sizes), PART)]
    typical = median(after - before for before, after in pairwise(sizes))
    return typical > LEAK and all(after - before > LEAK for before, after in pairwise(least))


def test_a_leak_is_told_from_what_an_allocator_keeps() -> None:
    mib = 1 << 20
    noise = [0, 8, 3, 9, 1, 7, 0, 5, 8, 2, 4, 1]
    assert not leaks([(160 + up) * mib for up in noise])
    assert not leaks([(160 + up + 60 * (at > 5)) * mib for at, up in enumerate(noise)])
    assert leaks([(160 + up + 3 * at) * mib for at, up in enumerate(noise)])
    queues_fill_late = [134, 158, 157, 157, 160, 159, 159, 159, 180, 181, 181, 181]
    assert not leaks([size * mib for size in queues_fill_late])
    freed_once = [198, 202, 205, 208, 210, 211, 213, 205, 208, 210, 212, 214]
    assert leaks([size * mib for size in freed_once])


def test_a_frame_larger_than_allowed_ends_its_connection_only(target: Target, context: zmq.Context[Any]) -> None:
    before = target.resident()
    sock = context.socket(zmq.DEALER)
    sock.connect(f"tcp://127.0.0.1:{target.frontend}")
    for _ in range(3):
        sock.send(bytes(65 << 20))
        target.honest()
    sock.close(linger=0)
    assert target.resident()["server"] - before["server"] < GROWTH


def test_members_without_number_take_no_memory_without_bound(target: Target, context: zmq.Context[Any]) -> None:
    """Well-formed heartbeats of ever new instances over ever new connections."""
    rng = random.Random(3)

    def crowd(first: int) -> None:
        socks = [context.socket(zmq.DEALER) for _ in range(40)]
        for number, sock in enumerate(socks, first):
            sock.linger = 5000
            sock.connect(f"tcp://127.0.0.1:{target.frontend}")
            for frame in messages(FromInstance, rng, max(4, FRAMES // 10_000), {"instance": f"crowd-{number}"}):
                sock.send(frame)
        for sock in socks:
            sock.close()
        target.honest()

    crowd(0)
    before = target.resident()
    for burst in range(1, BURSTS):
        crowd(burst * 40)
    target.check_alive()
    assert target.resident()["server"] - before["server"] < GROWTH


@pytest.mark.parametrize("direction", ["to the server", "to the instance"])
def test_well_typed_nonsense_in_the_name_of_live_peers_stops_no_process(
    target: Target, context: zmq.Context[Any], direction: str
) -> None:
    """An insider knows every id and epoch. He may spoil the work in flight, but nothing that comes after him."""
    target.honest()
    info = target.api.info()
    (instance,) = info["instances"]
    known = {
        "instance": instance["instance"],
        "epoch": instance["epoch"],
        "server_epoch": info["server_epoch"],
        "protocol": PROTOCOL_VERSION,
    }
    rng = random.Random(11)
    if direction == "to the instance":
        frames, ports, kind = messages(ToInstance, rng, FRAMES // 10, known), [target.work], zmq.PUSH
    else:
        frames, ports, kind = messages(FromInstance, rng, FRAMES // 10, known), [*target.ports.values()][1:], zmq.PUSH
    attackers = [Attacker(context, kind, port, 1) for port in ports]
    for number, frame in enumerate(frames):
        attackers[number % len(attackers)].send([frame])
    for attacker in attackers:
        attacker.close()
    target.check_alive()

    def works_again() -> bool:
        target.check_alive()
        answer = target.api.post("/v1/videos", {"prompt": "a tree"})
        return answer.status_code == 200 and target.api.ended(answer.json()["id"])["status"] == "completed"

    until(works_again, "a request to finish once the insider has gone", 60)
