"""How ranks share a model's steps, and what is refused with which reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from triptych.accel.parallel.degrees import Degrees, Layout, Traits, resolve
from triptych.errors import ConfigError
from triptych.parallelism import Parallelism

WAN = Traits(name="WanTransformer3DModel", heads=12, guided=True, sequence_plan=True, tensor_plan=True)
LARGE = replace(WAN, heads=40)
FLUX = Traits(name="FluxTransformer2DModel", heads=24, guided=False, sequence_plan=True)
MASKED = Traits(name="LTXVideoTransformer3DModel", heads=32, guided=True, sequence_plan=True, masked=True)
PLANLESS = Traits(name="Planless", heads=12, guided=True, sequence_plan=False)


def same(layout: Layout) -> Degrees:
    return Degrees(guided=layout, plain=layout)


@pytest.mark.parametrize(
    ("traits", "ranks", "wish", "expected"),
    [
        (WAN, 2, Parallelism(), Degrees(guided=Layout(cfg=2), plain=Layout(ulysses=2))),
        (WAN, 4, Parallelism(), Degrees(guided=Layout(cfg=2, ulysses=2), plain=Layout(ulysses=4))),
        (WAN, 3, Parallelism(), same(Layout(ulysses=3))),
        (WAN, 8, Parallelism(), Degrees(guided=Layout(cfg=2, ulysses=4), plain=Layout(ulysses=4, ring=2))),
        (WAN, 5, Parallelism(), same(Layout(ring=5))),
        (
            WAN,
            16,
            Parallelism(cfg=2),
            Degrees(guided=Layout(cfg=2, ulysses=4, ring=2), plain=Layout(ulysses=4, ring=4)),
        ),
        (WAN, 8, Parallelism(sp=8), same(Layout(ulysses=4, ring=2))),
        (LARGE, 3, Parallelism(), same(Layout(ring=3))),
        (LARGE, 6, Parallelism(), Degrees(guided=Layout(cfg=2, ring=3), plain=Layout(ulysses=2, ring=3))),
        (LARGE, 8, Parallelism(ulysses=4), Degrees(guided=Layout(cfg=2, ulysses=4), plain=Layout(ulysses=8))),
        (WAN, 8, Parallelism(ulysses=4), Degrees(guided=Layout(cfg=2, ulysses=4), plain=Layout(ulysses=4))),
        (
            replace(MASKED, heads=12),
            8,
            Parallelism(),
            Degrees(guided=Layout(cfg=2, ulysses=4), plain=Layout(ulysses=4)),
        ),
        (WAN, 2, Parallelism(cfg=1), same(Layout(ulysses=2))),
        (WAN, 2, Parallelism(sp=2), same(Layout(ulysses=2))),
        (WAN, 2, Parallelism(ulysses=2), same(Layout(ulysses=2))),
        (WAN, 4, Parallelism(ring=2), Degrees(guided=Layout(cfg=2, ring=2), plain=Layout(ring=2, ulysses=2))),
        (WAN, 4, Parallelism(cfg=1, ring=2), same(Layout(ring=2, ulysses=2))),
        (FLUX, 2, Parallelism(), same(Layout(ulysses=2))),
        (MASKED, 4, Parallelism(), Degrees(guided=Layout(cfg=2, ulysses=2), plain=Layout(ulysses=4))),
        (PLANLESS, 2, Parallelism(), Degrees(guided=Layout(cfg=2), plain=Layout())),
        (WAN, 1, Parallelism(), same(Layout())),
        (WAN, 2, Parallelism(tp=2), Degrees(guided=Layout(), plain=Layout(), tp=2)),
        (WAN, 4, Parallelism(tp=2), Degrees(guided=Layout(cfg=2), plain=Layout(ulysses=2), tp=2)),
    ],
)
def test_ranks_share_branches_first_and_then_tokens(
    traits: Traits, ranks: int, wish: Parallelism, expected: Degrees
) -> None:
    assert resolve(wish, ranks, traits) == expected


@pytest.mark.parametrize(
    ("traits", "ranks", "wish", "reason"),
    [
        (FLUX, 2, Parallelism(cfg=2), "need guidance with a forward for each branch"),
        (FLUX, 4, Parallelism(sp=2), "^denoiser-sp=2 of 4 GPUs: 2 groups of GPUs need guidance"),
        (PLANLESS, 4, Parallelism(), "^num-gpus=4: Planless has no complete plan in Diffusers"),
        (PLANLESS, 2, Parallelism(ulysses=2), "^denoiser-ulysses=2: .* no complete plan in Diffusers"),
        (MASKED, 2, Parallelism(cfg=1, ring=2), "attends with masks, .* say denoiser-ulysses=2"),
        (WAN, 5, Parallelism(ulysses=5), "^denoiser-ulysses=5: must divide the 12 attention heads"),
        (WAN, 16, Parallelism(cfg=2, ring=1), "^num-gpus=16: 8 must divide the 12 attention heads"),
        (MASKED, 3, Parallelism(), "^num-gpus=3: 3 must divide the 32 attention heads .* cannot go around a ring"),
        (Traits(name="X", heads=None, guided=False, sequence_plan=True), 2, Parallelism(), "^num-gpus=2: .* how many"),
        (WAN, 4, Parallelism(cfg=2, sp=4), "must equal it"),
        (WAN, 3, Parallelism(cfg=2), "must divide it"),
        (FLUX, 2, Parallelism(tp=2), "no plan for how to spread the weights of Flux"),
        (WAN, 5, Parallelism(tp=5), "must divide the 12 attention heads"),
        (
            replace(WAN, wide=10),
            4,
            Parallelism(tp=4),
            "must divide the 10 features of WanTransformer3DModel's wide layers",
        ),
        (WAN, 24, Parallelism(tp=4, ulysses=6), "must divide the 3 attention heads"),
        (WAN, 12, Parallelism(sp=12, ulysses=3, ring=2), "denoiser-ulysses x denoiser-ring = 3 x 2"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(traits: Traits, ranks: int, wish: Parallelism, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        resolve(wish, ranks, traits)


@pytest.mark.parametrize(
    ("traits", "ranks", "wish", "said", "why", "idle"),
    [
        (WAN, 8, Parallelism(), "cfg 2 x ulysses 4 with guidance, ulysses 4 x ring 2 without", "by 12 heads", ""),
        (LARGE, 3, Parallelism(), "ring 3", "and a ring", ""),
        (WAN, 4, Parallelism(tp=2), "tp 2 x cfg 2 with guidance, tp 2 x ulysses 2 without", "as asked for", ""),
        (PLANLESS, 2, Parallelism(), "cfg 2 with guidance, each rank alone without", "branches", "no complete"),
        (FLUX, 2, Parallelism(sp=2), "ulysses 2", "as asked for", ""),
    ],
)
def test_a_choice_says_what_it_is_and_why(
    traits: Traits, ranks: int, wish: Parallelism, said: str, why: str, idle: str
) -> None:
    degrees = resolve(wish, ranks, traits)
    assert str(degrees) == said
    assert why in degrees.why
    assert idle in degrees.passed_over
    assert bool(idle) == bool(degrees.passed_over)
