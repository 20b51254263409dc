"""The log of an instance says whether its server has it."""

from __future__ import annotations

import logging

import pytest

from triptych.worker.standing import Standing


def test_a_server_that_never_answers_is_named_and_named_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    standing = Standing("tcp://10.0.0.9:5555")
    for now in range(200):
        standing.saw(False, 1000.0 + now)
    assert len(caplog.messages) == 4  # after 10, 70, 130 and 190 seconds
    assert "tcp://10.0.0.9:5555 has not answered for 10 s" in caplog.messages[0]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_a_refusal_is_told_and_told_again(caplog: pytest.LogCaptureFixture) -> None:
    """Symptom: the log asked whether the server was there, which had answered."""
    caplog.set_level(logging.INFO)
    standing = Standing("tcp://10.0.0.9:5555")
    for now in range(100):
        standing.saw(False, 1000.0 + now, "model='a': the others serve 'b'" if now > 2 else "")
    assert len(caplog.messages) == 2  # at once and after a minute
    assert "refuses this instance for now, and is asked again: model='a': the others serve 'b'" in caplog.messages[0]
    assert {record.levelname for record in caplog.records} == {"ERROR"}


def test_the_answer_is_told_once_and_so_is_its_loss(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    standing = Standing("tcp://10.0.0.9:5555")
    for now, welcomed in enumerate((False, True, True, True, False, False, True)):
        standing.saw(welcomed, float(now))
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "INFO"]
    assert "has taken this instance" in caplog.messages[0]
    assert "does not know this instance any more" in caplog.messages[1]
