"""Which pipelines can be split, how, and why not: computed from Diffusers' own code, for the CLI and docs/models.md.

``python -m triptych.pipeline.capabilities`` prints the document.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import json
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from triptych.accel.parallel.text import PLANNED as TEXT_PLANNED
from triptych.accel.wan_vae import supports_class
from triptych.errors import ModelError
from triptych.ids import ROLES, Role
from triptych.pipeline.anatomy import anatomy_of
from triptych.pipeline.cut import Cut, cut
from triptych.pipeline.families import family_of
from triptych.pipeline.known import modular_counterpart, whether_picture
from triptych.pipeline.replay_load import owned_components, pipeline_class
from triptych.pipeline.source import index_components, read_index, resolve_source
from triptych.pipeline.standin import component_class
from triptych.pipeline.tasks import LISTS, sibling
from triptych.pipeline.ways import Way, modular_ways, replay_ways

Split = Literal["modular", "replay"]

TESTED = frozenset(
    {"CogVideoXImageToVideoPipeline", "CogVideoXPipeline", "Flux2KleinPipeline", "Flux2Pipeline",
     "FluxControlNetPipeline", "FluxControlPipeline", "FluxImg2ImgPipeline", "FluxInpaintPipeline",
     "FluxKontextPipeline", "FluxPipeline", "GlmImagePipeline", "HeliosPipeline", "HunyuanImagePipeline",
     "HunyuanVideo15Pipeline", "HunyuanVideoPipeline", "LTX2ImageToVideoPipeline", "LTX2Pipeline",
     "LTXImageToVideoPipeline", "LTXPipeline", "MochiPipeline", "PixArtSigmaPipeline", "QwenImageEditPipeline",
     "QwenImageEditPlusPipeline", "QwenImageImg2ImgPipeline", "QwenImageInpaintPipeline", "QwenImageLayeredPipeline",
     "QwenImagePipeline", "SanaPipeline", "StableDiffusion3Pipeline", "StableDiffusionPipeline",
     "StableDiffusionXLImg2ImgPipeline", "StableDiffusionXLInpaintPipeline", "StableDiffusionXLPipeline",
     "StableVideoDiffusionPipeline", "WanImageToVideoPipeline", "WanPipeline", "WanVACEPipeline",
     "WanVideoToVideoPipeline", "ZImagePipeline"}
)  # fmt: skip
"""Classes of which the tests hold a split model equal to the whole one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capability:
    """What can be done with one pipeline class."""

    pipeline: str
    """The class that a model folder's index names, e.g. ``WanPipeline``."""
    split: Split | None
    """How it is split; None when it is refused."""
    task: str = ""
    """E.g. ``text-to-video``; empty when refused."""
    same: tuple[str, ...] = ()
    """Tasks that it does too, as a request says: those that begin with a picture, where that is optional."""
    also: tuple[str, ...] = ()
    """Tasks that ``--task`` gets out of the same weights."""
    blocks: str = ""
    """The modular pipeline class whose blocks are cut; empty for replay."""
    ways: tuple[Way, ...] = ()
    """What several GPUs of one instance can share."""
    reason: str = ""
    """Why it is refused."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """What it does as it stands."""
        return (self.task, *self.same) if self.task else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One piece of a model and the role that runs it."""

    role: Role
    block: str
    """Name of a modular block; of a replayed pipeline, what the role does of the call."""
    components: tuple[str, ...]
    """Components of the model that it uses."""


def capabilities() -> tuple[Capability, ...]:
    """One row a pipeline class that needs no libraries besides ours, by name."""
    with warnings.catch_warnings():
        # Importing every pipeline brings up what Diffusers' oldest ones provoke in NumPy and torch.
        warnings.simplefilter("ignore")
        return tuple(capability_of(name) for name in sorted(_class_names()))


def capability_of(pipeline: str) -> Capability:
    """What can be done with the class of that name."""
    return _with_tasks(_own_capability(pipeline))


def for_task(index: dict[str, Any], task: str | None) -> dict[str, Any]:
    """The model index ``index`` for ``task``; None leaves it as it is.

    Raises `ModelError` where no class makes that of the model's weights, with the tasks that some class does.
    """
    if task is None:
        return index
    own = _capability(index)
    if task in own.tasks:
        return index
    kind = sibling(own.pipeline, task)
    if kind is not None:
        asked = {**index, "_class_name": kind}
        found = _capability(asked)
        if found.split is None or task in found.tasks:  # whatever cannot be split is refused with its own reason
            return asked
    tasks = ", ".join((*own.tasks, *_other_tasks(own.pipeline)))
    raise ModelError(f"{own.pipeline} cannot be served for {task}, only for {tasks or 'nothing'}")


def model_capability(model: str, revision: str | None = None) -> Capability:
    """What can be done with ``model``, as its index and configs are read: a folder, a Hub id or an embedded
    name.

    Raises `ModelError` for a model that has no index.
    """
    folder = resolve_source(model, revision=revision)
    index = read_index(folder)
    found = _with_tasks(_capability(index))
    kinds = {name: kind for name, (_, kind) in index_components(index).items()}
    lacks: set[Way] = set()
    if not any(kind in TEXT_PLANNED for kind in kinds.values()):
        lacks.add("encoder-tp")
    if not any(_decodes_in_strips(folder / name, kind) for name, kind in kinds.items()):
        lacks.add("decoder-tp")
    return replace(found, ways=tuple(way for way in found.ways if way not in lacks))


def _decodes_in_strips(folder: Path, kind: str) -> bool:
    config = folder / "config.json"
    return supports_class(kind, SimpleNamespace(**json.loads(config.read_text()) if config.exists() else {}))


def _with_tasks(found: Capability) -> Capability:
    """With what else ``--task`` makes of the same weights."""
    if found.split is None:
        return found
    return replace(found, also=tuple(_other_tasks(found.pipeline)))


def _other_tasks(pipeline: str) -> Iterator[str]:
    own = _own_capability(pipeline).tasks
    for task in LISTS:
        kind = sibling(pipeline, task)
        if kind is not None and task not in own and task in _own_capability(kind).tasks:
            yield task


@functools.cache
def _own_capability(pipeline: str) -> Capability:
    return _capability({"_class_name": pipeline})


def _capability(index: dict[str, Any]) -> Capability:
    pipeline: str = index["_class_name"]
    try:
        if modular_counterpart(index) is not None:
            blocks, parts = _cut(index)
            ways = modular_ways(parts)
            task, *more = _tasks_of(parts)
            return Capability(pipeline=pipeline, split="modular", task=task, same=tuple(more), blocks=blocks, ways=ways)
        kind = pipeline_class(pipeline)
        anatomy = anatomy_of(kind)
    except ModelError as error:
        reason = error.message.partition("cannot be split: ")[2] or error.message.partition("cannot be served: ")[2]
        return Capability(pipeline=pipeline, split=None, reason=reason or error.message)
    return Capability(pipeline=pipeline, split="replay", task=anatomy.task, ways=replay_ways(kind, anatomy))


def model_parts(model: str, revision: str | None = None) -> tuple[Part, ...]:
    """Which role runs what of ``model``: a folder, a Hub id or an embedded name. No weights are read.

    Raises `ModelError` for a model that cannot be split, with the reason.
    """
    index = read_index(resolve_source(model, revision=revision))
    present = index_components(index)
    if modular_counterpart(index) is not None:
        _, parts = _cut(index)
        return tuple(_block_parts(parts, present))
    anatomy = anatomy_of(pipeline_class(index["_class_name"]))
    classes = {name: component_class(name, *entry) for name, entry in present.items()}
    does = {
        Role.ENCODER: "up to the first denoiser call",
        Role.DENOISER: f"the step loop, up to {anatomy.decode}",
        Role.DECODER: f"from {anatomy.decode} on",
    }
    return tuple(
        Part(role=role, block=does[role], components=tuple(sorted(owned_components(role, anatomy, classes))))
        for role in ROLES
    )


def table(rows: Iterable[Capability]) -> str:
    """Rows as text in columns, for a terminal."""
    lines = [("PIPELINE", "SPLIT", "TASK", "GPUS SHARE", "")]
    lines += [
        (row.pipeline, row.split or "-", _tasks(row) or "-", _ways(row) or "-", row.blocks or row.reason)
        for row in rows
    ]
    return _columns(lines)


def parts_table(parts: Iterable[Part]) -> str:
    """Parts as text in columns, for a terminal."""
    lines = [("ROLE", "BLOCK", "COMPONENTS")]
    lines += [(str(part.role), part.block, ", ".join(part.components) or "-") for part in parts]
    return _columns(lines)


def markdown(rows: Iterable[Capability]) -> str:
    """The content of docs/models.md."""
    rows = tuple(rows)
    by_split = {split: [row for row in rows if row.split == split] for split in ("modular", "replay", None)}
    return "\n".join(
        [
            "# Models",
            "",
            "Computed from the installed Diffusers by `python -m triptych.pipeline.capabilities > docs/models.md`;",
            "a test keeps it fresh. `triptych models` prints the same, `triptych models MODEL` the parts of one model.",
            "A model folder is served as what its `model_index.json` names under `_class_name`; one that has only a",
            "`modular_model_index.json` as the modular pipeline that this names. The tests hold those marked with *",
            "equal to the whole pipeline on the CPU, from a tiny random model: the same bytes, or where the whole one",
            "computes two branches as one batch, at most one of 255 levels apart.",
            "Where --task stands with other tasks, `triptych serve MODEL --task TASK` makes these of the same weights.",
            "",
            "Every role of every model may have any number of instances. What the GPUs of one instance can share",
            "besides: `cfg` the branches of guidance (--denoiser-cfg), `ulysses` and `ring` the tokens of a forward in",
            "one way, the other or both (--denoiser-sp, --denoiser-ulysses, --denoiser-ring), `tp` the denoiser's",
            "weights (--denoiser-tp), `encoder-tp` those of a T5 encoder, `decoder-tp` strips of the pictures where",
            "the VAE is Wan 2.1's or Qwen-Image's (Wan 2.2's 5B model has another). What a model's own configs do not",
            "allow of it is refused at start with the reason.",
            "",
            "## Split at modular blocks",
            "",
            "Diffusers has these pipelines in blocks, which are cut at the one named `denoise`.",
            "",
            "| pipeline | task | GPUs share | blocks |",
            "|---|---|---|---|",
            *(f"| {_marked(row)} | {_tasks(row)} | {_ways(row)} | {row.blocks} |" for row in by_split["modular"]),
            "",
            "## Split by record and replay",
            "",
            "These run their own `__call__` in each role. The encoder records what text, image and VAE encoders",
            "answer; the denoiser replays it and stops at the decode; the decoder replays it and decodes. What a class",
            "does is read off its source; that a class stands here says that it has the shape that this needs.",
            "",
            "| pipeline | task | GPUs share |",
            "|---|---|---|",
            *(f"| {_marked(row)} | {_tasks(row)} | {_ways(row)} |" for row in by_split["replay"]),
            "",
            "## Refused",
            "",
            "Loading one of these fails before any weight is read, and gives the reason.",
            "",
            "| pipeline | reason |",
            "|---|---|",
            *(f"| {row.pipeline} | {row.reason} |" for row in by_split[None]),
            "",
        ]
    )


def _tasks(row: Capability) -> str:
    own = ", ".join(row.tasks)
    return f"{own}; --task {', '.join(row.also)}" if row.also else own


def _ways(row: Capability) -> str:
    return ", ".join(row.ways)


def _marked(row: Capability) -> str:
    return f"{row.pipeline} *" if row.pipeline in TESTED else row.pipeline


def _cut(index: dict[str, Any]) -> tuple[str, Cut]:
    """The modular class for a model index, and its blocks cut into roles."""
    import diffusers

    name = modular_counterpart(index)
    assert name is not None
    blocks: Any = getattr(diffusers, getattr(diffusers, name).default_blocks_name)
    return name, cut(name, blocks(), picture=whether_picture(index, family_of(name)))


def _tasks_of(parts: Cut) -> tuple[str, ...]:
    output = "video" if "videos" in parts.outputs else "image"
    starts = ("image",) if "image" in parts.given else ("text", "image") if "image" in parts.optional else ("text",)
    return tuple(f"{start}-to-{output}" for start in starts)


def _block_parts(parts: Cut, present: dict[str, tuple[str, str]]) -> Iterator[Part]:
    for role in ROLES:
        for name, block in parts.executed[role].sub_blocks.items():
            used = tuple(spec.name for spec in block.expected_components if spec.name in present)
            yield Part(role=role, block=name, components=used)


_BASES = ("DiffusionPipeline", "ModularPipeline")


def _class_names() -> Iterator[str]:
    """Pipeline classes for which torch and Transformers suffice, as Diffusers itself lists them, without those that it
    has retired."""
    import diffusers

    for module in ("dummy_pt_objects", "dummy_torch_and_transformers_objects"):
        spec = importlib.util.find_spec(f"diffusers.utils.{module}")
        assert spec is not None
        assert spec.origin is not None
        for node in ast.parse(Path(spec.origin).read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Pipeline") and node.name not in _BASES:
                kind = getattr(diffusers, node.name)
                if kind.__module__.startswith("diffusers.pipelines.") and ".deprecated." not in kind.__module__:
                    yield node.name


def _columns(lines: list[tuple[str, ...]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


if __name__ == "__main__":
    print(markdown(capabilities()), end="")
