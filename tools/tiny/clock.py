"""How far a stage has come: by its time, or by a limit of steps if that comes first."""

import time

import torch


class Stage:
    """`for progress in Stage(seconds, step_limit)` yields the progress in [0, 1) before each step."""

    def __init__(self, seconds: float, step_limit: int | None = None) -> None:
        if seconds <= 0:
            raise ValueError(f"a stage of {seconds:.0f} s: the stages before it have used up the run's time")
        self._seconds, self._limit = seconds, step_limit
        self._start = time.monotonic()
        self.steps = 0

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def __iter__(self) -> "Stage":
        return self

    def __next__(self) -> float:
        by_steps = self.steps / self._limit if self._limit else 0.0
        progress = max(self.elapsed / self._seconds, by_steps)
        if progress >= 1:
            raise StopIteration
        self.steps += 1
        return progress

    def summary(self, device: torch.device) -> dict[str, float]:
        """Steps and seconds, once the device has finished what was asked of it."""
        if device.type == "cuda":
            torch.cuda.synchronize()
        return {"steps": self.steps, "seconds": round(self.elapsed, 3)}
