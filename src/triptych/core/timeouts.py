"""What becomes of a request that ran out of time, and what its client is told: where, after how long, and why."""

from __future__ import annotations

from triptych.core.events import JobState
from triptych.core.job import Job
from triptych.core.ledger import Ledger
from triptych.core.states import COUNTS_AS_RUNNING
from triptych.wire.messages import ErrorInfo, replace


def timed_out(ledger: Ledger, job: Job) -> tuple[JobState, ErrorInfo]:
    """How a request ends whose waiting or running time is used up: for want of time, or of what it waited for."""
    if job.storing is not None and (error := job.storing.error) is not None:
        tried = f"tried {job.storing.tries} times until the run timeout of {job.run_timeout:g} s"
        return JobState.FAILED, replace(error, message=f"{error.message}; {tried}", retryable=False)
    return JobState.TIMED_OUT, _error(ledger, job)


def _error(ledger: Ledger, job: Job) -> ErrorInfo:
    waited, ran = job.clocks(ledger.now)
    if job.state in COUNTS_AS_RUNNING:
        where = f" on {job.grant.instance}" if job.grant is not None else ""
        message = (
            f"run timeout: {ran:.1f} s of running were used up (limit {job.run_timeout:g} s) in {job.state}{where}, "
            f"attempt {job.attempt}{', while its files were being stored' if job.storing is not None else ''}"
        )
        return ErrorInfo(code="run_timeout", message=message, blame="instance")
    message = f"queue timeout: {waited:.1f} s of waiting were used up (limit {job.queue_timeout:g} s) in {job.state}"
    serving = ledger.roster.serving[job.role]
    if not serving:
        reason = ledger.roster.last_lost.get(job.role)
        message += f"; no live {job.role} instance: " + (f"the last one was {reason}" if reason else "none has joined")
        return ErrorInfo(code="queue_timeout", message=message, blame="operator")
    largest = max(member.hello.pool_bytes for member in serving.values())
    needed = job.staged_bytes(ledger.schema, job.role)
    if needed > largest:
        message += f"; its output takes {needed} bytes, the largest transfer pool of the live {job.role}s has {largest}"
        return ErrorInfo(code="queue_timeout", message=message, blame="operator")
    if job.grant is not None:
        message += f"; leased to {job.grant.instance}, which has not started it"
    else:
        before = ledger.queues[job.role].position(job)
        message += f"; {len(serving)} {job.role} instance(s) live, {before} request(s) before this one"
    return ErrorInfo(code="queue_timeout", message=message, blame="us")
