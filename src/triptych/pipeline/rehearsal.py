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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from PIL import Image
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from triptych.accel.sizes import rehearsing
from triptych.accel.tally import Tally
from triptych.config import Shape
from triptych.errors import BadRequest, ConfigError, StageError
from triptych.ids import ROLES, Role
from triptych.pipeline.request import guidance_is_off
from triptych.pipeline.shadows import placed, replaced
from triptych.pipeline.stage import RolePipeline
from triptych.pipeline.standin import component_class, meta_module
from triptych.wire.schema import Param, RequestSchema

log = logging.getLogger(__name__)

_PROMPTS = ("a rehearsal", "a longer rehearsal, with a few more words in it than the one before")
_LENGTHS = 2
"""So many lengths tell a compiler that there are others."""
_STEPS = 3
"""Steps of a rehearsal: the second may differ from the first in what it keeps from it, and the third, as UniPC's does,
in what it keeps from two."""
_UNGUIDED_STEPS = 2
_FILES = ("image", "images", "video")
_FILE = {"blob": 0}
_LEAST_SIDE = 64
_STEPS_OF_TWO = 4
"""With two transformers, so that both get a turn."""
_AUTOCAST: Final = torch.autocast


def rehearse(
    own: RolePipeline,
    before: RolePipeline | None,
    shapes: Sequence[Shape],
    *,
    denoisers: int,
    tally: Tally,
    ranks: int = 1,
    unguided: int | None,
) -> None:
    """Run one request of each shape through ``own`` roles; the roles before them run in ``before``.

    Several prompts are used where their embeddings differ in length: what is compiled for two lengths is good for all,
    among ``ranks`` that share the tokens for all that divide by them or for all that do not. A model whose forwards
    have other sizes without guidance runs once more without it, where ``unguided`` ranks share the tokens. One that may
    be given a picture runs all of that once more with one of the shape's size.
    Raises `ConfigError` for a shape that the model cannot have.
    """
    for shape in shapes:
        compilations, begun = tally.compilations, time.perf_counter()
        try:
            with rehearsing():
                _rehearse(own, before, shape, _STEPS_OF_TWO if denoisers > 1 else _STEPS, ranks, unguided)
        except (BadRequest, StageError) as error:
            raise ConfigError(f"warmup={shape}: {error.message}") from error
        log.info(
            "warmed up for %s in %.1f s, %d graphs compiled",
            shape,
            time.perf_counter() - begun,
            tally.compilations - compilations,
        )


def _rehearse(
    own: RolePipeline, before: RolePipeline | None, shape: Shape, steps: int, ranks: int, unguided: int | None
) -> None:
    for pictures in _with_and_without(own.schema):
        params = _params(own.schema, shape, steps) | pictures
        for rest in _texts(own, before, shape, params, ranks):
            rest.run(own, before)
        if unguided and (off := _guidance_off(own.schema)):
            params = _params(own.schema, shape, _UNGUIDED_STEPS) | off | pictures
            for rest in _texts(own, before, shape, params, unguided):
                rest.run(own, before)
                if unguided == 1:
                    break


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
        run = pipeline.start(role, self.params, self.inbox[role], (_picture(self.shape),))
        while (result := run.advance()) is None:
            pass
        for output in result.outputs:
            self.inbox[output.consumer].append((output.tree, output.tensors))

    def run(self, own: RolePipeline, before: RolePipeline | None) -> None:
        """All later stages, up to the last one that is loaded here."""
        last = max(ROLES.index(role) for role in own.roles)
        for role in ROLES[1 : last + 1]:
            self.stage(role, own, before)


def _texts(
    own: RolePipeline, before: RolePipeline | None, shape: Shape, params: dict[str, Any], ranks: int
) -> Iterator[_Rest]:
    """One rehearsal, or where texts have lengths of their own, one for each of two; where ``ranks`` share the tokens,
    for two that divide by them and two that do not, as far as texts of such lengths are found."""
    if own.schema.param("prompt") is None:
        yield _encoded(own, before, shape, params)
        return
    first, second = (_encoded(own, before, shape, {**params, "prompt": prompt}) for prompt in _PROMPTS)
    yield first
    if second.sizes == first.sizes:
        return
    yield second
    done = [first, second]
    varying = [
        (index, dim)
        for index, sizes in enumerate(zip(first.sizes, second.sizes, strict=False))
        for dim, (one, other) in enumerate(zip(*sizes, strict=False))
        if one != other
    ]

    def divides(rest: _Rest) -> bool:
        return all(rest.sizes[index][dim] % ranks == 0 for index, dim in varying)

    for more in range(1, 2 * ranks + 1) if ranks > 1 else ():
        if len(done) == 2 * _LENGTHS:
            return
        rest = _encoded(own, before, shape, {**params, "prompt": _PROMPTS[1] + "1" * more})  # digits are tokens each
        alike = [other.sizes for other in done if divides(other) == divides(rest)]
        if len(alike) < _LENGTHS and rest.sizes not in alike:
            yield rest
            done.append(rest)


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
    wanted |= {p.name: _file(p) for p in schema.params if p.required and p.type in _FILES}
    if shape.frames > 1 and schema.param("num_frames") is None:
        raise ConfigError(f"warmup={shape}: the model makes images, so say WIDTHxHEIGHT")
    if shape.count > 1:
        if schema.param("n") is None:
            raise ConfigError(f"warmup={shape}: the model makes one output of a request")
        wanted["n"] = shape.count
    return {name: value for name, value in wanted.items() if schema.param(name) is not None}


def _with_and_without(schema: RequestSchema) -> Iterator[dict[str, Any]]:
    """What a request has of a picture that it may begin with: nothing, then that."""
    yield {}
    image = schema.param("image")
    if image is not None and image.nullable:
        yield {image.name: _file(image)}


def _file(param: Param) -> Any:
    return [_FILE] if param.type == "images" else _FILE


def _guidance_off(schema: RequestSchema) -> dict[str, float]:
    """What turns guidance off; nothing for a model that has none, or none by itself."""
    return {} if guidance_is_off(schema) else {p.name: p.off for p in schema.params if p.off is not None}


def _picture(shape: Shape) -> bytes:
    """Grey, and no smaller than models take them."""
    buffer = io.BytesIO()
    size = max(_LEAST_SIDE, shape.width), max(_LEAST_SIDE, shape.height)
    Image.new("RGB", size, (128, 128, 128)).save(buffer, format="png")
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
    _exchange_buffers(module, device)  # some, such as means of latents, are read by blocks that call no forward
    for method in ("forward", "encode", "decode"):
        if callable(getattr(module, method, None)):
            real = getattr(module, method)
            replaced(module, module, method, _shape_only(module, real, device))
    return module


def _exchange_buffers(module: torch.nn.Module, device: torch.device | str) -> None:
    """Have zeros on ``device`` for every buffer."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():  # pyright: ignore[reportPrivateUsage]
            if buffer is not None:
                owner._buffers[name] = torch.zeros_like(buffer, device=device)  # pyright: ignore[reportPrivateUsage]


def _shape_only(module: torch.nn.Module, compute: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    def answer(*args: Any, **kwargs: Any) -> Any:
        _exchange_buffers(module, "meta")
        try:
            # Fake tensors rather than plain ones on the meta device: libraries know not to ask them for their numbers.
            with FakeTensorMode(allow_non_fake_inputs=True):
                given = _mapped((args, kwargs), lambda t: torch.empty_like(t, device="meta"))
                with patch.object(torch, "autocast", _autocast):
                    made = compute(*given[0], **given[1])
        except (DataDependentOutputException, DynamicOutputShapeException):
            made = _as_it_came(module, kwargs)
            if made is None:
                raise
        finally:
            _exchange_buffers(module, device)
        return _mapped(made, lambda t: torch.zeros(t.shape, dtype=t.dtype, device=device))

    return answer


def _autocast(device_type: str, **settings: Any) -> Any:
    """`torch.autocast`, which refuses a device that computes nothing."""
    return nullcontext() if device_type == "meta" else _AUTOCAST(device_type, **settings)


def _as_it_came(module: torch.nn.Module, kwargs: Mapping[str, Any]) -> Any:
    """What a denoiser gives whose shapes on the way depend on numbers, as where padding is cut out of texts: of the
    shape of the latents that it got, but for their channels. None for another kind of model."""
    latents, channels = kwargs.get("hidden_states"), getattr(getattr(module, "config", None), "out_channels", None)
    if not isinstance(latents, torch.Tensor) or latents.dim() < 4 or not isinstance(channels, int):
        return None
    made = latents.new_zeros((latents.shape[0], channels, *latents.shape[2:]))
    return Transformer2DModelOutput(sample=made) if kwargs.get("return_dict", True) else (made,)


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
