"""Checkpoints of a denoise loop: what its steps have changed so far, as a value tree, and the way back.

Theory of operation. A resumed run executes its block from the beginning, which makes everything again that the
encoder's output determines, and skips the steps that were done. So a checkpoint need only hold what the steps changed:
the loop's state is looked at before the first step and compared when the checkpoint is taken. That goes for the
entries of the block's state and for the fields of schedulers, guiders and whatever objects of Diffusers these hold.
Tensors are compared by identity and version, plain values by value, and random generators are always kept; the global
ones only where something has drawn from them. A field that holds one of those objects, or a model, is kept as the path
of it: a loop puts the guider and the transformer of its present stage there. Whatever was changed and cannot cross a
process boundary makes the run one that has no checkpoints, rather than one that resumes wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from triptych.accel.step_cache import FIELD
from triptych.errors import StageError, WireError
from triptych.pipeline.codec import decode_state, encode_state, without_entry
from triptych.pipeline.randomness import GlobalRandomness

Frozen = tuple[bytes, tuple[torch.Tensor, ...]]
"""A value tree in MessagePack and the tensors that it refers to."""

_SECTIONS = {"step", "steps", "replaced", "written", "pointed", "host", "generators", "global"}


_STATE = "state"
"""Path of the block's state."""


class Unsaved(Exception):
    """Something was changed that a checkpoint cannot hold; the message says what."""


class Baseline:
    """The state of a loop before its first step."""

    def __init__(self, components: Any, block_state: Any, randomness: GlobalRandomness) -> None:
        self._randomness = randomness
        self._drawn = randomness.states()
        self._marks = {
            path: {name: _mark(value) for name, value in vars(owner).items()}
            for path, owner in _owners(components, block_state).items()
        }

    def capture(self, components: Any, block_state: Any, step: int, steps: int) -> Frozen:
        """What has changed since, copied, after ``step`` of ``steps``. Raises `Unsaved`."""
        replaced: dict[str, dict[str, Any]] = {}
        written: dict[str, dict[str, Any]] = {}
        pointed: dict[str, dict[str, str]] = {}
        host: list[str] = []
        owners = _owners(components, block_state)
        if owners.keys() != self._marks.keys():
            raise Unsaved(f"objects came or went: {', '.join(sorted(owners.keys() ^ self._marks.keys()))}")
        targets = _targets(components, owners)
        for path, owner in owners.items():
            before, now = self._marks[path], vars(owner)
            if gone := before.keys() - now.keys():
                raise Unsaved(f"{path}: {', '.join(sorted(gone))} went")
            for name, value in now.items():
                mark = _mark(value)
                old = before.get(name)
                if old is not None and old.same(mark):
                    continue
                if (target := next((at for at, it in targets.items() if it is value), None)) is not None:
                    pointed.setdefault(path, {})[name] = target
                    continue
                if any(isinstance(leaf, torch.Generator) for leaf in _leaves(value)):
                    raise Unsaved(f"{path}.{name}: a random generator was exchanged")
                in_place = isinstance(value, torch.Tensor) and old is not None and old.thing is value
                (written if in_place else replaced).setdefault(path, {})[name] = value
                if _on_host(path, name, value):
                    host.append(f"{path}.{name}")
        values = {
            "step": step,
            "steps": steps,
            "replaced": replaced,
            "written": written,
            "pointed": pointed,
            "host": host,
            "generators": dict(_generators(owners)),
            "global": self._randomness.changed(self._drawn),
        }
        try:
            tree, tensors = encode_state(values, {})
        except StageError as error:
            raise Unsaved(error.message) from error
        return tree, tuple(
            t.clone(memory_format=torch.contiguous_format) for t in tensors
        )  # the next step may write to them


def lighter(frozen: Frozen) -> Frozen | None:
    """A checkpoint without what step caching keeps, which is many times the rest: the step after it is computed whole.

    None for one that has nothing of it. Whoever goes on from it ends up with other bytes than an undisturbed run.
    """
    return without_entry(*frozen, ("replaced", _STATE, FIELD))


class Saved:
    """A checkpoint that was read."""

    def __init__(self, tree: bytes, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        """Read what `Baseline.capture` wrote; raises `StageError` for anything else."""
        try:
            values, _ = decode_state(tree, tensors, device)
        except WireError as error:
            raise StageError(f"the checkpoint cannot be read: {error.message}", retryable=True) from error
        step, steps = values.get("step"), values.get("steps")
        if values.keys() != _SECTIONS or not isinstance(step, int) or not isinstance(steps, int):
            raise StageError(f"not a checkpoint: it has {', '.join(sorted(values))}", retryable=True)
        if not 0 < step < steps:
            raise StageError(f"not a checkpoint between two steps: step {step} of {steps}", retryable=True)
        self.step = step
        self.steps = steps
        self._values = values

    def restore(self, components: Any, block_state: Any, randomness: GlobalRandomness) -> None:
        """Put a loop that has skipped its first steps, and has ``randomness`` installed, into the state after them.
        Raises `StageError`."""
        values = self._values
        owners = _owners(components, block_state)
        host = set(values["host"])
        for section in ("replaced", "written"):
            for path, fields in values[section].items():
                owner = _known(owners, path)
                for name, value in fields.items():
                    here = _to_host(value) if f"{path}.{name}" in host else value
                    if section == "written":
                        getattr(owner, name).copy_(here)
                    else:
                        setattr(owner, name, here)
        targets = _targets(components, owners)
        for path, fields in values["pointed"].items():
            owner = _known(owners, path)
            for name, target in fields.items():
                setattr(owner, name, _known(targets, target))
        present = dict(_generators(owners))
        for path, generator in values["generators"].items():
            _known(present, path).set_state(generator.get_state())
        if len(values["global"]) != len(randomness.states()):
            raise StageError("the checkpoint is of a run on another kind of device", retryable=True)
        randomness.advance(values["global"])


# -- what belongs to a loop ----------------------------------------------------------------------------------------


def _owners(components: Any, block_state: Any) -> dict[str, Any]:
    """The objects whose fields the steps of a loop may change, by path. Raises `Unsaved` for a caching model.

    What is a component goes by that name, whatever else holds it at the time.
    """
    found: dict[str, Any] = {}
    for name, component in components.components.items():
        if isinstance(component, torch.nn.Module):
            if getattr(component, "is_cache_enabled", False):
                raise Unsaved(f"{name} keeps a cache between steps")
        elif hasattr(component, "set_timesteps") or hasattr(component, "prepare_models"):
            _own(found, name, component)
    _own(found, _STATE, block_state)
    return found


def _targets(components: Any, owners: Mapping[str, Any]) -> dict[str, Any]:
    """What a field can point to, by path: the objects that steps change, and the models, which they do not."""
    models = {name: it for name, it in components.components.items() if isinstance(it, torch.nn.Module)}
    return {**models, **owners}


def _own(found: dict[str, Any], path: str, owner: Any) -> None:
    if any(owner is other for other in found.values()):
        return
    found[path] = owner
    for name, value in vars(owner).items():
        if _is_object(value):
            _own(found, f"{path}.{name}", value)


def _is_object(value: Any) -> bool:
    """An object of Diffusers that has fields of its own; configs never change, weights belong to no request."""
    kind = type(value)
    return (
        kind.__module__.startswith("diffusers.")
        and hasattr(value, "__dict__")
        and not isinstance(value, (dict, torch.nn.Module, type))
    )


def _generators(owners: Mapping[str, Any]) -> Iterator[tuple[str, torch.Generator]]:
    seen: list[torch.Generator] = []
    for path, owner in owners.items():
        for name, value in vars(owner).items():
            for number, leaf in enumerate(_leaves(value)):
                if isinstance(leaf, torch.Generator) and not any(leaf is other for other in seen):
                    seen.append(leaf)
                    yield f"{path}.{name}[{number}]", leaf


def _leaves(value: Any) -> Iterator[Any]:
    if type(value) in (list, tuple):
        for item in value:
            yield from _leaves(item)
    elif type(value) is dict:
        for item in value.values():
            yield from _leaves(item)
    else:
        yield value


def _known(things: Mapping[str, Any], path: str) -> Any:
    if path not in things:
        raise StageError(f"the checkpoint has {path}, which this run has not", retryable=True)
    return things[path]


# -- whether something changed ---------------------------------------------------------------------------------------

_PLAIN = (bool, int, float, str, bytes, torch.dtype, torch.device)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Mark:
    """What a value was like. ``thing`` is held, so that its identity is not given to another one meanwhile."""

    kind: type
    thing: object = None
    """Compared by identity."""
    detail: object = None
    """Compared by value."""
    parts: tuple[_Mark, ...] = ()

    def same(self, other: _Mark) -> bool:
        return (
            self.kind is other.kind
            and self.thing is other.thing
            and self.detail == other.detail
            and len(self.parts) == len(other.parts)
            and all(mine.same(its) for mine, its in zip(self.parts, other.parts, strict=True))
        )


def _mark(value: Any) -> _Mark:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        # An inference tensor counts no versions; NaN, which equals nothing, has it taken for changed.
        return _Mark(kind=kind, thing=value, detail=math.nan if value.is_inference() else value._version)
    if kind in (list, tuple):
        return _Mark(kind=kind, parts=tuple(_mark(item) for item in value))
    if kind is dict:
        return _Mark(kind=kind, detail=tuple(value), parts=tuple(_mark(item) for item in value.values()))
    if isinstance(value, np.ndarray):
        return _Mark(kind=kind, detail=(value.dtype.str, value.shape, value.tobytes()))
    if isinstance(value, _PLAIN):
        return _Mark(kind=kind, detail=repr(value))
    return _Mark(kind=kind, thing=value)


def _on_host(path: str, name: str, value: Any) -> bool:
    where = {leaf.device.type for leaf in _leaves(value) if isinstance(leaf, torch.Tensor)}
    if len(where) > 1:
        raise Unsaved(f"{path}.{name}: tensors on {' and '.join(sorted(where))}")
    return where == {"cpu"}


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, list | tuple):
        return type(value)(_to_host(item) for item in value)
    if isinstance(value, dict):
        return {key: _to_host(item) for key, item in value.items()}
    return value
