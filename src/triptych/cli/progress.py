"""A live progress bar for one job: its stage, the step that it is at, and when it should be done."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from triptych.client import Progress as JobProgress

_WORDS = {
    "pending": "accepted",
    "encoder_waiting": "waiting for an encoder",
    "encoder_running": "encoding the prompt",
    "encoder_done": "encoded",
    "denoising_waiting": "waiting for a denoiser",
    "denoising_running": "denoising",
    "denoising_done": "denoised",
    "decoder_waiting": "waiting for a decoder",
    "decoder_running": "decoding",
    "done": "done",
}


def describe(progress: JobProgress) -> str:
    """The stage in plain words, with what is special about it."""
    words = _WORDS.get(progress.stage, progress.stage)
    if progress.position:
        words += f", {progress.position} before it"
    if progress.attempt > 1:
        words += f" (attempt {progress.attempt})"
    return words


def detail(progress: JobProgress) -> str:
    """Steps and remaining time, as far as they are known."""
    parts: list[str] = []
    if progress.steps and progress.stage == "denoising_running":
        parts.append(f"step {progress.step} of {progress.steps}")
    if progress.eta_seconds is not None:
        parts.append(f"about {progress.eta_seconds:.0f} s left")
    return ", ".join(parts)


class JobBar:
    """Shows the progress of one job on standard error while it is entered. Give it to a client as ``on_progress``."""

    def __init__(self) -> None:
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<24}"),
            BarColumn(),
            TextColumn("{task.fields[detail]:<30}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("sending", total=100, detail="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bar.stop()

    def __call__(self, progress: JobProgress) -> None:
        """Show it."""
        self._bar.update(
            self._task, completed=progress.percent, description=describe(progress), detail=detail(progress)
        )
