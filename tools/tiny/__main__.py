"""Trains, saves and judges the model. About nine minutes on one H200."""

import argparse
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from tools.tiny import export, vae_training
from tools.tiny.dit_training import Trainer
from tools.tiny.exam import Examiner
from tools.tiny.latents import LatentPool
from tools.tiny.models import build_text_encoder, build_transformer, build_vae, parameters
from tools.tiny.recipe import PRESETS, Clip, Recipe
from tools.tiny.tokens import build_bank, build_tokenizer, complaints
from tools.tiny.whole_clip import WholeClipVae
from tools.tiny.world import combinations

log = logging.getLogger("tools.tiny")

_TOLERANCE = {"cpu": 1e-4, "cuda": 2e-2}  # of the training forwards to the stock ones; on CUDA in TF32


def _checked(difference: float, what: str, device: torch.device) -> None:
    log.info("%s: training forward differs from the stock one by %.1e", what, difference)
    limit = _TOLERANCE[device.type]
    if not difference < limit:
        raise RuntimeError(
            f"{what}: training forward differs from the stock one by {difference:.1e}, not below {limit:.0e}"
        )


def _train(recipe: Recipe, device: torch.device, seed: int, folder: Path) -> dict[str, Any]:
    began = time.monotonic()
    tokenizer = build_tokenizer()
    table = combinations(held_out=False)
    bank = build_bank(tokenizer, table, recipe.captions_each, seed)
    log.info("%d captions of %d combinations", bank.written[..., 0].numel(), len(table))
    torch.manual_seed(seed)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch._dynamo.config.recompile_limit = 32
    vae = build_vae(recipe).to(device)
    text_encoder = build_text_encoder(recipe, len(tokenizer)).to(device)
    transformer = build_transformer(recipe).to(device)
    report: dict[str, Any] = {
        "versions": {
            "torch": torch.__version__,
            "diffusers": diffusers.__version__,
            "transformers": transformers.__version__,
        },
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "parameters": {
            "vae_encoder": parameters(vae.encoder),
            "vae_decoder": parameters(vae.decoder),
            "text_encoder": parameters(text_encoder),
            "transformer": parameters(transformer),
        },
        "words": len(tokenizer),
        "combinations": {"trained": len(table), "held_out": len(combinations(held_out=True))},
    }
    log.info("%s", report)

    whole = WholeClipVae(vae)
    for clip in (Clip(9, 64, 64), Clip(1, 64, 64)):
        _checked(whole.largest_difference(clip), "VAE", device)
    if device.type == "cuda":
        whole.speed_up()
    negative = complaints(tokenizer, 256, seed)
    trainer = Trainer(text_encoder, transformer, recipe, seed + 4)
    trial = LatentPool(whole, recipe, table, bank, negative, seed)
    trial.fill(0)
    for length in (32, 512):
        _checked(trainer.largest_difference(trial, length), "transformer", device)
    trainer.rehearse(trial)
    del trial

    report["vae"] = vae_training.train(whole, recipe, device, seed + 1)
    vae.eval().requires_grad_(False)
    report["vae"] |= vae_training.measure(whole, recipe, device, seed + 2)
    log.info("vae %s", report["vae"])

    pool = LatentPool(whole, recipe, table, bank, negative, seed + 3)
    pool.fill(recipe.fill_seconds)
    log.info("pool of %d clips", pool.made)
    report["text"] = trainer.read_captions(pool)
    log.info("text %s", report["text"])
    left = recipe.total_seconds - recipe.judge_seconds - (time.monotonic() - began)
    report["transformer"] = trainer.denoise(pool, left)
    export.save_pipeline(folder, vae, text_encoder, transformer, tokenizer, recipe)
    return report


def _examine(examiner: Examiner, recipe: Recipe, folder: Path, report: dict[str, Any]) -> None:
    guidance, report["trials"] = examiner.best_guidance()
    export.write_serving_defaults(folder, recipe, guidance)
    report |= {"steps": recipe.steps, "guidance": guidance, "trial_prompts": recipe.trial_prompts}
    report["judged"] = examiner.judged(guidance)
    log.info("judged at guidance %.1f: %s", guidance, report["judged"])
    examiner.contact_sheet(folder / "contact_sheet.png", guidance)
    export.write_json(folder / "training.json", report)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.tiny", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder that receives the model's folder, `tiny`")
    parser.add_argument("--preset", choices=PRESETS, default="full")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pack", action="store_true", help="write tar parts below 14 MiB to --out instead of a folder")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)7.0f ms  %(message)s")
    recipe, device = PRESETS[args.preset], torch.device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch if args.pack else args.out) / "tiny"
        report = _train(recipe, device, args.seed, folder)

        def pack() -> None:  # after each part, so that a run cut short has what came before
            if args.pack:
                export.pack(folder, args.out)

        pack()
        torch.backends.cudnn.benchmark = False
        examiner = Examiner(folder, recipe, device)
        _examine(examiner, recipe, folder, report)
        pack()
        report["variations"] = examiner.variations(report["guidance"])
        log.info("variations %s", report["variations"])
        export.write_json(folder / "training.json", report)
        pack()


if __name__ == "__main__":
    main()
