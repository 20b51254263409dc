"""Tiny random checkpoints of pipelines that have no modular blocks, one function a family; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLCogVideoX,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLMochi,
    AutoencoderKLTemporalDecoder,
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    GlmImagePipeline,
    GlmImageTransformer2DModel,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    MochiPipeline,
    MochiTransformer3DModel,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    StableVideoDiffusionPipeline,
    UNet2DConditionModel,
    UNetSpatioTemporalConditionModel,
)
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from transformers import (
    ByT5Tokenizer,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    Gemma2Config,
    Gemma2Model,
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    GlmImageImageProcessorPil,
    GlmImageProcessor,
    LlamaConfig,
    LlamaModel,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from .checkpoints import clip_tokenizer, image_vae, qwen_tokenizer, seeded, t5_tokenizer


def t5(tokenizer: Any) -> T5EncoderModel:
    config = T5Config(
        vocab_size=len(tokenizer) + 8, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, pad_token_id=0,
        eos_token_id=1,
    )  # fmt: skip
    return seeded(T5EncoderModel, config)


def clip_text_config(tokenizer: Any, **changes: Any) -> CLIPTextConfig:
    size = len(tokenizer)
    config = {
        "vocab_size": size, "hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 3,
        "num_attention_heads": 4, "bos_token_id": size - 2, "eos_token_id": size - 1, "pad_token_id": size - 1,
        "projection_dim": 32,
    }  # fmt: skip
    return CLIPTextConfig(**(config | changes))


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


# -- image models -----------------------------------------------------------------------------------------------------


def sdxl(folder: Path) -> None:
    """Stable Diffusion XL text-to-image: a U-Net, two text encoders, a VAE that must not run in float16."""
    tokenizer = clip_tokenizer()
    StableDiffusionXLPipeline(
        unet=seeded(
            UNet2DConditionModel,
            block_out_channels=(32, 64), layers_per_block=1, sample_size=8, in_channels=4, out_channels=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=(2, 4), use_linear_projection=True,
            addition_embed_type="text_time", addition_time_embed_dim=8, transformer_layers_per_block=(1, 1),
            projection_class_embeddings_input_dim=80, cross_attention_dim=64, norm_num_groups=8,
        ),
        scheduler=EulerDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, steps_offset=1, beta_schedule="scaled_linear",
            timestep_spacing="leading",
        ),
        vae=sd_vae(),
        text_encoder=seeded(CLIPTextModel, clip_text_config(tokenizer)),
        tokenizer=tokenizer,
        text_encoder_2=seeded(CLIPTextModelWithProjection, clip_text_config(tokenizer, hidden_act="gelu")),
        tokenizer_2=tokenizer,
    ).save_pretrained(folder)  # fmt: skip


def sd_vae(**changes: Any) -> AutoencoderKL:
    config = {
        "latent_channels": 4, "scaling_factor": 0.18215, "shift_factor": None, "use_quant_conv": True,
        "use_post_quant_conv": True,
    }  # fmt: skip
    return image_vae(**(config | changes))


def stable_diffusion(folder: Path) -> None:
    """Stable Diffusion 1.5 text-to-image, with the model that looks at the decoded pixels."""
    tokenizer = clip_tokenizer()
    looks = CLIPConfig(
        text_config={"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8},
        vision_config={
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 16,
            "intermediate_size": 37, "projection_dim": 16,
        },
        projection_dim=16,
    )  # fmt: skip
    StableDiffusionPipeline(
        unet=seeded(
            UNet2DConditionModel,
            block_out_channels=(8, 16), layers_per_block=1, sample_size=8, in_channels=4, out_channels=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=32,
            norm_num_groups=4, attention_head_dim=4,
        ),
        scheduler=EulerAncestralDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1,
        ),
        vae=sd_vae(),
        text_encoder=seeded(CLIPTextModel, clip_text_config(tokenizer)),
        tokenizer=tokenizer,
        safety_checker=seeded(StableDiffusionSafetyChecker, looks),
        feature_extractor=CLIPImageProcessorPil(crop_size=32, size={"shortest_edge": 32}),
    ).save_pretrained(folder)  # fmt: skip


def pixart_sigma(folder: Path) -> None:
    """PixArt-Sigma text-to-image: sizes binned by aspect ratio, learned variance dropped."""
    tokenizer = t5_tokenizer()
    PixArtSigmaPipeline(
        tokenizer=tokenizer,
        text_encoder=t5(tokenizer),
        vae=sd_vae(),
        transformer=seeded(
            PixArtTransformer2DModel,
            sample_size=32, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=3,
            caption_channels=32, in_channels=4, cross_attention_dim=24, out_channels=8, attention_bias=True,
            activation_fn="gelu-approximate", num_embeds_ada_norm=1000, norm_type="ada_norm_single",
            norm_elementwise_affine=False, norm_eps=1e-6,
        ),
        scheduler=DPMSolverMultistepScheduler(),
    ).save_pretrained(folder)  # fmt: skip


def sana(folder: Path) -> None:
    """Sana text-to-image: a Gemma text encoder, linear attention, a deep-compression autoencoder."""
    tokenizer = qwen_tokenizer()
    gemma = Gemma2Config(
        vocab_size=len(tokenizer) + 8, hidden_size=8, head_dim=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512, bos_token_id=0, eos_token_id=1,
        pad_token_id=0, query_pre_attn_scalar=16,
    )  # fmt: skip
    vae = seeded(
        AutoencoderDC,
        in_channels=3, latent_channels=4, attention_head_dim=2, encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"), encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8), encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1), decoder_layers_per_block=[1, 1], downsample_block_type="conv",
        upsample_block_type="interpolate", decoder_norm_types="rms_norm", decoder_act_fns="silu",
        scaling_factor=0.41407,
    )  # fmt: skip
    SanaPipeline(
        transformer=seeded(
            SanaTransformer2DModel,
            patch_size=1, in_channels=4, out_channels=4, num_layers=1, num_attention_heads=2, attention_head_dim=4,
            num_cross_attention_heads=2, cross_attention_head_dim=4, cross_attention_dim=8, caption_channels=8,
            sample_size=16,
        ),
        vae=vae,
        text_encoder=seeded(Gemma2Model, gemma),
        tokenizer=tokenizer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    ).save_pretrained(folder)  # fmt: skip


def glm_image(folder: Path) -> None:
    """GLM-Image text-to-image: a language model samples image tokens from torch's global random state."""
    names = {"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"}
    tokenizer = Qwen2Tokenizer(
        vocab={letter: i for i, letter in enumerate(bytes_to_unicode().values())}, merges=[], unk_token=None,
        pad_token="<|endoftext|>", eos_token="<|endoftext|>", bos_token="<|start|>", extra_special_tokens=names,
    )  # fmt: skip
    template = (
        "{% for m in messages %}{% for c in m['content'] %}"
        "{% if c['type'] == 'text' %}{{ c['text'] }}{% else %}<|image|>{% endif %}{% endfor %}{% endfor %}"
    )
    language = GlmImageConfig(
        text_config={
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 1, "vocab_size": len(tokenizer) + 8, "vision_vocab_size": 32,
            "eos_token_id": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        },
        vision_config={
            "hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "image_size": 32,
            "patch_size": 16,
        },
        vq_config={"embed_dim": 8, "latent_channels": 16, "num_embeddings": 32},
        image_token_id=tokenizer.convert_tokens_to_ids("<|image|>"),
        image_start_token_id=tokenizer.bos_token_id, image_end_token_id=len(tokenizer) + 1,
    )  # fmt: skip
    language_model = seeded(GlmImageForConditionalGeneration, language)
    language_model.generation_config.eos_token_id = None
    glyphs = ByT5Tokenizer()
    GlmImagePipeline(
        tokenizer=glyphs,
        processor=GlmImageProcessor(GlmImageImageProcessorPil(), tokenizer, chat_template=template),
        text_encoder=t5(glyphs),
        vision_language_encoder=language_model,
        vae=sd_vae(latents_mean=[0.1, 0.0, -0.1, 0.2], latents_std=[1.0, 1.1, 0.9, 1.2]),
        transformer=seeded(
            GlmImageTransformer2DModel,
            patch_size=2, in_channels=4, out_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2,
            text_embed_dim=32, time_embed_dim=16, condition_dim=8, prior_vq_quantizer_codebook_size=32,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
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
}
"""Family name -> what writes its checkpoint into a folder."""
