"""Log lines of the role process: one line an event, readable, with its figures as key=value."""

from __future__ import annotations

from triptych.core.instance_events import Pulled, PullFailed
from triptych.wire.messages import Finished, Outcome, Staged, StageFailed, Stopped


def outcome_line(outcome: Outcome, pulled: Pulled | None) -> str:
    """The one line about a stage that ended. ``pulled``: how its inputs came, if they did."""
    lease = outcome.lease
    head = f"role={lease.role} request={lease.request} attempt={lease.attempt}"
    if pulled is not None and pulled.plane:
        head += f" pull_bytes={pulled.nbytes} pull_seconds={pulled.seconds:.4f} plane={pulled.plane}"
    match outcome:
        case Staged():
            nbytes = sum(o.manifest.nbytes for o in outcome.outputs)
            return (
                f"staged {head} compute_seconds={outcome.compute_seconds:.3f} "
                f"stage_bytes={nbytes} stage_seconds={outcome.stage_seconds:.4f}"
            )
        case Finished():
            return (
                f"finished {head} compute_seconds={outcome.compute_seconds:.3f} "
                f"files={len(outcome.files)} encode_seconds={outcome.encode_seconds:.3f}"
            )
        case StageFailed():
            error = outcome.error
            return f"failed {head} code={error.code} retryable={error.retryable} error={error.message!r}"
        case Stopped():
            return f"stopped {head}" + (f" step={outcome.step} checkpoint=yes" if outcome.checkpoint else "")


def pull_failed_line(event: PullFailed) -> str:
    """The line about an input that could not be had."""
    lease = event.lease
    return (
        f"pull failed role={lease.role} request={lease.request} attempt={lease.attempt} copy={event.copy} "
        f"code={event.error.code} error={event.error.message!r}"
    )
