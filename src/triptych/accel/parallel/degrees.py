"""From what was asked for and what the model can do to how the ranks share a step, or the reason why they cannot."""

from __future__ import annotations

from dataclasses import dataclass, replace

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


def resolve(wish: Parallelism, ranks: int, traits: Traits) -> Degrees:
    """The layouts of a model on so many ranks; `Parallelism.check` has passed.

    Branches of guidance are shared first, because that is exact and needs least to be exchanged; the tokens share what
    ranks are left. Raises `ConfigError` that says what the model lacks.
    """
    wish.check(ranks)
    if wish.tp > 1:
        return _with_shared_weights(wish, ranks, traits)
    cfg = wish.cfg
    if cfg is None:
        sp = wish.said_sp
        cfg = ranks // sp if sp is not None else _best_cfg(wish, ranks, traits)
    if cfg > 1 and not traits.guided:
        raise ConfigError(
            f"num-gpus={ranks}: {cfg} groups of GPUs need guidance with a forward for each branch, which "
            f"{traits.name} has not in this pipeline; say denoiser-sp={ranks}"
        )
    guided = _layout(wish, cfg, ranks // cfg, traits)
    if cfg == 1:
        return Degrees(guided=guided, plain=guided)
    # Without guidance there is one branch, whose tokens all ranks share if they can.
    try:
        plain = _layout(Parallelism(ring=wish.ring), 1, ranks, traits)
    except ConfigError:
        plain = Layout(ring=guided.ring, ulysses=guided.ulysses)
    return Degrees(guided=guided, plain=plain)


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
    return replace(resolve(replace(wish, tp=1), ranks // wish.tp, group), tp=wish.tp)


def _best_cfg(wish: Parallelism, ranks: int, traits: Traits) -> int:
    if not traits.guided or ranks % 2:
        return 1
    try:
        _layout(wish, 2, ranks // 2, traits)
    except ConfigError:
        return 1
    return 2


def _layout(wish: Parallelism, cfg: int, sp: int, traits: Traits) -> Layout:
    """A layout in which ``sp`` ranks share the tokens. Raises `ConfigError`."""
    if wish.ulysses is not None:
        ulysses, ring = wish.ulysses, wish.ring or sp // wish.ulysses
    else:
        ring = wish.ring or 1
        ulysses = sp // ring
    if ulysses * ring != sp:
        raise ConfigError(f"denoiser-ulysses x denoiser-ring = {ulysses} x {ring}: must be {sp}, the GPUs of a forward")

    if sp > 1 and not traits.sequence_plan:
        instead = "num-gpus=2, for the branches of guidance" if traits.guided else "one instance for each GPU"
        raise ConfigError(
            f"denoiser-sp={sp}: {traits.name} has no complete plan in Diffusers for where its tokens can be split; say "
            f"{instead}"
        )
    if ring > 1 and traits.masked:
        raise ConfigError(
            f"denoiser-ring={ring}: {traits.name} attends with masks, which cannot go around a ring; say "
            f"denoiser-ulysses={sp}"
        )
    if ulysses > 1 and traits.heads is None:
        raise ConfigError(f"denoiser-ulysses={ulysses}: the config of {traits.name} does not say how many heads it has")
    if ulysses > 1 and traits.heads is not None and traits.heads % ulysses:
        raise ConfigError(
            f"denoiser-ulysses={ulysses}: must divide the {traits.heads} attention heads of {traits.name}"
        )
    return Layout(cfg=cfg, ring=ring, ulysses=ulysses)
