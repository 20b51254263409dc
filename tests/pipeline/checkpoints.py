"""Tiny random checkpoints in the Diffusers folder layout, one function a family; nothing is downloaded."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from transformers import (
    CLIPImageProcessorPil,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    CLIPVisionConfig,
    CLIPVisionModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode


def seeded(build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A module with random weights that are the same every time."""
    torch.manual_seed(0)
    return build(*args, **kwargs).eval()


# -- Wan ----------------------------------------------------------------------------------------------------------


def t5_tokenizer() -> T5Tokenizer:
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    words = [(f"▁{word}", -2.0) for word in ("a", "the", "cat", "dog", "runs", "red", "ball")]
    letters = [(letter, -5.0) for letter in "▁" + string.ascii_letters + string.digits + string.punctuation]
    return T5Tokenizer(vocab=specials + words + letters, extra_ids=0, unk_token="<unk>")


def umt5(tokenizer: T5Tokenizer) -> UMT5EncoderModel:
    config = UMT5Config(
        vocab_size=len(tokenizer) + 8, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, pad_token_id=0,
        eos_token_id=1,
    )  # fmt: skip
    return seeded(UMT5EncoderModel, config)


def wan_transformer(**changes: Any) -> WanTransformer3DModel:
    config = {
        "patch_size": (1, 2, 2), "num_attention_heads": 4, "attention_head_dim": 12, "in_channels": 16,
        "out_channels": 16, "text_dim": 32, "freq_dim": 64, "ffn_dim": 64, "num_layers": 2, "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32,
    }  # fmt: skip
    return seeded(WanTransformer3DModel, **(config | changes))


def wan_parts() -> dict[str, Any]:
    tokenizer = t5_tokenizer()
    return {
        "tokenizer": tokenizer,
        "text_encoder": umt5(tokenizer),
        "vae": seeded(
            AutoencoderKLWan,
            base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
        ),
        "scheduler": UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    }  # fmt: skip


def wan_t2v(folder: Path) -> None:
    """Wan2.1 text-to-video."""
    WanPipeline(**wan_parts(), transformer=wan_transformer()).save_pretrained(folder)


def wan22_t2v(folder: Path) -> None:
    """Wan2.2 text-to-video: two transformers, the first for the noisy steps."""
    WanPipeline(
        **wan_parts(),
        transformer=wan_transformer(),
        transformer_2=wan_transformer(ffn_dim=48),
        boundary_ratio=0.875,
    ).save_pretrained(folder)


def wan_i2v(folder: Path) -> None:
    """Wan2.1 image-to-video, with its CLIP image encoder."""
    image_encoder = CLIPVisionConfig(
        hidden_size=8, projection_dim=8, num_hidden_layers=2, num_attention_heads=2, image_size=32,
        intermediate_size=16, patch_size=16,
    )  # fmt: skip
    WanImageToVideoPipeline(
        **wan_parts(),
        transformer=wan_transformer(in_channels=36, image_dim=8, added_kv_proj_dim=48),
        image_encoder=seeded(CLIPVisionModel, image_encoder),
        image_processor=CLIPImageProcessorPil(crop_size=32, size={"shortest_edge": 32}),
    ).save_pretrained(folder)


# -- Qwen-Image -----------------------------------------------------------------------------------------------------

QWEN_SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip


def qwen_tokenizer() -> Qwen2Tokenizer:
    vocab = {character: i for i, character in enumerate(bytes_to_unicode().values())}
    return Qwen2Tokenizer(
        vocab=vocab, merges=[], unk_token=None, pad_token="<|endoftext|>", eos_token="<|im_end|>", bos_token=None,
        additional_special_tokens=list(QWEN_SPECIALS),
    )  # fmt: skip


def qwen_text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    ids = {special: tokenizer.convert_tokens_to_ids(special) for special in QWEN_SPECIALS}
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2, "vocab_size": len(tokenizer) + 6,
            "eos_token_id": ids["<|im_end|>"],
            "bos_token_id": ids["<|endoftext|>"], "pad_token_id": ids["<|endoftext|>"],
            "rope_parameters": {"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 1e6},
        },
        vision_config={
            "depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 16,
            "fullatt_block_indexes": [1], "patch_size": 14, "window_size": 112,
        },
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
        vision_token_id=ids["<|vision_pad|>"], image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
    )  # fmt: skip
    return seeded(Qwen2_5_VLForConditionalGeneration, config)


def flow_match_euler(*, shift_terminal: float | None) -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256, base_shift=0.5, max_image_seq_len=8192, max_shift=0.9, shift=1.0,
        shift_terminal=shift_terminal, use_dynamic_shifting=True,
    )  # fmt: skip


def qwen_t2i(folder: Path, scheduler: Any = None) -> None:
    """Qwen-Image text-to-image."""
    tokenizer = qwen_tokenizer()
    QwenImagePipeline(
        tokenizer=tokenizer,
        text_encoder=qwen_text_encoder(tokenizer),
        scheduler=scheduler or flow_match_euler(shift_terminal=0.02),
        vae=seeded(
            AutoencoderKLQwenImage,
            base_dim=8, z_dim=4, dim_mult=[1, 1, 2, 2], num_res_blocks=1, temperal_downsample=[False, True, True],
            latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.1, 0.9, 1.2, 1.0],
        ),
        transformer=seeded(
            QwenImageTransformer2DModel,
            patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=4,
            joint_attention_dim=16, guidance_embeds=False, axes_dims_rope=(8, 4, 4),
        ),
    ).save_pretrained(folder)  # fmt: skip


# -- Flux and Z-Image -------------------------------------------------------------------------------------------------


def image_vae(**changes: Any) -> AutoencoderKL:
    config = {
        "in_channels": 3, "out_channels": 3, "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4, "block_out_channels": [8] * 4, "layers_per_block": 1,
        "latent_channels": 16, "norm_num_groups": 8, "sample_size": 32, "scaling_factor": 0.3611,
        "shift_factor": 0.1159, "use_quant_conv": False, "use_post_quant_conv": False,
    }  # fmt: skip
    return seeded(AutoencoderKL, **(config | changes))


def clip_tokenizer() -> CLIPTokenizer:
    letters = list(bytes_to_unicode().values())
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[], model_max_length=77)


def flux(folder: Path, pipeline: type[Any] = FluxPipeline) -> None:
    """Flux text-to-image with embedded guidance."""
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    clip_config = CLIPTextConfig(
        vocab_size=len(clip), hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
        bos_token_id=len(clip) - 2, eos_token_id=len(clip) - 1, pad_token_id=len(clip) - 1, projection_dim=32,
    )  # fmt: skip
    t5_config = T5Config(
        vocab_size=len(t5) + 8, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, pad_token_id=0, eos_token_id=1
    )
    pipeline(
        tokenizer=clip,
        text_encoder=seeded(CLIPTextModel, clip_config),
        tokenizer_2=t5,
        text_encoder_2=seeded(T5EncoderModel, t5_config),
        scheduler=flow_match_euler(shift_terminal=None),
        vae=image_vae(latent_channels=4),
        transformer=seeded(
            FluxTransformer2DModel,
            patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
            guidance_embeds=True,
        ),
    ).save_pretrained(folder)  # fmt: skip


def chat_tokenizer() -> Qwen2Tokenizer:
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer


def z_image(folder: Path) -> None:
    """Z-Image text-to-image."""
    tokenizer = chat_tokenizer()
    text_encoder = Qwen3Config(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=len(tokenizer) + 6, max_position_embeddings=512, head_dim=8,
    )  # fmt: skip
    transformer = seeded(
        ZImageTransformer2DModel,
        all_patch_size=(2,), all_f_patch_size=(1,), in_channels=16, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2,
        n_kv_heads=2, cap_feat_dim=16, axes_dims=[8, 4, 4], axes_lens=[256, 32, 32],
    )  # fmt: skip
    for name, parameter in transformer.named_parameters():
        if "pad_token" in name:  # made by torch.empty
            torch.nn.init.normal_(parameter, std=0.02)
    ZImagePipeline(
        tokenizer=tokenizer,
        text_encoder=seeded(Qwen3Model, text_encoder),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=image_vae(),
        transformer=transformer,
    ).save_pretrained(folder)


BUILDERS: dict[str, Callable[[Path], None]] = {
    "wan_t2v": wan_t2v,
    "wan22_t2v": wan22_t2v,
    "wan_i2v": wan_i2v,
    "qwen_t2i": qwen_t2i,
    "flux": flux,
    "z_image": z_image,
}
"""Family name -> what writes its checkpoint into a folder."""
