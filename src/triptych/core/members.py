"""One instance as the router knows it: its hello, the leases it holds, the copies it keeps, its heartbeat."""

from __future__ import annotations

from dataclasses import dataclass, field

from triptych.core.events import InstanceView
from triptych.core.health import Health
from triptych.core.job import Copy, Grant
from triptych.ids import ROLES, CopyId, Epoch, InstanceId, Role
from triptych.wire.messages import Counts, Hello, Lease


@dataclass(kw_only=True, slots=True, eq=False)
class Member:
    """A live instance."""

    id: InstanceId
    epoch: Epoch
    hello: Hello
    ordinal: int
    """Order of joining."""
    seen: float
    """When it was last heard of."""
    sequence: int = -1
    """Of the last heartbeat taken."""
    pool_used: int = 0
    resident_bytes: int = 0
    device_bytes: int = 0
    counts: Counts = field(default_factory=Counts)
    grants: dict[Lease, Grant] = field(default_factory=dict[Lease, Grant])
    copies: dict[CopyId, Copy] = field(default_factory=dict[CopyId, Copy])
    retained: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(ROLES, 0))
    """Bytes of the kept copies, by the role that made them."""
    typical: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(ROLES, 0))
    """Bytes that the last stage of each role staged here."""
    draining: bool = False
    """It was asked to stop: it gets nothing new."""
    spare_bytes: int = 0
    """Bytes of the checkpoints kept here, which yield to everything else."""
    health: Health = field(default_factory=Health)
    odd_leases: frozenset[Lease] = frozenset()
    odd_copies: frozenset[CopyId] = frozenset()
    """What its last heartbeat listed and the router does not know."""

    @property
    def free(self) -> int:
        """Slots without a lease."""
        return self.hello.slots - len(self.grants)

    def has_room(self, role: Role) -> bool:
        """Whether a stage of ``role`` may start here: a slot is free, and the pool will hold its output.

        Only copies made by this role or later ones count: they wait for stages which this rule does not hold back
        (a decoder stages nothing), so that full pools can never lock each other.
        """
        if self.draining or len(self.grants) >= self.hello.slots:
            return False
        if role is Role.DECODER:
            return True
        kept = self.retained[Role.DENOISER]
        if role is Role.ENCODER:
            kept += self.retained[Role.ENCODER]
        typical = self.typical[role]
        if kept + typical * self.hello.slots <= self.hello.pool_bytes:
            return True  # whatever holds the other slots
        staging = sum(lease.role is not Role.DECODER for lease in self.grants)
        return not (kept or staging) or kept + typical * (staging + 1) <= self.hello.pool_bytes

    @property
    def holds_suspect(self) -> bool:
        """Whether it has a stage of which another instance died."""
        return any(grant.job is not None and grant.job.kills for grant in self.grants.values())

    def keep(self, copy: Copy) -> None:
        """Book a copy that lies in this instance's pool."""
        self.copies[copy.manifest.copy] = copy
        self._book(copy, copy.manifest.nbytes)

    def drop(self, copy: Copy) -> None:
        """Strike a copy out."""
        del self.copies[copy.manifest.copy]
        self._book(copy, -copy.manifest.nbytes)

    def _book(self, copy: Copy, nbytes: int) -> None:
        if copy.spare:
            self.spare_bytes += nbytes
        else:
            self.retained[copy.producer] += nbytes

    def view(self, now: float) -> InstanceView:
        """A snapshot for operators."""
        return InstanceView(
            instance=self.id,
            epoch=self.epoch,
            roles=self.hello.roles,
            work_url=self.hello.work_url,
            device=self.hello.device,
            fingerprint=self.hello.fingerprint,
            slots=self.hello.slots,
            free_slots=self.free,
            leases=tuple(self.grants),
            copies=len(self.copies),
            pool_bytes=self.hello.pool_bytes,
            pool_used=self.pool_used,
            resident_bytes=self.resident_bytes,
            device_bytes=self.device_bytes,
            counts=self.counts,
            heartbeat_age=max(0.0, now - self.seen),
            draining=self.draining,
            quarantined=max(0.0, self.health.until - now),
            commit=self.hello.schema.commit,
            failures=self.health.evidence if self.health.quarantined(now) else "",
            sharing=self.hello.sharing,
        )
