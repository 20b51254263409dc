"""What a process logs, and from which level on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from triptych.config.logs import configure_logging
from triptych.errors import ConfigError

PROGRAM = """
import logging
from triptych.config.logs import configure_logging
configure_logging("encoder-7")
logging.getLogger("triptych.worker").info("loaded")
logging.getLogger("triptych.worker").warning("slow")
logging.getLogger("library").info("chatter")
logging.getLogger("library").warning("deprecated")
"""


def lines(level: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"TRIPTYCH_LOG_LEVEL": level},
    )
    assert done.stdout == ""
    return [" ".join(line.split(" ")[2:]) for line in done.stderr.splitlines()]


def test_a_line_has_its_level_and_who_says_it() -> None:
    everything = ["INFO encoder-7 loaded", "WARNING encoder-7 slow", "WARNING encoder-7 deprecated"]
    assert lines("") == everything
    assert lines("Info") == everything


def test_only_what_is_as_grave_as_the_level_is_logged() -> None:
    assert lines("error") == ["WARNING encoder-7 deprecated"]


def test_an_unknown_level_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="TRIPTYCH_LOG_LEVEL='loud': must be one of debug, info"):
        configure_logging("i")


@pytest.mark.parametrize("kind", ["server", "encoder"])
def test_the_flag_takes_effect_and_a_wrong_one_is_refused(kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "triptych.cli.main", "serve", "--disagg-role", kind, "--log-level", "loud"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "argument --log-level: 'loud': must be one of debug, info, warning, error, critical" in done.stderr
