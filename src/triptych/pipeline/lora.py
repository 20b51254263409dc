"""LoRA adapters of one loaded pipeline: put into its layers at launch, chosen anew for every step of every request.

Diffusers' own loaders do the loading, so whatever layout they can read is read. They are given a file that holds only
what belongs to the models here (text encoders live in another process than the denoiser), otherwise as it is: an alpha
that is stored beside each layer tells some of them which layout it is. Those that refuse one get it in the weights.

The adapters that are at work belong to the models, which requests share. So a stage chooses its own before it computes
anything, and again at each step, because another request may have had a turn in between. With profile stock they are
layers of PEFT's beside the models' own, as in a classic pipeline; where models are made faster they are written into
the weights (`triptych.accel.adapters`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import tempfile
import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from triptych.accel.adapters import Choice, Unwritable, WrittenAdapters, write_into
from triptych.accel.denoisers import DENOISERS
from triptych.config import Lora
from triptych.errors import ConfigError, ModelError
from triptych.ids import ROLES, Role
from triptych.wire.adapters import read_adapters
from triptych.wire.schema import LaunchOption, Param, RequestSchema

log = logging.getLogger(__name__)

PARAM = "lora"
"""The request parameter that names adapters."""

_TEXT_ENCODER = ("text_encoder", "lora_te")
"""How the names of a text encoder's tensors begin, in the layouts that have any."""
_HEADER = "lora_adapter_metadata"
"""Where a file's header has rank and alpha of each layer, as Diffusers writes it."""
FIRST, SECOND = "transformer", "transformer_2"
_UP = (".lora_up.weight", ".lora_B.weight", ".lora_B.default.weight", ".lora.up.weight")
_DOWN = (".lora_down.weight", ".lora_A.weight", ".lora_A.default.weight", ".lora.down.weight")
_REFUSALS = (ValueError, RuntimeError, KeyError, TypeError, AttributeError)
"""What Diffusers' loaders and converters raise for a file that they cannot make anything of."""


class Adapted(Protocol):
    """A model that has adapters."""

    def choose(self, choice: Choice) -> None:
        """Have exactly these at work, by their `inner_name`; names that it does not know change nothing in it."""
        ...


class BesideLayers:
    """Adapters as PEFT has them in a model: layers beside its own."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def choose(self, choice: Choice) -> None:
        """See `Adapted`."""
        from diffusers.utils.peft_utils import set_adapter_layers, set_weights_and_activate_adapters

        here: Mapping[str, Any] = getattr(self._model, "peft_config", {})
        own = [(name, scale) for name, scale in choice if name in here]
        set_adapter_layers(self._model, enabled=bool(own))
        if own:
            set_weights_and_activate_adapters(self._model, [name for name, _ in own], [scale for _, scale in own])


class Adapters:
    """The adapters of a pipeline's models, and which of them are at work now. Used from the compute thread only."""

    def __init__(self, loras: Sequence[Lora], models: Sequence[Adapted]) -> None:
        self._scales = {lora.name: lora.scale for lora in loras}
        self._models = models
        self._chosen: Choice | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may name."""
        return tuple(self._scales)

    def read(self, params: Mapping[str, Any]) -> Choice:
        """What a request's complete parameters choose."""
        text = params.get(PARAM)
        if text is None:
            return ()
        adapters = read_adapters(text, self._scales)
        return tuple((a.name, self._scales[a.name] if a.scale is None else a.scale) for a in adapters)

    def choose(self, choice: Choice) -> None:
        """Have exactly these at work in all models; nothing to do where they are already."""
        if choice == self._chosen:
            return
        self._chosen = None  # should one of the models fail half way
        inner = tuple((inner_name(name), scale) for name, scale in choice)
        for model in self._models:
            model.choose(inner)
        self._chosen = choice


def inner_name(name: str) -> str:
    """What the models call an adapter. Theirs become attributes of modules, which have attributes already: an adapter
    ``half`` would be in the way of `torch.nn.Module.half`."""
    return f"lora-{name}"


def with_adapters(schema: RequestSchema, loras: Sequence[Lora], kind: type[Any]) -> RequestSchema:
    """``schema`` with the parameter that chooses among ``loras``; as it was where there are none.

    Raises `ConfigError` where Diffusers' pipeline class ``kind`` takes none, and `ModelError` for an unreadable file.
    """
    if not loras:
        return schema
    names = tuple(lora.name for lora in loras)
    text = "LoRA adapters: NAME or NAME:SCALE, several with commas between."
    option = LaunchOption(flag="--lora", roles=_changed(loras, kind))
    param = Param(name=PARAM, type="adapters", nullable=True, choices=names, description=text, option=option)
    return msgspec.structs.replace(schema, params=(*schema.params, param))


def _changed(loras: Sequence[Lora], kind: type[Any]) -> tuple[Role, ...]:
    """The roles whose models the adapters change: every role can tell from the names in the files."""
    found: set[Role] = set()
    for lora in loras:
        if not hasattr(kind, "load_lora_weights"):
            raise ConfigError(f"lora {lora.name}: Diffusers loads no LoRA into {kind.__name__}")
        with _named(lora):
            for path in lora.files:
                for key in _keys(path):
                    found.add(Role.ENCODER if key.startswith(_TEXT_ENCODER) else Role.DENOISER)
    if not any(name.startswith("text_encoder") for name in _loadable(kind)):
        found.discard(Role.ENCODER)  # what is for text encoders is passed over
    return tuple(role for role in ROLES if role in found)


def _loadable(pipeline: Any) -> Sequence[str]:
    """The components of a pipeline, or class of pipelines, that Diffusers loads adapters into."""
    return getattr(pipeline, "_lora_loadable_modules", ())


def attach(
    loras: Sequence[Lora], pipelines: Iterable[Any], models: Mapping[str, torch.nn.Module], *, written: bool
) -> Adapters:
    """Load ``loras`` into those of ``models`` (by component name) that a role's pipeline has, for use by request:
    ``written`` into their weights, or as layers beside them.

    Raises `ModelError` for a file that does not fit, and `ConfigError` for one that cannot be written into weights.
    """
    wanted = {name: model for name, model in models.items() if name.startswith((*DENOISERS, "text_encoder"))}
    for lora in loras:
        for pipeline in pipelines:
            takes = _loadable(pipeline)
            own = {name for name, model in wanted.items() if name in takes and getattr(pipeline, name, None) is model}
            if own:
                _load(lora, pipeline, own)
    adapted = {name: model for name, model in wanted.items() if hasattr(model, "peft_config")}
    kinds = [_written(name, model) if written else BesideLayers(model) for name, model in adapted.items()]
    adapters = Adapters(loras, kinds)
    adapters.choose(())
    return adapters


def _written(name: str, model: torch.nn.Module) -> WrittenAdapters:
    try:
        adapters = write_into(model)
    except Unwritable as error:
        raise ConfigError(f"lora: {error}; profile stock can do that in {name}") from error
    kept = adapters.nbytes >> 20
    log.info("%s: adapters are written into %d layers, whose own weights are kept (%d MiB)", name, len(adapters), kept)
    return adapters


def _load(lora: Lora, pipeline: Any, own: set[str]) -> None:
    with _named(lora):
        for share in _shares(lora, own):
            _load_share(lora, pipeline, share, {SECOND} if share.second else own - {SECOND})


@contextlib.contextmanager
def _named(lora: Lora) -> Generator[None]:
    """Say which adapter cannot be read or does not fit."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, *_REFUSALS, SafetensorError) as error:
        raise ModelError(f"lora {lora.name}: {' and '.join(lora.files)} cannot be loaded: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Share:
    """What of an adapter goes into the models of one role, or into the second transformer alone."""

    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]
    second: bool


def _load_share(lora: Lora, pipeline: Any, share: _Share, targets: set[str]) -> None:
    """Into the components ``targets``; with the alphas in the weights where it cannot be had as it is."""
    try:
        _hand_over(lora, pipeline, share, targets)
    except _REFUSALS as refusal:
        folded = fold_alphas(share.tensors)
        if folded.keys() == share.tensors.keys() or _has(pipeline, targets, lora):
            raise
        try:
            _hand_over(lora, pipeline, replace(share, tensors=folded), targets)
        except _REFUSALS:
            raise refusal from None  # of the file as it is


def _hand_over(lora: Lora, pipeline: Any, share: _Share, targets: set[str]) -> None:
    """Raises one of `_REFUSALS` for what the pipeline's loader does not take, or finds nothing in."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix="triptych-lora-") as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several adapters are what is wanted
        file = Path(folder) / "lora.safetensors"
        save_file(share.tensors, file, share.metadata)
        pipeline.load_lora_weights(
            folder, weight_name=file.name, adapter_name=inner_name(lora.name), use_safetensors=True,
            local_files_only=True, **({"load_into_transformer_2": True} if share.second else {}),
        )  # fmt: skip
    if not _has(pipeline, targets, lora):
        raise ValueError(f"nothing in it fits {', '.join(sorted(targets))}")


def _has(pipeline: Any, targets: set[str], lora: Lora) -> bool:
    return any(inner_name(lora.name) in getattr(getattr(pipeline, name), "peft_config", {}) for name in targets)


def _shares(lora: Lora, own: set[str]) -> list[_Share]:
    """Everything in the adapter's files for the components ``own``.

    Raises `ValueError` for a second transformer's part where there is none.
    """
    tensors, metadata = _read(lora.path, own)
    first = {key: value for key, value in tensors.items() if not key.startswith(f"{SECOND}.")}
    named = {key: value for key, value in tensors.items() if key not in first}
    second, said = _as_first(named, metadata)
    if lora.second is not None:
        if second:
            raise ValueError(f"the first file has tensors of {SECOND}, for which there is a second one")
        second, said = _read(lora.second, own)
    if second and SECOND not in own:
        raise ValueError(f"a part of it is for {SECOND}, which this model has not")
    found = (_Share(tensors=first, metadata=metadata, second=False), _Share(tensors=second, metadata=said, second=True))
    return [share for share in found if share.tensors]


def _as_first(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of the second transformer under the names of the first, as Diffusers' loader asks."""
    renamed = {f"{FIRST}.{key.removeprefix(f'{SECOND}.')}": value for key, value in tensors.items()}
    said = dict(metadata)
    if _HEADER in said:
        header: dict[str, Any] = json.loads(said[_HEADER])
        own = {key: value for key, value in header.items() if key.startswith(f"{SECOND}.")}
        said[_HEADER] = json.dumps({f"{FIRST}.{key.removeprefix(f'{SECOND}.')}": v for key, v in own.items()})
        if not own:
            del said[_HEADER]
    return renamed, said


def _keys(path: str) -> list[str]:
    """The names in a file."""
    from safetensors import safe_open

    with safe_open(Path(path).expanduser(), "pt") as file:
        return list(file.keys())


def _read(path: str, own: set[str]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """A file's tensors that concern components ``own``, and its metadata."""
    from safetensors import safe_open

    text = any(name.startswith("text_encoder") for name in own)
    rest = any(not name.startswith("text_encoder") for name in own)
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(Path(path).expanduser(), "pt") as file:
        for key in file.keys():  # noqa: SIM118, it is no mapping
            if text if key.startswith(_TEXT_ENCODER) else rest:
                tensors[key] = file.get_tensor(key)
        metadata = dict(file.metadata() or {})
    return tensors, metadata


def fold_alphas(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``tensors`` with alpha over rank multiplied into the second matrix of each layer that has an alpha, and without
    these alphas."""
    folded = dict(tensors)
    for key in [key for key in tensors if key.endswith(".alpha")]:
        layer = key.removesuffix(".alpha")
        up = next((layer + end for end in _UP if layer + end in tensors), None)
        down = next((layer + end for end in _DOWN if layer + end in tensors), None)
        if up is not None and down is not None:
            folded[up] = tensors[up] * (tensors[key].item() / tensors[down].shape[0])
            del folded[key]
    return folded


def identities(loras: Sequence[Lora], *, written: bool) -> tuple[str, ...]:
    """What of the adapters' files changes results, for the fingerprint. ``written``: see `attach`.

    Raises `ModelError` for an unreadable file.
    """
    found: list[str] = []
    for lora in loras:
        digests: list[str] = []
        for path in lora.files:
            try:
                with Path(path).expanduser().open("rb") as file:
                    digests.append(hashlib.file_digest(file, "sha256").hexdigest()[:12])
            except OSError as error:
                raise ModelError(f"lora {lora.name}: {path!r} cannot be read: {error}") from error
        way = " written" if written else ""
        found.append(f"lora {lora.name} {' '.join(digests)} {lora.scale!r}{way}")
    return tuple(found)
