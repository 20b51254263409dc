"""What the role process needs of a loaded pipeline, whatever way it was split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from triptych.accel.companions import Companions
from triptych.ids import Role
from triptych.pipeline.frames import FrameStream
from triptych.wire.schema import RequestSchema


@dataclass(frozen=True, kw_only=True, slots=True)
class StageOutput:
    """State that goes to one consumer role: a value tree in MessagePack and the tensors that it refers to."""

    consumer: Role
    tree: bytes
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """Decoded media of one output: uint8 RGB or RGBA frames [frames, height, width, 3 or 4]; one frame is an image.
    A `FrameStream` gives frames while later ones are still decoded.

    ``audio`` is float32 [channels, samples] in -1..1 when the model makes sound.
    """

    frames: np.ndarray[Any, np.dtype[np.uint8]] | FrameStream
    fps: float
    audio: np.ndarray[Any, np.dtype[np.float32]] | None = None
    sample_rate: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageResult:
    """What a stage leaves: state for later roles (encoder, denoiser) or clips (decoder)."""

    outputs: tuple[StageOutput, ...] = ()
    clips: tuple[Clip, ...] = ()


class StageRun(Protocol):
    """One stage of one request in the making. Used from the compute thread only."""

    @property
    def step(self) -> int:
        """Denoising steps done."""
        ...

    @property
    def steps(self) -> int:
        """Denoising steps in all; 0 while unknown and for stages without steps."""
        ...

    def advance(self) -> StageResult | None:
        """Compute up to the next step boundary. None: there is more to do. Raises `StageError` or `BadRequest`."""
        ...

    def cancel(self) -> None:
        """Give up between two steps and free the memory. Idempotent."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """A `StageRun` that can be continued elsewhere. Runs that are not start again from the stage's beginning."""

    def checkpoint(self) -> tuple[bytes, tuple[torch.Tensor, ...]] | None:
        """What is needed, besides the stage's inputs, to go on from the present step: a value tree and its tensors,
        which are copies. None when this run cannot be continued from here. To be called between two steps."""
        ...

    def restore(self, tree: bytes, tensors: Sequence[torch.Tensor]) -> None:
        """Have a run that has not advanced yet go on after the steps that the checkpoint holds.

        With equal fingerprints the result is bit-identical to that of a run without interruption. Raises a retryable
        `StageError` for what is no checkpoint of such a run.
        """
        ...


@runtime_checkable
class Announcing(Protocol):
    """A denoiser's `StageRun` that says when its first step begins, which is after much else has been prepared."""

    def announce(self, told: Callable[[], None]) -> None:
        """Have ``told`` called once, when the model is about to compute for the first time."""
        ...


@runtime_checkable
class Preparable(Protocol):
    """A denoiser's `StageRun` whose preparations can be had apart from its first step."""

    def prepare(self) -> None:
        """Do what comes before the first step, on the current stream, between any two steps of other runs. The model is
        not called. Raises what `advance` would, or a `StageError` where this cannot be had; then the run is over."""
        ...


@runtime_checkable
class Preparing(Protocol):
    """A `RolePipeline` whose denoiser's runs may be `Preparable`."""

    @property
    def prepares(self) -> bool:
        """Whether a run may begin and be prepared while another one computes."""
        ...


@runtime_checkable
class Streaming(Protocol):
    """A decoder's `StageRun` that may hand on a clip before it has decoded it all."""

    def stream_to(self, deliver: Callable[[tuple[Clip, ...]], None]) -> None:
        """Have `advance` call ``deliver`` with clips of a `FrameStream`, if it can, once the first frames are there.

        The caller closes the stream, or fails it, when `advance` returns or raises, and gets no clips from that then.
        """
        ...


@runtime_checkable
class Together(Protocol):
    """A `RolePipeline` that can compute one step of several denoising runs, or several encodings, at once."""

    @property
    def joins(self) -> bool:
        """Whether it was asked to."""
        ...

    def companions(self, runs: Sequence[StageRun], turn: int) -> Companions:
        """Which of ``runs``, all its own and of one role, those first that take precedence, are to advance when it is
        the turn of the one at ``turn``, and which others have to wait for that."""
        ...

    def advance_together(self, runs: Sequence[StageRun]) -> list[StageResult | Exception | None]:
        """Advance each of ``runs``, all its own and of one role, by one step: what `StageRun.advance` gives, or raises.

        Results differ from those of runs that advance alone by rounding.
        """
        ...


@runtime_checkable
class Previewing(Protocol):
    """A `StageRun` that can show what it has so far."""

    def preview(self) -> Callable[[], bytes] | None:
        """What makes a small WebP picture, in any thread; None when none was asked for or there is nothing to show.

        To be called between two steps. It copies the little that it needs and waits for nothing.
        """
        ...


class RolePipeline(Protocol):
    """The roles of one pipeline that this process has loaded."""

    @property
    def roles(self) -> tuple[Role, ...]: ...

    @property
    def schema(self) -> RequestSchema:
        """What requests may say; the same from every role of one model."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints compute equal bytes."""
        ...

    @property
    def attention(self) -> dict[str, str]:
        """Each loaded denoiser model whose attention is dispatched, and the backend that it runs on."""
        ...

    @property
    def sharing(self) -> str:
        """How several GPUs share the work, in words; empty for one."""
        ...

    def start(
        self,
        role: Role,
        params: Mapping[str, Any],
        inputs: Sequence[tuple[bytes, Sequence[torch.Tensor]]],
        images: Sequence[bytes],
    ) -> StageRun:
        """Begin a stage. ``params`` are the request's validated parameters under the schema's names; image values
        are ``{"blob": i}`` into ``images`` (encoded files). ``inputs`` are (tree, tensors) of each pulled copy.

        Raises `BadRequest` for parameters that the pipeline cannot take, `StageError` for anything else.
        """
        ...
