"""Tiny random checkpoints of image pipelines that have no modular blocks, one function a family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLHunyuanImage,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    GlmImagePipeline,
    GlmImageTransformer2DModel,
    HunyuanImagePipeline,
    HunyuanImageTransformer2DModel,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from diffusers.guiders import AdaptiveProjectedMixGuidance
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from transformers import (
    ByT5Tokenizer,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Gemma2Config,
    Gemma2Model,
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    GlmImageImageProcessorPil,
    GlmImageProcessor,
    Qwen2Tokenizer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from .checkpoints import clip_tokenizer, image_vae, qwen_text_encoder, qwen_tokenizer, seeded, t5_tokenizer
from .classic_parts import clip_text_config, t5


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


def hunyuan_image(folder: Path) -> None:
    """HunyuanImage before distillation: guidance by one of two guiders, another for prompts with words to be drawn."""
    tokenizer, glyphs = qwen_tokenizer(), ByT5Tokenizer()
    HunyuanImagePipeline(
        text_encoder=qwen_text_encoder(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=t5(glyphs),
        tokenizer_2=glyphs,
        transformer=seeded(
            HunyuanImageTransformer2DModel,
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, num_layers=1,
            num_single_layers=1, num_refiner_layers=1, text_embed_dim=16, text_embed_2_dim=32, rope_axes_dim=(4, 4),
        ),
        vae=seeded(
            AutoencoderKLHunyuanImage,
            in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(32, 32, 32, 32), layers_per_block=1,
            spatial_compression_ratio=8, sample_size=32, scaling_factor=0.7,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        guider=AdaptiveProjectedMixGuidance(guidance_scale=3.5, adaptive_projected_guidance_start_step=2),
        ocr_guider=AdaptiveProjectedMixGuidance(guidance_scale=3.5, adaptive_projected_guidance_start_step=3),
    ).save_pretrained(folder)  # fmt: skip
