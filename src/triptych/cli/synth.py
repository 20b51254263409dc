"""`triptych synth`: writes a model folder of random weights at a real size."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from triptych.bench.synth import write


def run(args: argparse.Namespace) -> int:
    """Write the folder and name what is in it, as it comes."""
    out = Path(args.out)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    write(
        args.size, out, torch.device(device), getattr(torch, args.dtype), told=lambda folder: print(folder, flush=True)
    )
    print(out)
    return 0
