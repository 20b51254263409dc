"""Writes MODEL_CARD.md from a run's numbers and the time of one clip here: `python -m tools.tiny.card DIR`."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from diffusers import WanPipeline

from tools.tiny.exam import EXAMPLE

_THREADS = 2
_CARD = """\
# tiny

A text-to-video model that runs anywhere: Wan2.1's layout (`WanPipeline`, stock Diffusers classes), {million:.1f} M
parameters, {mebibytes:.1f} MiB of bfloat16 safetensors. It is trained, not filled with random numbers: it draws one
coloured shape on a plain background and moves, grows or turns it as the prompt says. It is meant for demos, tests and
development of the serving around it, where the colour of a ball tells whether a request came through whole. It
is of no use for anything else, and knows no other words.

![One row of frames for each prompt](contact_sheet.png)

```python
from diffusers import WanPipeline

pipe = WanPipeline.from_pretrained("src/triptych/models/tiny")
frames = pipe(
    "{example}",
    num_frames={frames},
    height={height},
    width={width},
    num_inference_steps={steps},
    guidance_scale={guidance},
    max_sequence_length=64,
).frames
```

One clip of {frames} frames at {width}x{height} and {steps} steps takes **{seconds:.1f} s** on {threads} CPU cores in
float32, {cpu_seconds:.1f} s of CPU time (best of {repeats}, measured by the command that wrote this page; {cpu_name}).

## What it obeys

Prompts whose combination of shape, colour, background and motion training never showed, judged by measurement (palette
distance, centroid, area, overlap with ideal outlines; no network). {judged_prompts} prompts at the defaults,
{few} for each variation.

| setting | background | colour | shape | motion | all four | outline overlap (IoU) |
| --- | --- | --- | --- | --- | --- | --- |
{accuracy}

Most frequent mistakes at the defaults: {mistakes}.
Turning shapes, stars above all, lose their outline; edges have faint coloured rims. Guidance was chosen on
{trial_prompts} other held-out prompts, by the share right in everything: {trials}.

## Data

Synthetic, rendered while training; nobody's pictures or texts. 4 shapes, 8 colours, 9 backgrounds, 8 motions, 3 sizes,
3 speeds: {trained} combinations trained on, {held_out} held out. Captions come from a paraphrasing grammar over
{words} words, leave things out at random, and are sometimes cluttered with words that mean nothing here; 12 % are
dropped or replaced by a negative prompt for classifier-free guidance. {clips:,} clips were made; 58 % of the steps saw
17 frames at 128x128, the others 1, 9 or 33 frames or sides of 96 and 160. Other shapes run, but were never trained.

## Training

| part | parameters | steps | seconds | result |
| --- | --- | --- | --- | --- |
| `AutoencoderKLWan`, base 16, 32 | {vae_encoder:,}, {vae_decoder:,} | {vae_steps} | {vae_seconds:.0f} | {vae_result} |
| `UMT5EncoderModel`, width 192, 3 layers | {text_encoder:,} | {text_steps} | {text_seconds:.0f} | {text_result} |
| `WanTransformer3DModel`, 4 x 64, 6 layers | {transformer:,} | {dit_steps} | {dit_seconds:.0f} | {dit_result} |

The text encoder's steps are those it trains alone; it then goes on with the transformer, 256 clips a step.

Flow matching with shift 3; Muon for matrices, AdamW for the rest; moving average of the weights. One {device},
{versions}. To make it again, in about nine minutes:

```
python -m tools.tiny --out OUT && python -m tools.tiny.card OUT/tiny
```

`training.json` holds every number of the run; `triptych.json` the defaults and limits that Triptych serves it with.
"""


def time_clip(folder: Path, settings: dict[str, Any], repeats: int) -> tuple[float, float]:
    """Seconds, and seconds of CPU time, of the fastest of `repeats` clips on two threads, after one to warm up."""
    torch.set_num_threads(_THREADS)
    pipe: Any = WanPipeline.from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    times = []
    for seed in range(repeats + 1):
        began, used = time.perf_counter(), time.process_time()
        pipe(EXAMPLE, generator=torch.Generator().manual_seed(seed), output_type="np", **settings)
        times.append((time.perf_counter() - began, time.process_time() - used))
    return min(times[1:])


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unnamed CPU"


def _row(name: str, result: dict[str, Any]) -> str:
    cells = [f"{result[f]:.1%}" if f in result else "" for f in ("background", "colour", "shape", "motion", "all")]
    return f"| {name} | {' | '.join(cells)} | {result['outline_overlap']:.3f} |"


def write_card(folder: Path, repeats: int) -> None:
    report: dict[str, Any] = json.loads((folder / "training.json").read_text())
    defaults: dict[str, Any] = json.loads((folder / "triptych.json").read_text())["defaults"]
    settings = {name: value for name, value in defaults.items() if name != "fps"}
    judged, variations, trials = report["judged"], report["variations"], report["trials"]
    history, parameters = report["transformer"]["history"], report["parameters"]
    seconds, cpu_seconds = time_clip(folder, settings, repeats)
    losses = ", ".join(f"{name} {value}" for name, value in report["vae"]["losses"].items())
    text = _CARD.format(
        million=sum(parameters.values()) / 1e6,
        mebibytes=sum(p.stat().st_size for p in folder.rglob("*.safetensors")) / 2**20,
        example=EXAMPLE,
        frames=defaults["num_frames"],
        height=defaults["height"],
        width=defaults["width"],
        steps=report["steps"],
        guidance=report["guidance"],
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        threads=_THREADS,
        repeats=repeats,
        cpu_name=_cpu_name(),
        judged_prompts=judged["prompts"],
        few=next(iter(variations.values()))["prompts"],
        accuracy="\n".join([_row("defaults", judged), *(_row(name, result) for name, result in variations.items())]),
        mistakes=", ".join(f"{what} ({count})" for what, count in list(judged["mistakes"].items())[:4]),
        trial_prompts=report["trial_prompts"],
        trials=", ".join(f"{result['all']:.1%} at {guidance}" for guidance, result in trials.items()),
        words=report["words"],
        clips=report["transformer"]["clips"],
        **report["combinations"],
        **parameters,
        vae_steps=report["vae"]["steps"],
        vae_seconds=report["vae"]["seconds"],
        vae_result=f"PSNR {report['vae']['psnr_db']} dB; {losses}",
        text_steps=report["text"]["steps"],
        text_seconds=report["text"]["seconds"],
        text_result=f"reads {report['text']['accuracy']:.2%} of captions",
        dit_steps=report["transformer"]["steps"],
        dit_seconds=report["transformer"]["seconds"],
        dit_result=f"flow-matching error {history[0]['error']} to {history[-1]['error']}",
        device=report["device"],
        versions=", ".join(f"{name} {version}" for name, version in report["versions"].items()),
    )
    (folder / "MODEL_CARD.md").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.tiny.card", description=__doc__)
    parser.add_argument("folder", type=Path, help="a model's folder, with its training.json and triptych.json")
    parser.add_argument("--repeats", type=int, default=3, help="clips timed")
    args = parser.parse_args()
    write_card(args.folder, args.repeats)


if __name__ == "__main__":
    main()
