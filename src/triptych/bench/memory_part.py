"""One row of `triptych bench memory`: loads some roles in this process, runs one short request, tells what it took.

``python -m triptych.bench.memory_part`` reads a `Part` as JSON and writes a `Usage`. Handoffs between roles of
different processes are files in a folder that they share.
"""

from __future__ import annotations

import io
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from triptych.bench import synth
from triptych.config import DeviceType, DTypeName, ModelConfig, Offload, ProfileChoice, Quantisation
from triptych.ids import ROLES, Role
from triptych.pipeline.load import load_pipeline, weightless_pipeline
from triptych.pipeline.stage import RolePipeline, StageOutput
from triptych.pipeline.weights import load_component
from triptych.wire.schema import RequestSchema

_PROMPT = "A red fox runs through fresh snow at dawn, seen from a low camera, soft light, shallow depth of field."


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What to load and to run."""

    folder: str
    size: str | None
    """Name of the size whose random weights are made; None: the folder has weights."""
    roles: tuple[Role, ...]
    handoffs: str
    """Folder for what passes between processes."""
    params: dict[str, int]
    device: DeviceType
    dtype: DTypeName | None = None
    profile: ProfileChoice = "stock"
    quant: dict[Role, Quantisation] = {}
    offload: dict[Role, Offload] = {}
    vae_tiling: bool = False
    vae_slicing: bool = False

    @property
    def model(self) -> ModelConfig:
        """How the roles are loaded."""
        return ModelConfig(
            path=self.folder,
            device=self.device,
            dtype=self.dtype,
            profile=self.profile,
            quant=self.quant,
            offload=self.offload,
            vae_tiling=self.vae_tiling,
            vae_slicing=self.vae_slicing,
        )


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Memory in bytes, and how long it took to fill it."""

    seconds: float | None
    """From nothing to weights that are ready to compute with; None where they were made instead of read."""
    loaded: int | None
    """Of the GPU, once the weights are there; None on the CPU."""
    allocated: int | None
    """Of the GPU, the most in use while the request ran."""
    reserved: int | None
    """Of the GPU, the most that torch kept for it."""
    resident: int
    """Of the host, the most that the process had, libraries included."""


def measure(part: Part) -> Usage:
    """Load and run ``part`` in this process."""
    torch.set_grad_enabled(False)
    on_gpu = part.device == "cuda"
    device = torch.device("cuda:0" if on_gpu else "cpu")
    component = load_component if part.size is None else synth.random_weights(part.size, device)
    begun = time.perf_counter()
    pipeline = load_pipeline(part.model, part.roles, str(device), component=component)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    loaded = None
    if on_gpu:
        torch.cuda.empty_cache()
        loaded = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    _run(pipeline, part, device)
    if on_gpu:
        torch.cuda.synchronize()
    return Usage(
        seconds=seconds if part.size is None else None,
        loaded=loaded,
        allocated=torch.cuda.max_memory_allocated() if on_gpu else None,
        reserved=torch.cuda.max_memory_reserved() if on_gpu else None,
        resident=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def hand_over_zeros(part: Part, roles: tuple[Role, ...]) -> bool:
    """Write what ``roles`` would hand over for the request, with zeros for what their models would compute.

    False, and nothing is written, where no shapes are known without the models themselves.
    """
    model = ModelConfig(path=part.folder, device="cpu", dtype=part.model.effective_dtype)
    with torch.no_grad():
        pipeline = weightless_pipeline(model, "cpu")
        if pipeline is None:
            return False
        _run(pipeline, msgspec.structs.replace(part, roles=roles), torch.device("cpu"))
    return True


def _run(pipeline: RolePipeline, part: Part, device: torch.device) -> None:
    params, images = request(pipeline.schema, part.params)
    folder = Path(part.handoffs)
    for role in ROLES:
        if role not in part.roles:
            continue
        run = pipeline.start(role, params, list(_received(folder, role, device)), images)
        while (result := run.advance()) is None:
            pass
        for number, output in enumerate(result.outputs):
            _send(folder / f"{output.consumer}.{role}.{number}", output)


def request(schema: RequestSchema, said: dict[str, int]) -> tuple[dict[str, Any], list[bytes]]:
    """A request of the model: what was said, the model's defaults, and a picture where it needs one."""
    params: dict[str, Any] = {"prompt": _PROMPT, "seed": 0, **said}
    params = {name: value for name, value in params.items() if schema.param(name) is not None}
    image = schema.param("image")
    if image is None or not image.required:
        return params, []
    sides: list[Any] = [params.get(n) or getattr(schema.param(n), "default", None) or 64 for n in ("height", "width")]
    pixels = np.random.default_rng(0).integers(0, 255, (sides[0], sides[1], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    blob = {"blob": 0}
    return {**params, "image": [blob] if image.type == "images" else blob}, [file.getvalue()]


def _send(path: Path, output: StageOutput) -> None:
    path.with_name(f"{path.name}.tree").write_bytes(output.tree)
    save_file({str(i): t.contiguous() for i, t in enumerate(output.tensors)}, f"{path}.safetensors")


def _received(folder: Path, role: Role, device: torch.device) -> Iterator[tuple[bytes, list[torch.Tensor]]]:
    for tree in sorted(folder.glob(f"{role}.*.tree")):
        tensors = load_file(tree.with_suffix(".safetensors"), device=str(device))
        yield tree.read_bytes(), [tensors[str(i)] for i in range(len(tensors))]


if __name__ == "__main__":
    usage = measure(msgspec.json.decode(sys.stdin.buffer.read(), type=Part))
    sys.stdout.buffer.write(msgspec.json.encode(usage))
