"""Readiness: the truth about roles and named instances, whatever way an address is spelled."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from triptych.ids import ROLES, Role
from triptych.server.readiness import Addresses, judge


@dataclass(frozen=True)
class Instance:
    roles: tuple[Role, ...]
    work_url: str
    instance: str = "i"
    quarantined: float = 0.0
    failures: str = ""


E, N, D = ROLES


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


def test_a_named_instance_of_another_role_is_told_apart_from_a_missing_one() -> None:
    live = [Instance((E, D), "tcp://127.0.0.1:19000"), Instance((N,), "tcp://127.0.0.1:19001")]
    verdict = judge(live, {N: ("tcp://127.0.0.1:19000",)}, Addresses(), {})
    assert verdict.reasons == (
        "denoiser instance tcp://127.0.0.1:19000 (--denoiser-urls) serves encoder, decoder, not denoiser",
    )


def test_spelling_does_not_matter() -> None:
    addresses = Addresses()
    host = socket.gethostname()
    assert addresses.match("tcp://localhost:19000", "tcp://127.0.0.1:19000")
    assert addresses.match("tcp://LOCALHOST:19000", "tcp://[::1]:19000")
    assert not addresses.match("tcp://localhost:19000", "tcp://127.0.0.1:19001")
    assert not addresses.match(f"tcp://{host}:19000", "tcp://127.0.0.1:19000")
    assert addresses.unresolved == {host}
    addresses.resolve()
    assert addresses.match(f"tcp://{host}:19000", "tcp://127.0.0.1:19000")


def test_two_machines_are_not_one() -> None:
    addresses = Addresses()
    addresses.resolve()
    assert not addresses.match("tcp://192.0.2.1:19000", "tcp://192.0.2.2:19000")
    assert not addresses.match("tcp://192.0.2.1:19000", "tcp://127.0.0.1:19000")


def test_a_name_that_cannot_be_looked_up_is_asked_for_again() -> None:
    addresses = Addresses()
    assert not addresses.match("tcp://no-such-host.invalid:1", "tcp://127.0.0.1:1")
    addresses.resolve()
    assert addresses.unresolved == {"no-such-host.invalid"}


def test_an_instance_in_quarantine_is_named_and_does_not_make_the_server_unready() -> None:
    doubtful = Instance(ROLES, "tcp://127.0.0.1:19000", "denoiser-1", 12.0, "r1: broken; r2: broken; r3: broken")
    verdict = judge([doubtful], {}, Addresses(), {})
    assert verdict.ready
    (reason,) = verdict.reasons
    assert "denoiser-1 is in quarantine for 12 s more" in reason
    assert "r3: broken" in reason
