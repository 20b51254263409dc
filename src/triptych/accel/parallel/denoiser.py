"""A denoiser on the ranks of a team: before each forward, the layout that fits the step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from torch import nn

from triptych.accel.parallel.degrees import Degrees, Layout
from triptych.accel.parallel.exchange import install
from triptych.accel.parallel.guidance import BranchSharing
from triptych.accel.parallel.ring import RingAttention
from triptych.accel.parallel.sequence import TokenSharing, context
from triptych.accel.parallel.team import Team
from triptych.accel.parallel.tensor import shard
from triptych.accel.qwen_dit import leave_out_masks
from triptych.accel.recordable import launched_one_by_one
from triptych.accel.tally import Tally


class SharedDenoiser:
    """Makes the models of a loaded denoiser compute their rank's share. To be built by all ranks at the same time."""

    def __init__(self, team: Team, degrees: Degrees, models: Mapping[str, nn.Module], tally: Tally) -> None:
        """``tally`` counts forwards that could not be shared."""
        self._tally = tally
        guided = team.mesh(degrees.guided, degrees.tp)
        self._degrees = degrees
        self._branches = BranchSharing(guided) if degrees.guided.cfg > 1 else None
        self._guided = None if degrees.guided.sp == 1 else context(guided, degrees.guided, team.device)
        self._plain = self._guided
        if degrees.plain.sp != degrees.guided.sp:
            self._plain = context(team.mesh(degrees.plain, degrees.tp), degrees.plain, team.device)
        for model in models.values():
            if degrees.tp > 1:
                shard(model, guided["tp"])
            ring = None
            if max(degrees.guided.ring, degrees.plain.ring) > 1:
                if type(model).__name__ == "QwenImageTransformer2DModel":
                    leave_out_masks(model)
                ring = RingAttention(model, team.device)
                if degrees.guided.ring > 1:
                    ring.use()
            if self._guided is not None or self._plain is not None:
                install()
                self._install_layouts(model, ring if degrees.guided.ring == 1 else None)
            if self._branches is not None:
                self._branches.install(model)

    def guider(self, guider: Any) -> Any:
        """A request's own guider, with its branches shared."""
        return guider if self._branches is None else self._branches.share(guider)

    @property
    def techniques(self) -> tuple[str, ...]:
        """What changes results, by rounding, for the fingerprint: nothing where only whole branches are shared."""
        layouts: tuple[Layout, ...] = (self._degrees.guided, self._degrees.plain)
        inexact = [f"ulysses {layout.ulysses} ring {layout.ring}" for layout in layouts if layout.sp > 1]
        weights = [f"weights spread over {self._degrees.tp}"] if self._degrees.tp > 1 else []
        return (*weights, *(f"tokens shared by {way}" for way in dict.fromkeys(inexact)))

    def _install_layouts(self, model: nn.Module, ring: RingAttention | None) -> None:
        """``ring`` is for forwards without guidance alone."""
        tokens = TokenSharing(model, self._tally)
        compute: Callable[..., Any] = model.forward

        @functools.wraps(compute)
        def forward(*args: Any, **kwargs: Any) -> Any:
            in_step = self._branches is not None and self._branches.in_step
            way = self._guided if in_step else self._plain
            ringed = nullcontext() if ring is None or in_step else ring.used()
            with ringed, tokens.using(way), nullcontext() if way is None else launched_one_by_one():
                return compute(*args, **kwargs)

        model.forward = forward
