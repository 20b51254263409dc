"""`triptych synth`: writes a model folder of random weights at a real size."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from triptych.bench.synth import write


def run(args: argparse.Namespace) -> int:
    """Write the folder and name what is in it."""
    out = Path(args.out)
    for folder in write(args.size, out, torch.device(args.device), getattr(torch, args.dtype)):
        print(folder)
    print(out)
    return 0
