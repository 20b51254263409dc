"""Readiness: the truth about roles and named instances, whatever way an address is spelled."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from triptych.ids import ROLES, Role
from triptych.server.readiness import LOOK_AGAIN_SECONDS, Addresses, Attendance, Readiness


@dataclass(frozen=True)
class Instance:
    roles: tuple[Role, ...]
    work_url: str
    instance: str = "i"
    quarantined: float = 0.0
    failures: str = ""
    commit: str = ""


E, N, D = ROLES


def judge(
    live: Sequence[Instance],
    named: Mapping[Role, Sequence[str]],
    addresses: Addresses,
    missing: Mapping[Role, str],
    refused: Mapping[str, str] | None = None,
) -> Readiness:
    """The verdict of a server that has just begun."""
    return Attendance(named, addresses).judge(live, missing, refused or {})


def match(addresses: Addresses, one: str, other: str) -> bool:
    return not addresses.points(one).isdisjoint(addresses.points(other))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the names of the network stand for."""
    known: dict[str, str] = {}

    def look_up(name: str, *_: object, **__: object) -> list[tuple[Any, ...]]:
        if name not in known:
            raise socket.gaierror("no such name")
        return [(0, 0, 0, "", (known[name], 0))]

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    return known


def test_nothing_registered_names_every_role() -> None:
    verdict = judge([], {}, Addresses(), dict.fromkeys(ROLES, "none has joined"))
    assert not verdict.ready
    assert len(verdict.reasons) == 3
    for role in ROLES:
        assert any(f"role {role}" in reason for reason in verdict.reasons)


def test_one_instance_with_all_roles_is_enough() -> None:
    assert judge([Instance(ROLES, "tcp://127.0.0.1:19000")], {}, Addresses(), {}).ready


def test_a_named_instance_that_has_not_come_is_named() -> None:
    live = [Instance(ROLES, "tcp://127.0.0.1:19000")]
    named = {E: ("tcp://127.0.0.1:19000",), N: ("tcp://127.0.0.1:19001", "tcp://127.0.0.1:19000")}
    verdict = judge(live, named, Addresses(), {})
    assert verdict.reasons == (
        "denoiser instance tcp://127.0.0.1:19001 (--denoiser-urls) has not registered or is gone",
    )


def test_a_named_instance_that_was_refused_is_told_apart_from_a_missing_one() -> None:
    """Symptom: it was said not to have registered, and why it was refused stood in a log only."""
    live = [Instance((E, D), "tcp://127.0.0.1:19000")]
    named = {N: ("tcp://localhost:19001", "tcp://localhost:19002")}
    refused = {"tcp://127.0.0.1:19001": "model='a': the others serve 'b'"}
    assert judge(live, named, Addresses(), {}, refused).reasons == (
        "denoiser instance tcp://localhost:19001 (--denoiser-urls) was refused: model='a': the others serve 'b'",
        "denoiser instance tcp://localhost:19002 (--denoiser-urls) has not registered or is gone",
    )


def test_a_named_instance_of_another_role_is_told_apart_from_a_missing_one() -> None:
    live = [Instance((E, D), "tcp://127.0.0.1:19000"), Instance((N,), "tcp://127.0.0.1:19001")]
    verdict = judge(live, {N: ("tcp://127.0.0.1:19000",)}, Addresses(), {})
    assert verdict.reasons == (
        "denoiser instance tcp://127.0.0.1:19000 (--denoiser-urls) serves encoder, decoder, not denoiser",
    )


def test_a_named_instance_that_came_once_and_is_gone_is_told_while_others_serve_its_role() -> None:
    """Symptom: one dead replica of eight took the server out of every load balancer."""
    rest = Instance((E, D), "tcp://127.0.0.1:19000")
    one, other = Instance((N,), "tcp://127.0.0.1:19001"), Instance((N,), "tcp://127.0.0.1:19002")
    attendance = Attendance({E: (rest.work_url,), N: (one.work_url, other.work_url)}, Addresses())
    assert not attendance.judge([rest, one], {}, {}).ready  # the other is still loading
    assert attendance.judge([rest, one, other], {}, {}) == Readiness(ready=True, reasons=())
    degraded = attendance.judge([rest, one], {}, {})
    assert degraded.ready
    assert degraded.reasons == (f"denoiser instance {other.work_url} (--denoiser-urls) has not registered or is gone",)
    assert not attendance.judge([rest], {N: "denoiser-1 was lost"}, {}).ready
    assert attendance.judge([rest, other], {}, {}).ready
    assert attendance.judge([rest, one, other], {}, {}).reasons == ()


def test_all_that_are_named_are_waited_for_even_when_they_are_never_there_at_the_same_time() -> None:
    rest = Instance((E, D), "tcp://127.0.0.1:19000")
    one, other = Instance((N,), "tcp://127.0.0.1:19001"), Instance((N,), "tcp://127.0.0.1:19002")
    attendance = Attendance({N: (one.work_url, other.work_url)}, Addresses())
    assert not attendance.judge([rest, one], {}, {}).ready
    assert attendance.judge([rest, other], {}, {}).ready


def test_spelling_does_not_matter() -> None:
    addresses = Addresses()
    host = socket.gethostname()
    assert match(addresses, "tcp://localhost:19000", "tcp://127.0.0.1:19000")
    assert match(addresses, "tcp://LOCALHOST:19000", "tcp://[::1]:19000")
    assert not match(addresses, "tcp://localhost:19000", "tcp://127.0.0.1:19001")
    assert not match(addresses, f"tcp://{host}:19000", "tcp://127.0.0.1:19000")
    assert addresses.stale
    addresses.resolve()
    assert match(addresses, f"tcp://{host}:19000", "tcp://127.0.0.1:19000")


def test_two_machines_are_not_one() -> None:
    addresses = Addresses()
    addresses.resolve()
    assert not match(addresses, "tcp://192.0.2.1:19000", "tcp://192.0.2.2:19000")
    assert not match(addresses, "tcp://192.0.2.1:19000", "tcp://127.0.0.1:19000")


def test_an_address_that_is_none_points_nowhere() -> None:
    addresses = Addresses()
    for url in ("tcp://::1:5555", "tcp://[::1", "tcp://host", "nonsense", "tcp://host:99999"):
        assert not addresses.points(url)
    assert judge([Instance(ROLES, "tcp://::1:5555")], {E: ("tcp://[::1]:5555",)}, addresses, {}).reasons


def test_a_name_that_cannot_be_looked_up_is_asked_for_again_after_a_while(hosts: dict[str, str]) -> None:
    clock = Clock()
    addresses = Addresses(clock)
    assert not match(addresses, "tcp://late.example:1", "tcp://192.0.2.1:1")
    addresses.resolve()
    assert not match(addresses, "tcp://late.example:1", "tcp://192.0.2.1:1")
    assert not addresses.stale
    clock.now += LOOK_AGAIN_SECONDS
    assert addresses.stale
    hosts["late.example"] = "192.0.2.1"
    addresses.resolve()
    assert match(addresses, "tcp://late.example:1", "tcp://192.0.2.1:1")
    clock.now += 1000
    assert not addresses.stale


@pytest.mark.parametrize("name", ["gpu7..lan", ".a", "x" * 64 + ".lan"])
def test_a_name_that_can_be_none_does_not_keep_others_unknown(name: str) -> None:
    """Symptom: a server was not ready for ever, once an instance under a malformed name had said hello."""
    addresses = Addresses()
    here = socket.gethostname()
    for url in (f"tcp://{name}:9", f"tcp://{here}:19000"):
        addresses.points(url)
    addresses.resolve()
    assert match(addresses, f"tcp://{here}:19000", "tcp://127.0.0.1:19000")
    assert match(addresses, f"tcp://{name}:9", f"tcp://{name}:9")


def test_names_that_only_refused_instances_have_are_not_looked_up(hosts: dict[str, str]) -> None:
    """Symptom: names that strangers chose were looked up before those of the operator, every five seconds."""
    hosts |= {"denoiser-0.svc": "192.0.2.1", "stranger.example": "192.0.2.1"}
    addresses = Addresses(Clock())
    attendance = Attendance({N: ("tcp://denoiser-0.svc:19000",)}, addresses)
    stranger = {"tcp://stranger.example:19000": "protocol=0"}
    attendance.judge([], {}, stranger)
    addresses.resolve()
    assert "has not registered" in attendance.judge([], {}, stranger).reasons[0]
    for url in ("tcp://denoiser-0.svc:19000", "tcp://192.0.2.1:19000"):
        assert "was refused: protocol=0" in attendance.judge([], {}, {url: "protocol=0"}).reasons[0]


def test_a_named_instance_that_comes_back_at_another_address_is_known_again(hosts: dict[str, str]) -> None:
    """Symptom: a pod that got another address behind its name was missed until the server was started anew."""
    clock = Clock()
    addresses = Addresses(clock)
    attendance = Attendance({N: ("tcp://denoiser-0.svc:19000",)}, addresses)
    hosts["denoiser-0.svc"] = "192.0.2.1"
    attendance.judge([], {}, {})
    addresses.resolve()
    assert attendance.judge([Instance((N,), "tcp://192.0.2.1:19000")], {}, {}).reasons == ()

    again = Instance((N,), "tcp://192.0.2.7:19000")
    assert attendance.judge([again], {}, {}).reasons
    hosts.clear()  # the name service does not know yet
    clock.now += LOOK_AGAIN_SECONDS
    assert addresses.stale
    addresses.resolve()
    assert attendance.judge([Instance((N,), "tcp://192.0.2.1:19000")], {}, {}).reasons == ()
    assert attendance.judge([again], {}, {}).reasons
    hosts["denoiser-0.svc"] = "192.0.2.7"
    assert not addresses.stale
    clock.now += LOOK_AGAIN_SECONDS
    assert addresses.stale
    addresses.resolve()
    assert attendance.judge([again], {}, {}).reasons == ()
    assert attendance.judge([Instance((N,), "tcp://192.0.2.1:19000")], {}, {}).reasons


def test_instances_that_serve_different_commits_are_named() -> None:
    """Those of a folder are compared with nothing: it may hold what one role needs, and no more."""
    encoder, decoder = (
        Instance((E,), "tcp://e:1", "encoder-0"),
        Instance((D,), "tcp://d:1", "decoder-0", commit="a" * 40),
    )
    old, new = (Instance((N,), f"tcp://{c}:1", f"denoiser-{c}", commit=c * 40) for c in "ab")
    assert judge([encoder, old, decoder], {}, Addresses(), {}) == Readiness(ready=True, reasons=())
    mixed = judge([encoder, old, new, decoder], {}, Addresses(), {})
    assert mixed.ready
    assert mixed.reasons == (
        "different commits of the model are served: aaaaaaaaaaaa by denoiser-a, decoder-0; bbbbbbbbbbbb by denoiser-b; "
        "launch all with the same --revision",
    )


def test_an_instance_in_quarantine_is_named_and_does_not_make_the_server_unready() -> None:
    doubtful = Instance(ROLES, "tcp://127.0.0.1:19000", "denoiser-1", 12.0, "r1: broken; r2: broken; r3: broken")
    verdict = judge([doubtful], {}, Addresses(), {})
    assert verdict.ready
    (reason,) = verdict.reasons
    assert "denoiser-1 is in quarantine for 12 s more" in reason
    assert "r3: broken" in reason
