"""The invariants of the router's books, checked from end to end."""

from __future__ import annotations

from triptych.core.job import Job
from triptych.core.ledger import Ledger
from triptych.core.members import Member
from triptych.core.states import RUNNING, TERMINAL, WAITING
from triptych.ids import ROLES
from triptych.wire.messages import Lease


def check_ledger(ledger: Ledger) -> None:
    """Raise AssertionError at the first invariant that does not hold."""
    for job in ledger.jobs.values():
        _check_job(ledger, job)
    for member in ledger.members.values():
        _check_member(ledger, member)
    queued = sum(len(queue) for queue in ledger.queues.values())
    granted = sum(grant.job is not None for member in ledger.members.values() for grant in member.grants.values())
    storing = sum(job.storing is not None and job.grant is None for job in ledger.jobs.values())
    held = sum(job.held for job in ledger.awaiting.values())
    parked = sum(job.parked for job in ledger.jobs.values())
    places = queued + granted + storing + held + parked
    assert places == len(ledger.jobs), f"{len(ledger.jobs)} live requests stand in {places} places"
    assert len(ledger.job_deadlines) == len(ledger.jobs), "each live request has one deadline"
    assert len(ledger.member_deadlines) == len(ledger.members), "each instance has one deadline"
    copies = sum(len(job.copies) for job in ledger.jobs.values())
    kept = sum(len(member.copies) for member in ledger.members.values())
    assert copies == kept, f"requests need {copies} copies, instances keep {kept}"


def _check_job(ledger: Ledger, job: Job) -> None:
    name = f"request {job.request}"
    assert job.state not in TERMINAL, f"{name} has ended as {job.state} and is still booked"
    queued = [role for role in ROLES if job in ledger.queues[role]]
    grant = job.grant
    places = len(queued) + (grant is not None or job.storing is not None) + job.held + job.parked
    assert places == 1, f"{name} stands in {places} places, queues {queued}"
    if queued:
        assert job.queued, f"{name} does not know that it is queued"
        assert queued == [job.role], f"{name} waits for {job.role} in the queue of {queued}"
        assert job.state is WAITING[job.role], f"{name} is queued for {job.role} as {job.state}"
        made = [made for output in job.outputs.values() for made in output]
        gone = [copy for copy, reader in made if reader not in job.outputs and copy not in job.copies]
        assert not gone, f"{name} waits for {job.role} although {gone} are gone"
    assert (job.awaited is not None) == (job.request in ledger.awaiting), f"{name}: wrongly listed as awaiting"
    if job.awaited is not None:
        assert job.awaited.copies.keys().isdisjoint(job.copies), f"{name} waits for copies that it has"
    assert not job.parked or (job.paused and job.state is WAITING[job.role]), f"{name} is parked as {job.state}"
    for first in job.keeping.values():
        assert first.job is job, f"{name} has a copy of another request kept"
    if grant is not None:
        assert grant.job is job, f"{name} holds a grant of another request"
        assert grant.lease == Lease(job.request, job.role, job.attempt), f"{name}: {grant.lease}"
        assert ledger.members[grant.instance].grants.get(grant.lease) is grant, f"{name}: its instance does not know"
        expected = WAITING if grant.started is None else RUNNING
        assert job.state is expected[job.role], f"{name} is {job.state} under {grant.lease}"
        assert grant.storing == (job.storing is not None), f"{name}: request and lease disagree about storing"
    elif job.storing is not None:
        assert job.storing.writing, f"{name}: its files are neither being written nor with a decoder"
    for copy in job.copies.values():
        member = ledger.members.get(copy.instance)
        assert member is not None, f"{name} needs a copy of {copy.instance}, which is gone"
        assert member.copies.get(copy.manifest.copy) is copy, f"{name}: {copy.instance} does not know its copy"


def _check_member(ledger: Ledger, member: Member) -> None:
    id, hello, serving = member.id, member.hello, ledger.roster.serving
    assert ledger.members[id] is member
    assert member.free >= 0, f"instance {id} holds {len(member.grants)} leases in {hello.slots} slots"
    for lease, grant in member.grants.items():
        assert grant.lease == lease, f"instance {id}: {grant.lease} booked as {lease}"
        assert grant.instance == id, f"instance {id}: {lease} booked here and with {grant.instance}"
        if grant.job is not None:
            assert ledger.jobs.get(lease.request) is grant.job, f"instance {id}: {lease} of a request that has ended"
            assert grant.job.grant is grant, f"instance {id}: {lease} is not the request's own lease"
    spare, kept = 0, dict.fromkeys(ROLES, 0)
    for copy in member.copies.values():
        assert copy.job.copies.get(copy.manifest.copy) is copy, f"instance {id}: its copy is unknown to the request"
        if copy.spare:
            spare += copy.manifest.nbytes
        else:
            kept[copy.producer] += copy.manifest.nbytes
    assert spare == member.spare_bytes, f"instance {id}: {spare} bytes of checkpoints, booked {member.spare_bytes}"
    assert kept == member.retained, f"instance {id}: keeps bytes {kept}, booked {member.retained}"
    for role in ROLES:
        serves = role in hello.roles and not member.draining
        assert (id in serving[role]) == serves, f"instance {id}: wrongly listed for {role}"
        is_open = ledger.roster.open[role].get(id) is member
        assert is_open == (serves and member.has_room(role)), f"instance {id}: open for {role} is {is_open}"
