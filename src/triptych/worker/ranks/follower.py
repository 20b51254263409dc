"""The process of a follower: joins the ranks of its instance, loads what all compute, and carries out rank 0's orders.

It lives as long as rank 0 holds its end of the socket, and not a moment longer, whatever it is at: the process then
ends on the spot, since it may stand in a collective that nobody will complete.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

import torch

from triptych.accel.parallel.team import Team
from triptych.accel.sizes import rehearsing
from triptych.accel.tally import Tally
from triptych.config.logs import configure_logging
from triptych.errors import Blame, OutOfMemory, TriptychError
from triptych.ids import Role
from triptych.pipeline.guard import guarded
from triptych.pipeline.load import load_cold
from triptych.pipeline.stage import Preparable, Resumable, RolePipeline, StageRun
from triptych.worker.beside import Beside
from triptych.worker.lifecycle import exit_now
from triptych.worker.ranks.orders import (
    Advance,
    Answer,
    Begin,
    Compiled,
    Done,
    Drop,
    Failed,
    Here,
    Join,
    Meet,
    Order,
    Prepare,
    Ready,
    Resume,
    Sent,
    decode_order,
    encode,
)

log = logging.getLogger(__name__)


def main() -> None:
    """Follow the rank 0 that started this process with its end of a socket pair as the one argument."""
    # A terminal's Ctrl+C, or a service manager's signal to all, is for rank 0 to act on.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    join = decode_order(connection.recv_bytes())
    assert isinstance(join, Join)
    configure_logging(f"{join.who}.{join.rank}")
    orders: SimpleQueue[Order] = SimpleQueue()
    threading.Thread(target=_read, args=(connection, orders, join.store), name="orders", daemon=True).start()
    try:
        follower = _Follower(join, connection, orders)
    except Exception as error:
        mendable = isinstance(error, TriptychError) and error.blame is Blame.OPERATOR
        if not mendable:
            log.critical("rank %d cannot start", join.rank, exc_info=True)
        connection.send_bytes(encode(Failed(reason=_words(error), mendable=mendable)))
        exit_now(1)
    while True:
        follower.carry_out(orders.get())


def _read(connection: Connection, orders: SimpleQueue[Order], store: str) -> None:
    """Pass orders on until rank 0 is gone."""
    while True:
        try:
            orders.put(decode_order(connection.recv_bytes()))
        except (EOFError, OSError):
            break
    shutil.rmtree(Path(store).parent, ignore_errors=True)  # a rank 0 that was killed could not
    os._exit(0)


class _Follower:
    """One rank with its model and its runs."""

    def __init__(self, join: Join, connection: Connection, orders: SimpleQueue[Order]) -> None:
        torch.set_grad_enabled(False)
        self._connection = connection
        self._orders = orders
        self._tally = Tally()
        self._told = Compiled()
        """All that rank 0 knows of what was compiled here."""
        self._device = torch.device(join.device)
        self._team = Team.join(
            join.rank,
            join.size,
            self._device,
            wish=join.parallel,
            store=Path(join.store),
            seconds=join.seconds,
            meet=self._meet,
        )
        pipeline, _ = load_cold(join.model, join.roles, join.device, self._tally, self._team)
        self._pipeline: RolePipeline = pipeline
        self._runs: dict[int, StageRun] = {}
        self._rehearses = False
        self._beside = Beside(self._device)
        """What comes before a run's first step is done there, for another run may be in a step."""
        self._new: set[int] = set()
        """Runs that have not come to their first step."""
        self._answer(Ready(compiled=self._compiled()))

    def _meet(self, said: Mapping[str, str]) -> None:
        """Wait until rank 0 says that all have come so far."""
        self._answer(Here(said=dict(said), compiled=self._compiled()))
        order = self._orders.get()
        assert isinstance(order, Meet), order

    def carry_out(self, order: Order) -> None:
        """Do what rank 0 does, and say how it went."""
        if isinstance(order, Drop):
            self._new.discard(order.run)
            if (run := self._runs.pop(order.run, None)) is not None:
                run.cancel()
            return
        try:
            ended = self._do(order)
        except Exception as error:
            if not isinstance(error, TriptychError) or error.__cause__ is not None:
                log.error("rank %d failed", self._team.rank, exc_info=error)
            self._settle()
            short = isinstance(error, OutOfMemory)
            self._answer(Failed(reason=_words(error), short=short, compiled=self._compiled()))
        else:
            self._answer(Done(ended=ended, compiled=self._compiled()))

    def _do(self, order: Order) -> bool:
        match order:
            case Begin():
                received = [self._received(sent) for sent in order.inputs]
                self._rehearses = order.rehearses
                with self._beside.entered(), self._settings(), guarded(order.role):
                    inputs = [(sent.tree, self._placed(own)) for sent, own in zip(order.inputs, received, strict=True)]
                    self._runs[order.run] = self._pipeline.start(order.role, order.params, inputs, order.images)
                self._new.add(order.run)
            case Resume():
                received = self._received(order.saved)
                run = self._runs[order.run]
                assert isinstance(run, Resumable)
                with self._beside.entered(), guarded(Role.DENOISER):
                    run.restore(order.saved.tree, self._placed(received))
            case Prepare():
                run = self._runs[order.run]
                assert isinstance(run, Preparable)
                with self._beside.entered():
                    run.prepare()
            case Advance():
                if order.run in self._new:
                    self._new.remove(order.run)
                    self._beside.join()
                with self._settings():
                    ended = self._runs[order.run].advance() is not None
                if ended:
                    del self._runs[order.run]
                return ended
            case Join() | Meet() | Drop():
                raise AssertionError(f"{order!r} now")
        return False

    def _settings(self) -> AbstractContextManager[None]:
        """What holds on rank 0, which rehearses before all else."""
        return rehearsing() if self._rehearses else nullcontext()

    def _received(self, sent: Sent) -> list[torch.Tensor]:
        """The tensors that come after an order, in host memory."""
        tensors = [torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for t in sent.tensors]
        for tensor in tensors:
            self._team.broadcast(tensor)
        return tensors

    def _placed(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.to(self._device) for tensor in tensors]

    def _compiled(self) -> Compiled:
        """What was compiled since this was last asked."""
        tally, before = self._tally, self._told
        self._told = Compiled(
            compilations=tally.compilations, seconds=tally.compile_seconds, uncompiled=tally.uncompiled
        )
        return Compiled(
            compilations=self._told.compilations - before.compilations,
            seconds=self._told.seconds - before.seconds,
            uncompiled=self._told.uncompiled - before.uncompiled,
        )

    def _settle(self) -> None:
        """Wait until nothing of a failed order is left on the device; for ever, where a collective is left alone."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _answer(self, answer: Answer) -> None:
        try:
            self._connection.send_bytes(encode(answer))
        except OSError:  # rank 0 is gone
            os._exit(0)


def _words(error: Exception) -> str:
    return error.message if isinstance(error, TriptychError) else f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
