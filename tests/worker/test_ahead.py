"""Requests that are prepared beside others, in a real compute thread: the same bytes as of requests alone."""

from __future__ import annotations

import contextlib
import time
from queue import Empty, SimpleQueue
from typing import Any

import pytest
import torch

from tests.pipeline.harness import finish
from triptych.accel.tally import Tally
from triptych.config import DeviceType, ModelConfig, Profile
from triptych.ids import ROLES, Epoch, InstanceId, RequestId, Role
from triptych.pipeline.load import load_pipeline
from triptych.pipeline.modular import ModularRolePipeline
from triptych.pipeline.stage import Resumable, RolePipeline
from triptych.transport.data.protocol import Payload
from triptych.wire.messages import Lease
from triptych.worker.compute import ComputeThread
from triptych.worker.jobs import CheckpointJob, ComputeJob, Identity, Post, StageJob, Ticket

WAIT = 120.0
BASE: dict[str, Any] = {"prompt": "a red ball", "width": 64, "height": 64, "num_frames": 9, "num_inference_steps": 4}
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
GPU = pytest.param("cuda:0", marks=[pytest.mark.gpu, NO_GPU])


def payloads(pipeline: RolePipeline, params: dict[str, Any]) -> tuple[Payload, ...]:
    outputs = finish(pipeline.start(Role.ENCODER, params, [], [])).outputs
    return tuple(
        Payload(tree=output.tree, tensors=tuple(tensor.cpu() for tensor in output.tensors))
        for output in outputs
        if output.consumer is Role.DENOISER
    )


def denoised(pipeline: RolePipeline, params: dict[str, Any], inputs: tuple[Payload, ...]) -> list[torch.Tensor]:
    run = pipeline.start(Role.DENOISER, params, [(p.tree, p.tensors) for p in inputs], [])
    return [tensor.cpu() for output in finish(run).outputs for tensor in output.tensors]


def halfway(pipeline: RolePipeline, params: dict[str, Any], inputs: tuple[Payload, ...], steps: int) -> Payload:
    """A checkpoint after so many steps."""
    run = pipeline.start(Role.DENOISER, params, [(p.tree, p.tensors) for p in inputs], [])
    assert isinstance(run, Resumable)
    for _ in range(steps):
        run.advance()
    frozen = run.checkpoint()
    run.cancel()
    assert frozen is not None
    return Payload(tree=frozen[0], tensors=tuple(tensor.cpu() for tensor in frozen[1]))


def following(staged: SimpleQueue[StageJob | CheckpointJob], thread: ComputeThread) -> StageJob | CheckpointJob:
    """The next job, unless the thread dies before it."""
    until = time.monotonic() + WAIT
    while time.monotonic() < until and thread.is_alive():
        with contextlib.suppress(Empty):
            return staged.get(timeout=0.2)
    raise AssertionError("the compute thread is gone" if not thread.is_alive() else "nothing came")


@pytest.mark.parametrize("profile", ["stock", "lossless"])
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_requests_in_a_row_have_the_bytes_of_requests_alone(device: str, profile: Profile) -> None:
    """Every third one goes on from a checkpoint."""
    kind: DeviceType = "cuda" if device.startswith("cuda") else "cpu"
    loaded = load_pipeline(ModelConfig(path="tiny", device=kind, profile=profile), ROLES, device)
    assert isinstance(loaded, ModularRolePipeline)
    assert loaded.prepares
    requests = [BASE | {"seed": seed, "height": 64 + 32 * (seed % 2)} for seed in range(8)]
    inputs = [payloads(loaded, params) for params in requests]
    expected = [denoised(loaded, params, given) for params, given in zip(requests, inputs, strict=True)]
    resumes = {number: halfway(loaded, requests[number], inputs[number], 2) for number in range(1, 8, 3)}
    prepared: list[int] = []
    staged: SimpleQueue[StageJob | CheckpointJob] = SimpleQueue()
    posts: SimpleQueue[Post] = SimpleQueue()
    tally = Tally()
    thread = ComputeThread(
        load=lambda: loaded,
        device=device,
        max_running=1,
        tally=tally,
        identity=Identity(instance=InstanceId("i"), epoch=Epoch("e")),
        post=posts.put,
        stage=staged.put,
        encode=lambda _: None,
    )
    prepare = thread._ahead.prepare

    def noted(pipeline: Any, job: ComputeJob) -> None:
        prepare(pipeline, job)
        prepared.append(id(job))

    thread._ahead.prepare = noted
    for number, (params, given) in enumerate(zip(requests, inputs, strict=True)):
        ticket = Ticket(Lease(RequestId(str(number)), Role.DENOISER, 1))
        thread.put(ComputeJob(ticket=ticket, params=params, inputs=given, images=(), resume=resumes.get(number)))
    thread.start()
    for number, tensors in enumerate(expected):
        job = following(staged, thread)
        assert isinstance(job, StageJob)
        assert job.ticket.lease.request == str(number)
        made = [tensor.cpu() for output in job.outputs for tensor in output.tensors]
        assert all(torch.equal(a, b) for a, b in zip(made, tensors, strict=True))
    thread.close()
    thread.join(WAIT)
    assert len(set(prepared)) == len(requests) - 1
    assert tally.turnovers == len(requests) - 1
