"""What the threads of the role process say to each other: jobs go down the line, posts come back to control.

A lease is at every moment in the hands of exactly one thread. Whoever holds it when its flag is set answers `Stopped`,
so a cancelled lease ends exactly once, wherever it is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from triptych.core.instance_events import InstanceEvent, Pulled
from triptych.ids import Epoch, InstanceId
from triptych.pipeline.frames import FrameStream
from triptych.pipeline.stage import Clip, StageOutput
from triptych.transport.data.protocol import Payload
from triptych.wire.manifest import Manifest
from triptych.wire.messages import Finished, Lease
from triptych.wire.schema import RequestSchema


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Who this process is, for the messages that its threads write."""

    instance: InstanceId
    epoch: Epoch


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """One lease on its way through the threads, with the flag that stops it wherever it is."""

    lease: Lease
    cancelled: threading.Event = field(default_factory=threading.Event)
    suspended: threading.Event = field(default_factory=threading.Event)
    """Asks the compute thread, and nobody else, to stop it between two steps and keep what was done."""
    since: float = field(default_factory=time.monotonic)
    """When this process took it on."""


# -- jobs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class PullJob:
    """Fetch the inputs of a lease, and the checkpoint to go on from, ahead of its computation."""

    ticket: Ticket
    inputs: tuple[Manifest, ...]
    resume: Manifest | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeepJob:
    """Fetch another instance's copy and stage it here, so that it outlives its maker."""

    manifest: Manifest
    spare: bool
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set once nobody wants it kept any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeJob:
    """Run a stage whose inputs are in memory. ``images`` are encoded files that ``params`` refers to."""

    ticket: Ticket
    params: dict[str, Any]
    inputs: tuple[Payload, ...]
    images: tuple[bytes, ...]
    resume: Payload | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StageJob:
    """Put the outputs of a finished stage into the pool. Their tensors are complete on the device."""

    ticket: Ticket
    outputs: tuple[StageOutput, ...]
    compute_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointJob:
    """Put what a run has done so far into the pool, if there is room to spare."""

    ticket: Ticket
    frozen: Payload
    step: int
    steps: int
    last: bool
    """The run was stopped for it: the lease ends with this."""
    saved: threading.Event = field(default_factory=threading.Event)
    """Set when it is done with, well or not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaJob:
    """Write the files of a request, whose last frames may yet be to come. ``wanted`` is the format that it asked for,
    if it did."""

    ticket: Ticket
    clips: tuple[Clip, ...]
    wanted: str | None
    compute_seconds: float = 0.0
    """Of clips that are complete; a stream of frames says so itself."""

    def seconds(self) -> float:
        """What the decoding took; to be asked once all frames were read."""
        return self.compute_seconds + sum(c.frames.seconds for c in self.clips if isinstance(c.frames, FrameStream))


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviewJob:
    """Make a picture of what a stage has after ``step`` of ``steps``."""

    ticket: Ticket
    step: int
    steps: int
    make: Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class Close:
    """The last job of a thread."""


# -- posts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """The compute thread has the model and takes jobs."""

    schema: RequestSchema
    fingerprint: str
    device: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class InputsReady:
    """The inputs of a lease are in memory; control keeps them until the machine starts the computation."""

    ticket: Ticket
    inputs: tuple[Payload, ...]
    pulled: Pulled
    resume: Payload | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaReady:
    """The files of a request; control keeps ``files`` until the server has stored them."""

    outcome: Finished
    files: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadDied:
    """A thread ended that should not have. The process cannot go on."""

    thread: str
    reason: str
    mendable: bool = False
    """The operator must mend something (the model folder, a setting); starting again as it is will not help."""


Post: TypeAlias = Loaded | InputsReady | MediaReady | ThreadDied | InstanceEvent
