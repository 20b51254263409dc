"""The crew: all threads of the role process beside control, started together and ended together."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from queue import SimpleQueue
from typing import Final

from triptych.accel.tally import Tally
from triptych.config import Shape
from triptych.ids import CopyId
from triptych.pipeline.stage import RolePipeline
from triptych.transport.data.protocol import DataPlane
from triptych.worker.compute import ComputeThread
from triptych.worker.encoding import MediaThread
from triptych.worker.jobs import Close, ComputeJob, Identity, KeepJob, Post, PullJob
from triptych.worker.keeping import KeepThread
from triptych.worker.preview import PreviewThread
from triptych.worker.transfer import PullThread, StageThread

_MOST_PULLERS: Final = 4
"""Pulls at the same time; enough that one dead sender does not hold up the others."""


class Crew:
    """One compute, stage, media, preview and keeping thread each, and a puller for each slot up to four.

    Jobs flow compute → stage or media; everything is posted to control by ``post``.
    """

    def __init__(
        self,
        *,
        load: Callable[[], RolePipeline],
        device: str,
        slots: int,
        max_running: int,
        tally: Tally,
        warmed: Sequence[Shape] = (),
        checkpoint_interval: float = 0.0,
        plane: DataPlane,
        identity: Identity,
        post: Callable[[Post], None],
    ) -> None:
        self._media = MediaThread(device=device, identity=identity, post=post)
        self._stage = StageThread(plane=plane, device=device, identity=identity, post=post)
        self._show = PreviewThread(device=device, post=post)
        self._compute = ComputeThread(
            load=load,
            device=device,
            max_running=max_running,
            tally=tally,
            warmed=warmed,
            checkpoint_interval=checkpoint_interval,
            identity=identity,
            post=post,
            stage=self._stage.put,
            encode=self._media.put,
            show=self._show,
        )
        self._keeper = KeepThread(plane=plane, device=device, post=post)
        pulls: SimpleQueue[PullJob | Close] = SimpleQueue()
        self._pullers = [
            PullThread(number, plane=plane, device=device, identity=identity, post=post, jobs=pulls)
            for number in range(min(slots, _MOST_PULLERS))
        ]
        self._threads = (self._compute, self._stage, self._media, self._show, self._keeper, *self._pullers)

    def start(self) -> None:
        """Start every thread; the compute thread begins to load the model."""
        for thread in self._threads:
            thread.start()

    def pull(self, job: PullJob) -> None:
        """Fetch inputs; the first free puller takes it."""
        self._pullers[0].put(job)

    def keep(self, job: KeepJob) -> None:
        """Fetch and stage another instance's copy."""
        self._keeper.put(job)

    def compute(self, job: ComputeJob) -> None:
        """Run a stage."""
        self._compute.put(job)

    def released(self, copies: Collection[CopyId]) -> None:
        """Nobody wants these copies any more: they are not fetched to be kept, and an output that waits for room may
        try again."""
        self._keeper.release(copies)
        self._stage.room_made()

    def close(self, seconds: float) -> bool:
        """Let all threads end; False when one has not within ``seconds``."""
        for thread in self._threads:
            thread.close()
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
