"""Copies that outlive their maker: another instance pulls and keeps what only one pool held.

Checkpoints of running stages go to a buddy as soon as they are made, so that the death of a denoiser costs what it did
since. What an instance that is leaving keeps for others goes to one that stays. Both are the same move: `Keep` names
the copy, the buddy pulls it and answers `Kept` with a copy of its own, which takes the place of the first.
"""

from __future__ import annotations

from triptych.core.job import Copy, Grant, Job
from triptych.core.ledger import Ledger
from triptych.core.members import Member
from triptych.ids import Role
from triptych.wire.manifest import Manifest
from triptych.wire.messages import Keep, Kept, Lease


class Safekeeping:
    """Moves over the ledger's copies."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def book(self, job: Job, member: Member, lease: Lease, manifest: Manifest, step: int, steps: int) -> None:
        """Enter a checkpoint that ``member`` has staged, and have a buddy keep it."""
        ledger = self._ledger
        if manifest.copy in member.copies:
            return  # repeated
        overtaken = any(old.instance == member.id and old.step >= step for old in job.checkpoints())
        if not 0 < step < steps or overtaken or job.role is not Role.DENOISER:
            ledger.release_ids(member, (manifest.copy,))
            return
        copy = Copy(
            manifest=manifest,
            lease=lease,
            consumer=Role.DENOISER,
            instance=member.id,
            job=job,
            staged=ledger.now,
            step=step,
            steps=steps,
            origin=(job.encoded_by, member.hello.fingerprint),
        )
        ledger.release([old for old in job.checkpoints() if old.instance == member.id and old.step < step])
        for old in [old for old in job.keeping.values() if old.spare and old.step < step]:
            ledger.call_off(old)
        ledger.keep(copy)
        self.save(copy)

    def save(self, copy: Copy) -> None:
        """Have another instance keep ``copy``: on another host if there is one, with as few of them as possible."""
        ledger = self._ledger
        source = ledger.members[copy.instance]
        buddies = [
            member
            for member in ledger.members.values()
            if member is not source and not member.draining and member.hello.pool_bytes >= copy.manifest.nbytes
        ]
        if not buddies:
            return
        buddy = min(buddies, key=lambda m: (m.hello.host == source.hello.host, m.spare_bytes, m.ordinal))
        if copy.buddy != buddy.id:
            ledger.call_off(copy)
        copy.buddy = buddy.id
        copy.job.keeping[copy.manifest.copy] = copy
        keep = Keep(server_epoch=ledger.server_epoch, epoch=buddy.epoch, manifest=copy.manifest, spare=copy.spare)
        ledger.send(buddy, keep)

    def kept(self, message: Kept) -> None:
        """A buddy has a copy of its own: it takes the place of the first, unless that is of no use any more."""
        ledger = self._ledger
        member = ledger.members.get(message.instance)
        if member is None or member.epoch != message.epoch:
            ledger.count("stale_message", "Kept", message.instance, message.manifest.request)
            return
        if message.manifest.copy in member.copies:
            return  # repeated
        job = ledger.jobs.get(message.manifest.request)
        first = None if job is None else job.keeping.pop(message.copy, None)
        if job is None or first is None or not self._useful(job, first):
            ledger.release_ids(member, (message.manifest.copy,))
            return
        copy = first.moved(message.manifest, member.id, ledger.now)
        ledger.keep(copy)
        old = [c for c in job.checkpoints() if c.step <= copy.step and c is not copy] if copy.spare else [first]
        job.exchange(first, copy)
        ledger.release([c for c in old if c.manifest.copy in job.copies and not _being_pulled(job.grant, c)])
        if member.draining:
            self.save(copy)

    def evacuate(self, member: Member) -> None:
        """Have others keep what an instance that is leaving keeps."""
        for copy in list(member.copies.values()):
            self.save(copy)

    def needs(self, member: Member) -> bool:
        """Whether requests would lose something if ``member`` were gone: work, outputs, or a checkpoint that is about
        to be pulled. What a paused request has, and nobody else can keep, is not waited for: nothing says how long."""
        return any(grant.job is not None for grant in member.grants.values()) or any(
            not (copy.spare or copy.job.parked)
            or copy.manifest.copy in copy.job.keeping
            or _being_pulled(copy.job.grant, copy)
            for copy in member.copies.values()
        )

    @staticmethod
    def _useful(job: Job, first: Copy) -> bool:
        if first.consumer in job.outputs:
            return False
        if first.spare:
            return all(copy.step <= first.step for copy in job.checkpoints() if copy.origin == first.origin)
        made = job.outputs.get(first.producer, ())
        return any(copy == first.manifest.copy for copy, _ in made)


def _being_pulled(grant: Grant | None, copy: Copy) -> bool:
    if grant is None or grant.fetched or grant.started is not None:
        return False
    return grant.resume is copy if copy.spare else grant.lease.role is copy.consumer
