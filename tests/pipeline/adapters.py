"""A LoRA adapter for tiny models, written as a file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from triptych.config import Lora


def adapter(model: Any, layers: Iterable[str], path: Path, seed: int = 1) -> Lora:
    """Of rank 4, for linear ``layers`` of a transformer that is loaded, of a size that shows in what it makes."""
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in layers:
        linear = model.get_submodule(layer)
        down = torch.randn(4, linear.in_features, generator=random) / linear.in_features**0.5
        tensors[f"transformer.{layer}.lora_A.weight"] = down
        tensors[f"transformer.{layer}.lora_B.weight"] = torch.randn(linear.out_features, 4, generator=random) * 4
    save_file(tensors, path)
    return Lora(name=path.stem, path=str(path))
