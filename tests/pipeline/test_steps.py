"""Interleaved and cancelled denoising runs against lone ones."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

from triptych.config import ModelConfig
from triptych.errors import StageError
from triptych.ids import ROLES, Role
from triptych.pipeline.load import load_pipeline
from triptych.pipeline.stage import Announcing, Preparable, Resumable, StageRun
from triptych.worker.beside import Made

from .harness import Inbox, Trio, finish, latents, post

BASE = {"prompt": "a cat", "max_sequence_length": 32, "num_frames": 5}
REQUESTS: list[dict[str, Any]] = [
    BASE | {"height": 32, "width": 32, "num_inference_steps": 5, "guidance_scale": 6.0, "seed": 1},
    BASE | {"height": 48, "width": 32, "num_inference_steps": 3, "guidance_scale": 1.0, "seed": 2},
    BASE | {"height": 32, "width": 64, "num_inference_steps": 4, "guidance_scale": 2.0, "seed": 1, "num_frames": 9},
    BASE | {"height": 32, "width": 32, "num_inference_steps": 5, "guidance_scale": 6.0, "seed": 3, "n": 2},
]


@pytest.fixture(scope="module")
def trio(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Trio:
    return Trio(checkpoint("wan_t2v"), tmp_path_factory.mktemp("steps"))


@pytest.fixture(scope="module")
def inboxes(trio: Trio) -> list[Inbox]:
    return [trio.encoded(request) for request in REQUESTS]


@pytest.fixture(scope="module")
def alone(trio: Trio, inboxes: list[Inbox]) -> list[torch.Tensor]:
    return [
        denoised(trio.start(Role.DENOISER, request, inbox)) for request, inbox in zip(REQUESTS, inboxes, strict=True)
    ]


def denoised(run: StageRun) -> torch.Tensor:
    inbox: Inbox = {role: [] for role in Role}
    post(finish(run), inbox)
    return latents(inbox)


def test_one_advance_is_one_step(trio: Trio, inboxes: list[Inbox]) -> None:
    run = trio.start(Role.DENOISER, REQUESTS[1], inboxes[1])
    assert (run.step, run.steps) == (0, 0)
    seen: list[tuple[int, int]] = []
    while run.advance() is None:
        seen.append((run.step, run.steps))
    assert seen == [(1, 3), (2, 3)]
    assert (run.step, run.steps) == (3, 3)


def test_the_first_step_is_announced_when_the_model_is_about_to_compute(trio: Trio, inboxes: list[Inbox]) -> None:
    model = trio.pipelines[Role.DENOISER].component(Role.DENOISER, "transformer")
    told: list[str] = []
    hook = model.register_forward_pre_hook(lambda *_: told.append("forward"))
    run = trio.start(Role.DENOISER, REQUESTS[1], inboxes[1])
    assert isinstance(run, Announcing)
    run.announce(lambda: told.append("announced"))
    finish(run)
    hook.remove()
    assert told == ["announced", "forward", "forward", "forward"]


def test_a_run_that_was_prepared_beside_others_is_bit_identical(
    trio: Trio, inboxes: list[Inbox], alone: list[torch.Tensor]
) -> None:
    first = trio.start(Role.DENOISER, REQUESTS[0], inboxes[0])
    first.advance()
    second = trio.start(Role.DENOISER, REQUESTS[1], inboxes[1])
    assert isinstance(second, Preparable)
    assert isinstance(second, Resumable)
    second.prepare()
    assert (second.step, second.steps) == (0, 3)
    assert second.checkpoint() is None
    first.advance()
    assert second.advance() is None
    assert second.step == 1
    assert torch.equal(denoised(first), alone[0])
    assert torch.equal(denoised(second), alone[1])


def test_a_loop_that_computes_before_its_first_step_cannot_be_prepared(
    trio: Trio, inboxes: list[Inbox], alone: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trio.pipelines[Role.DENOISER].component(Role.DENOISER, "transformer")
    run = trio.start(Role.DENOISER, REQUESTS[1], inboxes[1])
    assert isinstance(run, Preparable)
    with monkeypatch.context() as patched:
        patched.setattr(UniPCMultistepScheduler, "set_timesteps", lambda *_, **__: model(None))
        with pytest.raises(StageError, match="the model is called before the first step"):
            run.prepare()
    with pytest.raises(StageError, match="the denoiser run is over"):
        run.advance()
    assert torch.equal(denoised(trio.start(Role.DENOISER, REQUESTS[1], inboxes[1])), alone[1])


def test_all_that_a_preparation_makes_is_known_to_it(trio: Trio, inboxes: list[Inbox]) -> None:
    """Else the allocator would give memory to one stream that another still reads."""
    given = {t.untyped_storage().data_ptr() for _, tensors in inboxes[0][Role.DENOISER] for t in tensors}
    made = Made("cpu")
    with made:
        run = trio.start(Role.DENOISER, REQUESTS[0], inboxes[0])
        assert isinstance(run, Preparable)
        run.prepare()
    known = given | {tensor.untyped_storage().data_ptr() for tensor in made.tensors}
    scheduler = run.stepped._pipeline.scheduler  # type: ignore[attr-defined]
    held = [scheduler.timesteps, *scheduler._near]
    held += [t for t in run.stepped._baseline._marks["state"].values() if isinstance(t.thing, torch.Tensor)]  # type: ignore[attr-defined]
    tensors = [t if isinstance(t, torch.Tensor) else t.thing for t in held]
    assert len(tensors) > 5
    assert {t.untyped_storage().data_ptr() for t in tensors} <= known | {scheduler.sigmas.untyped_storage().data_ptr()}
    run.cancel()


def test_interleaved_runs_are_bit_identical_to_lone_ones(
    trio: Trio, inboxes: list[Inbox], alone: list[torch.Tensor]
) -> None:
    runs = [trio.start(Role.DENOISER, request, inbox) for request, inbox in zip(REQUESTS, inboxes, strict=True)]
    results: dict[int, Any] = {}
    while len(results) < len(runs):
        for i, run in enumerate(runs):
            if i not in results and (result := run.advance()) is not None:
                results[i] = result
    for i, expected in enumerate(alone):
        inbox: Inbox = {role: [] for role in Role}
        post(results[i], inbox)
        assert torch.equal(latents(inbox), expected)


def test_other_stages_between_two_steps_change_nothing(
    trio: Trio, inboxes: list[Inbox], alone: list[torch.Tensor]
) -> None:
    run = trio.start(Role.DENOISER, REQUESTS[0], inboxes[0])
    run.advance()
    trio.generate(REQUESTS[2])
    assert torch.equal(denoised(run), alone[0])


def test_a_cancel_leaves_the_others_untouched(trio: Trio, inboxes: list[Inbox], alone: list[torch.Tensor]) -> None:
    kept, cancelled, unbegun = (trio.start(Role.DENOISER, REQUESTS[i], inboxes[i]) for i in (0, 2, 3))
    kept.advance()
    cancelled.advance()
    cancelled.advance()
    cancelled.cancel()
    cancelled.cancel()
    unbegun.cancel()
    assert torch.equal(denoised(kept), alone[0])
    assert torch.equal(denoised(trio.start(Role.DENOISER, REQUESTS[2], inboxes[2])), alone[2])


@pytest.mark.parametrize("role", [Role.ENCODER, Role.DENOISER, Role.DECODER])
def test_a_cancelled_run_refuses_to_advance(trio: Trio, inboxes: list[Inbox], role: Role) -> None:
    inbox: Inbox = {other: list(copies) for other, copies in inboxes[1].items()}
    trio.stage(Role.DENOISER, REQUESTS[1], inbox)
    run = trio.start(role, REQUESTS[1], inbox)
    run.cancel()
    with pytest.raises(StageError, match=f"the {role} run is over"):
        run.advance()


def test_a_finished_run_refuses_to_advance(trio: Trio, inboxes: list[Inbox]) -> None:
    run = trio.start(Role.DENOISER, REQUESTS[1], inboxes[1])
    finish(run)
    with pytest.raises(StageError, match="the denoiser run is over"):
        run.advance()


def test_the_same_copy_denoises_twice_to_the_same_latents(
    trio: Trio, inboxes: list[Inbox], alone: list[torch.Tensor]
) -> None:
    before = [tensor.clone() for _, tensors in inboxes[0][Role.DENOISER] for tensor in tensors]
    assert torch.equal(denoised(trio.start(Role.DENOISER, REQUESTS[0], inboxes[0])), alone[0])
    after = [tensor for _, tensors in inboxes[0][Role.DENOISER] for tensor in tensors]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


class Failing:
    """A forward hook that fails once, in the given forward."""

    def __init__(self, error: Exception, at: int) -> None:
        self.error, self.at, self.calls = error, at, 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise self.error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore."),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_out_of_memory_is_retryable_gives_advice_and_spares_the_others(
    trio: Trio, inboxes: list[Inbox], alone: list[torch.Tensor], error: Exception
) -> None:
    other = trio.start(Role.DENOISER, REQUESTS[1], inboxes[1])
    other.advance()
    run = trio.start(Role.DENOISER, REQUESTS[0], inboxes[0])
    run.advance()
    hook = (
        trio.pipelines[Role.DENOISER]
        .component(Role.DENOISER, "transformer")
        .register_forward_hook(Failing(error, at=1))
    )
    with pytest.raises(StageError, match="ran out of memory: lower height, width, num_frames or n") as caught:
        run.advance()
    hook.remove()
    assert caught.value.retryable
    assert caught.value.code == "out_of_memory"
    assert "\n" not in caught.value.message
    assert torch.equal(denoised(other), alone[1])


def test_an_error_inside_the_model_names_role_and_cause(trio: Trio, inboxes: list[Inbox]) -> None:
    run = trio.start(Role.DENOISER, REQUESTS[0], inboxes[0])
    hook = (
        trio.pipelines[Role.DENOISER]
        .component(Role.DENOISER, "transformer")
        .register_forward_hook(Failing(KeyError("absent"), at=3))
    )
    run.advance()
    with pytest.raises(StageError, match="the denoiser failed: KeyError: 'absent'") as caught:
        run.advance()
    hook.remove()
    assert not caught.value.retryable


def test_no_gradients_are_kept_in_a_thread_that_never_turned_them_off(trio: Trio, inboxes: list[Inbox]) -> None:
    torch.set_grad_enabled(True)
    run = trio.start(Role.DENOISER, REQUESTS[1], inboxes[1])
    seen: list[bool] = []
    hook = (
        trio.pipelines[Role.DENOISER]
        .component(Role.DENOISER, "transformer")
        .register_forward_hook(
            lambda module, args, output: seen.append(output[0].requires_grad or torch.is_grad_enabled())
        )
    )
    finish(run)
    hook.remove()
    assert seen
    assert not any(seen)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Seen:
    """What a denoiser was given and has given, as long as anybody else holds it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.tensors: list[weakref.ref[torch.Tensor]] = []
        self.hook = model.register_forward_hook(self._note, with_kwargs=True)

    def _note(self, _module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        found = (*args, *kwargs.values(), output[0])
        self.tensors += [weakref.ref(t) for t in found if isinstance(t, torch.Tensor)]

    @property
    def alive(self) -> int:
        return sum(tensor() is not None for tensor in self.tensors)


def fail(*_: object) -> None:
    raise KeyError("absent")


def ends(run: StageRun, how: str) -> None:
    """Bring a run to its end in one of the ways in which runs end."""
    if how == "prepared":
        assert isinstance(run, Preparable)
        run.prepare()
        run.cancel()
        return
    run.advance()
    run.advance()
    if how == "cancelled":
        run.cancel()
    elif how == "done":
        finish(run)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("how", ["done", "cancelled", "failed", "prepared"])
def test_a_run_that_is_over_keeps_no_tensor(trio: Trio, how: str) -> None:
    model = trio.pipelines[Role.DENOISER].component(Role.DENOISER, "transformer")
    inbox = trio.encoded(REQUESTS[0])
    seen = Seen(model)
    seen.tensors += [weakref.ref(tensor) for _, tensors in inbox[Role.DENOISER] for tensor in tensors]
    run = trio.start(Role.DENOISER, REQUESTS[0], inbox)
    del inbox
    ends(run, how)
    if how == "failed":
        failing = model.register_forward_hook(fail)
        with pytest.raises(StageError):
            run.advance()
        failing.remove()
    seen.hook.remove()
    assert len(seen.tensors) > (1 if how == "prepared" else 4)
    assert seen.alive == 0


@pytest.mark.usefixtures("no_collector")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:diffusers", "ignore::FutureWarning:diffusers")
@pytest.mark.parametrize("how", ["done", "cancelled"])
def test_a_replayed_run_that_is_over_keeps_no_tensor(classic_checkpoint: Callable[[str], Path], how: str) -> None:
    pipeline = load_pipeline(ModelConfig(path=str(classic_checkpoint("stable_diffusion")), device="cpu"), ROLES, "cpu")
    params = {"prompt": "a cat", "height": 32, "width": 32, "num_inference_steps": 5}
    inbox: Inbox = {role: [] for role in Role}
    post(finish(pipeline.start(Role.ENCODER, params, [], [])), inbox)
    seen = Seen(pipeline.component(Role.DENOISER, "unet"))
    run = pipeline.start(Role.DENOISER, params, inbox[Role.DENOISER], [])
    before: list[int] = []
    assert isinstance(run, Announcing)
    run.announce(lambda: before.append(len(seen.tensors)))
    ends(run, how)
    assert before == [0]
    del run
    assert len(seen.tensors) > 2
    assert seen.alive == 0
