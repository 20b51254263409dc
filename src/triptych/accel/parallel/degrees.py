"""From what was asked for and what the model can do to how the ranks share a step, or the reason why they cannot."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from triptych.errors import ConfigError
from triptych.parallelism import Parallelism


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """What a denoiser has to be shared by."""

    name: str
    """Its class, for messages."""
    heads: int | None
    """Attention heads; None where the config does not say."""
    guided: bool
    """Whether guidance is computed as one forward for each branch."""
    sequence_plan: bool
    """Whether Diffusers knows where its tokens can be split."""
    masked: bool = False
    """Whether its attention always has masks, which cannot go around a ring."""
    tensor_plan: bool = False
    """Whether it is known how to spread its weights."""
    wide: int = 0
    """Features of the wide layers of its blocks; 0 where the config does not say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How the ranks share one forward, or the forwards of one step."""

    cfg: int = 1
    ring: int = 1
    ulysses: int = 1

    @property
    def sp(self) -> int:
        """Ranks that share the tokens of one forward."""
        return self.ring * self.ulysses

    @property
    def ranks(self) -> int:
        """Ranks that have work of their own."""
        return self.cfg * self.sp

    def __str__(self) -> str:
        degrees = {"cfg": self.cfg, "ulysses": self.ulysses, "ring": self.ring}
        return " x ".join(f"{name} {n}" for name, n in degrees.items() if n > 1) or "each rank alone"


@dataclass(frozen=True, kw_only=True, slots=True)
class Degrees:
    """The two layouts that a denoiser changes between from step to step."""

    guided: Layout
    """For steps with several branches of guidance."""
    plain: Layout
    """For steps of one forward. When it has fewer ranks than there are, groups of ranks compute the same."""
    tp: int = 1
    """Ranks that share the weights in both, and count as one there."""
    why: str = field(default="", compare=False)
    """What decided."""
    passed_over: str = field(default="", compare=False)
    """Why not all ranks have work of their own in ``plain``; empty where they have."""

    def __str__(self) -> str:
        guided, plain = (self._named(layout) for layout in (self.guided, self.plain))
        return guided if guided == plain else f"{guided} with guidance, {plain} without"

    def _named(self, layout: Layout) -> str:
        if self.tp == 1:
            return str(layout)
        return f"tp {self.tp}" + (f" x {layout}" if layout.ranks > 1 else "")


class _Impossible(ConfigError):
    """A layout that the model cannot have."""

    def __init__(self, asked: str, reason: str, instead: str = "") -> None:
        """Of what was ``asked`` for; ``instead`` is what can be said."""
        super().__init__(f"{asked}: {reason}" + (f"; say {instead}" if instead else ""))
        self.reason = reason


def resolve(wish: Parallelism, ranks: int, traits: Traits) -> Degrees:
    """The layouts of a model on so many ranks; `Parallelism.check` has passed.

    Branches of guidance are shared first, because that is exact and needs least to be exchanged; the tokens share what
    ranks are left, by heads as far as these divide, and around a ring for the rest. Raises `ConfigError` that says what
    the model lacks, of the flags that were given.
    """
    wish.check(ranks)
    if wish.tp > 1:
        return _with_shared_weights(wish, ranks, traits)
    return _resolve(wish, ranks, traits, gpus=ranks)


def _resolve(wish: Parallelism, ranks: int, traits: Traits, *, gpus: int) -> Degrees:
    cfg = wish.cfg
    if cfg is None:
        sp = wish.said_sp
        cfg = ranks // sp if sp is not None else _best_cfg(wish, ranks, traits, gpus)
    if cfg > 1 and not traits.guided:
        given = f"denoiser-cfg={wish.cfg}" if wish.cfg else f"{_asked(wish, gpus)} of {gpus} GPUs"
        raise ConfigError(
            f"{given}: {cfg} groups of GPUs need guidance with a forward for each branch, which {traits.name} has not "
            f"in this pipeline; say denoiser-sp={ranks}"
        )
    guided = _layout(wish, cfg, ranks // cfg, traits, gpus)
    why = "as asked for" if wish.of_denoiser else _reason(guided, ranks, traits)
    if cfg == 1:
        return Degrees(guided=guided, plain=guided, why=why)
    # Without guidance there is one branch, whose tokens all ranks share if they can.
    ring = wish.ring if wish.ulysses is None else guided.ring
    try:
        plain = _layout(Parallelism(ring=ring), 1, ranks, traits, gpus)
    except _Impossible as error:
        plain = Layout(ring=guided.ring, ulysses=guided.ulysses)
        return Degrees(guided=guided, plain=plain, why=why, passed_over=error.reason)
    return Degrees(guided=guided, plain=plain, why=why)


def _reason(guided: Layout, ranks: int, traits: Traits) -> str:
    parts: list[str] = []
    if guided.cfg > 1:
        parts.append("branches of guidance first, which is exact")
    elif not traits.guided:
        parts.append(f"{traits.name} has no branches of guidance here")
    elif ranks > 1:
        parts.append("the branches of guidance cannot be shared by so many GPUs")
    if guided.sp > 1:
        parts.append(f"then tokens, by {traits.heads} heads" + (" and a ring" if guided.ring > 1 else ""))
    return ", ".join(parts) or "there is one GPU"


def _with_shared_weights(wish: Parallelism, ranks: int, traits: Traits) -> Degrees:
    """The layouts of groups of ``wish.tp`` ranks, each of which is one rank with a part of the heads."""
    if not traits.tensor_plan:
        raise ConfigError(f"denoiser-tp={wish.tp}: there is no plan for how to spread the weights of {traits.name}")
    if traits.heads is None or traits.heads % wish.tp:
        raise ConfigError(f"denoiser-tp={wish.tp}: must divide the {traits.heads} attention heads of {traits.name}")
    if traits.wide % wish.tp:
        raise ConfigError(
            f"denoiser-tp={wish.tp}: must divide the {traits.wide} features of {traits.name}'s wide layers"
        )
    group = replace(traits, heads=traits.heads // wish.tp, tensor_plan=False)
    degrees = _resolve(replace(wish, tp=1), ranks // wish.tp, group, gpus=ranks)
    return replace(degrees, tp=wish.tp, why="as asked for")


def _best_cfg(wish: Parallelism, ranks: int, traits: Traits, gpus: int) -> int:
    if not traits.guided or ranks % 2:
        return 1
    try:
        _layout(wish, 2, ranks // 2, traits, gpus)
    except ConfigError:
        return 1
    return 2


def _layout(wish: Parallelism, cfg: int, sp: int, traits: Traits, gpus: int) -> Layout:
    """A layout in which ``sp`` ranks share the tokens, of an instance of ``gpus``. Raises `ConfigError`."""
    asked = _asked(wish, gpus)
    if wish.ulysses is not None:
        ulysses, ring = wish.ulysses, wish.ring or sp // wish.ulysses
    elif wish.ring is not None:
        ulysses, ring = sp // wish.ring, wish.ring
    elif traits.heads is None or traits.masked:
        ulysses, ring = sp, 1
    else:
        ulysses = math.gcd(traits.heads, sp)
        ring = sp // ulysses
    if ulysses * ring != sp:
        product = f"denoiser-ulysses x denoiser-ring = {ulysses} x {ring}"
        raise _Impossible(product, f"must be {sp}, the GPUs of a forward")
    if sp > 1 and not traits.sequence_plan:
        instead = "num-gpus=2, for the branches of guidance" if traits.guided else "one instance for each GPU"
        reason = f"{traits.name} has no complete plan in Diffusers for where its tokens can be split"
        raise _Impossible(asked, reason, instead)
    if ring > 1 and traits.masked:
        reason = f"{traits.name} attends with masks, which cannot go around a ring"
        raise _Impossible(asked, reason, f"denoiser-ulysses={sp}")
    if ulysses > 1 and traits.heads is None:
        reason = f"{ulysses} GPUs cannot share heads, for the config of {traits.name} does not say how many it has"
        raise _Impossible(asked, reason)
    if ulysses > 1 and traits.heads is not None and traits.heads % ulysses:
        number = "" if asked == f"denoiser-ulysses={ulysses}" else f"{ulysses} "
        ringless = ", and its masks cannot go around a ring" if traits.masked else ""
        reason = f"{number}must divide the {traits.heads} attention heads of {traits.name}{ringless}"
        raise _Impossible(asked, reason)
    return Layout(cfg=cfg, ring=ring, ulysses=ulysses)


def _asked(wish: Parallelism, gpus: int) -> str:
    """What was said of how tokens are shared; else the number of GPUs, which asks for some way."""
    said = {"ulysses": wish.ulysses, "ring": wish.ring, "sp": wish.sp}
    given = [f"denoiser-{name}={n}" for name, n in said.items() if n is not None and n > 1]
    return given[0] if given else f"num-gpus={gpus}"
