"""Warm-up: a role runs a request of each declared shape before it says that it is there.

A role alone has none of the models whose outputs it works on. The stages before it run here too, on models without
weights: such a ghost computes with fake tensors, which gives the shape of its answer and no number, and answers with
zeros of that shape. So a rehearsal needs no knowledge of any model family, and touches every kernel and graph that a
request of that shape will.
"""

from __future__ import annotations

import copy
import io
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch._subclasses.fake_tensor import FakeTensorMode

from triptych.accel.tally import Tally
from triptych.config import Shape
from triptych.errors import BadRequest, ConfigError, StageError
from triptych.ids import ROLES, Role
from triptych.pipeline.request import guidance_is_off
from triptych.pipeline.shadows import placed, replaced
from triptych.pipeline.stage import RolePipeline
from triptych.pipeline.standin import component_class, meta_module
from triptych.wire.schema import RequestSchema

log = logging.getLogger(__name__)

_PROMPTS = ("a rehearsal", "a longer rehearsal, with a few more words in it than the one before")
_STEPS = 3
"""Steps of a rehearsal: the second may differ from the first in what it keeps from it, and the third, as UniPC's does,
in what it keeps from two."""
_UNGUIDED_STEPS = 2
_FILES = ("image", "images", "video")
_FILE = {"blob": 0}
_STEPS_OF_TWO = 4
"""With two transformers, so that both get a turn."""


def rehearse(
    own: RolePipeline,
    before: RolePipeline | None,
    shapes: Sequence[Shape],
    *,
    denoisers: int,
    tally: Tally,
    unguided: bool,
) -> None:
    """Run one request of each shape through ``own`` roles; the roles before them run in ``before``.

    Two prompts are used where their embeddings differ in length: what is compiled for two lengths is good for all. A
    model whose forwards have other sizes without guidance (``unguided``) runs once more without it.
    Raises `ConfigError` for a shape that the model cannot have.
    """
    for shape in shapes:
        compilations, begun = tally.compilations, time.perf_counter()
        unshared = tally.unshared_forwards
        params = _params(own.schema, shape, _STEPS_OF_TWO if denoisers > 1 else _STEPS)
        lengths: list[list[torch.Size]] = []
        try:
            for prompt in _PROMPTS:
                rest = _encoded(own, before, shape, {**params, "prompt": prompt})
                if rest.sizes not in lengths:
                    lengths.append(rest.sizes)
                    rest.run(own, before)
            _tell_unshared(shape, "", tally.unshared_forwards - unshared)
            if unguided and (off := _guidance_off(own.schema)):
                params = _params(own.schema, shape, _UNGUIDED_STEPS) | {"prompt": _PROMPTS[0], **off}
                unshared = tally.unshared_forwards
                _encoded(own, before, shape, params).run(own, before)
                _tell_unshared(shape, " without guidance", tally.unshared_forwards - unshared)
        except (BadRequest, StageError) as error:
            raise ConfigError(f"warmup={shape}: {error.message}") from error
        log.info(
            "warmed up for %s in %.1f s, %d graphs compiled",
            shape,
            time.perf_counter() - begun,
            tally.compilations - compilations,
        )


def _tell_unshared(shape: Shape, which: str, forwards: int) -> None:
    if forwards:
        log.warning(
            "warmup=%s: the tokens of %d forwards%s do not divide among the GPUs, each of which computed them whole: "
            "requests of this shape are no faster than on fewer GPUs, unless their prompts are of other lengths",
            shape,
            forwards,
            which,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rest:
    """A rehearsal after its first stage."""

    shape: Shape
    params: dict[str, Any]
    inbox: dict[Role, list[tuple[bytes, Sequence[torch.Tensor]]]]

    @property
    def sizes(self) -> list[torch.Size]:
        """Sizes of all that the first stage handed on."""
        return [tensor.shape for inputs in self.inbox.values() for _, tensors in inputs for tensor in tensors]

    def stage(self, role: Role, own: RolePipeline, before: RolePipeline | None) -> None:
        """Run one stage and deliver what it gives."""
        pipeline = own if role in own.roles else before
        if pipeline is None:
            raise ConfigError(f"warmup={self.shape}: without the {role} this model's other roles cannot be warmed up")
        run = pipeline.start(role, self.params, self.inbox[role], (_picture(),))
        while (result := run.advance()) is None:
            pass
        for output in result.outputs:
            self.inbox[output.consumer].append((output.tree, output.tensors))

    def run(self, own: RolePipeline, before: RolePipeline | None) -> None:
        """All later stages, up to the last one that is loaded here."""
        last = max(ROLES.index(role) for role in own.roles)
        for role in ROLES[1 : last + 1]:
            self.stage(role, own, before)


def _encoded(own: RolePipeline, before: RolePipeline | None, shape: Shape, params: dict[str, Any]) -> _Rest:
    rest = _Rest(shape=shape, params=params, inbox={role: [] for role in ROLES})
    rest.stage(Role.ENCODER, own, before)
    return rest


def _params(schema: RequestSchema, shape: Shape, steps: int) -> dict[str, Any]:
    wanted: dict[str, Any] = {
        "width": shape.width,
        "height": shape.height,
        "num_frames": shape.frames,
        "num_inference_steps": steps,
        "seed": 0,
    }
    wanted |= {
        p.name: [_FILE] if p.type == "images" else _FILE for p in schema.params if p.required and p.type in _FILES
    }
    if shape.frames > 1 and schema.param("num_frames") is None:
        raise ConfigError(f"warmup={shape}: the model makes images, so say WIDTHxHEIGHT")
    if shape.count > 1:
        if schema.param("n") is None:
            raise ConfigError(f"warmup={shape}: the model makes one output of a request")
        wanted["n"] = shape.count
    return {name: value for name, value in wanted.items() if schema.param(name) is not None}


def _guidance_off(schema: RequestSchema) -> dict[str, float]:
    """What turns guidance off; nothing for a model that has none, or none by itself."""
    return {} if guidance_is_off(schema) else {p.name: p.off for p in schema.params if p.off is not None}


def _picture() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), (128, 128, 128)).save(buffer, format="png")
    return buffer.getvalue()


# -- models without weights -----------------------------------------------------------------------------------------


def ghosts(
    folder: Path, names: Sequence[str], present: Mapping[str, tuple[str, str]], dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Components ``names`` of the model in ``folder`` without weights; tokenizers and the like for real."""
    return {name: _ghost(folder, name, present[name], dtype, device) for name in names}


def _ghost(folder: Path, name: str, entry: tuple[str, str], dtype: torch.dtype, device: torch.device) -> Any:
    kind: Any = component_class(name, *entry)
    if not issubclass(kind, torch.nn.Module):
        return kind.from_pretrained(str(folder / name))
    if hasattr(kind, "load_config"):
        module = meta_module(folder, name, kind)
    else:
        model: Any = kind
        with torch.device("meta"):
            module = model(model.config_class.from_pretrained(folder / name))
    module = placed(module.to(dtype).eval().requires_grad_(False), device)
    for method in ("forward", "encode", "decode"):
        if callable(getattr(module, method, None)):
            real = getattr(module, method)
            replaced(module, module, method, _shape_only(real, device))
    return module


def _shape_only(compute: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    def answer(*args: Any, **kwargs: Any) -> Any:
        # Fake tensors rather than plain ones on the meta device: libraries know not to ask them for their numbers.
        with FakeTensorMode(allow_non_fake_inputs=True):
            given = _mapped((args, kwargs), lambda t: torch.empty_like(t, device="meta"))
            made = compute(*given[0], **given[1])
        return _mapped(made, lambda t: torch.zeros(t.shape, dtype=t.dtype, device=device))

    return answer


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with every tensor in it changed; containers and outputs of both libraries are copied."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):  # model outputs are dictionaries whose entries are attributes too
        made: Any = copy.copy(value)
        for key, item in value.items():
            made[key] = _mapped(item, change)
        return made
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, change) for item in value)
    if hasattr(value, "mode") and hasattr(value, "sample"):  # a latent distribution
        made = copy.copy(value)
        for name, item in vars(value).items():
            setattr(made, name, _mapped(item, change))
        return made
    return value
