"""Stock Diffusers from prompt to MP4 bytes, in a process of its own that loads nothing of Triptych but the MP4 writer.

``python -m triptych.bench.stock`` loads the model as its documentation says, makes one small request that is not
counted, and prints one JSON line for each request that is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from triptych.bench.arrangement import Arrangement
from triptych.errors import StageError


def measure_stock(arrangement: Arrangement, fields: Mapping[str, Any], repeats: int) -> list[float]:
    """Seconds of each of ``repeats`` requests with ``fields`` of the HTTP API. Raises `StageError` when one fails."""
    device = arrangement.options.get("device")
    command = [sys.executable, "-m", "triptych.bench.stock", arrangement.model, json.dumps(dict(fields)), str(repeats)]
    if device is not None:
        command += ["--device", str(device)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise StageError(f"stock Diffusers failed:\n{result.stderr[-4000:]}")
    return [json.loads(line)["seconds"] for line in result.stdout.splitlines() if line.startswith("{")]


def run(model: str, fields: Mapping[str, Any], repeats: int, device: str) -> Iterator[dict[str, Any]]:
    """One entry for each request: its seconds, the part of them that wrote the file, and the file's length."""
    import torch
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    from triptych.pipeline.decode import to_clips
    from triptych.pipeline.source import resolve_source
    from triptych.worker.media import encode_clip

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    pipeline: Any = DiffusionPipeline.from_pretrained(resolve_source(model), dtype=dtype).to(device)
    pipeline.set_progress_bar_config(disable=True)
    settings = _settings(fields)
    pipeline(**{**settings, "num_inference_steps": 3})  # the third step of UniPC is the first with all of its kernels
    for seed in range(repeats):
        begun = time.perf_counter()
        output = pipeline(**settings, output_type="pt", generator=torch.Generator("cpu").manual_seed(seed))
        name = "videos" if hasattr(output, "frames") else "images"
        clips = to_clips({name: output.frames if name == "videos" else output.images}, fps=16.0)
        made = time.perf_counter()
        files = [encode_clip(clip, None) for clip in clips]
        ended = time.perf_counter()
        yield {"seconds": ended - begun, "encoding": ended - made, "nbytes": sum(len(file.data) for file in files)}


def _settings(fields: Mapping[str, Any]) -> dict[str, Any]:
    """HTTP fields in the words of a classic pipeline."""
    settings = dict(fields)
    if "size" in settings:
        settings["width"], settings["height"] = (int(part) for part in settings.pop("size").split("x"))
    return settings


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("fields")
    parser.add_argument("repeats", type=int)
    parser.add_argument("--device")
    args = parser.parse_args()
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    for row in run(args.model, json.loads(args.fields), args.repeats, device):
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
