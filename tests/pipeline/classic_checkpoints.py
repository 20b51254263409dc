"""Tiny random checkpoints of pipelines that have no modular blocks, one function a family; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffusers import (
    AutoencoderKLCogVideoX,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLMochi,
    AutoencoderKLTemporalDecoder,
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    MochiPipeline,
    MochiTransformer3DModel,
    StableVideoDiffusionPipeline,
    UNetSpatioTemporalConditionModel,
)
from transformers import (
    CLIPImageProcessorPil,
    CLIPTextModel,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    LlamaConfig,
    LlamaModel,
)

from .checkpoints import clip_tokenizer, qwen_tokenizer, seeded, t5_tokenizer
from .classic_image_checkpoints import glm_image, hunyuan_image, pixart_sigma, sana, sdxl, stable_diffusion
from .classic_parts import clip_text_config, t5

# -- CogVideoX --------------------------------------------------------------------------------------------------------


def cogvideox_vae() -> AutoencoderKLCogVideoX:
    return seeded(
        AutoencoderKLCogVideoX,
        in_channels=3, out_channels=3, down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4, block_out_channels=(8, 8, 8, 8), latent_channels=4,
        layers_per_block=1, norm_num_groups=2, temporal_compression_ratio=4,
    )  # fmt: skip


def cogvideox_transformer(**changes: Any) -> CogVideoXTransformer3DModel:
    config = {
        "num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "time_embed_dim": 2,
        "text_embed_dim": 32, "num_layers": 1, "sample_width": 2, "sample_height": 2, "sample_frames": 9,
        "patch_size": 2, "temporal_compression_ratio": 4, "max_text_seq_length": 16,
    }  # fmt: skip
    return seeded(CogVideoXTransformer3DModel, **(config | changes))


def cogvideox_t2v(folder: Path) -> None:
    """CogVideoX text-to-video with the DDIM scheduler."""
    tokenizer = t5_tokenizer()
    CogVideoXPipeline(
        tokenizer=tokenizer,
        text_encoder=t5(tokenizer),
        vae=cogvideox_vae(),
        transformer=cogvideox_transformer(),
        scheduler=CogVideoXDDIMScheduler(),
    ).save_pretrained(folder)


def cogvideox_i2v(folder: Path) -> None:
    """CogVideoX1.5 image-to-video: rotary embeddings, padded latent frames, the DPM scheduler."""
    tokenizer = t5_tokenizer()
    CogVideoXImageToVideoPipeline(
        tokenizer=tokenizer,
        text_encoder=t5(tokenizer),
        vae=cogvideox_vae(),
        transformer=cogvideox_transformer(
            in_channels=8, attention_head_dim=16, patch_size_t=2, use_rotary_positional_embeddings=True,
            patch_bias=False, use_learned_positional_embeddings=False, sample_width=8, sample_height=8,
        ),
        scheduler=CogVideoXDPMScheduler(),
    ).save_pretrained(folder)  # fmt: skip


# -- Stable Video Diffusion -------------------------------------------------------------------------------------------


def svd(folder: Path) -> None:
    """Stable Video Diffusion image-to-video: no prompt, a U-Net, frames decoded in chunks."""
    unet = seeded(
        UNetSpatioTemporalConditionModel,
        block_out_channels=(32, 64), layers_per_block=1, sample_size=32, in_channels=8, out_channels=4,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), cross_attention_dim=32,
        num_attention_heads=4, projection_class_embeddings_input_dim=96, addition_time_embed_dim=32, num_frames=3,
    )  # fmt: skip
    vae = seeded(
        AutoencoderKLTemporalDecoder,
        block_out_channels=[32, 64], in_channels=3, out_channels=3, latent_channels=4,
        down_block_types=["DownEncoderBlock2D", "DownEncoderBlock2D"],
    )  # fmt: skip
    image_encoder = CLIPVisionConfig(
        hidden_size=32, projection_dim=32, num_hidden_layers=2, num_attention_heads=4, image_size=224,
        intermediate_size=37, patch_size=32,
    )  # fmt: skip
    StableVideoDiffusionPipeline(
        unet=unet,
        image_encoder=seeded(CLIPVisionModelWithProjection, image_encoder),
        scheduler=EulerDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", interpolation_type="linear",
            num_train_timesteps=1000, prediction_type="v_prediction", sigma_max=700.0, sigma_min=0.002,
            steps_offset=1, timestep_spacing="leading", timestep_type="continuous", trained_betas=None,
            use_karras_sigmas=True,
        ),
        vae=vae,
        feature_extractor=CLIPImageProcessorPil(crop_size=224, size={"shortest_edge": 224}),
    ).save_pretrained(folder)  # fmt: skip


# -- HunyuanVideo and Mochi -------------------------------------------------------------------------------------------


def hunyuan_video(folder: Path) -> None:
    """HunyuanVideo text-to-video: a Llama whose third-last hidden states are read, and a CLIP text encoder."""
    llama_tokenizer, tokenizer = qwen_tokenizer(), clip_tokenizer()
    llama = LlamaConfig(
        vocab_size=len(llama_tokenizer) + 8, hidden_size=16, intermediate_size=37, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        max_position_embeddings=512,
    )  # fmt: skip
    HunyuanVideoPipeline(
        text_encoder=seeded(LlamaModel, llama),
        tokenizer=llama_tokenizer,
        text_encoder_2=seeded(CLIPTextModel, clip_text_config(tokenizer, projection_dim=8, hidden_size=8)),
        tokenizer_2=tokenizer,
        transformer=seeded(
            HunyuanVideoTransformer3DModel,
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1,
            num_single_layers=1, num_refiner_layers=1, patch_size=1, patch_size_t=1, guidance_embeds=True,
            text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(2, 4, 4),
        ),
        vae=seeded(
            AutoencoderKLHunyuanVideo,
            in_channels=3, out_channels=3, latent_channels=4,
            down_block_types=("HunyuanVideoDownBlock3D",) * 4, up_block_types=("HunyuanVideoUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8), layers_per_block=1, act_fn="silu", norm_num_groups=4,
            scaling_factor=0.476986,
            spatial_compression_ratio=8, temporal_compression_ratio=4, mid_block_add_attention=True,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
    ).save_pretrained(folder)  # fmt: skip


def mochi(folder: Path) -> None:
    """Mochi text-to-video: flipped sigmas, twelve latent channels with their own statistics."""
    tokenizer = t5_tokenizer()
    MochiPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        vae=seeded(
            AutoencoderKLMochi,
            latent_channels=12, out_channels=3, encoder_block_out_channels=(32, 32, 32, 32),
            decoder_block_out_channels=(32, 32, 32, 32), layers_per_block=(1, 1, 1, 1, 1),
        ),
        text_encoder=t5(tokenizer),
        tokenizer=tokenizer,
        transformer=seeded(
            MochiTransformer3DModel,
            patch_size=2, num_attention_heads=2, attention_head_dim=8, num_layers=2, pooled_projection_dim=16,
            in_channels=12, out_channels=None, qk_norm="rms_norm", text_embed_dim=32, time_embed_dim=4,
            activation_fn="swiglu", max_sequence_length=16,
        ),
    ).save_pretrained(folder)  # fmt: skip


CLASSIC_BUILDERS: dict[str, Callable[[Path], None]] = {
    "cogvideox_t2v": cogvideox_t2v,
    "cogvideox_i2v": cogvideox_i2v,
    "svd": svd,
    "hunyuan_video": hunyuan_video,
    "mochi": mochi,
    "sdxl": sdxl,
    "stable_diffusion": stable_diffusion,
    "pixart_sigma": pixart_sigma,
    "sana": sana,
    "glm_image": glm_image,
    "hunyuan_image": hunyuan_image,
}
"""Family name -> what writes its checkpoint into a folder."""
