"""When a stage has failed too often to be tried again, and what its client is told then."""

from __future__ import annotations

from triptych.config import RouterConfig
from triptych.core.job import Fault, Job
from triptych.ids import Role
from triptych.wire.messages import ErrorInfo


def verdict(config: RouterConfig, job: Job, role: Role, faults: list[Fault]) -> ErrorInfo | None:
    """The error of a request after another failure of the stage of ``role``; None: it is tried again.

    ``faults``: all failures of that stage.
    """
    if len(kills := job.kills) >= config.max_kills:
        code, message, faults = "poison", f"{len(kills)} instances died of the {role} stage", kills
    elif len(faults) >= config.max_attempts:
        code, message = "attempts_exhausted", f"the {role} stage failed {len(faults)} times"
    else:
        return None
    return ErrorInfo(code=code, message=f"{message}: {'; '.join(map(str, faults))}", blame="instance")
