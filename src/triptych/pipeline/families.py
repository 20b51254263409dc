"""The exceptions table: what a pipeline class needs beyond its own declarations, and the usual settings of its models.

This is the only place where a model family is named. A class that is absent here is served by the generic rules alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """Defaults and limits of requests. None leaves the value to the pipeline's declarations and the model's config."""

    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    fps: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    max_sequence_length: int | None = None
    max_side: int | None = None
    """Largest height or width in pixels."""
    max_pixels: int | None = None
    """Most pixels of one output, over all of its frames."""
    max_frames: int | None = None
    max_steps: int | None = None
    max_n: int | None = None
    """Most outputs of one request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How one modular pipeline class differs from the generic rules."""

    preset: Preset = Preset()
    guidance_offset: float = 0.0
    """Added to the client's guidance scale to get the guider's: 1 where the classic formula is ``c + s * (c - u)``."""
    encoder_needs_guider: bool = False
    """The text block leaves its negative embeddings unset when its guider is off, so the guider stays on there."""
    text_length: int | None = None
    """The transformer finds the image's tokens behind exactly so many of the text, so no other length is legal."""
    streams: bool = False
    """The decoder's last word is what its VAE decodes, so frames can be handed on while later ones are decoded."""
    exact_timestep: bool = False
    """The loop rounds the timestep to the weights' dtype (999 becomes 1000 in bfloat16), which the classic pipeline
    does not; the transformer is given the scheduler's own value."""


GENERIC = Family()
"""What applies to a class that the table does not name."""

BASE = Preset(fps=16, max_side=2048, max_frames=257, max_steps=200, max_n=4)
"""Used where neither the model folder nor the family's preset says anything."""

_WAN = Family(
    preset=Preset(
        height=480, width=832, num_frames=81, fps=16, num_inference_steps=50, guidance_scale=5.0, max_side=1280
    ),
    encoder_needs_guider=True,
    exact_timestep=True,
    streams=True,
)
# Its blocks do not repeat the image's embeddings, so one output at a time is all that it can make.
_WAN_I2V = replace(_WAN, preset=replace(_WAN.preset, num_inference_steps=40, max_n=1), text_length=512)
_WAN22 = replace(_WAN, preset=replace(_WAN.preset, num_inference_steps=40, guidance_scale=4.0))

MODULAR_NAMES: dict[str, str] = {
    "FluxPipeline": "flux",
    "QwenImagePipeline": "qwenimage",
    "WanImageToVideoPipeline": "wan-i2v",
    "WanPipeline": "wan",
    "ZImagePipeline": "z-image",
}
"""Classic pipeline class to Diffusers' name of its modular counterpart, for the classes seen to work.

Diffusers' own table answers for others, at the price of importing every pipeline that it has.
"""

FAMILIES: dict[str, Family] = {
    "WanModularPipeline": _WAN,
    "WanImage2VideoModularPipeline": _WAN_I2V,
    "Wan22ModularPipeline": _WAN22,
    "Wan22Image2VideoModularPipeline": replace(_WAN22, preset=replace(_WAN22.preset, guidance_scale=3.5)),
    "QwenImageModularPipeline": Family(
        preset=Preset(
            height=1328, width=1328, num_inference_steps=50, guidance_scale=4.0, max_side=2752, max_pixels=1536 * 2752
        )
    ),
    "ZImageModularPipeline": Family(preset=Preset(height=1024, width=1024, guidance_scale=0.0), guidance_offset=1.0),
}


def family_of(modular_class: str) -> Family:
    """The entry of a modular pipeline class, or the generic one."""
    return FAMILIES.get(modular_class, GENERIC)
