"""What is done to models between loading and serving: quantised, made faster, fitted into the device's memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from triptych.accel import forgetful
from triptych.accel.batching import ForwardBatcher
from triptych.accel.compiling import default_folder
from triptych.accel.memory import divide, offload
from triptych.accel.plan import Technique, accelerate
from triptych.accel.prompts import PromptCache
from triptych.accel.quant import quantise
from triptych.accel.step_cache import StepMemory
from triptych.accel.tally import Tally
from triptych.config import ModelConfig, Offload
from triptych.ids import ROLES, Role

logger = logging.getLogger(__name__)


def home_of(model: ModelConfig, role: Role, device: torch.device) -> torch.device:
    """Where the weights of a role are loaded to: host memory where they would not fit the device as they are."""
    return torch.device("cpu") if role in model.offload or role in model.quant else device


def outfit(
    model: ModelConfig,
    loaded: Mapping[str, Any],
    owners: Mapping[str, Role],
    device: torch.device,
    dtype: torch.dtype,
    tally: Tally,
    memory: StepMemory | None = None,
    batcher: ForwardBatcher | None = None,
    agree: Callable[[str], str] = str,
) -> tuple[str, ...]:
    """Prepare loaded components in place; what changes the bytes of results, for the fingerprint.

    ``owners`` names the role whose options count for each. ``tally``, ``memory``, ``batcher`` and ``agree``
    are as in `accelerate`. Raises `ConfigError` for an option that cannot take effect.
    """
    modules = modules_of(loaded)
    techniques = [*_quantised(model, modules, owners, device)]
    techniques += divide(modules, tiling=model.vae_tiling, slicing=model.vae_slicing)
    for name, module in modules.items():
        if owners[name] not in model.offload:
            module.to(device)
    # Before the prompt cache, which stands in front of the text encoder: what it knows brings no weights.
    kinds: dict[str, Offload] = {name: model.offload[owners[name]] for name in modules if owners[name] in model.offload}
    techniques += offload(modules, kinds, device)
    cached, prompts = _prompts(model, modules, tally)
    techniques += cached
    assert model.profile != "auto", "a profile is chosen before anything is loaded"
    techniques += accelerate(
        modules,
        device=device,
        dtype=dtype,
        profile=model.profile,
        backend=model.attention_backend,
        quantised=[name for name in modules if owners[name] in model.quant],
        prompts=prompts,
        batcher=batcher,
        step_cache=model.step_cache,
        memory=memory,
        tally=tally,
        cache_dir=model.cache_dir or default_folder(),
        agree=agree,
    )
    for module in modules.values():
        forgetful.install(module)
    for technique in techniques:
        logger.info("%s: %s (%s)", technique.name, "on" if technique.on else "off", technique.why)
    # Not the measured milliseconds: they differ from start to start, the bytes do not.
    return tuple(f"{t.name} {t.why.partition(' (')[0].partition(',')[0]}" for t in techniques if t.on and not t.exact)


def modules_of(components: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
    """Those of ``components`` that have weights."""
    return {name: part for name, part in components.items() if isinstance(part, torch.nn.Module)}


def _prompts(
    model: ModelConfig, modules: Mapping[str, torch.nn.Module], tally: Tally
) -> tuple[list[Technique], PromptCache | None]:
    """A cache of embeddings; none where adapters may change what a text encoder answers, of which it knows nothing."""
    if not model.prompt_cache_bytes:
        return [], None
    adapted = [
        name for name, part in modules.items() if name.startswith("text_encoder") and hasattr(part, "peft_config")
    ]
    if adapted:
        why = f"adapters change what {', '.join(adapted)} answers"
        return [Technique(name="prompt cache", on=False, why=why)], None
    return [], PromptCache(max_bytes=model.prompt_cache_bytes, tally=tally)


def _quantised(
    model: ModelConfig, modules: Mapping[str, torch.nn.Module], owners: Mapping[str, Role], device: torch.device
) -> list[Technique]:
    done: list[Technique] = []
    for role in ROLES:
        names = [name for name in modules if owners[name] == role]
        if role not in model.quant or not names:
            continue
        kind = model.quant[role]
        layers = quantise([modules[name] for name in names], kind, device)
        done.append(Technique(name=f"{', '.join(names)}: {kind}", on=True, why=f"{layers} linear layers"))
    return done
