"""Where a pipeline is cut, and which state entries cross: both read off the blocks' own declarations.

The top-level block list is cut at the block named ``denoise``: what stands before is the encoder, the block itself the
denoiser, what follows the decoder. An entry crosses when a later part declares that it reads it: as an input, as a
trigger that selects a branch, or through a kwargs type under which a producer filed it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from triptych.errors import ModelError
from triptych.ids import Role

DENOISE = "denoise"


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a part may read from the state."""

    keys: frozenset[str]
    kwargs_types: frozenset[str]

    def of(self, kwargs_types: Mapping[str, list[str]]) -> frozenset[str]:
        """All names, given which names are filed under each kwargs type."""
        return self.keys.union(*(kwargs_types.get(name, ()) for name in self.kwargs_types))


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """The three parts of one pipeline and what flows between them."""

    inputs: tuple[Any, ...]
    """Declared inputs of the uncut blocks. (Blocks compute theirs anew at each look.)"""
    outputs: frozenset[str]
    """Declared outputs of the uncut blocks."""
    parts: dict[Role, Any]
    needs: dict[Role, Needs]
    denoiser_writes: frozenset[str]
    """Entries that the denoiser may change, which therefore cannot go past it."""
    executed: dict[Role, Any]
    """The blocks of each part that run for this model's requests, conditional branches resolved."""
    given: frozenset[str]
    """Conditioning inputs that every request has: the prompt, and the image where the model cannot do without."""
    optional: frozenset[str] = frozenset()
    """Conditioning inputs that a request may have."""


def cut(pipeline_class: str, blocks: Any, *, picture: Literal["needed", "optional", "unsaid"] = "unsaid") -> Cut:
    """Cut ``blocks`` into the roles; raises `ModelError` when they have no top-level denoise block.

    ``picture``: whether requests begin with one, or may, where the blocks could do without; if nothing is said of it,
    only where they could not.
    """
    names = list(blocks.sub_blocks)
    if DENOISE not in names:
        raise ModelError(f"{pipeline_class} cannot be split: none of its blocks {names} is named {DENOISE!r}")
    at = names.index(DENOISE)
    given, executed = _executed(pipeline_class, blocks, picture == "needed")
    optional = frozenset({"image"} if picture == "optional" else ()) - given
    if optional:  # what runs with a picture loads all that is loaded without
        executed = blocks.get_execution_blocks(**dict.fromkeys((*given, *optional), True))
    sections = {Role.ENCODER: names[:at], Role.DENOISER: [DENOISE], Role.DECODER: names[at + 1 :]}
    parts = {role: _sequence({name: blocks.sub_blocks[name] for name in section}) for role, section in sections.items()}
    return Cut(
        inputs=tuple(entry for entry in blocks.inputs if entry.name),
        outputs=frozenset(output.name for output in blocks.outputs if output.name),
        parts=parts,
        needs={role: _needs(part) for role, part in parts.items()},
        denoiser_writes=_writes(parts[Role.DENOISER]),
        executed={
            role: _sequence({n: b for n, b in executed.sub_blocks.items() if n.split(".")[0] in section})
            for role, section in sections.items()
        },
        given=given,
        optional=optional,
    )


def walk(block: Any) -> Iterator[Any]:
    """A block and everything nested in it."""
    yield block
    for child in block.sub_blocks.values():
        yield from walk(child)


def _sequence(blocks: dict[str, Any]) -> Any:
    from diffusers.modular_pipelines.modular_pipeline import SequentialPipelineBlocks

    return SequentialPipelineBlocks.from_blocks_dict(blocks)


def _needs(part: Any) -> Needs:
    keys: set[str] = set()
    kwargs_types: set[str] = set()
    for block in walk(part):
        keys.update(name for name in getattr(block, "block_trigger_inputs", None) or () if name)
        for declared in block.inputs:
            if declared.name:
                keys.add(declared.name)
            if declared.kwargs_type:
                kwargs_types.add(declared.kwargs_type)
    return Needs(keys=frozenset(keys), kwargs_types=frozenset(kwargs_types))


def _writes(part: Any) -> frozenset[str]:
    """Declared outputs, and declared inputs too: a block may store a changed input back."""
    names: set[str] = set()
    for block in walk(part):
        names.update(output.name for output in block.intermediate_outputs if output.name)
        names.update(declared.name for declared in block.inputs if declared.name)
    return frozenset(names)


def _executed(pipeline_class: str, blocks: Any, picture: bool) -> tuple[frozenset[str], Any]:
    """The least conditioning inputs under which every required entry has a producer, and the blocks that then run."""
    declared = {entry.name for entry in blocks.inputs if entry.name}
    refusal = "its blocks take no prompt"
    for given in (("prompt", "image"),) if picture else (("prompt",), ("prompt", "image")):
        if not declared.issuperset(given):
            continue
        executed = blocks.get_execution_blocks(**dict.fromkeys(given, True))
        missing = _unproduced(executed, set(given))
        if not missing:
            return frozenset(given), executed
        refusal = f"given {' and '.join(given)}, its blocks still lack {', '.join(missing)}"
    raise ModelError(f"{pipeline_class} cannot be served: {refusal}")


def _unproduced(executed: Any, known: set[str]) -> list[str]:
    missing: list[str] = []
    for block in executed.sub_blocks.values():
        for declared in block.inputs:
            if declared.name and declared.required and declared.default is None and declared.name not in known:
                missing.append(declared.name)
        known.update(declared.name for declared in block.inputs if declared.name)
        known.update(output.name for output in block.intermediate_outputs if output.name)
    return missing
