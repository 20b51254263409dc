"""Tiny random checkpoints of further Qwen-Image models; nothing is downloaded.

The processor of those that start from pictures works with torchvision, so it is imported only where one is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImageLayeredPipeline,
    QwenImageTransformer2DModel,
)

from .checkpoints import flow_match_euler, qwen_t2i, qwen_text_encoder, qwen_tokenizer, seeded


def qwen_distilled(folder: Path) -> None:
    """Qwen-Image distilled to few steps without guidance: the same shift at all sizes, no stretched end."""
    shift = math.log(3)
    scheduler = FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256, base_shift=shift, max_image_seq_len=8192, max_shift=shift, shift=1.0,
        use_dynamic_shifting=True,
    )  # fmt: skip
    qwen_t2i(folder, scheduler)


def qwen_edit(folder: Path) -> None:
    """Qwen-Image-Edit: one picture."""
    QwenImageEditPipeline(**_parts()).save_pretrained(folder)


def qwen_edit_plus(folder: Path) -> None:
    """Qwen-Image-Edit-2511: several pictures, whose tokens are modulated as without noise."""
    QwenImageEditPlusPipeline(**_parts(zero_cond_t=True)).save_pretrained(folder)


def qwen_layered(folder: Path) -> None:
    """Qwen-Image-Layered: a picture taken apart into layers with transparency."""
    parts = _parts(in_channels=32, out_channels=8, use_additional_t_cond=True, use_layer3d_rope=True)
    # A picture of as many channels as a latent would be taken for one.
    statistics = {"latents_mean": [0.1] * 8, "latents_std": [1.1] * 8}
    vae = _vae(input_channels=4, z_dim=8, **statistics)
    QwenImageLayeredPipeline(**parts | {"vae": vae}).save_pretrained(folder)


def _parts(**changes: Any) -> dict[str, Any]:
    tokenizer = qwen_tokenizer()
    transformer = {
        "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16,
        "num_attention_heads": 2, "joint_attention_dim": 16, "guidance_embeds": False, "axes_dims_rope": (8, 4, 4),
    }  # fmt: skip
    return {
        "tokenizer": tokenizer,
        "processor": _processor(tokenizer),
        "text_encoder": qwen_text_encoder(tokenizer),
        "scheduler": flow_match_euler(shift_terminal=0.02),
        "vae": _vae(),
        "transformer": seeded(QwenImageTransformer2DModel, **(transformer | changes)),
    }


def _vae(**changes: Any) -> AutoencoderKLQwenImage:
    config = {
        "base_dim": 4, "z_dim": 4, "dim_mult": [1, 1, 2, 2], "num_res_blocks": 1,
        "temperal_downsample": [False, True, True], "latents_mean": [0.1, -0.2, 0.3, 0.0],
        "latents_std": [1.1, 0.9, 1.2, 1.0],
    }  # fmt: skip
    return seeded(AutoencoderKLQwenImage, **(config | changes))


def _processor(tokenizer: Any) -> Any:
    """Pictures are shown to the text encoder in few patches: what is tested does not depend on how many."""
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    pixels = {"min_pixels": 56 * 56, "max_pixels": 112 * 112}
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(**pixels),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**pixels),
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}",
    )


QWEN_BUILDERS: dict[str, Callable[[Path], None]] = {
    "qwen_distilled": qwen_distilled,
    "qwen_edit": qwen_edit,
    "qwen_edit_plus": qwen_edit_plus,
    "qwen_layered": qwen_layered,
}
"""Model name -> what writes its checkpoint into a folder."""
