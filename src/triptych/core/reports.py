"""What instances say about the stages that they hold, and how each word moves the request."""

from __future__ import annotations

from typing import TypeAlias, assert_never

from triptych.core.cost import Costs, size_of
from triptych.core.events import JobState, StageDone, StageTiming, StoreFiles
from triptych.core.job import Accused, Copy, Grant, Job, Storing
from triptych.core.ledger import Ledger
from triptych.core.members import Member
from triptych.core.safekeeping import Safekeeping
from triptych.core.states import FINISHED, RUNNING
from triptych.errors import OutOfMemory
from triptych.ids import ROLES, RequestId, Role
from triptych.wire.messages import (
    Checkpointed,
    Dropped,
    ErrorInfo,
    Fetched,
    Finished,
    Progress,
    Pull,
    Staged,
    StageFailed,
    Started,
    Stopped,
)

Report: TypeAlias = Fetched | Started | Progress | Checkpointed | Staged | Finished | StageFailed | Stopped

_PULLS = 2
"""Failed pulls of one copy after which it is taken for lost."""


class Reports:
    """Handlers of stage reports over the ledger."""

    def __init__(self, ledger: Ledger, safekeeping: Safekeeping, costs: Costs) -> None:
        self._ledger = ledger
        self._costs = costs
        self._safekeeping = safekeeping

    def handle(self, message: Report) -> None:
        """Apply a report to the lease that it speaks of; late and repeated ones change nothing but are answered."""
        ledger = self._ledger
        member = ledger.members.get(message.instance)
        if member is None or member.epoch != message.epoch:
            ledger.count("stale_message", type(message).__name__, message.instance, message.lease.request)
            return
        grant = member.grants.get(message.lease)
        if grant is not None and message.server_epoch != ledger.server_epoch and not grant.resumed:
            grant = None  # it speaks of a lease that this life has granted under the same numbers
        if grant is None or grant.job is None:
            self._late(member, grant, message)
            return
        if grant.storing:
            if isinstance(message, Finished):
                self._store_again(grant.job, message)
            return
        match message:
            case Fetched():
                self._fetch(grant.job, grant, message)
            case Started():
                self._start(grant.job, grant)
            case Progress():
                self._progress(grant.job, grant, message)
            case Checkpointed():
                self._start(grant.job, grant)
                self._safekeeping.book(grant.job, member, message.lease, message.manifest, message.step, message.steps)
            case Staged():
                self._staged(grant.job, grant, member, message)
            case Finished():
                self._finished(grant.job, grant, message)
            case StageFailed():
                self._failed(grant.job, grant, member, message)
            case Stopped():
                self._stopped(grant.job, grant, member, message)
            case _:
                assert_never(message)

    def dropped(self, message: Dropped) -> None:
        """Kept copies are gone because a pool needed the room."""
        ledger = self._ledger
        member = ledger.members.get(message.instance)
        if member is None or member.epoch != message.epoch:
            ledger.count("stale_message", "Dropped", message.instance)
            return
        copies = [member.copies[copy] for copy in dict.fromkeys(message.copies) if copy in member.copies]
        ledger.lose_copies(copies, "dropped for room")

    def _late(self, member: Member, grant: Grant | None, message: Report) -> None:
        """A report of a lease that nobody waits for any more: its end frees the slot, its outputs are of no use.

        That a lease which was taken back has stopped is what was asked for, and not late.
        """
        ledger = self._ledger
        if grant is None or not isinstance(message, Stopped):
            ledger.count("late_report", type(message).__name__, member.id, message.lease.request)
        if isinstance(message, Checkpointed):
            if message.manifest.copy not in member.copies:
                ledger.release_ids(member, (message.manifest.copy,))
            return
        if isinstance(message, Fetched | Started | Progress):
            return
        if grant is not None:
            ledger.free(grant)
        ledger.ack(member, message.lease)
        if isinstance(message, Staged):
            copies = (output.manifest.copy for output in message.outputs)
            ledger.release_ids(member, [copy for copy in copies if copy not in member.copies])
        elif isinstance(message, Stopped) and message.checkpoint and message.checkpoint.copy not in member.copies:
            ledger.release_ids(member, (message.checkpoint.copy,))

    def _read(self, job: Job, reader: Role) -> None:
        """What earlier stages made could be pulled: only that shows that their instances are well."""
        for copy in job.copies.values():
            if copy.consumer is reader and not copy.spare:
                self._ledger.members[copy.instance].health.succeed()

    # -- on the way ---------------------------------------------------------------------------------------------

    def _fetch(self, job: Job, grant: Grant, pull: Fetched | Pull) -> None:
        """The first word of the inputs being there counts."""
        if not grant.plane:
            grant.fetched = True
            grant.pull_seconds, grant.pulled_bytes, grant.plane = pull.seconds, pull.nbytes, pull.plane
            self._read(job, grant.lease.role)

    def _start(self, job: Job, grant: Grant) -> None:
        """The first word of computing ends the waiting, whichever word arrives first."""
        if grant.started is not None:
            return
        grant.fetched = True
        grant.started = self._ledger.now
        self._ledger.move(job, RUNNING[grant.lease.role])
        self._ledger.update(job)

    def _progress(self, job: Job, grant: Grant, message: Progress) -> None:
        self._start(job, grant)
        further = message.step > job.step
        if further:
            job.step, job.steps = message.step, message.steps
        if message.preview:
            job.preview = message.preview
        if further or message.preview:
            self._ledger.update(job)

    # -- ends ---------------------------------------------------------------------------------------------------

    def _staged(self, job: Job, grant: Grant, member: Member, message: Staged) -> None:
        ledger, role = self._ledger, grant.lease.role
        if role is Role.DECODER:
            self._nonsense(job, grant, member, "a decoder must finish files, not stage outputs")
            return
        if message.pull is not None:
            self._fetch(job, grant, message.pull)
        self._start(job, grant)
        self._time(job, grant, message.compute_seconds, message.stage_seconds)
        self._note(job, grant, message)
        job.grant = grant.job = None
        member.typical[role] = sum([output.manifest.nbytes for output in message.outputs])
        ledger.free(grant)
        ledger.ack(member, grant.lease)
        job.outputs[role] = ()
        if role is Role.ENCODER:
            job.encoded_by = member.hello.fingerprint
        else:
            for copy in [copy for copy in job.keeping.values() if copy.consumer is role]:
                ledger.call_off(copy)
        ledger.release([copy for copy in job.copies.values() if copy.consumer is role])
        # A later stage that was done already may have lost its output meanwhile, and then reads this one's again.
        ledger.release(job.settle())
        job.outputs[role] = tuple((output.manifest.copy, output.consumer) for output in message.outputs)
        useless = []
        for output in message.outputs:
            if output.consumer in job.outputs or ROLES.index(output.consumer) <= ROLES.index(role):
                useless.append(output.manifest.copy)
                continue
            copy = Copy(
                manifest=output.manifest,
                lease=grant.lease,
                consumer=output.consumer,
                instance=member.id,
                job=job,
                staged=ledger.now,
            )
            ledger.keep(copy)
            if member.draining:
                self._safekeeping.save(copy)
        ledger.release_ids(member, useless)
        ledger.move(job, FINISHED[role])
        ledger.update(job)
        job.avoid.clear()
        job.accused.clear()
        job.moved_from = None
        ledger.line_up(job)

    def _finished(self, job: Job, grant: Grant, message: Finished) -> None:
        ledger = self._ledger
        if grant.lease.role is not Role.DECODER:
            member = ledger.members[grant.instance]
            self._nonsense(job, grant, member, f"a {grant.lease.role} must stage outputs, not finish files")
            return
        if message.pull is not None:
            self._fetch(job, grant, message.pull)
        self._start(job, grant)
        self._time(job, grant, message.compute_seconds, message.encode_seconds)
        grant.storing = True
        job.storing = Storing()
        ledger.members[grant.instance].health.succeed()
        # Its inputs are kept: they are needed once more when the decoder dies before the files are stored.
        ledger.out.append(StoreFiles(lease=grant.lease, files=message.files))

    def _store_again(self, job: Job, message: Finished) -> None:
        """A decoder that has heard no acknowledgement sends its files again: another try if the last one failed."""
        storing = job.storing
        assert storing is not None
        if not storing.writing:
            storing.writing = True
            storing.tries += 1
            self._ledger.out.append(StoreFiles(lease=message.lease, files=message.files))

    def stored(self, request: RequestId, attempt: int) -> None:
        """The shell has stored the files of a request."""
        if (job := self._storing(request, attempt)) is not None:
            self._ledger.end(job, JobState.DONE)

    def not_stored(self, request: RequestId, attempt: int, error: ErrorInfo) -> None:
        """The shell could not store the files of a request. A store may recover, so the decoder is left without an
        acknowledgement and sends them again, until the run timeout; a decoder that is gone has to be replaced."""
        ledger, job = self._ledger, self._storing(request, attempt)
        if job is None:
            return
        assert job.storing is not None
        if not error.retryable:
            ledger.end(job, JobState.FAILED, error)
            return
        job.storing.writing = False
        job.storing.error = error
        grant = job.grant
        ledger.count("store_failed", error.message, None if grant is None else grant.instance, request)
        if grant is None:
            ledger.decode_again(job, None, error.message)

    def _storing(self, request: RequestId, attempt: int) -> Job | None:
        job = self._ledger.jobs.get(request)
        if job is not None and job.storing is not None and job.attempt == attempt:
            return job
        self._ledger.count("late_report", "files of a request that has ended", None, request)
        return None

    def _failed(self, job: Job, grant: Grant, member: Member, message: StageFailed) -> None:
        ledger = self._ledger
        ledger.free(grant)
        ledger.ack(member, grant.lease)
        if grant.resume is not None and grant.resume.manifest.copy in job.copies:
            # Whatever it failed of, the next attempt must not fail of the same checkpoint.
            ledger.release([grant.resume])
        blamed = (
            not message.lost_copies and message.error.blame == "instance" and message.error.code != OutOfMemory.code
        )
        if blamed:
            self._accuse(job, grant.lease.role, member, message.error.message)
        if grant.resume is not None and grant.resume.manifest.copy in message.lost_copies:
            ledger.requeue(job, grant, f"pull failed: {message.error.message}", charged=False)
        elif message.lost_copies:
            self._unpulled(job, grant, member, message)
        elif message.error.retryable or (blamed and self._another_opinion(job, grant)):
            ledger.requeue(job, grant, message.error.message, charged=True)
        else:
            job.grant = grant.job = None
            ledger.end(job, JobState.FAILED, message.error)

    def _accuse(self, job: Job, role: Role, member: Member, reason: str) -> None:
        """Blame a member, until another one that is sound has failed of the same stage: then it is the request."""
        ledger, limit = self._ledger, self._ledger.config.quarantine_after
        sound = member.health.sound(but=job.request)
        ledger.blame(member, job.request, reason)
        others = [accused for accused in job.accused if accused.role is role and accused.instance != member.id]
        job.accused = [*others, Accused(role=role, instance=member.id, health=member.health, sound=sound)]
        for one in job.accused:
            if any(other.sound for other in job.accused if other is not one):
                one.health.share(job.request, ledger.now, limit=limit)

    def _another_opinion(self, job: Job, grant: Grant) -> bool:
        """Whether a failure that would come again where it came is tried once on another instance: that tells whose
        fault it is, and is all that a request needs which a broken instance has failed."""
        ledger, role = self._ledger, grant.lease.role
        if len(job.accused) > 1 or len(job.failures(role)) + 1 >= ledger.config.max_attempts:
            return False
        return bool(ledger.eligible(job, role) - job.avoid - {grant.instance})

    def _stopped(self, job: Job, grant: Grant, member: Member, message: Stopped) -> None:
        """A lease that was taken back, or that an instance which is leaving could not finish."""
        ledger = self._ledger
        asked = grant.suspending or member.draining
        ledger.free(grant)
        ledger.ack(member, grant.lease)
        if message.checkpoint is not None:
            self._safekeeping.book(job, member, grant.lease, message.checkpoint, message.step, message.steps)
        reason = f"suspended after step {message.step}" if asked else "stopped without being asked"
        ledger.requeue(job, grant, reason, charged=not asked)

    def _unpulled(self, job: Job, grant: Grant, member: Member, message: StageFailed) -> None:
        """An input could not be pulled: try once more elsewhere, then make it anew."""
        ledger = self._ledger
        hopeless: list[Copy] = []
        alive = False
        for copy_id in dict.fromkeys(message.lost_copies):
            if (copy := job.copies.get(copy_id)) is not None:
                alive = True
                copy.failures += 1
                copy.failed_at.add(member.id)
                if copy.failures >= _PULLS:
                    hopeless.append(copy)
        if alive:
            job.avoid.add(member.id)
            self._blame_pull(job, member, hopeless, message.error.message)
        for copy in hopeless:
            ledger.count("copy_lost", f"{copy.manifest.copy}: cannot be pulled", copy.instance, job.request)
        ledger.release(hopeless)
        ledger.requeue(job, grant, f"pull failed: {message.error.message}", charged=bool(hopeless))

    def _blame_pull(self, job: Job, receiver: Member, hopeless: list[Copy], reason: str) -> None:
        """The receiver is blamed, until another one has failed of the same copy: then it is the sender."""
        members = self._ledger.members
        senders = {copy.instance for copy in hopeless if len(copy.failed_at) > 1}
        for sender in senders:
            self._ledger.blame(members[sender], job.request, f"cannot be pulled from: {reason}")
        if not senders:
            self._ledger.blame(receiver, job.request, f"pull failed: {reason}")
            return
        for victim in {id for copy in hopeless for id in copy.failed_at} & members.keys():
            limit = self._ledger.config.quarantine_after
            members[victim].health.pardon(job.request, self._ledger.now, limit=limit)

    def _note(self, job: Job, grant: Grant, message: Staged) -> None:
        waited, ran = job.clocks(self._ledger.now)
        self._ledger.out.append(
            StageDone(
                lease=grant.lease,
                instance=grant.instance,
                outputs=message.outputs,
                timing=job.timings[-1],
                waited=waited,
                ran=ran,
            )
        )

    def _nonsense(self, job: Job, grant: Grant, member: Member, message: str) -> None:
        ledger = self._ledger
        ledger.free(grant)
        ledger.ack(member, grant.lease)
        job.grant = grant.job = None
        ledger.end(job, JobState.FAILED, ErrorInfo(code="protocol_error", message=message, blame="instance"))

    def _time(self, job: Job, grant: Grant, compute: float, staging: float) -> None:
        assert grant.started is not None
        if job.size is None:
            job.size = size_of(self._ledger.schema, job.params)
        taken_over = job.resumed_from / job.steps if grant.resume is not None and job.steps else 0.0
        if taken_over < 1.0:
            self._costs.learn(grant.lease.role, job.size, compute + staging, share=1.0 - taken_over)
        job.timings.append(
            StageTiming(
                role=grant.lease.role,
                instance=grant.instance,
                attempt=grant.lease.attempt,
                waiting=grant.started - job.ready,
                pulling=grant.pull_seconds,
                pulled_bytes=grant.pulled_bytes,
                plane=grant.plane,
                running=self._ledger.now - grant.started,
                compute=compute,
                staging=staging,
            )
        )
