"""Tiny random checkpoints of image pipelines with modular blocks, one function a family; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    FluxKontextPipeline,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    CLIPTextModelWithProjection,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from .checkpoints import chat_tokenizer, clip_tokenizer, flux, image_vae, seeded, t5_tokenizer
from .classic_parts import clip_text_config, t5

# -- Stable Diffusion 3 -----------------------------------------------------------------------------------------------


def sd3(folder: Path, *, with_t5: bool = True) -> None:
    """Stable Diffusion 3.5 text-to-image: two CLIP encoders and a T5, which the model may lack."""
    tokenizer, tokenizer_3 = clip_tokenizer(), t5_tokenizer()
    StableDiffusion3Pipeline(
        transformer=seeded(
            SD3Transformer2DModel,
            sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8,
            num_attention_heads=4, caption_projection_dim=32, joint_attention_dim=32, pooled_projection_dim=64,
            dual_attention_layers=(0,), qk_norm="rms_norm", pos_embed_max_size=16,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=image_vae(latent_channels=4, scaling_factor=1.5305, shift_factor=0.0609),
        text_encoder=seeded(CLIPTextModelWithProjection, clip_text_config(tokenizer)),
        tokenizer=tokenizer,
        text_encoder_2=seeded(CLIPTextModelWithProjection, clip_text_config(tokenizer, hidden_act="gelu")),
        tokenizer_2=tokenizer,
        text_encoder_3=t5(tokenizer_3) if with_t5 else None,
        tokenizer_3=tokenizer_3 if with_t5 else None,
    ).save_pretrained(folder)  # fmt: skip


def sd3_without_t5(folder: Path) -> None:
    """The same without its largest text encoder, as it is often served."""
    sd3(folder, with_t5=False)


# -- Flux Kontext -----------------------------------------------------------------------------------------------------


def flux_kontext(folder: Path) -> None:
    """Flux that may begin with a picture."""
    flux(folder, FluxKontextPipeline)


# -- Flux 2 -----------------------------------------------------------------------------------------------------------


def flux2_parts(**transformer: Any) -> dict[str, Any]:
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type="exponential"),
        "vae": seeded(
            AutoencoderKLFlux2,
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(8, 8, 8, 8), layers_per_block=1, latent_channels=4, norm_num_groups=4, sample_size=32,
        ),
        "transformer": seeded(
            Flux2Transformer2DModel,
            patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=48, timestep_guidance_channels=32, axes_dims_rope=(4, 4, 4, 4),
            **transformer,
        ),
    }  # fmt: skip


def flux2(folder: Path, *, with_processor: bool = False) -> None:
    """Flux 2: three layers of a Mistral as text embeddings, and guidance that the transformer is told.

    Published ones have Pixtral's processor for a tokenizer, which is not to be had without torchvision; of that, texts
    meet the chat template and the tokenizer alone.
    """
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for part in m['content'] %}{{ part['text'] }}"
        "{% endfor %}<|im_end|>\n{% endfor %}"
    )
    config = Mistral3Config(
        text_config={
            "model_type": "mistral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 31,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": len(tokenizer) + 6,
            "max_position_embeddings": 512,
        },
        vision_config={
            "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 32, "patch_size": 16,
        },
        image_token_index=len(tokenizer) + 5,
    )  # fmt: skip
    Flux2Pipeline(
        **flux2_parts(guidance_embeds=True),
        text_encoder=seeded(Mistral3ForConditionalGeneration, config),
        tokenizer=_pixtral(tokenizer) if with_processor else tokenizer,
    ).save_pretrained(folder)


def _pixtral(tokenizer: Any) -> Any:
    from transformers import PixtralImageProcessor, PixtralProcessor

    tokenizer.add_special_tokens({"additional_special_tokens": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]})
    return PixtralProcessor(PixtralImageProcessor(), tokenizer, chat_template=tokenizer.chat_template)


def flux2_klein(folder: Path, **settings: Any) -> None:
    """Flux 2 Klein, distilled: no guidance, three layers of a Qwen3 as text embeddings."""
    tokenizer = chat_tokenizer()
    language = Qwen3Config(
        hidden_size=16, intermediate_size=16, num_hidden_layers=28, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=len(tokenizer) + 6, max_position_embeddings=512, head_dim=8,
    )  # fmt: skip
    Flux2KleinPipeline(
        **flux2_parts(guidance_embeds=False),
        text_encoder=seeded(Qwen3ForCausalLM, language),
        tokenizer=tokenizer,
        **({"is_distilled": True} | settings),
    ).save_pretrained(folder)


def flux2_klein_base(folder: Path) -> None:
    """Flux 2 Klein before distillation, with a guider."""
    flux2_klein(folder, is_distilled=False)


IMAGE_BUILDERS: dict[str, Callable[[Path], None]] = {
    "sd3": sd3,
    "sd3_without_t5": sd3_without_t5,
    "flux_kontext": flux_kontext,
    "flux2": flux2,
    "flux2_klein": flux2_klein,
    "flux2_klein_base": flux2_klein_base,
}
"""Family name -> what writes its checkpoint into a folder."""
