"""When a job will start and end, from the plain mean of what lately ended well."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

from triptych.core.events import JobState, JobView
from triptych.ids import ROLES, RequestId, Role
from triptych.server.records import JobRecord
from triptych.server.service import DiffusionService

REMEMBERED: Final = 32
"""Jobs whose stages make the mean."""

_STAGE: Final[dict[JobState, Role]] = {
    JobState.PENDING: Role.ENCODER,
    JobState.ENCODER_WAITING: Role.ENCODER,
    JobState.ENCODER_RUNNING: Role.ENCODER,
    JobState.ENCODER_DONE: Role.DENOISER,
    JobState.DENOISING_WAITING: Role.DENOISER,
    JobState.DENOISING_RUNNING: Role.DENOISER,
    JobState.DENOISING_DONE: Role.DECODER,
    JobState.DECODER_WAITING: Role.DECODER,
    JobState.DECODER_RUNNING: Role.DECODER,
}
"""State to the role whose stage runs or comes next."""

RUNNING: Final = frozenset({JobState.ENCODER_RUNNING, JobState.DENOISING_RUNNING, JobState.DECODER_RUNNING})


class Forecast:
    """Learns from ended jobs; knows nothing, and says so, until one has ended well."""

    def __init__(self) -> None:
        self._running: dict[Role, deque[float]] = {role: deque(maxlen=REMEMBERED) for role in ROLES}
        self._seen: OrderedDict[RequestId, None] = OrderedDict()

    def learn(self, record: JobRecord) -> None:
        """Take the stages of an ended job into the mean; each job counts once however often it is looked at."""
        if record.view.state is not JobState.DONE or record.id in self._seen:
            return
        self._seen[record.id] = None
        while len(self._seen) > 8 * REMEMBERED:
            self._seen.popitem(last=False)
        for timing in record.view.timings:
            self._running[timing.role].append(timing.running)

    def mean(self, role: Role) -> float | None:
        """Seconds that a stage of ``role`` runs."""
        seconds = self._running[role]
        return sum(seconds) / len(seconds) if seconds else None

    def starts_in(self, view: JobView, instances: Callable[[Role], int]) -> float | None:
        """Seconds until a waiting job's next stage begins; None when it does not wait or nothing is known."""
        role = _STAGE.get(view.state)
        if role is None or view.position is None or view.state in RUNNING:
            return None
        mean = self.mean(role)
        return None if mean is None else mean * (view.position + 1) / max(1, instances(role))

    def ends_in(self, view: JobView, starts_in: float | None, step_seconds: float | None) -> float | None:
        """Seconds until the end, waiting for later stages left out.

        ``step_seconds``: the pace of its own denoising steps, better than any mean, once two were seen.
        """
        role = _STAGE.get(view.state)
        if role is None or (starts_in is None and view.position is not None):
            return None
        total = starts_in or 0.0
        for later in ROLES[ROLES.index(role) :]:
            mean = self.mean(later)
            if later is Role.DENOISER and view.state is JobState.DENOISING_RUNNING and view.steps:
                if step_seconds is not None:
                    mean = step_seconds * (view.steps - view.step)
                elif mean is not None:
                    mean *= 1 - view.step / view.steps
            if mean is None and (later is role or step_seconds is None):
                return None
            total += mean or 0.0  # a stage that never ended yet counts for nothing against steps that are known
        return total


def live_instances(service: DiffusionService) -> Callable[[Role], int]:
    """How many instances serve a role, read when asked."""
    return lambda role: len(service.info()["roles"][role.value]["instances"])
