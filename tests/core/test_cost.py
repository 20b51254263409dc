"""What requests cost: their size, and what is foretold from stages that have ended."""

from __future__ import annotations

import pytest

from triptych.core.cost import REMEMBERED, Costs, Size, size_of
from triptych.ids import ROLES, Role
from triptych.wire.messages import replace
from triptych.wire.schema import HandoffSize

from .harness import SCHEMA

VIDEO = {"height": 480, "width": 832, "num_frames": 81, "num_inference_steps": 50, "guidance_scale": 5.0}
LATENTS = HandoffSize(channels=16, spatial=8, temporal=4, item_bytes=2)


def test_a_size_is_steps_times_branches_times_latent_positions() -> None:
    size = size_of(replace(SCHEMA, handoff=LATENTS), VIDEO)
    assert size == Size(steps=50, branches=2, outputs=1, tokens=21 * 60 * 104)
    assert size.units(Role.DENOISER) == 100
    assert size_of(SCHEMA, {}) == Size(steps=1, branches=1, outputs=1, tokens=1)


@pytest.mark.parametrize(("scale", "branches"), [(None, 1), (0.0, 1), (1.0, 1), (1.5, 2)])
def test_without_guidance_a_step_is_one_forward(scale: float | None, branches: int) -> None:
    assert size_of(SCHEMA, {"guidance_scale": scale}).branches == branches


def test_nothing_is_foretold_of_a_role_that_has_done_nothing() -> None:
    costs = Costs()
    size = size_of(SCHEMA, VIDEO)
    costs.learn(Role.ENCODER, size, 1.0)
    assert costs.seconds(Role.ENCODER, size) == pytest.approx(1.0)
    assert costs.seconds(Role.DENOISER, size) is None


def test_half_the_steps_take_half_the_time_and_a_stage_that_took_over_steps_counts_for_its_own() -> None:
    costs = Costs()
    whole, half = (Size(steps=steps, branches=2, outputs=1, tokens=1000) for steps in (50, 25))
    costs.learn(Role.DENOISER, whole, 20.0, share=0.2)
    assert costs.seconds(Role.DENOISER, whole) == pytest.approx(100.0)
    assert costs.seconds(Role.DENOISER, half) == pytest.approx(50.0)


def test_the_growth_with_tokens_is_learnt() -> None:
    costs = Costs()
    for tokens in (1000, 2000, 4000):
        size = Size(steps=10, branches=1, outputs=1, tokens=tokens)
        costs.learn(Role.DENOISER, size, 10 * (tokens / 1000) ** 1.6)
    large = Size(steps=10, branches=1, outputs=1, tokens=16_000)
    assert costs.seconds(Role.DENOISER, large) == pytest.approx(10 * 16**1.6, rel=1e-6)


@pytest.mark.parametrize("role", ROLES)
def test_noise_between_two_sizes_never_makes_larger_requests_cheaper(role: Role) -> None:
    costs = Costs()
    small, large = (Size(steps=1, branches=1, outputs=1, tokens=tokens) for tokens in (1000, 1001))
    costs.learn(role, small, 5.0)
    costs.learn(role, large, 1.0)
    huge = costs.seconds(role, Size(steps=1, branches=1, outputs=1, tokens=100_000))
    least = costs.seconds(role, small)
    assert huge is not None
    assert least is not None
    assert huge >= least


def test_what_was_long_ago_is_forgotten() -> None:
    costs = Costs()
    size = Size(steps=1, branches=1, outputs=1, tokens=10)
    costs.learn(Role.DECODER, size, 1000.0)
    for _ in range(REMEMBERED):
        costs.learn(Role.DECODER, size, 2.0)
    assert costs.seconds(Role.DECODER, size) == pytest.approx(2.0)
