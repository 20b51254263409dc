"""Stopping between two steps on purpose: pause and resume, migration, and the leave-taking of an instance."""

from __future__ import annotations

from triptych.core.events import SendMember
from triptych.core.job import Grant, Job
from triptych.core.ledger import Ledger
from triptych.core.safekeeping import Safekeeping
from triptych.ids import RequestId, Role
from triptych.wire.messages import Draining, DrainStatus


class Preemption:
    """Moves over the ledger that take a stage away from its instance without blame."""

    def __init__(self, ledger: Ledger, safekeeping: Safekeeping) -> None:
        self._ledger = ledger
        self._safekeeping = safekeeping

    def pause(self, request: RequestId) -> None:
        """Have a request wait for `resume`, with the steps that it has done."""
        ledger = self._ledger
        job = ledger.jobs.get(request)
        if job is None or job.paused or job.storing is not None:
            return
        job.paused = True
        if job.queued:
            ledger.queues[job.role].remove(job)
            ledger.park(job)
        elif job.grant is not None:
            self._take_back(job, job.grant, "paused")
        ledger.update(job)

    def resume(self, request: RequestId) -> None:
        """Let a paused request go on."""
        ledger = self._ledger
        job = ledger.jobs.get(request)
        if job is None or not job.paused:
            return
        job.paused = False
        if job.parked:
            ledger.unpark(job)
            ledger.queues[job.role].add(job)
        ledger.update(job)

    def migrate(self, request: RequestId) -> None:
        """Have another instance go on with a denoising stage, unless `immovable` says why not."""
        job = self._ledger.jobs.get(request)
        if job is None or job.grant is None or job.grant.suspending or self.immovable(request) is not None:
            return
        job.moved_from = job.grant.instance
        self._take_back(job, job.grant, "migrated")

    def immovable(self, request: RequestId) -> str | None:
        """Why no other instance can go on with a request; None when one can."""
        ledger = self._ledger
        job = ledger.jobs.get(request)
        if job is None:
            return "it has ended"
        if job.paused:
            return "it is paused"
        if job.grant is None or job.role is not Role.DENOISER:
            return f"no denoiser has it now: it is {job.state}"
        if not ledger.eligible(job, job.role) - job.avoid - {job.grant.instance}:
            return f"no other denoiser than {job.grant.instance} can take it"
        return None

    def draining(self, message: Draining) -> None:
        """An instance wants to leave: give it nothing new, have others keep what it holds, say whether it may go."""
        ledger = self._ledger
        member = ledger.members.get(message.instance)
        if member is None or member.epoch != message.epoch:
            ledger.count("stale_message", "Draining", message.instance)
            return
        if not member.draining:
            ledger.count("instance_draining", f"leaves in {message.seconds:g} s at the latest", member.id)
            ledger.roster.withdraw(member, "asked to stop")
            for grant in list(member.grants.values()):
                if grant.job is not None and grant.started is None and not grant.storing:
                    self._take_back(grant.job, grant, "its instance is leaving")
            self._safekeeping.evacuate(member)
        status = DrainStatus(
            server_epoch=ledger.server_epoch, epoch=member.epoch, needed=self._safekeeping.needs(member)
        )
        ledger.out.append(SendMember(instance=member.id, message=status))

    def _take_back(self, job: Job, grant: Grant, reason: str) -> None:
        """A stage that has not begun goes back at once, a denoising one between two steps; any other is finished.

        One that an earlier life of the server has granted may have begun, though no word of it has come yet.
        """
        ledger = self._ledger
        if grant.started is None and not grant.resumed:
            ledger.revoke(grant)
            ledger.requeue(job, grant, reason, charged=False)
        elif grant.lease.role is Role.DENOISER and not grant.suspending:
            grant.suspending = True
            ledger.suspend(grant)
