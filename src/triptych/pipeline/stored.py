"""Where the tensors of safetensors files lie, so that their bytes can be read without mapping the files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor

_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Those of which an element is a whole number of bytes and means the same wherever it is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One tensor of a file, its elements in order and without gaps."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    def mapped(self) -> Tensor:
        """The tensor in host memory, mapped from the file."""
        with safe_open(self.file, "pt") as tensors:
            return tensors.get_tensor(self.name)


def stored_tensors(files: Iterable[str | Path]) -> dict[str, Stored] | None:
    """The tensors of ``files`` by name, in the order of their bytes; None where one has a dtype that is not known here.

    Of two of one name the last counts. Raises `OSError` or safetensors' own error for a file that is none, or is cut
    short.
    """
    found: dict[str, Stored] = {}
    for file in map(Path, files):
        for name, entry in _entries(file).items():
            dtype = _DTYPES.get(entry["dtype"])
            if dtype is None:
                return None
            found[name] = Stored(
                file=file, name=name, dtype=dtype, shape=tuple(entry["shape"]), offset=entry["data_offsets"][0]
            )
    return found


def _entries(file: Path) -> dict[str, dict[str, Any]]:
    """The header of a file, with offsets that count from the start of the file."""
    with safe_open(file, "pt"):  # which checks that sizes, shapes and the file's length agree
        pass
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    ordered = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    return {
        name: entry | {"data_offsets": [8 + length + offset for offset in entry["data_offsets"]]}
        for name, entry in ordered
    }
