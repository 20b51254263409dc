"""What a process asks for when it loads a model, and who helps: who counts, who shares, and who fetches weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from triptych.accel.batching import MOST_AT_ONCE
from triptych.accel.parallel.team import Team
from triptych.accel.tally import Tally
from triptych.config import ModelConfig
from triptych.ids import Role
from triptych.pipeline.outfit import home_of
from triptych.pipeline.stage import RolePipeline
from triptych.pipeline.weights import LoadComponent

log = logging.getLogger(__name__)

WarmUp: TypeAlias = Callable[[RolePipeline], None]
"""Runs a request of each declared shape through a pipeline that was loaded, or one that wraps it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """One load of a model."""

    model: ModelConfig
    roles: tuple[Role, ...]
    device: str
    """A torch device name."""
    tally: Tally
    """Where what accelerations do is counted."""
    team: Team | None
    """The ranks that share the work, each of which loads at the same time."""
    component: LoadComponent
    """What gives a component its weights."""
    at_once: int = MOST_AT_ONCE
    """Requests that are computed by turns, so as many as may share a forward."""
    chosen: bool = False
    """Whether the profile was chosen here, and not asked for by name."""
    commit: str = ""
    """Of a model from the Hub, that which ``model`` asks for as its revision."""

    def at(self, commit: str) -> Loading:
        """The same load of that commit, or of rank 0's: a branch may move between two looks at the Hub."""
        agreed = self.agree()(commit)
        return replace(self, model=replace(self.model, revision=agreed), commit=agreed)

    def settled(self) -> Loading:
        """The same load with a profile in place of ``auto``."""
        if self.model.profile != "auto":
            return self
        spread = self.team is not None and self.team.wish.tp > 1
        why = self.model.against_kernels or ("the weights are spread over GPUs" if spread else "")
        log.info("profile=%s (auto): %s", "stock" if why else "lossless", why or "bfloat16 on CUDA")
        return replace(self, model=replace(self.model, profile="stock" if why else "lossless"), chosen=True)

    def without_kernels(self, why: str) -> Loading:
        """The same load with profile stock, unless the operator has asked for another one by name."""
        if not self.chosen or self.model.profile == "stock":
            return self
        log.warning("profile=stock (auto), which is slower: %s", why)
        return replace(self, model=replace(self.model, profile="stock"))

    @property
    def where(self) -> torch.device:
        """The device that is computed on."""
        return torch.device(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that weights are loaded in."""
        return getattr(torch, self.model.effective_dtype)

    def serves(self, role: Role) -> bool:
        """Whether the process has that role."""
        return role in self.roles

    def from_model(self, names: Iterable[str]) -> list[str]:
        """Those of the components ``names`` whose weights are the model's own, and not replaced by others."""
        return [name for name in names if name not in self.model.components]

    def agree(self) -> Callable[[str], str]:
        """Makes the ranks take the same one of several choices."""
        return str if self.team is None else self.team.agree

    def meet(self, weights: Iterable[str], loaded: Iterable[str], techniques: Iterable[str]) -> None:
        """Wait until all ranks have loaded: the same ``weights``, with the same done to each component that two have.

        ``loaded`` are this rank's components. A technique begins with those that it was applied to, and a colon.
        """
        if self.team is None:
            return
        applied: dict[str, list[str]] = {name: [] for name in loaded}
        for technique in techniques:
            names, _, what = technique.partition(": ")
            for name in names.split(", "):
                applied.setdefault(name, []).append(what)
        done = {name: ", ".join(words) for name, words in applied.items()}
        self.team.meet({"at": "the weights", "model": ", ".join(weights), **done})

    def fetch(self, folder: Path, name: str, entry: tuple[str, str], role: Role | None = None) -> Any:
        """A component with its weights, for ``role`` where these weights may have to stay in host memory; ``entry``
        is its library and class."""
        home = self.where if role is None else home_of(self.model, role, self.where)
        return self.component(folder, name, entry, self.model.components.get(name), self.dtype, home)
