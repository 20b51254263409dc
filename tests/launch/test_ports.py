"""Ports that are chosen are free, and a taken one is named."""

from __future__ import annotations

import itertools
import runpy

import pytest

from triptych.config import METRICS_OFFSET
from triptych.errors import ConfigError
from triptych.launch import ports
from triptych.launch.ports import free_ports, is_free, listen

EPHEMERAL = 32768
"""The first port that Linux gives to outgoing connections."""


def test_a_taken_port_is_named() -> None:
    (port,) = free_ports(1)
    with listen("127.0.0.1", port, "--port"):
        assert not is_free(port)
        with pytest.raises(ConfigError, match=f"--port {port} on 127.0.0.1 is in use"):
            listen("127.0.0.1", port, "--port")
    assert is_free(port)


def test_chosen_ports_are_neighbours_and_never_given_twice() -> None:
    one, two = free_ports(4), free_ports(4)
    assert one == list(range(one[0], one[0] + 4))
    assert not set(one) & set(two)


def test_a_process_that_has_had_all_ports_gets_those_again_that_it_had_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (lowest,) = free_ports(1)
    monkeypatch.setattr(ports, "LOWEST", lowest)
    monkeypatch.setattr(ports, "HIGHEST", lowest + 60)
    monkeypatch.setattr(ports, "_handed_out", {})
    given = [free_ports(5) for _ in range(100)]
    assert all(not set(one) & set(two) for one, two in itertools.pairwise(given))


def test_no_outgoing_connection_can_have_a_chosen_port_or_that_of_its_metrics() -> None:
    """Symptom: an instance had no metrics, or a server with task ports did not start, since a client had the port."""
    chosen = runpy.run_path(ports.__file__)  # as it is without the tests, which have a range of their own
    assert chosen["LOWEST"] < chosen["HIGHEST"] <= EPHEMERAL - METRICS_OFFSET
    assert max(free_ports(1)) + METRICS_OFFSET < EPHEMERAL


def test_an_impossible_address_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--port 80 on 203\.0\.113\.1 cannot be bound"):
        listen("203.0.113.1", 80, "--port")
