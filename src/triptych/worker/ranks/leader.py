"""Rank 0's side: starts the followers, gives them orders, hears how these went and when one of them dies or freezes.

A request's own failure is one that all ranks have in the same order: it fails that request and nothing else. So is one
that some ranks have in an order by which nothing is exchanged: the run is dropped everywhere, so nothing is left of it.
Anything else leaves the ranks apart, some of them perhaps in a collective that nobody will complete. Then the instance
is lost: its process ends, whoever supervises it starts it again, and its work is given out anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, Queue
from typing import Final, TypeVar

import torch

from triptych.accel.parallel.team import Team
from triptych.accel.tally import Tally
from triptych.config import InstanceConfig
from triptych.errors import ConfigError, OutOfMemory, StageError
from triptych.worker.jobs import Post, ThreadDied
from triptych.worker.ranks.frozen import FrozenWatch
from triptych.worker.ranks.orders import (
    Answer,
    Compiled,
    Done,
    Drop,
    Failed,
    Here,
    Join,
    Meet,
    Order,
    Ready,
    Sent,
    Shape,
    decode_answer,
    encode,
)

log = logging.getLogger(__name__)

COLLECTIVE_SECONDS: Final = 300.0
"""Bound of every collective, and of the wait for a follower's answer. Ranks may compile for minutes, one after all."""
GRACE_SECONDS: Final = 10.0
"""Once one rank has failed, how long the others have to fail of the same."""
_END_SECONDS: Final = 1.0
_Loading = TypeVar("_Loading", Here, Ready)


class RanksApart(BaseException):
    """The ranks are not in the same place any more. No `Exception`, for it must not pass for one request's failure."""


class Leader:
    """Rank 0 and its followers. Started and closed by the main thread, used from the compute thread."""

    def __init__(
        self, config: InstanceConfig, who: str, post: Callable[[Post], None], tally: Tally | None = None
    ) -> None:
        """Start the followers, which begin to load. One that dies, or is apart, is posted as `ThreadDied`.

        What followers compile is counted in ``tally``, which is that of rank 0.
        """
        self._tally = tally or Tally()
        self._config = config
        self._post = post
        self._folder = Path(tempfile.mkdtemp(prefix="triptych-ranks-"))
        self._team: Team | None = None
        self._loaded = self._closing = False
        self._given = self._settled = 0
        """Orders given that are answered, and how many of them are known to leave the ranks in the same place."""
        self.followers = [_Follower(rank) for rank in range(1, config.ranks)]
        for follower in self.followers:
            join = Join(
                who=who,
                rank=follower.rank,
                size=config.ranks,
                device=config.device_of(follower.rank),
                model=config.model,
                roles=config.shared_roles,
                parallel=config.parallel,
                store=str(self._store),
                seconds=COLLECTIVE_SECONDS,
            )
            follower.tell(encode(join))
            threading.Thread(target=self._hear, args=(follower,), name=f"rank-{follower.rank}", daemon=True).start()
        self._frozen = FrozenWatch({follower.rank: follower.process.pid for follower in self.followers}, self._lost)
        threading.Thread(target=self._frozen.run, name="frozen-ranks", daemon=True).start()

    def join(self) -> Team:
        """Meet the followers, all of whom load at the same time. Called once, by the compute thread."""
        self._team = Team.join(
            0,
            self._config.ranks,
            torch.device(self._config.torch_device),
            wish=self._config.parallel,
            store=self._store,
            seconds=COLLECTIVE_SECONDS,
            meet=self._meet,
        )
        return self._team

    def await_ready(self) -> None:
        """Wait until every follower has loaded, once rank 0 has. Raises as `_meet`."""
        for follower in self.followers:
            self._loads(follower, Ready)
        self._loaded = True

    def _meet(self, said: Mapping[str, str]) -> None:
        """Have all ranks go on loading once each has come so far, however long the slowest takes; see `Team.meet`.

        A rank that ends or freezes ends the wait. Raises `ConfigError` for what an operator must mend of a follower,
        and `RanksApart`.
        """
        for follower in self.followers:
            its = self._loads(follower, Here).said
            if apart := [name for name in its if its[name] != said.get(name)]:
                differ = "; ".join(f"{name}: {its[name]!r}, not {said.get(name)!r}" for name in apart)
                raise RanksApart(f"rank {follower.rank} has loaded something else than rank 0: {differ}")
        for follower in self.followers:
            follower.tell(encode(Meet()))

    def _loads(self, follower: _Follower, kind: type[_Loading]) -> _Loading:
        """A follower's next answer while it loads."""
        match self._answer(follower, None):
            case Failed(reason=reason, mendable=True):
                raise ConfigError(f"rank {follower.rank}: {reason}")
            case Failed(reason=reason):
                raise RanksApart(f"rank {follower.rank} did not load: {reason}")
            case None:
                raise RanksApart(f"rank {follower.rank} ended while it loaded")
            case answer if isinstance(answer, kind):
                return answer
            case answer:
                raise RanksApart(f"rank {follower.rank} answers {answer!r} where rank 0 waits for {kind.__name__}")

    def tell(self, order: Order, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Give every follower an order, and all ranks the tensors that belong to it, which are complete.

        Tensors go through host memory, and are read on the current stream: one beside the computation's waits for no
        step in flight. What fails before anyone has heard of the order, for want of memory mostly, is the request's own
        failure. What fails after that raises `RanksApart`: followers wait for tensors, and would take the next
        request's for them.
        """
        assert self._team is not None
        told = encode(order)
        read = [tensor.cpu().contiguous() for tensor in tensors]
        self._given += not isinstance(order, Drop)
        try:
            for follower in self.followers:
                follower.tell(told)
            for tensor in read:
                self._team.broadcast(tensor)
        except Exception as error:
            raise RanksApart(f"tensors were not handed to the other ranks: {error}") from error

    def settle(self, own: Exception | None = None, *, ended: bool = False) -> None:
        """Hear from every follower how the last order went, which here failed of ``own`` or ``ended`` its run.

        Raises `RanksApart` unless it went the same everywhere.
        """
        if own is not None:
            self._expect_settled(self._given, f"rank 0 alone failed: {own}")
            assert self._team is not None
            try:
                if self._team.device.type == "cuda":
                    torch.cuda.synchronize(self._team.device)
            except Exception as error:
                raise RanksApart(f"rank 0 cannot say how it went: {error}") from error
        for follower in self.followers:
            match self._answer(follower, COLLECTIVE_SECONDS if own is None else GRACE_SECONDS):
                case Failed(reason=reason) if own is None:
                    raise RanksApart(f"rank {follower.rank} alone failed: {reason}")
                case Failed():
                    pass
                case Done(ended=its) if own is None and its == ended:
                    pass
                case answer:
                    raise RanksApart(f"rank {follower.rank} answers {answer!r} where rank 0 has {own or ended!r}")
        self._settled = self._given

    def failure(self) -> StageError | None:
        """Hear from every follower how the last order went, one by which ranks exchange nothing; what some failed at.

        Then the run is to be dropped, and the ranks are in the same place. Raises `RanksApart` without an answer.
        """
        failed: list[str] = []
        kind: type[StageError] = OutOfMemory
        for follower in self.followers:
            match self._answer(follower, COLLECTIVE_SECONDS):
                case Failed(reason=reason, short=short):
                    failed.append(f"rank {follower.rank}: {reason}")
                    kind = kind if short else StageError
                case Done(ended=False):
                    pass
                case answer:
                    raise RanksApart(f"rank {follower.rank} answers {answer!r} where nothing was exchanged")
        self._settled = self._given
        return kind(f"the ranks could not all begin: {'; '.join(failed)}", retryable=True) if failed else None

    def close(self) -> None:
        """End the followers, whatever they are at."""
        self._closing = True
        self._frozen.close()
        for follower in self.followers:
            follower.end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answer(self, follower: _Follower, seconds: float | None) -> Answer | None:
        """A follower's next answer, whose compilations are counted and logged."""
        answer = follower.answer(seconds)
        if answer is not None and answer.compiled != Compiled():
            made = answer.compiled
            log.info(
                "rank %d compiled %d graphs in %.1f s, and computed %d calls without one",
                follower.rank,
                made.compilations,
                made.seconds,
                made.uncompiled,
            )
            self._tally.compilations += made.compilations
            self._tally.compile_seconds += made.seconds
            self._tally.uncompiled += made.uncompiled
        return answer

    @property
    def _store(self) -> Path:
        return self._folder / "store"

    def _hear(self, follower: _Follower) -> None:
        """Pass a follower's answers on. In a thread of its own, for the compute thread may stand in a collective."""
        answered = 0
        while (answer := follower.hear()) is not None:
            answered += isinstance(answer, Done | Failed)
            if isinstance(answer, Failed):
                reason = f"rank {follower.rank} failed: {answer.reason}"
                if self._loaded:
                    self._expect_settled(answered, reason)
                else:
                    self._lost(follower.rank, answer.reason, mendable=answer.mendable)
        if not self._closing:
            self._lost(follower.rank, f"its process ended ({follower.process.wait()})")

    def _expect_settled(self, number: int, reason: str) -> None:
        """Give the instance up unless the order of that number is settled within the grace."""

        def check() -> None:
            if self._settled < number and not self._closing:
                self._post(ThreadDied(thread="compute", reason=reason))

        timer = threading.Timer(GRACE_SECONDS, check)
        timer.daemon = True
        timer.start()

    def _lost(self, rank: int, reason: str, *, mendable: bool = False) -> None:
        log.critical("rank %d is lost: %s", rank, reason)
        self._post(ThreadDied(thread=f"rank {rank}", reason=reason, mendable=mendable))


class _Follower:
    """A follower's process, and what it has answered."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        # No SimpleQueue: before Python 3.13 its get never ends when the timeout passes before it begins to wait.
        self._answers: Queue[Answer | None] = Queue()
        self._mine, its = socket.socketpair()
        self._connection = Connection(os.dup(self._mine.fileno()))
        with its:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "triptych.worker.ranks.follower", str(its.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(its.fileno(),),
            )

    def tell(self, order: bytes) -> None:
        """Send an order; nothing happens where the process is gone, which `hear` will say."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(order)

    def hear(self) -> Answer | None:
        """The next answer, which is also kept for `answer`; None once the process is gone."""
        try:
            answer = decode_answer(self._connection.recv_bytes())
        except (EOFError, OSError):
            answer = None
        self._answers.put(answer)
        return answer

    def answer(self, seconds: float | None) -> Answer | None:
        """The next answer that was heard; None after that time, if it is bounded, and when the process is gone."""
        try:
            return self._answers.get(timeout=seconds)
        except Empty:
            return None

    def end(self) -> None:
        """End the process by hanging up, or by force."""
        with contextlib.suppress(OSError):
            self._mine.shutdown(socket.SHUT_RDWR)
        self._mine.close()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def sent(tree: bytes, tensors: Sequence[torch.Tensor]) -> Sent:
    """What an order says of a value tree whose tensors are broadcast after it."""
    shapes = tuple(Shape(shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch.")) for t in tensors)
    return Sent(tree=tree, tensors=shapes)
