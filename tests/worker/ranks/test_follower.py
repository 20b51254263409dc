"""What a follower says of its own when it has carried out an order."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from triptych.accel.shortage import drop_when_short
from triptych.accel.sizes import is_rehearsing
from triptych.accel.tally import Tally
from triptych.errors import StageError
from triptych.ids import Role
from triptych.worker.beside import Beside
from triptych.worker.ranks import follower as module
from triptych.worker.ranks.orders import Advance, Answer, Begin, Compiled, Done, Failed, Sent, decode_answer


class Line:
    """A connection to a rank 0 that only listens."""

    def __init__(self) -> None:
        self.heard: list[Answer] = []

    def send_bytes(self, data: bytes) -> None:
        self.heard.append(decode_answer(data))


class Run:
    """A stage whose first step has a shape that is compiled for, and whose last step fails."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._step = 0

    def advance(self) -> None:
        self._step += 1
        if self._step == 1:
            self._tally.compilations += 3
            self._tally.compile_seconds += 1.5
        if self._step == 3:
            self._tally.uncompiled += 2
            raise StageError("no more")


def test_a_follower_tells_once_what_it_has_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    line, tally = Line(), Tally(compilations=4)
    follower: Any = object.__new__(cast(Any, module)._Follower)
    follower._connection, follower._tally, follower._told = line, tally, Compiled(compilations=4)
    follower._runs, follower._new, follower._rehearses = {1: Run(tally)}, set(), False
    monkeypatch.setattr(follower, "_settle", lambda: None)
    for _ in range(3):
        follower.carry_out(Advance(run=1))
    assert line.heard == [
        Done(compiled=Compiled(compilations=3, seconds=1.5)),
        Done(),
        Failed(reason="no more", compiled=Compiled(uncompiled=2)),
    ]


class Noting:
    """A pipeline that notes whether what it does is part of a rehearsal, and is its own run."""

    def __init__(self) -> None:
        self.rehearsing: list[bool] = []

    def start(self, *_: object) -> Noting:
        self.rehearsing.append(is_rehearsing())
        return self

    def advance(self) -> None:
        self.rehearsing.append(is_rehearsing())


class Droppable:
    """Something that fills memory and can be made again."""

    dropped = 0

    def drop(self) -> None:
        self.dropped += 1


def test_a_follower_without_room_for_a_request_makes_room_and_says_what_lacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: nothing was let go, so all next requests failed too, and clients heard of a fault of the server."""
    follower: Any = object.__new__(cast(Any, module)._Follower)
    line = Line()
    follower._connection, follower._tally, follower._told = line, Tally(), Compiled()
    follower._runs, follower._new, follower._rehearses = {}, set(), False
    follower._pipeline, follower._beside = Noting(), Beside(torch.device("cpu"))
    monkeypatch.setattr(follower, "_settle", lambda: None)

    def full(_: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(follower, "_received", lambda _: [])
    monkeypatch.setattr(follower, "_placed", full)
    kept = Droppable()
    drop_when_short(kept)
    inputs = (Sent(tree=b"", tensors=()),)
    follower.carry_out(Begin(run=1, role=Role.DENOISER, params={}, inputs=inputs, images=()))
    (answer,) = line.heard
    assert isinstance(answer, Failed)
    assert answer.short
    assert kept.dropped == 1


def test_a_follower_rehearses_what_rank_0_rehearses() -> None:
    pipeline = Noting()
    follower: Any = object.__new__(cast(Any, module)._Follower)
    follower._connection, follower._tally, follower._told = Line(), Tally(), Compiled()
    follower._runs, follower._new, follower._rehearses = {}, set(), False
    follower._pipeline, follower._beside = pipeline, Beside(torch.device("cpu"))
    for number, rehearses in enumerate((True, False)):
        follower.carry_out(Begin(run=number, role=Role.DENOISER, params={}, inputs=(), images=(), rehearses=rehearses))
        follower.carry_out(Advance(run=number))
    assert pipeline.rehearsing == [True, True, False, False]
