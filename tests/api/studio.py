"""A live server whose one instance computes a real pipeline: everything between a client and a model but the wires
between instances."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tests.api.conftest import House
from tests.pipeline.harness import Inbox, finish, post
from triptych.bench.noop import NoopInstance
from triptych.core.instance_events import Ended
from triptych.ids import ROLES, RequestId, Role
from triptych.launch.ports import free_ports
from triptych.wire.messages import Finished, Lease, Outcome
from triptych.worker.failure import failed
from triptych.worker.jobs import Identity
from triptych.worker.media import encode_clip


class Artist(NoopInstance):
    """An instance of all roles that computes, in a thread of its own; what roles hand on stays in its memory."""

    def __init__(self, *, pipeline: Any, **options: Any) -> None:
        super().__init__(schema=pipeline.schema, **options)
        self._pipeline = pipeline
        self._inboxes: dict[RequestId, Inbox] = defaultdict(lambda: {role: [] for role in ROLES})
        # Gradients are a thread's own matter.
        self._hand = ThreadPoolExecutor(1, initializer=torch.set_grad_enabled, initargs=(False,))

    def run(self) -> None:
        """Serve until asked to stop."""
        with self._hand:
            super().run()

    def work(self, lease: Lease, params: dict[str, Any], blobs: tuple[bytes, ...]) -> None:
        """Begin one stage."""
        self._hand.submit(lambda: self.post(Ended(outcome=self._computed(lease, params, blobs))))

    def _computed(self, lease: Lease, params: dict[str, Any], blobs: tuple[bytes, ...]) -> Outcome:
        inbox = self._inboxes[lease.request]
        try:
            pictures = blobs if lease.role is Role.ENCODER else ()
            result = finish(self._pipeline.start(lease.role, params, inbox[lease.role], pictures))
            if lease.role is not Role.DECODER:
                post(result, inbox)
                return self.outcome(lease)
            files = [encode_clip(clip, params.get("output_format")) for clip in result.clips]
        except Exception as error:
            return failed(Identity(instance=self.instance, epoch=self.epoch), lease, error)
        self._files[lease] = tuple(file.data for file in files)
        return Finished(
            instance=self.instance,
            epoch=self.epoch,
            server_epoch=None,
            lease=lease,
            files=tuple(file.describe(number) for number, file in enumerate(files)),
            compute_seconds=0.0,
            encode_seconds=0.0,
        )


class Studio(House):
    """A server on a free port and an artist."""

    def __init__(self, folder: Path, pipeline: Any, **options: Any) -> None:
        super().__init__(folder, pipeline.schema, **options)
        self._pipeline = pipeline

    def _staff(self) -> Iterator[NoopInstance]:
        yield Artist(
            pipeline=self._pipeline,
            server_addr=f"tcp://127.0.0.1:{self.config.scheduler_port}",
            work_url=f"tcp://127.0.0.1:{free_ports(1)[0]}",
            roles=ROLES,
            slots=4,
        )
