"""Runs of classic pipelines step by step: alone, interleaved, cancelled, failing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from triptych.errors import StageError
from triptych.ids import Role

from .classic_harness import REQUESTS, TOLERATED, Trios, asked, denoised, latents_of
from .harness import Inbox, Trio, finish

pytestmark = TOLERATED

Encoded = list[tuple[Trio, dict[str, Any], Inbox]]
"""Of each mixed request: its roles, its parameters, and the inbox after the encoder."""

MIXED: list[tuple[str, dict[str, Any]]] = [
    ("cogvideox_t2v", {"seed": 1, "num_inference_steps": 5}),
    ("cogvideox_t2v", {"seed": 2, "width": 48, "guidance_scale": 1.0}),
    ("cogvideox_t2v", {"seed": 1, "num_frames": 5, "guidance_scale": 2.0}),
    ("cogvideox_i2v", {"seed": 3}),
    ("cogvideox_i2v", {"seed": 4, "num_inference_steps": 4}),
    ("glm_image", {"seed": 5, "num_inference_steps": 4}),
    ("mochi", {"seed": 6}),
    ("mochi", {"seed": 7, "guidance_scale": 8.0, "num_inference_steps": 4}),
]
"""CogVideoX1.5's scheduler draws noise in every step."""


@pytest.fixture(scope="module")
def encoded(trios: Trios) -> Encoded:
    found: Encoded = []
    for family, changes in MIXED:
        request, images = asked(REQUESTS[family], **changes)
        found.append((trios(family), request, trios(family).encoded(request, images)))
    return found


@pytest.fixture(scope="module")
def alone(encoded: Encoded) -> list[torch.Tensor]:
    return [denoised(trio.start(Role.DENOISER, request, inbox)) for trio, request, inbox in encoded]


def test_one_advance_is_one_step(encoded: Encoded) -> None:
    trio, request, inbox = encoded[0]
    run = trio.start(Role.DENOISER, request, inbox)
    assert (run.step, run.steps) == (0, 0)
    seen: list[tuple[int, int]] = []
    while run.advance() is None:
        seen.append((run.step, run.steps))
    assert seen == [(1, 5), (2, 5), (3, 5), (4, 5)]
    assert (run.step, run.steps) == (5, 5)


def test_interleaved_runs_are_bit_identical_to_lone_ones(encoded: Encoded, alone: list[torch.Tensor]) -> None:
    runs = [trio.start(Role.DENOISER, request, inbox) for trio, request, inbox in encoded]
    done: dict[int, Any] = {}
    while len(done) < len(runs):
        for i, run in enumerate(runs):
            if i not in done and (result := run.advance()) is not None:
                done[i] = result
    for i, expected in enumerate(alone):
        assert torch.equal(latents_of(done[i]), expected)


def test_other_stages_between_two_steps_change_nothing(
    trios: Trios, encoded: Encoded, alone: list[torch.Tensor]
) -> None:
    trio, request, inbox = encoded[3]
    run = trio.start(Role.DENOISER, request, inbox)
    run.advance()
    torch.manual_seed(99)
    other, images = asked(REQUESTS["cogvideox_i2v"], seed=9)
    trio.generate(other, images)
    trios("glm_image").encoded(REQUESTS["glm_image"] | {"seed": 11})
    assert torch.equal(denoised(run), alone[3])


def test_runs_leave_torchs_own_random_state_alone(encoded: Encoded) -> None:
    trio, request, _ = encoded[5]
    torch.manual_seed(4)
    before = torch.get_rng_state()
    trio.encoded(request)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_cancel_leaves_the_others_untouched(encoded: Encoded, alone: list[torch.Tensor]) -> None:
    kept, cancelled, unbegun = (encoded[i][0].start(Role.DENOISER, *encoded[i][1:]) for i in (0, 1, 2))
    kept.advance()
    cancelled.advance()
    cancelled.cancel()
    cancelled.cancel()
    unbegun.cancel()
    assert torch.equal(denoised(kept), alone[0])
    trio, request, inbox = encoded[1]
    assert torch.equal(denoised(trio.start(Role.DENOISER, request, inbox)), alone[1])
    with pytest.raises(StageError, match="the denoiser run is over"):
        cancelled.advance()


def test_a_finished_run_refuses_to_advance(encoded: Encoded) -> None:
    trio, request, inbox = encoded[1]
    run = trio.start(Role.DENOISER, request, inbox)
    finish(run)
    with pytest.raises(StageError, match="the denoiser run is over"):
        run.advance()


def test_an_error_inside_the_model_spares_the_others(encoded: Encoded, alone: list[torch.Tensor]) -> None:
    trio, request, inbox = encoded[0]
    other = trio.start(Role.DENOISER, encoded[1][1], encoded[1][2])
    other.advance()
    run = trio.start(Role.DENOISER, request, inbox)
    run.advance()

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    hook = trio.pipelines[Role.DENOISER].component(Role.DENOISER, "transformer").register_forward_hook(fails)
    with pytest.raises(StageError, match="the denoiser ran out of memory") as caught:
        run.advance()
    hook.remove()
    assert caught.value.retryable
    assert torch.equal(denoised(other), alone[1])
