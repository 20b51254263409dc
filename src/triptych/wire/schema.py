"""What a loaded pipeline accepts: the request schema that instances announce and the server validates from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any, Literal, NamedTuple

import msgspec

from triptych.ids import Role

ParamType = Literal["string", "integer", "number", "boolean", "image", "images", "video", "adapters"]
"""``adapters`` is a text as `triptych.wire.adapters` reads it; its choices are the names."""


class LaunchOption(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What instances are launched with to have a parameter."""

    flag: str
    """As it is said: ``--lora``."""
    roles: tuple[Role, ...]
    """Those that take part, of which all instances need it. Others may be without."""


class Beside(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A bound that holds only beside another parameter."""

    param: str
    minimum: float


class Objection(NamedTuple):
    """What is wrong with values that are each legal alone."""

    field: str
    """The parameter, or ``size``."""
    message: str
    """Names the field, its value and what is accepted."""


class Param(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request parameter under the pipeline's own name."""

    name: str
    type: ParamType
    required: bool = False
    nullable: bool = False
    """None is a legal value and means the pipeline's own default."""
    default: bool | int | float | str | None = None
    minimum: float | None = None
    maximum: float | None = None
    multiple_of: int | None = None
    """The value minus ``remainder`` must divide by this."""
    remainder: int = 0
    """With multiple_of 4 and remainder 1, the legal values are 1, 5, 9, ..."""
    choices: tuple[str, ...] = ()
    max_length: int | None = None
    """Characters of a string, or number of images."""
    needs: str = ""
    """The parameter without which this one is of no use."""
    unless: str = ""
    """The parameter beside which this one has no default."""
    beside: tuple[Beside, ...] = ()
    """Greater minima, each beside another parameter that is given."""
    off: float | None = None
    """Of a scale of classifier-free guidance: the value at which there is none."""
    description: str = ""
    option: LaunchOption | None = None
    """Of a parameter that is not the model's own."""

    def default_beside(self, values: Mapping[str, Any]) -> bool | int | float | str | None:
        """What applies where a request gives ``values`` and not this."""
        return None if self.unless and values.get(self.unless) is not None else self.default


class HandoffSize(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many bytes those boundary tensors take that grow with a request, so that the door can refuse what no pool can
    hold: ``item_bytes * channels * (1 + (frames - 1) // temporal) * (height // spatial) * (width // spatial)``.
    """

    channels: int
    """Of the latents that the denoiser makes."""
    condition_channels: int = 0
    """Of what the encoder makes of a picture in the shape of the latents; 0 where it makes nothing of that kind."""
    spatial: int
    temporal: int
    item_bytes: int


class RequestSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model as clients see it."""

    model: str
    """Name clients use: the model id or folder as launched."""
    pipeline: str
    """Diffusers pipeline class, e.g. ``WanPipeline``."""
    split: Literal["modular", "replay"]
    task: str
    """The field's word, e.g. ``text-to-video``, ``image-to-video``, ``text-to-image``."""
    output: Literal["video", "image"]
    params: tuple[Param, ...]
    handoff: HandoffSize | None = None
    max_pixels: int | None = None
    """Most pixels of one output, over all of its frames."""
    commit: str = ""
    """Which of the model on the Hub it is; empty for a folder, which may hold what some roles need, and no more."""

    @property
    def names(self) -> tuple[str, ...]:
        """What the model may be called: as launched, and the last part of that."""
        return tuple(dict.fromkeys((self.model, PurePath(self.model).name)))

    def is_called(self, model: str) -> bool:
        """Whether a path or Hub id names this model; its last part is enough."""
        return model in self.names or PurePath(model).name in self.names

    def agrees(self, other: RequestSchema) -> bool:
        """Whether both take the same requests for one model: they differ at most in how it was named, of which the last
        part counts, since hosts have folders in different places; and in the commit."""
        alike = msgspec.structs.replace(self, model=other.model, commit=other.commit)
        return self.is_called(other.model) and alike == other

    def param(self, name: str) -> Param | None:
        """The parameter of that name, or None."""
        return next((p for p in self.params if p.name == name), None)

    @property
    def options(self) -> tuple[Param, ...]:
        """The parameters that come of how an instance was launched."""
        return tuple(param for param in self.params if param.option is not None)

    def with_options(self, options: Iterable[Param]) -> RequestSchema:
        """The model's own parameters, and these."""
        return msgspec.structs.replace(self, params=(*(p for p in self.params if p.option is None), *options))

    def differing(self, other: RequestSchema) -> tuple[str, ...]:
        """The names of fields and parameters that differ from those of ``other``."""
        fields = (name for name in self.__struct_fields__ if name not in ("model", "params", "commit"))
        names = dict.fromkeys(param.name for param in (*self.params, *other.params))
        return (
            *(name for name in fields if getattr(self, name) != getattr(other, name)),
            *(name for name in names if self.param(name) != other.param(name)),
        )

    def without_defaults(self) -> RequestSchema:
        """What can be said at all, whatever applies where nothing is said."""
        return msgspec.structs.replace(
            self, params=tuple(msgspec.structs.replace(param, default=None, unless="") for param in self.params)
        )

    def objection(self, params: Mapping[str, Any]) -> Objection | None:
        """The first thing wrong with complete ``params`` that are each legal alone; None when nothing is.

        Every rule between parameters stands here, so that the door refuses what the pipeline's own blocks would fail
        of. A parameter that is None counts as not given.
        """
        if (excess := self._too_large(params)) is not None:
            return Objection("size", f"size: {excess}")
        for param in self.params:
            value = params.get(param.name)
            if value is None:
                continue
            if param.needs and params.get(param.needs) is None:
                return Objection(param.name, f"{param.name}: is of no use without {param.needs}")
            for bound in param.beside:
                if params.get(bound.param) is not None and value < bound.minimum:
                    return Objection(
                        param.name, f"{param.name}={value}: must be at least {bound.minimum:g} beside {bound.param}"
                    )
        return self._no_step(params)

    @staticmethod
    def _no_step(params: Mapping[str, Any]) -> Objection | None:
        """Pipelines compute ``strength`` of the steps, and cannot do with none."""
        strength, steps = params.get("strength"), params.get("num_inference_steps")
        if strength is None or steps is None or int(steps * strength) >= 1:
            return None
        least = math.ceil(1e4 / steps) / 1e4  # rounded up: what is named is taken
        return Objection(
            "strength",
            f"strength={strength}: must be at least {least:g} at {steps} steps, so that one step is computed",
        )

    def _too_large(self, params: Mapping[str, Any]) -> str | None:
        if self.max_pixels is None or not {"height", "width"} <= params.keys():
            return None
        height, width, frames = (int(params.get(name) or 1) for name in ("height", "width", "num_frames"))
        if height * width * frames <= self.max_pixels:
            return None
        most = self.max_pixels // (height * width)
        fits = f"at most {most} frames fit at that size" if most else f"at most {self.max_pixels} fit in one frame"
        return f"{width}x{height} in {frames} frames is {height * width * frames} pixels; {fits}"
