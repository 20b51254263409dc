"""The four networks in Wan2.1's layout, with weights to start training from."""

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from torch import Tensor, nn
from transformers import UMT5Config, UMT5EncoderModel

from tools.tiny.recipe import Recipe
from tools.tiny.tokens import END, PAD

LATENT_CHANNELS = 16


def build_vae(recipe: Recipe) -> AutoencoderKLWan:
    encoder, decoder = recipe.vae_base
    vae = AutoencoderKLWan(
        base_dim=encoder,
        decoder_base_dim=None if decoder == encoder else decoder,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )
    _start_vae(vae)
    return vae


def build_text_encoder(recipe: Recipe, words: int) -> UMT5EncoderModel:
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=words,
            d_model=recipe.text_width,
            d_kv=32,
            d_ff=2 * recipe.text_width,
            num_layers=recipe.text_layers,
            num_heads=recipe.text_width // 32,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            relative_attention_num_buckets=32,
            relative_attention_max_distance=64,
            pad_token_id=PAD,
            eos_token_id=END,
            decoder_start_token_id=PAD,
        )
    )


def build_transformer(recipe: Recipe) -> WanTransformer3DModel:
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=recipe.heads,
        attention_head_dim=64,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=recipe.text_width,
        freq_dim=256,
        ffn_dim=recipe.ffn,
        num_layers=recipe.layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        eps=1e-6,
    )
    for module in transformer.modules():
        if isinstance(module, nn.Linear | nn.Conv3d):
            nn.init.xavier_uniform_(module.weight.view(len(module.weight), -1))
            nn.init.zeros_(module.bias)
    embed = transformer.condition_embedder
    for layer in (embed.time_embedder.linear_1, embed.time_embedder.linear_2):
        nn.init.normal_(layer.weight, std=0.02)
    for layer in (embed.text_embedder.linear_1, embed.text_embedder.linear_2):
        nn.init.normal_(layer.weight, std=0.05)
    nn.init.zeros_(transformer.proj_out.weight)
    return transformer


def build_scheduler(recipe: Recipe) -> UniPCMultistepScheduler:
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=recipe.flow_shift,
    )


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# PyTorch's own start of a convolution shrinks the signal by about sqrt(3) a layer; over this depth nothing arrives, and
# the autoencoder settles on the mean colour. Below, every branch keeps the variance, and the path without branches
# (shortcuts and resampling) starts as what it has to become at least: averaging on the way down, repeating upwards.


@torch.no_grad()
def _start_vae(vae: AutoencoderKLWan) -> None:
    for name, module in vae.named_modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            nn.init.zeros_(module.bias)
            down = name.startswith("encoder")
            _keep_variance(module.weight, causal=not (down and name.endswith("time_conv")))
            _start_convolution(name, module.weight, down=down)
    nn.init.constant_(vae.quant_conv.bias[LATENT_CHANNELS:], -5.0)  # log-variance: an almost noiseless posterior
    vae.quant_conv.weight[LATENT_CHANNELS:] *= 0.1


def _keep_variance(weight: Tensor, *, causal: bool) -> None:
    """Unit gain; a kernel over three frames starts on the newest one, which the first frame of a clip has too."""
    past = weight.shape[2] - 1 if causal and weight.dim() == 5 else 0
    fan_in = weight[0].numel() // (past + 1)
    nn.init.normal_(weight, std=fan_in**-0.5)
    if past:
        weight[:, :, :past] *= 0.05


def _start_convolution(name: str, weight: Tensor, *, down: bool) -> None:
    outputs, inputs = weight.shape[:2]
    match name.rsplit(".", 1)[-1]:
        case "conv2":
            weight *= 0.3  # residual branches start small
        case "proj":
            weight.zero_()  # attention starts off
        case "time_conv" if down:
            weight *= 0.5
            _identity(weight[:, :, 1], inputs, 0.5)
            _identity(weight[:, :, 2], inputs, 0.5)
        case "time_conv":
            weight *= 0.5
            _identity(weight[:, :, 2], inputs, 1.0)
        case "1" if down:  # the convolution inside a spatial resampling
            weight *= 0.5
            for y in (0, 1):
                for x in (0, 1):
                    _identity(weight[:, :, y, x], inputs, 0.25)
        case "1":
            weight *= 0.5
            _identity(weight[:, :, 1, 1], inputs, 1.0, rows=min(outputs, inputs))
        case "conv_shortcut" | "post_quant_conv":
            weight *= 0.5
            _identity(weight[:, :, -1, 0, 0], inputs, 1.0, rows=min(outputs, inputs))
        case "conv_in":
            weight *= 0.5
            _identity(weight[:, :, -1, 1, 1], inputs, 1.0)
        case _:
            pass


def _identity(matrix: Tensor, inputs: int, gain: float, rows: int | None = None) -> None:
    """Adds `gain` where output channel i reads input channel i (modulo their number). `matrix` is a view [out, in]."""
    index = torch.arange(len(matrix) if rows is None else rows)
    matrix[index, index % inputs] += gain
