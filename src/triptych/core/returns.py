"""Requests that an earlier life of the server had under way: what the instances bring back of them goes on.

A journal knows which lease a request ran under and which outputs were kept for it, and the hello of an instance says
what of that it still has. So a restored request is held until each instance concerned has come, with or without its
part, or until the grace is over. Then it goes on with what there is: under the lease that came back, or in the queue
of the earliest stage whose output is gone.
"""

from __future__ import annotations

from triptych.core.events import Restore
from triptych.core.job import Awaited, Copy, Grant, Job
from triptych.core.ledger import Ledger
from triptych.core.members import Member
from triptych.core.states import WAITING
from triptych.ids import ROLES, CopyId, RequestId, Role
from triptych.wire.messages import Hello, Lease


class Returns:
    """Puts restored requests into the ledger, and compares them with each hello."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def restore(self, event: Restore) -> None:
        """Book a request as the journal knows it."""
        ledger = self._ledger
        job = Job(
            request=event.request,
            number=ledger.next_number(),
            params=event.params,
            queue_timeout=event.queue_timeout,
            run_timeout=event.run_timeout,
            since=ledger.now,
            attempt=event.attempt,
            waited=event.waited,
            ran=event.ran,
            ready=ledger.now,
            timings=list(event.timings),
        )
        ledger.jobs[job.request] = job
        if event.holder is None and not event.done:
            ledger.line_up(job)
            return
        for stage in event.done:
            job.outputs[stage.lease.role] = tuple((output.manifest.copy, output.consumer) for output in stage.outputs)
        job.awaited = Awaited(
            holder=event.holder,
            copies={
                output.manifest.copy: Copy(
                    manifest=output.manifest,
                    lease=stage.lease,
                    consumer=output.consumer,
                    instance=stage.instance,
                    job=job,
                    staged=ledger.now,
                )
                for stage in event.done
                for output in stage.outputs
                if output.consumer not in job.outputs and ROLES.index(output.consumer) > ROLES.index(stage.lease.role)
            },
            until=ledger.now + ledger.config.restore_grace,
        )
        ledger.awaiting[job.request] = job
        job.role = job.next_role()
        job.state = WAITING[job.role]
        ledger.job_deadlines.set(job.request, job.deadline)
        ledger.update(job)

    def reclaim(self, member: Member, message: Hello) -> list[CopyId]:
        """Book what a joining instance brings back; returns the copies of its hello that nobody waits for."""
        ledger = self._ledger
        resumed: set[RequestId] = set()
        for lease in message.leases:
            job = ledger.jobs.get(lease.request)
            if job is None:
                continue
            if self._fits(job, lease, member):
                self._resume(job, lease, member)
                resumed.add(job.request)
            elif job.queued or job.held:
                # It carries an attempt that must not be granted again to the same instance.
                job.attempt = max(job.attempt, lease.attempt + 1)
        brought = {manifest.copy for manifest in message.copies}
        for job in tuple(ledger.awaiting.values()):
            awaited = job.awaited
            assert awaited is not None
            for copy in [copy for copy in awaited.copies.values() if copy.instance == member.id]:
                del awaited.copies[copy.manifest.copy]
                reported_anew = copy.lease in member.grants  # by the outcome of a resumed lease
                if copy.manifest.copy in brought and copy.manifest.epoch == member.epoch and not reported_anew:
                    copy.staged = ledger.now
                    ledger.keep(copy)
            if awaited.holder == member.id:
                awaited.holder = None
            if awaited.holder is None and not awaited.copies:
                self._go_on(job)
        # The outcome of a resumed lease is on its way, and names copies that the hello lists already.
        return [m.copy for m in message.copies if m.copy not in member.copies and m.request not in resumed]

    def expire(self) -> None:
        """Wait no longer for what has not come back in time."""
        ledger = self._ledger
        for job in tuple(ledger.awaiting.values()):
            awaited = job.awaited
            assert awaited is not None
            if awaited.until <= ledger.now:
                missing = {copy.instance for copy in awaited.copies.values()} | {awaited.holder} - {None}
                names = ", ".join(sorted(name for name in missing if name is not None))
                ledger.count("not_brought_back", f"{job.role}: {names} did not come back", None, job.request)
                self._go_on(job)

    def _fits(self, job: Job, lease: Lease, member: Member) -> bool:
        """Whether a lease of an earlier life is one that the request, as far as is known, still runs under.

        Attempts only grow, so an equal one is the same lease, and a greater one was granted just before the server
        died: the journal had no time for it.
        """
        return (
            (job.queued or job.held)
            and lease.role is job.role
            and lease.role in member.hello.roles
            and lease.attempt >= job.attempt
            and member.free > 0
        )

    def _resume(self, job: Job, lease: Lease, member: Member) -> None:
        ledger = self._ledger
        if job.queued:
            ledger.queues[job.role].remove(job)
        job.attempt = lease.attempt
        job.grant = member.grants[lease] = Grant(
            lease=lease, instance=member.id, granted=ledger.now, job=job, resumed=True
        )
        if job.awaited is not None:
            job.awaited.holder = None
        ledger.roster.refresh(member)
        ledger.granted(job, member, lease)
        if job.paused and lease.role is Role.DENOISER:  # nobody was there to tell the instance
            job.grant.suspending = True
            ledger.suspend(job.grant)
        ledger.count("lease_resumed", f"{lease.role} attempt {lease.attempt}", member.id, job.request)
        ledger.update(job)

    def _go_on(self, job: Job) -> None:
        held = job.held
        del self._ledger.awaiting[job.request]
        job.awaited = None
        if held:
            self._ledger.line_up(job)
