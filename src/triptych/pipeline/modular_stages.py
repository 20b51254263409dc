"""The stages of one request in a cut pipeline: encoding and decoding at once, denoising step by step."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from triptych.accel.companions import Calls
from triptych.accel.wan_vae import installed
from triptych.errors import StageError
from triptych.ids import ROLES, Role
from triptych.pipeline.checkpoint import Frozen, Saved
from triptych.pipeline.decode import sample_rate, to_clips, to_pixels
from triptych.pipeline.frames import FrameStream
from triptych.pipeline.guard import guarded
from triptych.pipeline.preview import PREVIEW, middle_frame
from triptych.pipeline.randomness import GlobalRandomness
from triptych.pipeline.stage import Clip, StageResult
from triptych.pipeline.steps import SteppedBlock

if TYPE_CHECKING:
    from triptych.pipeline.modular import ModularRolePipeline


class WholeStage:
    """Encoder or decoder: one advance does it all."""

    def __init__(
        self, owner: ModularRolePipeline, role: Role, view: Any, state: Any, params: Mapping[str, Any]
    ) -> None:
        self._owner = owner
        self._role = role
        self._view = view
        self._state = state
        self._params = params
        # Beside the denoiser's, so that what the roles draw is not the same.
        self.randomness = GlobalRandomness(seed_of(params, state) + 1 + ROLES.index(role), owner.device)

    @property
    def step(self) -> int:
        return 0

    @property
    def steps(self) -> int:
        return 0

    def advance(self) -> StageResult:
        with self.randomness.installed():
            return self.compute()

    def compute(self) -> StageResult:
        """All that `advance` does, with the random states as they are."""
        view, state = self._view, self._state
        self.cancel()
        with guarded(self._role):
            if state is None:
                raise StageError(f"the {self._role} run is over")
            self._owner.adapters.choose(self._owner.adapters.read(self._params))
            _, state = self._owner.blocks(self._role)(view, state)
            if self._role is Role.DECODER:
                rate = sample_rate(view)
                return StageResult(
                    clips=to_clips(state.values, fps=float(self._params.get("fps", 0)), sample_rate=rate)
                )
            return StageResult(outputs=self._owner.outputs(self._role, state))

    def cancel(self) -> None:
        self._view = self._state = None


class _AllHeard(BaseException):
    """Ends a decoding whose frames have all been handed on. No block catches a `BaseException`."""


class DecodeStage(WholeStage):
    """Decoder, which may hand on frames as they are done."""

    def __init__(
        self, owner: ModularRolePipeline, role: Role, view: Any, state: Any, params: Mapping[str, Any], *, streams: bool
    ) -> None:
        super().__init__(owner, role, view, state, params)
        self._decoder = installed(getattr(view, "vae", None)) if streams and params.get("n", 1) == 1 else None
        self._deliver: Callable[[tuple[Clip, ...]], None] | None = None

    def stream_to(self, deliver: Callable[[tuple[Clip, ...]], None]) -> None:
        self._deliver = deliver

    def advance(self) -> StageResult:
        deliver, decoder, view = self._deliver, self._decoder, self._view
        self._deliver = None  # it leads back to this run
        if decoder is None or deliver is None or view is None:
            return super().advance()
        stream: FrameStream | None = None
        heard = 0

        def hear(part: torch.Tensor, frames: int) -> None:
            nonlocal stream, heard
            if frames == 1:  # an image is not worth it
                return
            pixels = to_pixels(view.video_processor.postprocess_video(part, output_type="pt")[0])
            if stream is None:
                height, width, channels = pixels.shape[1:]
                stream = FrameStream((frames, height, width, channels))
                deliver((Clip(frames=stream, fps=float(self._params.get("fps", 0))),))
            stream.put(pixels)
            heard += len(pixels)
            if heard == frames:  # nobody wants the whole video besides
                raise _AllHeard

        decoder.listener = hear
        try:
            return super().advance()
        except _AllHeard:
            return StageResult()
        finally:
            decoder.listener = None


class DenoiseStage:
    """Denoiser: one advance is one step."""

    def __init__(self, owner: ModularRolePipeline, stepped: SteppedBlock, params: Mapping[str, Any]) -> None:
        self._owner = owner
        self.stepped = stepped
        self.called: Calls = ()
        """What its last step called, where forwards are joined."""
        self._adapters = owner.adapters.read(params)
        self._params = params

    @property
    def step(self) -> int:
        return self.stepped.step

    @property
    def steps(self) -> int:
        return self.stepped.steps

    def advance(self) -> StageResult | None:
        with guarded(Role.DENOISER):
            self._owner.adapters.choose(self._adapters)
            state = self.stepped.advance()
            return None if state is None else self._owner.denoised(state)

    def prepare(self) -> None:
        with guarded(Role.DENOISER):
            self.stepped.prepare()

    def announce(self, told: Callable[[], None]) -> None:
        self.stepped.computes = told

    def preview(self) -> Callable[[], bytes] | None:
        projection, latents = self._owner.projection, self.stepped.latents
        if projection is None or latents is None or not self._params.get(PREVIEW):
            return None
        height, width = (self._params.get(side) or self.stepped.value(side) for side in ("height", "width"))
        if not height or not width:
            return None
        handoff = self._owner.schema.handoff
        temporal = 1 if handoff is None else handoff.temporal
        frame = middle_frame(
            latents,
            channels=len(projection.weight),
            frames=1 + (self._params.get("num_frames", 1) - 1) // temporal,
            height=height,
            width=width,
        )
        return None if frame is None else projection.picture(frame)

    def checkpoint(self) -> Frozen | None:
        return self.stepped.checkpoint()

    def restore(self, tree: bytes, tensors: Sequence[torch.Tensor]) -> None:
        self.stepped.restore(Saved(tree, tensors, self._owner.device))

    def cancel(self) -> None:
        self.stepped.cancel()


def seed_of(params: Mapping[str, Any], state: Any) -> int:
    """What the request's random numbers begin from; drawn by the encoder where it names none."""
    seed, generator = params.get("seed"), state.values.get("generator")
    if seed is None:
        return generator.initial_seed() if isinstance(generator, torch.Generator) else secrets.randbits(53)
    return seed
