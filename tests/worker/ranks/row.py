"""Requests in a row for two ranks, through a real compute thread; and followers that are told what they cannot do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest
import torch

from tests.worker.ranks.pair import SMALL, Pair
from tests.worker.test_ahead import WAIT, following, payloads
from triptych.accel.tally import Tally
from triptych.ids import Epoch, InstanceId, RequestId, Role
from triptych.transport.data.protocol import Payload
from triptych.wire.messages import Lease
from triptych.worker.compute import ComputeThread
from triptych.worker.jobs import CheckpointJob, ComputeJob, Identity, Post, StageJob, ThreadDied, Ticket
from triptych.worker.ranks.orders import Begin, Prepare, Resume

Alter = Callable[[Any], Any]
"""What the follower is told in the place of an order."""


class Row:
    """The compute thread of rank 0, and requests that wait in it one behind the other."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.posts: SimpleQueue[Post] = SimpleQueue()
        self.tickets: list[Ticket] = []
        self._staged: SimpleQueue[StageJob | CheckpointJob] = SimpleQueue()
        self._known = len(pair.orders)
        self._thread = ComputeThread(
            load=lambda: pair.shared,
            device=str(pair.team.device),
            max_running=1,
            tally=Tally(),
            identity=Identity(instance=InstanceId("i"), epoch=Epoch("e")),
            post=self.posts.put,
            stage=self._staged.put,
            encode=lambda _: None,
        )

    def add(self, params: Mapping[str, Any], inputs: tuple[Payload, ...], resume: Payload | None = None) -> Ticket:
        ticket = Ticket(Lease(RequestId(str(len(self.tickets))), Role.DENOISER, 1))
        self.tickets.append(ticket)
        given = tuple(map(self._pulled, inputs))
        resume = None if resume is None else self._pulled(resume)
        self._thread.put(ComputeJob(ticket=ticket, params=dict(params), inputs=given, images=(), resume=resume))
        return ticket

    def _pulled(self, payload: Payload) -> Payload:
        """A copy on the device, complete, as a transfer thread leaves it."""
        device = self.pair.team.device
        copy = Payload(tree=payload.tree, tensors=tuple(tensor.to(device) for tensor in payload.tensors))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return copy

    def start(self) -> None:
        self._thread.start()

    def told(self, kind: type[Any]) -> list[Any]:
        """Orders of that kind so far, as they were given."""
        return [order for order in self.pair.orders[self._known :] if isinstance(order, kind)]

    def result(self, ticket: Ticket) -> list[torch.Tensor]:
        """What the next request, which must be this one, was made into."""
        job = following(self._staged, self._thread)
        assert isinstance(job, StageJob)
        assert job.ticket is ticket
        return [tensor.cpu() for output in job.outputs for tensor in output.tensors]

    def close(self) -> None:
        self._thread.close()
        self._thread.join(WAIT)
        assert not self._thread.is_alive()

    def died(self) -> ThreadDied:
        while not isinstance(post := self.posts.get(timeout=WAIT), ThreadDied):
            pass
        return post


def asked(pair: Pair, count: int, **more: Any) -> list[tuple[dict[str, Any], tuple[Payload, ...]]]:
    """Requests that differ, and what the denoiser gets of each."""
    requests = [SMALL | {"num_inference_steps": 4, "seed": seed, **more} for seed in range(count)]
    return [(params, payloads(pair.alone, params)) for params in requests]


def same(made: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(made) == len(expected) and all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))


def left_over(pair: Pair, orders: list[Any]) -> list[int]:
    """The runs begun by ``orders`` that the follower has still: it fails at those that it has not."""
    known: list[int] = []
    for run in {order.run for order in orders if isinstance(order, Begin)}:
        pair.leader.tell(Prepare(run=run))
        failed = pair.leader.failure()
        if failed is None or not failed.message.endswith(f": rank 1: KeyError: {run}"):
            known.append(run)
    return known


def _unreadable(order: Begin) -> Begin:
    return msgspec.structs.replace(order, inputs=tuple(msgspec.structs.replace(s, tree=b"") for s in order.inputs))


def _no_checkpoint(order: Resume) -> Resume:
    return msgspec.structs.replace(order, saved=msgspec.structs.replace(order.saved, tree=b""))


FAILURES: dict[str, tuple[type[Any], Alter]] = {
    "begin": (Begin, _unreadable),
    "resume": (Resume, _no_checkpoint),
    "prepare": (Prepare, lambda _: Prepare(run=10**6)),
}
"""Orders that the follower cannot carry out, and rank 0 can."""


def misled(pair: Pair, monkeypatch: pytest.MonkeyPatch, kind: type[Any], alter: Alter, number: int) -> None:
    """Have the follower told something else in the place of the order of that kind and number."""
    tell, seen = pair._tell, [0]

    def told(order: Any, tensors: Any = ()) -> None:
        if isinstance(order, kind):
            seen[0] += 1
            order = alter(order) if seen[0] == number else order
        tell(order, tensors)

    monkeypatch.setattr(pair, "_tell", told)
