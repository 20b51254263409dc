"""Tiny random checkpoints of further Wan models, one function a model; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanVACEPipeline,
    WanVACETransformer3DModel,
    WanVideoToVideoPipeline,
)
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

from .checkpoints import seeded, wan_parts, wan_transformer


def wan22_i2v(folder: Path) -> None:
    """Wan2.2 image-to-video: two transformers, no image encoder."""
    WanImageToVideoPipeline(
        **wan_parts(),
        transformer=wan_transformer(in_channels=36),
        transformer_2=wan_transformer(in_channels=36, ffn_dim=48),
        boundary_ratio=0.9,
    ).save_pretrained(folder)


def wan_flf2v(folder: Path) -> None:
    """Wan2.1 first and last frame to video: the embeddings of two pictures go to the transformer."""
    config = CLIPVisionConfig(
        hidden_size=8, projection_dim=8, num_hidden_layers=2, num_attention_heads=2, image_size=32,
        intermediate_size=16, patch_size=16,
    )  # fmt: skip
    WanImageToVideoPipeline(
        **wan_parts(),
        transformer=wan_transformer(in_channels=36, image_dim=8, added_kv_proj_dim=48, pos_embed_seq_len=10),
        image_encoder=seeded(CLIPVisionModel, config),
        image_processor=CLIPImageProcessorPil(crop_size=32, size={"shortest_edge": 32}),
    ).save_pretrained(folder)


def wan22_ti2v(folder: Path) -> None:
    """Wan2.2 TI2V: one transformer with a timestep for each token, and the autoencoder of sixteen-pixel latents."""
    WanPipeline(**_ti2v_parts(), expand_timesteps=True).save_pretrained(folder)


def wan22_ti2v_i2v(folder: Path) -> None:
    """The same model started from a picture, which takes the place of the first frame's noise."""
    WanImageToVideoPipeline(**_ti2v_parts(), expand_timesteps=True).save_pretrained(folder)


def _ti2v_parts() -> dict[str, Any]:
    vae = seeded(
        AutoencoderKLWan,
        base_dim=4, z_dim=48, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
        is_residual=True, in_channels=12, out_channels=12, patch_size=2, decoder_base_dim=4,
        scale_factor_spatial=16, scale_factor_temporal=4, latents_mean=[0.1] * 48, latents_std=[1.1] * 48,
    )  # fmt: skip
    return wan_parts() | {"vae": vae, "transformer": wan_transformer(in_channels=48, out_channels=48)}


def wan_distilled(folder: Path) -> None:
    """Wan2.1 distilled to four steps without guidance, with a plain flow-matching scheduler."""
    parts = wan_parts() | {"scheduler": FlowMatchEulerDiscreteScheduler(shift=5.0)}
    WanPipeline(**parts, transformer=wan_transformer()).save_pretrained(folder)


def wan22_distilled(folder: Path) -> None:
    """Wan2.2 distilled: two steps for each of its transformers."""
    parts = wan_parts() | {"scheduler": FlowMatchEulerDiscreteScheduler(shift=5.0)}
    WanPipeline(
        **parts, transformer=wan_transformer(), transformer_2=wan_transformer(ffn_dim=48), boundary_ratio=0.9
    ).save_pretrained(folder)


def vace_transformer(**changes: Any) -> WanVACETransformer3DModel:
    config = {
        "patch_size": (1, 2, 2), "num_attention_heads": 4, "attention_head_dim": 12, "in_channels": 16,
        "out_channels": 16, "text_dim": 32, "freq_dim": 64, "ffn_dim": 64, "num_layers": 3, "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32, "vace_layers": [0, 2], "vace_in_channels": 96,
    }  # fmt: skip
    return seeded(WanVACETransformer3DModel, **(config | changes))


def wan_vace(folder: Path) -> None:
    """Wan2.1 VACE: guided by a clip with a mask, and by reference pictures."""
    WanVACEPipeline(**wan_parts(), transformer=vace_transformer()).save_pretrained(folder)


def wan22_vace(folder: Path) -> None:
    """Wan2.2 VACE: the same with two transformers."""
    WanVACEPipeline(
        **wan_parts(),
        transformer=vace_transformer(),
        transformer_2=vace_transformer(ffn_dim=48),
        boundary_ratio=0.875,
    ).save_pretrained(folder)


def wan_v2v(folder: Path) -> None:
    """Wan2.1 text-to-video, started from a clip."""
    WanVideoToVideoPipeline(**wan_parts(), transformer=wan_transformer()).save_pretrained(folder)


WAN_BUILDERS: dict[str, Callable[[Path], None]] = {
    "wan22_i2v": wan22_i2v,
    "wan_flf2v": wan_flf2v,
    "wan22_ti2v": wan22_ti2v,
    "wan22_ti2v_i2v": wan22_ti2v_i2v,
    "wan_distilled": wan_distilled,
    "wan22_distilled": wan22_distilled,
    "wan_vace": wan_vace,
    "wan22_vace": wan22_vace,
    "wan_v2v": wan_v2v,
}
"""Model name -> what writes its checkpoint into a folder."""
