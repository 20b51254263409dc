"""What Diffusers' pipelines call the things that requests and schemas speak of, where that differs."""

from __future__ import annotations

import dataclasses
from typing import Any

COUNT_INPUTS = ("num_videos_per_prompt", "num_images_per_prompt")
"""What pipelines call the number of outputs."""

AREA = "max_area"
"""What pipelines that take height and width for an aspect alone call the pixels that they make."""

STAGE_STEPS = "pyramid_num_inference_steps_list"
"""What pipelines that go from small to large call the steps of each size."""

GUIDANCE_STEPS = "guidance_schedule"
"""What pipelines whose guidance changes in the course of the steps call its scales, one a step."""

CHUNK = "num_latent_frames_per_chunk"
"""What pipelines that make a clip in chunks call the length of one."""

GUIDANCE, TRUE_GUIDANCE = "guidance_scale", "true_cfg_scale"
"""What pipelines call their scale of guidance, and that of classifier-free guidance where the first is a condition of
the model itself."""

MASK = "mask_image"
"""What pipelines call the picture that says where to work."""

CONTROL = "control_image"
"""What pipelines call the picture that says where things are: edges, depth, a pose."""

LAST = "last_image"
"""What pipelines call the picture to end with."""

SPATIAL = (
    "vae_scale_factor", "vae_scale_factor_spatial", "vae_spatial_compression_ratio", "vae_spatial_scale_factor",
    "movq_scale_factor",
)  # fmt: skip
TEMPORAL = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor")
"""What pipelines call the factors by which their autoencoder compresses."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Guider:
    """The request parameter that sets a guider's scale."""

    param: str
    follows: bool = False
    """Takes ``guidance_scale`` where its own parameter is not given."""
    description: str = ""


GUIDERS = {
    "guider": Guider(param=GUIDANCE),
    "guider_2": Guider(
        param="guidance_scale_2",
        follows=True,
        description="The same for the second transformer; None is guidance_scale.",
    ),
    "audio_guider": Guider(
        param="audio_guidance_scale", description="The same for the sound; None is the pipeline's own."
    ),
}
"""Guider component to its parameter."""


SCALES = (*(guider.param for guider in GUIDERS.values()), TRUE_GUIDANCE)
"""Every parameter that is a scale of guidance, of whatever model."""


def factor(pipeline: Any, names: tuple[str, ...]) -> int | None:
    """The first of ``names`` that ``pipeline`` has."""
    return next((value for name in names if isinstance(value := getattr(pipeline, name, None), int)), None)
