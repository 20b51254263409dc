"""The messages of one life of an instance, each signed with its id, its epoch and the server life it speaks to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

from triptych.core.instance_events import CheckpointMade, CopyKept, Pulled, Usage
from triptych.ids import CopyId, Epoch, InstanceId
from triptych.wire.manifest import Manifest
from triptych.wire.messages import (
    Checkpointed,
    Draining,
    Dropped,
    ErrorInfo,
    Fetched,
    Goodbye,
    Heartbeat,
    Hello,
    Kept,
    Lease,
    Outcome,
    Progress,
    StageFailed,
    Started,
    Stopped,
    replace,
)


class _Signature(TypedDict):
    instance: InstanceId
    epoch: Epoch
    server_epoch: Epoch | None


class Voice:
    """Builds messages; ``template`` is the hello without what changes."""

    def __init__(self, template: Hello) -> None:
        self._template = template
        self._sequence = 0
        self.server: Epoch | None = None
        """The server life that welcomed the instance last."""

    @property
    def _signature(self) -> _Signature:
        """Who speaks, and to which life of the server."""
        return {"instance": self._template.instance, "epoch": self._template.epoch, "server_epoch": self.server}

    def hello(self, leases: Iterable[Lease], copies: Iterable[Manifest]) -> Hello:
        """What the instance is, and what it still holds."""
        return replace(self._template, server_epoch=self.server, leases=tuple(leases), copies=tuple(copies))

    def heartbeat(self, leases: Iterable[Lease], copies: Iterable[CopyId], usage: Usage) -> Heartbeat:
        """The next sign of life."""
        self._sequence += 1
        return Heartbeat(
            **self._signature,
            sequence=self._sequence,
            leases=tuple(leases),
            pool_used=usage.pool_used,
            resident_bytes=usage.resident_bytes,
            device_bytes=usage.device_bytes,
            counts=usage.counts,
            copies=tuple(copies),
        )

    def goodbye(self, reason: str, *, failed: bool) -> Goodbye:
        """The last word."""
        return Goodbye(**self._signature, reason=reason, failed=failed)

    def draining(self, seconds: float) -> Draining:
        """The instance was asked to stop, and stays so long at most."""
        return Draining(**self._signature, seconds=seconds)

    def kept(self, event: CopyKept) -> Kept:
        """Another instance's copy is here too."""
        return Kept(**self._signature, copy=event.copy, manifest=event.manifest)

    def checkpointed(self, event: CheckpointMade) -> Checkpointed:
        """What a lease did so far is staged."""
        return Checkpointed(
            **self._signature, lease=event.lease, manifest=event.manifest, step=event.step, steps=event.steps
        )

    def fetched(self, event: Pulled) -> Fetched:
        """The inputs of a lease are here."""
        return Fetched(
            **self._signature, lease=event.lease, seconds=event.seconds, nbytes=event.nbytes, plane=event.plane
        )

    def started(self, lease: Lease) -> Started:
        """A lease is being computed."""
        return Started(**self._signature, lease=lease)

    def progress(self, lease: Lease, step: int, steps: int, preview: bytes) -> Progress:
        """Steps of a lease are done."""
        return Progress(**self._signature, lease=lease, step=step, steps=steps, preview=preview)

    def dropped(self, copies: Iterable[CopyId]) -> Dropped:
        """Copies are gone."""
        return Dropped(**self._signature, copies=tuple(copies))

    def failed(self, lease: Lease, error: ErrorInfo, lost: tuple[CopyId, ...] = ()) -> StageFailed:
        """A lease could not be done."""
        return StageFailed(**self._signature, lease=lease, error=error, lost_copies=lost)

    def stopped(self, lease: Lease) -> Stopped:
        """A lease is over without a result."""
        return Stopped(**self._signature, lease=lease)

    def outcome(self, outcome: Outcome) -> Outcome:
        """An outcome made under whatever server life, addressed to the present one."""
        return outcome if outcome.server_epoch == self.server else replace(outcome, server_epoch=self.server)
