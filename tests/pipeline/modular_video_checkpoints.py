"""Tiny random checkpoints of video pipelines with modular blocks, one function a family; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffusers import (
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    AutoencoderKLLTXVideo,
    AutoencoderKLWan,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HeliosPipeline,
    HeliosPyramidPipeline,
    HeliosScheduler,
    HeliosTransformer3DModel,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from transformers import ByT5Tokenizer, Gemma3ForCausalLM, Gemma3TextConfig, Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

from .checkpoints import qwen_tokenizer, seeded, t5_tokenizer, umt5
from .classic_parts import t5

# -- LTX ----------------------------------------------------------------------------------------------------------


def ltx(folder: Path) -> None:
    """LTX-Video text-to-video: a VAE that is told a timestep and draws noise while it decodes."""
    tokenizer = t5_tokenizer()
    LTXPipeline(
        transformer=seeded(
            LTXVideoTransformer3DModel,
            in_channels=8, out_channels=8, patch_size=1, patch_size_t=1, num_attention_heads=4, attention_head_dim=8,
            cross_attention_dim=32, num_layers=1, caption_channels=32,
        ),
        vae=seeded(
            AutoencoderKLLTXVideo,
            latent_channels=8, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1, 1),
            spatio_temporal_scaling=(True, True, False, False),
            decoder_spatio_temporal_scaling=(True, True, False, False), decoder_inject_noise=(False,) * 5,
            upsample_residual=(False,) * 4, upsample_factor=(1,) * 4, timestep_conditioning=True,
            patch_size=1, patch_size_t=1, encoder_causal=True, decoder_causal=False,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.1),
        text_encoder=t5(tokenizer),
        tokenizer=tokenizer,
    ).save_pretrained(folder)  # fmt: skip


# -- LTX-2 ----------------------------------------------------------------------------------------------------------


def ltx2_sound() -> dict[str, Any]:
    """What makes the sound: an autoencoder of spectrograms and the vocoder that turns them into samples."""
    audio_vae = seeded(
        AutoencoderKLLTX2Audio,
        base_channels=4, output_channels=2, ch_mult=(1,), num_res_blocks=1, attn_resolutions=None, in_channels=2,
        resolution=32, latent_channels=2, norm_type="pixel", causality_axis="height", mid_block_add_attention=False,
        sample_rate=16000, mel_hop_length=160, is_causal=True, mel_bins=8,
    )  # fmt: skip
    vocoder = seeded(
        LTX2Vocoder,
        in_channels=16, hidden_channels=32, out_channels=2, upsample_kernel_sizes=[20, 32], upsample_factors=[10, 16],
        resnet_kernel_sizes=[3], resnet_dilations=[[1, 3, 5]], leaky_relu_negative_slope=0.1,
        output_sampling_rate=16000,
    )  # fmt: skip
    return {"audio_vae": audio_vae, "vocoder": vocoder}


def ltx2(folder: Path) -> None:
    """LTX-2 text-to-video with sound: one transformer denoises both, guided by four passes."""
    tokenizer = qwen_tokenizer()
    language = Gemma3TextConfig(
        vocab_size=len(tokenizer) + 8, hidden_size=16, head_dim=8, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512, bos_token_id=0, eos_token_id=1,
        pad_token_id=tokenizer.pad_token_id, sliding_window=64, query_pre_attn_scalar=8,
    )  # fmt: skip
    LTX2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.1),
        vae=seeded(
            AutoencoderKLLTX2Video,
            in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(8,),
            decoder_block_out_channels=(8,), layers_per_block=(1,), decoder_layers_per_block=(1, 1),
            spatio_temporal_scaling=(True,), decoder_spatio_temporal_scaling=(True,),
            decoder_inject_noise=(False, False), downsample_type=("spatial",), upsample_residual=(False,),
            upsample_factor=(1,), timestep_conditioning=False, patch_size=1, patch_size_t=1, encoder_causal=True,
            decoder_causal=False,
        ),
        **ltx2_sound(),
        text_encoder=seeded(Gemma3ForCausalLM, language),
        tokenizer=tokenizer,
        connectors=seeded(
            LTX2TextConnectors,
            caption_channels=16, text_proj_in_factor=3, video_connector_num_attention_heads=2,
            video_connector_attention_head_dim=8, video_connector_num_layers=1,
            video_connector_num_learnable_registers=None, audio_connector_num_attention_heads=2,
            audio_connector_attention_head_dim=8, audio_connector_num_layers=1,
            audio_connector_num_learnable_registers=None, connector_rope_base_seq_len=32, rope_theta=10000.0,
            rope_double_precision=False, causal_temporal_positioning=False, rope_type="split",
        ),
        transformer=seeded(
            LTX2VideoTransformer3DModel,
            in_channels=4, out_channels=4, patch_size=1, patch_size_t=1, num_attention_heads=2, attention_head_dim=8,
            cross_attention_dim=16, audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2,
            audio_attention_head_dim=4, audio_cross_attention_dim=8, num_layers=2, caption_channels=16,
            rope_double_precision=False, rope_type="split",
        ),
    ).save_pretrained(folder)  # fmt: skip


# -- Helios -----------------------------------------------------------------------------------------------------------


def helios_parts() -> dict[str, Any]:
    tokenizer = t5_tokenizer()
    vae = seeded(
        AutoencoderKLWan,
        base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
    )  # fmt: skip
    transformer = seeded(
        HeliosTransformer3DModel,
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=16, out_channels=16,
        text_dim=32, freq_dim=64, ffn_dim=32, num_layers=2, rope_dim=(4, 4, 4),
    )  # fmt: skip
    return {"tokenizer": tokenizer, "text_encoder": umt5(tokenizer), "vae": vae, "transformer": transformer}


def helios(folder: Path) -> None:
    """Helios text-to-video: chunk after chunk, each with the latents before it as history."""
    scheduler = HeliosScheduler(stage_range=[0, 1], stages=1, use_dynamic_shifting=True)
    HeliosPipeline(**helios_parts(), scheduler=scheduler).save_pretrained(folder)


def helios_pyramid(folder: Path) -> None:
    """Helios that makes each chunk small first, and twice as large in each of two more stages."""
    HeliosPyramidPipeline(
        **helios_parts(), scheduler=HeliosScheduler(use_dynamic_shifting=True, gamma=0.25), is_cfg_zero_star=True
    ).save_pretrained(folder)


# -- HunyuanVideo 1.5 -------------------------------------------------------------------------------------------------


def hunyuan_video15(folder: Path) -> None:
    """HunyuanVideo1.5 text-to-video: guidance by a guider, which is a component and no argument of the call."""
    tokenizer, glyphs = qwen_tokenizer(), ByT5Tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    text = Qwen2_5_VLTextConfig(
        vocab_size=len(tokenizer) + 8, hidden_size=16, intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=2, pad_token_id=tokenizer.pad_token_id, bos_token_id=0,
        eos_token_id=1, rope_parameters={"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    HunyuanVideo15Pipeline(
        text_encoder=seeded(Qwen2_5_VLTextModel, text),
        tokenizer=tokenizer,
        text_encoder_2=t5(glyphs),
        tokenizer_2=glyphs,
        transformer=seeded(
            HunyuanVideo15Transformer3DModel,
            in_channels=9, out_channels=4, num_attention_heads=2, attention_head_dim=8, num_layers=1,
            num_refiner_layers=1, text_embed_dim=16, text_embed_2_dim=32, image_embed_dim=8, rope_axes_dim=(2, 2, 4),
            target_size=32, task_type="t2v",
        ),
        vae=seeded(
            AutoencoderKLHunyuanVideo15,
            latent_channels=4, block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        guider=ClassifierFreeGuidance(guidance_scale=6.0),
    ).save_pretrained(folder)  # fmt: skip


VIDEO_BUILDERS: dict[str, Callable[[Path], None]] = {
    "ltx": ltx,
    "ltx2": ltx2,
    "helios": helios,
    "helios_pyramid": helios_pyramid,
    "hunyuan_video15": hunyuan_video15,
}
"""Family name -> what writes its checkpoint into a folder."""
