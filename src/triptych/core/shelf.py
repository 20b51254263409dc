"""What lies in an instance's pool, as its machine knows it: outputs of its own stages, checkpoints, kept copies."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from triptych.ids import CopyId, Role
from triptych.wire.manifest import Manifest
from triptych.wire.messages import Lease, Outcome, Staged, Stopped


@dataclass(frozen=True, slots=True)
class _Copy:
    manifest: Manifest
    role: Role
    """The stage that made it."""
    lease: Lease | None
    """The lease whose outcome it is; None for what no acknowledged message speaks of."""


class Shelf:
    """Copies by id."""

    def __init__(self) -> None:
        self._copies: dict[CopyId, _Copy] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def add(self, outcome: Outcome) -> None:
        """Enter what a stage left."""
        for manifest in _made(outcome):
            self._copies[manifest.copy] = _Copy(manifest, outcome.lease.role, outcome.lease)

    def add_spare(self, manifest: Manifest, role: Role) -> None:
        """Enter a checkpoint, or a copy that is kept for another instance."""
        self._copies[manifest.copy] = _Copy(manifest, role, None)

    def unknown(self, outcome: Outcome) -> tuple[CopyId, ...]:
        """Copies that an outcome speaks of and that are not here."""
        return tuple(sorted({manifest.copy for manifest in _made(outcome)} - self._copies.keys()))

    def remove(self, copies: Iterable[CopyId]) -> None:
        """They are released."""
        for copy in copies:
            self._copies.pop(copy, None)

    def drop(self, copies: Iterable[CopyId]) -> dict[Role, list[CopyId]]:
        """They fell out of the pool; which of them were known, by the role that made them."""
        by_role: dict[Role, list[CopyId]] = {}
        for copy in copies:
            if (known := self._copies.pop(copy, None)) is not None:
                by_role.setdefault(known.role, []).append(copy)
        return by_role

    def manifests(self) -> Iterable[Manifest]:
        """All of them."""
        return (copy.manifest for copy in self._copies.values())

    def listed(self, unacknowledged: Collection[Lease]) -> Iterable[CopyId]:
        """Those that the server should know of: not the ones that an outcome on its way speaks of."""
        return (id for id, copy in self._copies.items() if copy.lease not in unacknowledged)


def _made(outcome: Outcome) -> tuple[Manifest, ...]:
    if isinstance(outcome, Staged):
        return tuple(output.manifest for output in outcome.outputs)
    if isinstance(outcome, Stopped) and outcome.checkpoint is not None:
        return (outcome.checkpoint,)
    return ()
