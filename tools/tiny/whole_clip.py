"""Encodes and decodes whole clips at once with a stock Wan VAE, whose own loop goes by chunks of four frames.

The numbers are the same (see `largest_difference`), with far fewer and larger kernels. Called without a feature cache
the stock encoder and decoder already take a whole clip, all but the resampling in time, which they then leave out:
two hooks on the resampling modules put it back.
"""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample, WanRMS_norm
from torch import Tensor, nn

from tools.tiny.recipe import Clip


class _Repeat2x(nn.Module):
    """Nearest upsampling by two in any dtype. The library's goes through float32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2.0, mode="nearest")


def _normed_silu(rows: Tensor, gamma: Tensor) -> Tensor:
    scale = torch.rsqrt(rows.float().square().mean(1, keepdim=True) + 1e-20)
    return F.silu(rows.float() * scale * gamma).to(rows.dtype)


class _NormedSilu(nn.Module):
    """A Wan norm and the activation behind it, in a form of which one compilation serves all sizes: on rows of
    channels, which channels-last clips are already, and with a weight that is no parameter (those have fixed sizes)."""

    compute = staticmethod(_normed_silu)

    def __init__(self, norm: WanRMS_norm) -> None:
        super().__init__()
        self.gamma = norm.gamma

    def forward(self, x: Tensor) -> Tensor:
        last = x.movedim(1, -1)
        rows = self.compute(last.reshape(-1, x.shape[1]), self.gamma.flatten())
        return rows.view(last.shape).movedim(-1, 1)


def _fuse_norms(vae: AutoencoderKLWan) -> None:
    for module in vae.modules():
        for name in ("norm1", "norm2", "norm_out"):
            if isinstance(norm := getattr(module, name, None), WanRMS_norm):
                setattr(module, name, _NormedSilu(norm))
                module.nonlinearity = nn.Identity()


def _double_frames(module: WanResample, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    if module.mode != "upsample3d" or kwargs.get("feat_cache") is not None or args[0].shape[2] == 1:
        return None
    first, later = args[0][:, :, :1], args[0][:, :, 1:]
    pairs = torch.stack(module.time_conv(later).chunk(2, 1), 3).flatten(2, 3)
    return (_like(torch.cat([first, pairs], 2), args[0]),), kwargs


def _halve_frames(module: WanResample, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
    if module.mode != "downsample3d" or kwargs.get("feat_cache") is not None or output.shape[2] == 1:
        return output
    return _like(torch.cat([output[:, :, :1], module.time_conv(output)], 2), args[0])


def _like(x: Tensor, pattern: Tensor) -> Tensor:
    last = pattern.is_contiguous(memory_format=torch.channels_last_3d) and not pattern.is_contiguous()
    return x.contiguous(memory_format=torch.channels_last_3d) if last else x


class WholeClipVae:
    """A VAE in training; parameters keep their names and the stock chunked path its results."""

    def __init__(self, vae: AutoencoderKLWan) -> None:
        self.vae = vae
        self._fast = False
        _fuse_norms(vae)
        for module in vae.modules():
            if isinstance(module, WanResample):
                module.register_forward_pre_hook(_double_frames, with_kwargs=True)
                module.register_forward_hook(_halve_frames, with_kwargs=True)
                if module.mode.startswith("upsample"):
                    module.resample[0] = _Repeat2x()

    def speed_up(self) -> None:
        """What GPUs like: channels last, norm and activation compiled to one kernel."""
        self._fast = True
        compiled = torch.compile(_normed_silu, dynamic=True)
        for module in self.vae.modules():
            if isinstance(module, _NormedSilu):
                module.compute = compiled
        for parameter in self.vae.parameters():
            layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(parameter.dim())
            if layout is not None:
                parameter.data = parameter.data.contiguous(memory_format=layout)

    def encode(self, clips: Tensor) -> tuple[Tensor, Tensor]:
        """Clips [n, 3, t, height, width] -> mean and log-variance [n, 16, (t + 3) / 4, height / 8, width / 8]."""
        if self._fast:
            clips = clips.contiguous(memory_format=torch.channels_last_3d)
        mean, log_variance = self.vae.quant_conv(self.vae.encoder(clips)).float().chunk(2, 1)
        return mean, log_variance.clamp(-30, 20)

    def decode(self, latents: Tensor) -> Tensor:
        """Clips, not yet clamped to [-1, 1]."""
        if self._fast:
            latents = latents.contiguous(memory_format=torch.channels_last_3d)
        return self.vae.decoder(self.vae.post_quant_conv(latents)).float()

    @torch.no_grad()
    def largest_difference(self, clip: Clip) -> float:
        """Of the whole-clip results to the stock chunked ones, relative to the largest value."""
        device = self.vae.device
        clips = torch.rand(2, 3, *clip, generator=torch.Generator(device).manual_seed(0), device=device) * 2 - 1
        mean, _ = self.encode(clips)
        expected = self.vae.encode(clips).latent_dist.mean
        worst = (mean - expected).abs().max() / expected.abs().max()
        decoded, expected = self.decode(mean).clamp(-1, 1), self.vae.decode(mean).sample
        return float(torch.maximum(worst, (decoded - expected).abs().max() / expected.abs().max()))
