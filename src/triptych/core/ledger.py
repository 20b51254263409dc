"""The router's books, and the moves that keep them consistent; each move leaves its actions in ``out``.

Theory of operation. A live request stands in exactly one place: in the queue of its role, under a grant (a lease that
some instance holds; also while its decoder is to send files again that could not be stored), in storing (its files have
arrived and the shell is writing them), parked (a client has paused it), or held (an earlier life of the server had it
under way, and the instances may bring back what they have of it). A copy is booked twice, with the request that will
read it and with the instance whose pool holds it; both are struck out together. A grant whose request has ended or
moved on stays with the instance without a request, because the slot is taken until the instance says that it stopped.
Every way back (lost instance, lost copy, failed stage) goes through `requeue` or `recheck`: settle what is still there,
then line up for the earliest stage that has to be done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from triptych.config import RouterConfig
from triptych.core.deadlines import Deadlines
from triptych.core.events import (
    Count,
    CountName,
    Disconnect,
    JobState,
    JobView,
    LeaseGranted,
    RouterAction,
    SendWork,
    Submit,
    Update,
)
from triptych.core.health import Records
from triptych.core.job import Copy, Grant, Job
from triptych.core.members import Member
from triptych.core.options import told
from triptych.core.queues import StageQueue
from triptych.core.roster import Roster
from triptych.core.states import WAITING
from triptych.core.verdict import verdict
from triptych.ids import ROLES, CopyId, Epoch, InstanceId, RequestId, Role
from triptych.wire.messages import Ack, Cancel, ErrorInfo, Lease, Release, RunStage, ToInstance
from triptych.wire.schema import RequestSchema


class Ledger:
    """Requests, instances, queues and deadlines of one router. ``now`` is the time of the event being handled."""

    def __init__(self, config: RouterConfig, server_epoch: Epoch) -> None:
        self.config = config
        self.server_epoch = server_epoch
        self.now = 0.0
        self.out: list[RouterAction] = []
        self.schema: RequestSchema | None = None
        self.jobs: dict[RequestId, Job] = {}
        self.awaiting: dict[RequestId, Job] = {}
        """Requests of which instances may bring something back."""
        self.roster = Roster()
        self.members = self.roster.members
        self.queues: dict[Role, StageQueue] = {role: StageQueue() for role in ROLES}
        self.job_deadlines: Deadlines[RequestId] = Deadlines()
        self.member_deadlines: Deadlines[InstanceId] = Deadlines()
        self.records = Records()
        self._accepted = 0

    # -- what goes out ------------------------------------------------------------------------------------------

    def send(self, member: Member, message: ToInstance, with_blobs: RequestId | None = None) -> None:
        """Push ``message`` to the member's work port."""
        self.out.append(
            SendWork(instance=member.id, work_url=member.hello.work_url, message=message, with_blobs=with_blobs)
        )

    def ack(self, member: Member, lease: Lease) -> None:
        """Let the member forget the outcome of ``lease``."""
        self.send(member, Ack(server_epoch=self.server_epoch, epoch=member.epoch, leases=(lease,)))

    def count(
        self, name: CountName, detail: str, instance: InstanceId | None = None, request: RequestId | None = None
    ) -> None:
        """Leave a counter and a log line."""
        self.out.append(Count(name=name, detail=detail, instance=instance, request=request))

    def update(self, job: Job, error: ErrorInfo | None = None) -> None:
        """Show the request as it is now."""
        self.out.append(Update(view=self.view(job, error)))

    def view(self, job: Job, error: ErrorInfo | None = None) -> JobView:
        """A snapshot of a request."""
        position = self.queues[job.role].position(job) if job.queued else None
        return job.view(self.now, position, error)

    # -- requests -----------------------------------------------------------------------------------------------

    def accept(self, event: Submit) -> None:
        """Book a new request and line it up."""
        job = Job(
            request=event.request,
            number=self.next_number(),
            params=event.params,
            queue_timeout=event.queue_timeout,
            run_timeout=event.run_timeout,
            since=self.now,
        )
        self.jobs[job.request] = job
        self.line_up(job)

    def next_number(self) -> int:
        """Order of acceptance of a new request."""
        self._accepted += 1
        return self._accepted - 1

    def move(self, job: Job, state: JobState) -> None:
        """Enter ``state``; the deadline follows."""
        job.move(state, self.now)
        self.job_deadlines.set(job.request, job.deadline)

    def line_up(self, job: Job) -> None:
        """Put a request that stands nowhere into the queue of the earliest stage that has to be done.

        It is held instead while instances may bring back what it needs.
        """
        if job.awaited is None:
            self.release(job.settle())
        role = job.next_role()
        if job.state is not JobState.PENDING and ROLES.index(role) <= ROLES.index(job.role):
            job.attempt += 1
        job.role = role
        job.ready = self.now
        saved = job.checkpoints() if role is Role.DENOISER else []
        job.step, job.steps = (saved[-1].step, saved[-1].steps) if saved else (0, 0)
        if job.state is not WAITING[role]:
            self.move(job, WAITING[role])
        if job.awaited is None and job.paused:
            self.park(job)
        elif job.awaited is None:
            self.queues[role].add(job)
        self.update(job)

    def park(self, job: Job) -> None:
        """Have a request that stands nowhere wait until it is resumed; its clocks stand still."""
        job.park(self.now)
        self.job_deadlines.set(job.request, job.deadline)

    def unpark(self, job: Job) -> None:
        """Take a parked request up again; it stands nowhere then."""
        job.unpark(self.now)
        self.job_deadlines.set(job.request, job.deadline)

    def requeue(
        self,
        job: Job,
        grant: Grant,
        reason: str,
        *,
        charged: bool,
        killed: Epoch | None = None,
        silent: Epoch | None = None,
    ) -> None:
        """Go back after a lost or failed attempt; a stage that was charged too often fails the request.

        ``killed``: the life of the instance that may have died of it; ``silent``: of one that cannot have, see `Fault`.
        """
        job.grant = grant.job = None
        if charged and self.exhausted(job, grant.lease.role, grant.instance, reason, killed, silent):
            return
        self.count("requeued", f"{grant.lease.role}: {reason}", grant.instance, job.request)
        self.line_up(job)

    def exhausted(
        self,
        job: Job,
        role: Role,
        instance: InstanceId,
        reason: str,
        killed: Epoch | None = None,
        silent: Epoch | None = None,
    ) -> bool:
        """Charge a stage with a failed attempt; whether that was the last one, which fails the request."""
        error = verdict(self.config, job, role, job.charge(role, instance, reason, killed, silent))
        if error is not None:
            self.end(job, JobState.FAILED, error)
        return error is not None

    def recheck(self, job: Job, lost: Copy, reason: str, *, charged: bool) -> None:
        """Go back if ``lost``, or another copy lost with it, is needed and cannot have been pulled yet.

        A stage that has its inputs goes on; what a later stage misses is found when this one is done. ``charged``: it
        counts as a failure of the stage that made the copy.
        """
        grant = job.grant
        if job.queued or job.parked:
            self.release(job.settle())
            if job.next_role() is job.role or (
                charged and self.exhausted(job, lost.producer, lost.instance, f"output {reason}")
            ):
                return
            self.take_out(job)
            self.count("requeued", f"{job.role}: input {reason}", lost.instance, job.request)
            self.line_up(job)
        elif grant is not None and not grant.fetched and grant.started is None and job.storing is None:
            role = grant.lease.role
            needed = (copy for made in job.outputs.values() for copy, consumer in made if consumer is role)
            if any(copy not in job.copies for copy in needed):
                if charged and self.exhausted(job, lost.producer, lost.instance, f"output {reason}"):
                    return
                self.revoke(grant)
                self.requeue(job, grant, f"input {reason}", charged=False)

    def end(self, job: Job, state: JobState, error: ErrorInfo | None = None) -> None:
        """Leave for good: free everything everywhere and show the terminal state."""
        if job.queued or job.parked:
            self.take_out(job)
        elif (grant := job.grant) is not None:
            if grant.storing:
                self.free(grant)
                self.ack(self.members[grant.instance], grant.lease)
            else:
                self.revoke(grant)
            job.grant = grant.job = None
        job.storing, job.paused = None, False
        for copy in list(job.keeping.values()):
            self.call_off(copy)
        if job.awaited is not None:
            del self.awaiting[job.request]
            job.awaited = None
        self.release(list(job.copies.values()))
        before = job.state
        job.move(state, self.now)
        self.job_deadlines.discard(job.request)
        del self.jobs[job.request]
        self.out.append(Update(view=job.view(self.now, None, error, before)))

    def decode_again(self, job: Job, instance: InstanceId | None, reason: str) -> None:
        """The files of a request are neither stored nor with a decoder any more; what they are made from is kept."""
        job.storing = None
        self.count("requeued", f"{job.role}: files not stored: {reason}", instance, job.request)
        self.line_up(job)

    def take_out(self, job: Job) -> None:
        """Take a request out of its queue, or from where it is parked."""
        if job.queued:
            self.queues[job.role].remove(job)
        else:
            self.unpark(job)

    # -- leases -------------------------------------------------------------------------------------------------

    def grant(self, job: Job, member: Member) -> None:
        """Lease the stage of a request that has just been taken from its queue."""
        lease = Lease(job.request, job.role, job.attempt)
        resume = None
        if job.role is Role.DENOISER:
            resume = job.checkpoint(member.hello.fingerprint)
            job.step, job.steps = (resume.step, resume.steps) if resume else (0, 0)
            job.resumed_from = job.step
        job.grant = member.grants[lease] = Grant(
            lease=lease, instance=member.id, granted=self.now, job=job, resume=resume
        )
        self.roster.refresh(member)
        self.granted(job, member, lease)
        self.send(
            member,
            RunStage(
                server_epoch=self.server_epoch,
                epoch=member.epoch,
                lease=lease,
                params=told(job.params, job.role, member.hello.schema, self._schemas()),
                inputs=job.inputs(job.role),
                budget_seconds=max(0.0, job.run_timeout - job.ran),
                resume=resume.manifest if resume else None,
            ),
            with_blobs=job.request if job.role is Role.ENCODER else None,
        )

    def _schemas(self) -> Iterator[RequestSchema | None]:
        """All that is known of request parameters."""
        yield self.schema
        yield from (member.hello.schema for member in self.members.values())

    def granted(self, job: Job, member: Member, lease: Lease) -> None:
        """Let the journal know who holds the lease."""
        waited, ran = job.clocks(self.now)
        self.out.append(LeaseGranted(lease=lease, instance=member.id, waited=waited, ran=ran))

    def free(self, grant: Grant) -> None:
        """Give the slot of an ended lease back."""
        member = self.members[grant.instance]
        del member.grants[grant.lease]
        self.roster.refresh(member)

    def revoke(self, grant: Grant) -> None:
        """Have a lease stopped; its slot stays taken until the instance says so."""
        self.cancel(self.members[grant.instance], grant.lease)

    def suspend(self, grant: Grant) -> None:
        """Have a lease stopped between two steps, with what it has done."""
        member = self.members[grant.instance]
        self.send(member, Cancel(server_epoch=self.server_epoch, epoch=member.epoch, lease=grant.lease, keep=True))

    def cancel(self, member: Member, lease: Lease) -> None:
        """Tell a member to stop a lease, whether it is booked or not."""
        self.send(member, Cancel(server_epoch=self.server_epoch, epoch=member.epoch, lease=lease))

    # -- copies -------------------------------------------------------------------------------------------------

    def release(self, copies: Sequence[Copy]) -> None:
        """Strike out copies that nobody will read and have their memory freed."""
        if not copies:
            return
        freed: dict[InstanceId, list[CopyId]] = {}
        for copy in copies:
            self.strike(copy)
            self.call_off(copy)
            freed.setdefault(copy.instance, []).append(copy.manifest.copy)
        for instance, ids in freed.items():
            self.release_ids(self.members[instance], ids)

    def call_off(self, copy: Copy) -> None:
        """Nobody needs ``copy`` to be kept by another instance too, if one was asked to."""
        if copy.job.keeping.pop(copy.manifest.copy, None) is None or copy.buddy is None:
            return
        if (buddy := self.members.get(copy.buddy)) is not None:
            self.release_ids(buddy, (copy.manifest.copy,))

    def release_ids(self, member: Member, copies: Iterable[CopyId]) -> None:
        """Have copies freed that may not be booked."""
        if ids := tuple(copies):
            self.send(member, Release(server_epoch=self.server_epoch, epoch=member.epoch, copies=ids))

    def strike(self, copy: Copy) -> None:
        """Take a copy out of both books."""
        del copy.job.copies[copy.manifest.copy]
        member = self.members[copy.instance]
        member.drop(copy)
        self.roster.refresh(member)

    def keep(self, copy: Copy) -> None:
        """Enter a copy into both books."""
        copy.job.copies[copy.manifest.copy] = copy
        member = self.members[copy.instance]
        member.keep(copy)
        self.roster.refresh(member)

    def lose_copies(self, copies: Iterable[Copy], reason: str) -> None:
        """Copies are gone from a member that lives: who has yet to read them goes back.

        The stage that made them is charged: a pool too small for them would drop them for ever.
        """
        lost: dict[RequestId, Copy] = {}
        for copy in copies:
            self.strike(copy)
            if not copy.spare:
                lost[copy.job.request] = copy
            self.count(
                "checkpoint_lost" if copy.spare else "copy_lost",
                f"{copy.manifest.copy}: {reason}",
                copy.instance,
                copy.job.request,
            )
        for copy in lost.values():
            self.recheck(copy.job, copy, reason, charged=True)

    # -- instances ----------------------------------------------------------------------------------------------

    def join(self, member: Member) -> None:
        """Book a new life of an instance."""
        member.health = self.records.join(member.id, member.epoch)
        self.roster.join(member)

    def blame(self, member: Member, request: RequestId, reason: str) -> None:
        """Book a request that failed through the fault of a member, as far as one can see."""
        config = self.config
        limit, cooldown = config.quarantine_after, config.quarantine_seconds
        if member.health.fail(request, reason, self.now, limit=limit, cooldown=cooldown):
            seconds = member.health.until - self.now
            self.count("instance_quarantined", f"for {seconds:g} s: {member.health.evidence}", member.id)

    def eligible(self, job: Job, role: Role) -> set[InstanceId]:
        """Who may get a stage of a request, see `Roster.eligible`."""
        return self.roster.eligible(role, job.staged_bytes(self.schema, role), self.now)

    def lose(self, member: Member, reason: str, *, crashed: bool) -> None:
        """An instance is gone with its copies; its leases return to the queues.

        A crash is charged to what was being computed; to everything that it held, when no start had been heard of.
        """
        self.roster.remove(member, reason)
        self.member_deadlines.discard(member.id)
        self.out.append(Disconnect(instance=member.id, work_url=member.hello.work_url))
        self.count("instance_lost" if crashed else "instance_left", reason, member.id)
        lost: dict[RequestId, Copy] = {}
        for copy in member.copies.values():
            del copy.job.copies[copy.manifest.copy]
            if not copy.spare:
                lost[copy.job.request] = copy
        grants = [grant for grant in member.grants.values() if grant.job is not None]
        fatal = False
        any_started = any(grant.started is not None for grant in grants)
        for grant in grants:
            job = grant.job
            assert job is not None
            if grant.storing:
                job.grant = grant.job = None
                if job.storing is not None and not job.storing.writing:
                    self.decode_again(job, member.id, f"instance lost: {reason}")
            else:
                charged = crashed and (grant.started is not None or not any_started)
                if charged:
                    fatal = True
                    self.blame(member, job.request, f"instance lost: {reason}")
                killed = member.epoch if charged and (grant.started is not None or len(grants) == 1) else None
                self.requeue(job, grant, f"instance lost: {reason}", charged=charged, killed=killed)
        self.records.leave(member.id, member.epoch, member.health, fatal=fatal)
        for copy in lost.values():
            if self.jobs.get(copy.job.request) is copy.job:
                self.recheck(copy.job, copy, f"lost with its instance: {reason}", charged=False)
