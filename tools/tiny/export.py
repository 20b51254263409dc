"""Writes the trained networks as a stock Diffusers pipeline, and packs it for slow or narrow ways home."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

from tools.tiny.models import build_scheduler
from tools.tiny.recipe import Recipe

_PART = 13 * 2**20


def save_pipeline(
    folder: Path,
    vae: AutoencoderKLWan,
    text_encoder: UMT5EncoderModel,
    transformer: WanTransformer3DModel,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
) -> None:
    """Saves in bfloat16, through freshly built modules: whatever training hung onto the others stays behind."""
    fresh: list[Any] = [
        AutoencoderKLWan.from_config(vae.config),
        UMT5EncoderModel(text_encoder.config),
        WanTransformer3DModel.from_config(transformer.config),
    ]
    for new, trained in zip(fresh, (vae, text_encoder, transformer), strict=True):
        new.load_state_dict({name: value.cpu().contiguous() for name, value in trained.state_dict().items()})
        new.to(torch.bfloat16).eval()
    pipeline = WanPipeline(
        tokenizer=tokenizer,
        vae=fresh[0],
        text_encoder=fresh[1],
        transformer=fresh[2],
        scheduler=build_scheduler(recipe),
    )
    pipeline.save_pretrained(folder)
    # transformers 5 renamed the class; the old name loads with 4 and 5
    _edit(folder / "model_index.json", tokenizer=["transformers", "PreTrainedTokenizerFast"])
    _edit(folder / "tokenizer" / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


def _edit(path: Path, **changes: object) -> None:
    content: dict[str, Any] = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes, indent=2, sort_keys=True) + "\n")


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_serving_defaults(folder: Path, recipe: Recipe, guidance: float) -> None:
    """What Triptych offers when a request names no settings, and where it refuses."""
    clip = recipe.judged_clip
    write_json(
        folder / "triptych.json",
        {
            "defaults": {
                "num_inference_steps": recipe.steps,
                "guidance_scale": guidance,
                "height": clip.height,
                "width": clip.width,
                "num_frames": clip.frames,
                "fps": 8,
                "max_sequence_length": 64,
            },
            "limits": {"max_side": 256, "max_frames": 65, "max_steps": 100, "max_sequence_length": 512},
        },
    )


def pack(folder: Path, out: Path) -> None:
    """`folder` as tar in parts below 14 MiB: `cat NAME.tar.* | tar x`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(folder, arcname=folder.name)
    content = buffer.getvalue()
    for number, start in enumerate(range(0, len(content), _PART)):
        (out / f"{folder.name}.tar.{number:02d}").write_bytes(content[start : start + _PART])
