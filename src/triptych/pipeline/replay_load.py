"""Load the roles of a classic pipeline: their components' weights, weightless stand-ins for all others."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from triptych.accel.parallel.team import Team
from triptych.errors import ConfigError, ModelError
from triptych.ids import ROLES, Role
from triptych.pipeline.anatomy import Anatomy, anatomy_of
from triptych.pipeline.answers import OutputClasses
from triptych.pipeline.fingerprint import fingerprint, weights_of
from triptych.pipeline.loading import Loading
from triptych.pipeline.lora import attach, identities, with_adapters
from triptych.pipeline.outfit import modules_of, outfit
from triptych.pipeline.readahead import read_ahead
from triptych.pipeline.replay import ReplayModel, ReplayRolePipeline
from triptych.pipeline.replay_schema import build_replay_schema
from triptych.pipeline.request import with_defaults
from triptych.pipeline.schema import read_settings
from triptych.pipeline.shadows import placed
from triptych.pipeline.sharing import Shares
from triptych.pipeline.source import index_components, resolve_source
from triptych.pipeline.standin import component_class, without_weights
from triptych.pipeline.weights import load_component


def load_replay(loading: Loading, index: dict[str, Any]) -> ReplayRolePipeline:
    """The classic pipeline that ``index`` names, with the weights of the roles asked for.

    Raises `ModelError` for a class that cannot be split, with the reason, or a component that cannot be loaded, and
    `ConfigError` for what the class cannot do.
    """
    model, where, team = loading.model, loading.where, loading.team
    kind = pipeline_class(index["_class_name"])
    anatomy = anatomy_of(kind)
    present = {name: entry for name, entry in index_components(index).items() if name in _takes(kind)}
    classes = {name: component_class(name, *entry) for name, entry in present.items()}
    owned = {role: owned_components(role, anatomy, classes) for role in ROLES if loading.serves(role)}
    owners = {name: role for role, names in owned.items() for name in sorted(names)}
    read = loading.from_model(owners)
    folder = resolve_source(model.path, read, model.revision)
    read_ahead(folder, read)
    stand_ins: dict[str, Any] = {
        name: _stand_in(folder, name, entry, classes[name], loading.dtype, where) for name, entry in present.items()
    }
    anatomy = _as_guided(anatomy, stand_ins)
    if team is not None:
        _refuse_what_cannot_be_shared(kind, anatomy, team, denoises=loading.serves(Role.DENOISER))
    # Its guidance is one forward of a doubled batch, so branches are not apart.
    shares = Shares(team, loading.roles, present, stand_ins, sorted(anatomy.denoisers), guided=False)
    loaded = {
        name: _as_stock(loading.fetch(folder, name, present[name], role)) for name, role in sorted(owners.items())
    }

    def built() -> dict[Role, Any]:
        return {
            role: _built(kind, index, stand_ins | {name: loaded[name] for name in names}, where)
            for role, names in owned.items()
        }

    adapters = attach(
        model.loras, built().values() if model.loras else (), modules_of(loaded), written=model.writes_adapters
    )
    techniques = outfit(model, loaded, owners, where, loading.dtype, loading.tally, agree=loading.agree())
    weights = weights_of(folder, model.components)
    adapted_by = identities(model.loras, written=model.writes_adapters)
    loading.meet((weights, *adapted_by), loaded, techniques)
    techniques += shares.share(loaded, loading.tally)[1]
    pipelines = built()
    any_role = next(iter(pipelines.values()))
    schema = build_replay_schema(model.path, index, any_role, anatomy, read_settings(folder))
    schema = msgspec.structs.replace(schema, commit=loading.commit)
    return ReplayRolePipeline(
        model=ReplayModel(
            anatomy=anatomy,
            classes=OutputClasses(classes.values()),
            schema=with_defaults(with_adapters(schema, model.loras, kind), model.defaults),
            fingerprint=fingerprint(loading.device, loading.dtype, weights, (*techniques, *adapted_by)),
            device=where,
            sharing=shares.words,
        ),
        pipelines=pipelines,
        owned=owned,
        adapters=adapters,
    )


def _refuse_what_cannot_be_shared(kind: type[Any], anatomy: Anatomy, team: Team, *, denoises: bool) -> None:
    if team.wish.encoder_tp > 1:
        raise ConfigError(f"encoder-tp={team.size}: {kind.__name__} is split by replay, whose encoder is on one GPU")
    if anatomy.keeps_keys and denoises:
        raise ConfigError(
            f"num-gpus={team.size}: steps of {kind.__name__} attend to keys that earlier ones have kept, which GPUs do "
            "not exchange"
        )


def _as_guided(anatomy: Anatomy, components: Mapping[str, Any]) -> Anatomy:
    """The anatomy without a distilled model's scale where the model is none: its guider then has the scale.

    HunyuanImage has weights of both kinds in one class, which reads the call's scale for the distilled ones alone.
    """
    has_guider = any(hasattr(component, "prepare_models") for component in components.values())
    denoisers = [components[name] for name in anatomy.denoisers if name in components]
    embeds = any(getattr(denoiser.config, "guidance_embeds", False) for denoiser in denoisers)
    if not has_guider or embeds:
        return anatomy
    read = {name: default for name, default in anatomy.parameters.items() if name != "distilled_guidance_scale"}
    return dataclasses.replace(anatomy, parameters=read)


def _as_stock(component: torch.nn.Module) -> torch.nn.Module:
    """Weights that ask for gradients, as Diffusers loads them, though none is ever computed.

    Torch folds a matmul with frozen weights differently, which changes the last bit.
    """
    for parameter in component.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(True)
    return component


def pipeline_class(name: str) -> type[Any]:
    """The classic pipeline class of that name; raises `ModelError` when Diffusers has none."""
    import diffusers
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    kind = getattr(diffusers, name, None)
    if not isinstance(kind, type) or not issubclass(kind, DiffusionPipeline):
        raise ModelError(f"Diffusers has no modular pipeline for {name}, nor a classic one")
    return kind


def owned_components(role: Role, anatomy: Anatomy, classes: Mapping[str, type[Any]]) -> frozenset[str]:
    """Components whose weights ``role`` needs. The VAE serves the decoder, and the encoder where images are encoded."""
    models = {name for name, kind in classes.items() if issubclass(kind, torch.nn.Module)}
    denoisers = models & anatomy.denoisers
    autoencoders = {name for name in models - denoisers if hasattr(classes[name], "decode")}
    match role:
        case Role.ENCODER:
            used = models - denoisers - anatomy.inspectors
            looks = anatomy.takes_image or anatomy.takes_control or anatomy.carried
            return frozenset(used if anatomy.encodes and looks else used - autoencoders)
        case Role.DENOISER:
            return frozenset(denoisers)
        case Role.DECODER:
            return frozenset(autoencoders | models & anatomy.inspectors)


def _takes(kind: type[Any]) -> frozenset[str]:
    return frozenset(inspect.signature(kind.__init__).parameters)


def _stand_in(
    folder: Path, name: str, entry: tuple[str, str], kind: type[Any], dtype: torch.dtype, device: torch.device
) -> Any:
    """A model without weights that says to be on ``device``; anything else, such as a tokenizer, for real."""
    if not issubclass(kind, torch.nn.Module):
        return load_component(folder, name, entry, None, dtype, device)
    try:
        made = (
            without_weights(folder, name, kind, dtype)
            if hasattr(kind, "load_config")
            else _text_model(folder / name, kind)
        )
        return placed(made.to(dtype), device)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"component {name!r}: its config cannot be read: {error}") from error


def _text_model(folder: Path, kind: Any) -> torch.nn.Module:
    config = kind.config_class.from_pretrained(folder)
    with torch.device("meta"):
        return kind(config).eval().requires_grad_(False)


def _built(kind: type[Any], index: dict[str, Any], components: Mapping[str, Any], device: torch.device) -> Any:
    """The pipeline of ``components`` that computes on ``device`` wherever its stand-ins are, and shows no progress."""
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        if name == "self":
            continue
        if name in components:
            arguments[name] = components[name]
        elif isinstance(index.get(name), list) and index[name] == [None, None]:
            arguments[name] = None
        elif name in index and not _is_component(index[name]):
            arguments[name] = index[name]
        elif parameter.default is inspect.Parameter.empty:
            raise ModelError(f"component {name!r}, which {kind.__name__} needs, is not in the model's index")
    own = type(kind.__name__, (_OnDevice, kind), {"__module__": kind.__module__, "_triptych_device": device})
    try:
        pipeline = own(**arguments)
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise ModelError(f"{kind.__name__} cannot be built from the model's components: {error}") from error
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _is_component(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and all(isinstance(part, str) for part in entry)


class _OnDevice:
    """Where a pipeline puts what it makes: on the role's device, whatever its components are."""

    _triptych_device: torch.device

    @property
    def device(self) -> torch.device:
        """The role's device."""
        return self._triptych_device

    @property
    def _execution_device(self) -> torch.device:
        return self._triptych_device
