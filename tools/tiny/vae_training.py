"""First stage: the VAE learns to redraw clips, then its latents are measured."""

import logging
from typing import Any

import torch
from torch import Tensor

from tools.tiny import judge
from tools.tiny.clock import Stage
from tools.tiny.models import LATENT_CHANNELS
from tools.tiny.optim import Optimizers
from tools.tiny.recipe import Clip, Recipe
from tools.tiny.whole_clip import WholeClipVae
from tools.tiny.world import combinations, render

log = logging.getLogger(__name__)

_WEIGHTS = {"colour": 1.0, "edges": 0.5, "change": 0.25, "kl": 3e-4}
_ADAM_RATE, _MUON_RATE = 4e-3, 0.02
_ROWS, _COLUMNS, _FRAMES = 3, 4, 2


def _slope_error(a: Tensor, b: Tensor, axis: int) -> Tensor:
    """Mean difference of the steps from one pixel (or frame) to the next: keeps edges sharp."""
    return (a.diff(dim=axis) - b.diff(dim=axis)).abs().mean()


def _muon_rate(name: str, parameter: Tensor) -> float:
    is_kernel = parameter.dim() >= 4 and parameter[0].numel() > 1 and min(parameter.shape[:2]) > 3
    return _MUON_RATE if is_kernel else 0.0


def train(vae: WholeClipVae, recipe: Recipe, device: torch.device, seed: int) -> dict[str, Any]:
    """Trains in place; returns steps, seconds and the last losses."""
    generator = torch.Generator(device).manual_seed(seed)
    table = combinations(held_out=False).to(device)
    optimizers = Optimizers(vae.vae.named_parameters(), _muon_rate, _ADAM_RATE)
    stage = Stage(recipe.vae_seconds, recipe.step_limit)
    losses: dict[str, float] = {}
    for progress in stage:
        windowed = progress < recipe.vae_window_share
        count = recipe.vae_batch[0 if windowed else 1]
        rows = table[torch.randint(len(table), (count,), generator=generator, device=device)]
        with torch.no_grad():
            clips = render(rows, recipe.vae_scene, generator, recipe.vae_window if windowed else None)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            mean, log_variance = vae.encode(clips)
            noise = torch.randn(mean.shape, generator=generator, device=device)
            redrawn = vae.decode(mean + noise * (0.5 * log_variance).exp())
        parts = {
            "colour": (redrawn - clips).abs().mean(),
            "edges": _slope_error(redrawn, clips, _ROWS) + _slope_error(redrawn, clips, _COLUMNS),
            "change": _slope_error(redrawn, clips, _FRAMES),
            "kl": 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean(),
        }
        optimizers.zero_grad()
        torch.stack([_WEIGHTS[name] * part for name, part in parts.items()]).sum().backward()
        optimizers.step(progress)
        if stage.steps % recipe.log_every == 0 or stage.steps in (10, recipe.step_limit):
            losses = {name: round(float(part.detach()), 4) for name, part in parts.items()}
            log.info("vae step %d, %.0f s: %s", stage.steps, stage.elapsed, losses)
    return stage.summary(device) | {"losses": losses}


@torch.inference_mode()
def measure(vae: WholeClipVae, recipe: Recipe, device: torch.device, seed: int) -> dict[str, Any]:
    """Sets latents_mean and latents_std from training clips; returns the quality on held-out combinations."""
    generator = torch.Generator(device).manual_seed(seed)
    seen, unseen = (combinations(held_out=h).to(device) for h in (False, True))

    def encoded(table: Tensor, clip: Clip, count: int) -> tuple[Tensor, Tensor, Tensor]:
        rows = table[torch.randint(len(table), (count,), generator=generator, device=device)]
        clips = render(rows, clip, generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return rows, clips, vae.encode(clips)[0]

    kinds = [bucket.clip for bucket in recipe.buckets for _ in range(2)]
    samples = [encoded(seen, clip, recipe.encode_batch // 4)[2] for clip in kinds]
    latents = torch.cat([s.transpose(0, 1).reshape(LATENT_CHANNELS, -1) for s in samples], 1)
    mean, std = latents.mean(1), latents.std(1)
    vae.vae.register_to_config(
        latents_mean=[round(v, 5) for v in mean.tolist()], latents_std=[round(v, 5) for v in std.tolist()]
    )
    rows, clips, latents = encoded(unseen, recipe.judged_clip, recipe.encode_batch // 2)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        redrawn = vae.decode(latents).clamp(-1, 1)
    error = ((redrawn - clips) / 2).square().mean((1, 2, 3, 4))
    truth = judge.Truth.of_rows(rows.cpu())
    pictures = {"rendered": clips, "redrawn": redrawn}
    return {
        "psnr_db": round(float((-10 * error.log10()).mean()), 2),
        "judged": {
            name: judge.accuracy([judge.look(f) for f in to_frames(video)], truth) for name, video in pictures.items()
        },
    }


def to_frames(clips: Tensor) -> Tensor:
    """[n, 3, frames, height, width] in [-1, 1] -> [n, frames, height, width, 3] in [0, 1], on the CPU."""
    return ((clips.float() + 1) / 2).clamp(0, 1).permute(0, 2, 3, 4, 1).cpu()
