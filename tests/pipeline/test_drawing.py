"""Blocks that draw on the GPU with the request's generator, which is the CPU's: torch refuses that on a real GPU.

Here tensors without memory stand for those of a GPU, and a mode for torch's refusal.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from torch.overrides import TorchFunctionMode

from triptych.pipeline.drawing import WhereTheGeneratorIs, draw_elsewhere
from triptych.pipeline.families import FAMILIES

META = torch.device("meta")


class LikeAGpu(TorchFunctionMode):
    """Refuses what a GPU would."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator, device = kwargs.get("generator"), kwargs.get("device")
        if generator is not None and device is not None and torch.device(device).type != generator.device.type:
            raise RuntimeError(f"Expected a '{device}' device type for generator but found '{generator.device}'")
        return func(*args, **kwargs)


def generator() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(3)


def test_numbers_are_drawn_where_the_generator_is() -> None:
    there, here = generator(), generator()
    with LikeAGpu(), WhereTheGeneratorIs():
        drawn = torch.rand(2, 3, device=META, generator=there)
    assert drawn.device == META
    torch.rand(2, 3, generator=here)
    assert torch.equal(there.get_state(), here.get_state())


def test_what_is_drawn_at_home_is_as_ever() -> None:
    with WhereTheGeneratorIs():
        drawn = torch.randn(4, device="cpu", generator=generator()), torch.ones(2, device="cpu")
    assert torch.equal(drawn[0], torch.randn(4, generator=generator()))


HELIOS = ("HeliosModularPipeline", "HeliosPyramidModularPipeline", "HeliosPyramidDistilledModularPipeline")


@pytest.mark.parametrize("family", HELIOS)
def test_helios_begins_with_a_picture_on_a_gpu(family: str) -> None:
    """Symptom: Expected a 'cuda' device type for generator but found 'cpu'."""
    from diffusers.modular_pipelines.modular_pipeline import PipelineState

    whole: Any = getattr(diffusers, family)()
    blocks = draw_elsewhere(whole.blocks, FAMILIES[family].draw_on_device)
    (block,) = named(blocks, "HeliosAddNoiseToImageLatentsStep")
    own = generator()
    values = {name: torch.empty(1, 4, 1, 2, 2, device=META) for name in ("image_latents", "fake_image_latents")}
    state = PipelineState(values={**values, "generator": own})
    with LikeAGpu():
        _, state = block(SimpleNamespace(_execution_device=META), state)
    assert state.values["image_latents"].device == META
    expected = generator()
    for _ in range(2):
        torch.rand(1, generator=expected)
        torch.randn(1, 4, 1, 2, 2, generator=expected)
    assert torch.equal(own.get_state(), expected.get_state())


def named(block: Any, kind: str) -> list[Any]:
    found = {id(b): b for b in (block, *(inner for child in block.sub_blocks.values() for inner in named(child, kind)))}
    return [b for b in found.values() if type(b).__name__ == kind]


def test_blocks_of_diffusers_that_draw_so_are_known() -> None:
    """A new one, after Diffusers was updated, belongs into the table of families."""
    known = {kind for family in FAMILIES.values() for kind in family.draw_on_device}
    found = set(drawing_classes(Path(diffusers.__file__).parent / "modular_pipelines"))
    assert found == known


def drawing_classes(folder: Path) -> Iterator[str]:
    """Classes that hand torch both a generator and a device that is not said to be the generator's."""
    for file in folder.rglob("*.py"):
        for kind in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)):
            for call in (node for node in ast.walk(kind) if isinstance(node, ast.Call)):
                said = {word.arg: ast.unparse(word.value) for word in call.keywords if word.arg}
                if not ast.unparse(call.func).startswith("torch.") or not {"generator", "device"} <= said.keys():
                    continue
                if said["device"] != f"{said['generator']}.device":
                    yield kind.name
