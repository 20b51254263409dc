"""One line of `triptych bench parallel`: a step on one device, or shared by several, measured in its own process.

``python -m triptych.bench.parallel_part`` reads a `Part` as JSON and writes a `Line` as JSON for each thing measured
as soon as it is. It is the instance's own machinery that is measured: rank 0 in this process, the others in processes
of their own. The process ends without giving its groups up: NCCL ends a communicator on all ranks of a host together,
and the others only wait for orders. SIGUSR1 has it write where its threads stand.
"""

from __future__ import annotations

import faulthandler
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from triptych.accel.sizes import rehearsing
from triptych.config import DeviceType, InstanceConfig, ModelConfig, Profile, TransferConfig
from triptych.errors import ConfigError, TriptychError
from triptych.ids import Role
from triptych.parallelism import Parallelism
from triptych.pipeline.codec import encode_state
from triptych.pipeline.load import load_cold
from triptych.pipeline.modular import ModularRolePipeline
from triptych.pipeline.request import complete, first_state
from triptych.pipeline.stage import RolePipeline, StageResult
from triptych.worker.jobs import Post, ThreadDied
from triptych.worker.lifecycle import exit_now
from triptych.worker.ranks.leader import Leader, RanksApart
from triptych.worker.ranks.lockstep import LockstepPipeline

GUIDED, PLAIN = 5.0, 1.0
"""Guidance scales of the measured requests: two branches a step, and one."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure."""

    model: str
    width: int
    height: int
    frames: int
    steps: int
    profile: Profile
    device: DeviceType
    gpus: int
    parallel: Parallelism
    role: Role = Role.DENOISER
    """Whose work is measured."""
    folder: str
    """Where the latents of each measured request are put."""


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One measured request."""

    guidance: bool | None
    """None for a decoder, which knows of none."""
    seconds: float
    """Median of a step, or of a decode."""
    result: str
    """File with latents or pictures in float32."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nothing more will be measured."""

    reason: str


Line: TypeAlias = Measured | Failed


def say(line: Line) -> None:
    """Write ``line``."""
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


def measure(part: Part) -> Iterator[Measured]:
    """Load, and measure a denoiser's request with guidance and one without, or a decoder's."""
    torch.set_grad_enabled(False)
    model = ModelConfig(path=part.model, device=part.device, profile=part.profile)
    if part.gpus == 1:
        device = "cuda:0" if part.device == "cuda" else "cpu"
        own, _ = load_cold(model, (part.role,), device)
        with rehearsing():  # which compiles what that size has of its own
            yield from _requests(own, own, part)
        return
    config = InstanceConfig(
        roles=(part.role,),
        server_addr="tcp://127.0.0.1:1",
        work_port=1,
        transfer=TransferConfig(),
        model=model,
        gpu_ids=tuple(range(part.gpus)),
        parallel=part.parallel,
    )
    leader = Leader(config, "bench", _heard)
    try:
        own, _ = load_cold(model, config.roles, config.torch_device, team=leader.join())
        leader.await_ready()
        with rehearsing():
            yield from _requests(LockstepPipeline(own, leader, (part.role,)), own, part)
    finally:
        leader.close()


def _heard(post: Post) -> None:
    """A rank is lost: this one may stand in a collective that nobody will complete."""
    if isinstance(post, ThreadDied):
        say(Failed(reason=f"{post.thread}: {post.reason}"))
        exit_now(1)


def _requests(pipeline: RolePipeline, own: RolePipeline, part: Part) -> Iterator[Measured]:
    if not isinstance(own, ModularRolePipeline):
        raise ConfigError(f"{part.model!r}: only pipelines with modular blocks can be measured without their encoder")
    for guidance in (GUIDED, PLAIN) if part.role is Role.DENOISER else (GUIDED,):
        seconds, result = _measured(pipeline, part, *_inputs(own, part, guidance))
        file = Path(part.folder) / f"{guidance}.safetensors"
        save_file({"result": result}, file)
        told = guidance != PLAIN if part.role is Role.DENOISER else None
        yield Measured(guidance=told, seconds=seconds, result=str(file))


def _inputs(
    pipeline: ModularRolePipeline, part: Part, guidance: float
) -> tuple[dict[str, Any], tuple[bytes, tuple[torch.Tensor, ...]]]:
    """Parameters, and what the role before would hand over for them, with random embeddings or latents."""
    params = {
        "prompt": "",
        "seed": 1,
        "width": part.width,
        "height": part.height,
        "num_frames": part.frames,
        "num_inference_steps": part.steps,
        "guidance_scale": guidance,
    }
    state = first_state(pipeline.cut.inputs, complete(pipeline.schema, params), (), pipeline.family)
    transformer, vae = (pipeline.component(part.role, name) for name in ("transformer", "vae"))
    if not hasattr(transformer.config, "text_dim"):
        raise ConfigError(f"{part.model!r}: embeddings and latents are only known for Wan's models")
    generator = torch.Generator().manual_seed(2)
    if part.role is Role.DENOISER:
        for name in ("prompt_embeds", "negative_prompt_embeds"):
            embeds = torch.randn(1, 512, transformer.config.text_dim, generator=generator)
            state[name] = embeds.to(pipeline.device, transformer.dtype)
    else:
        shape = (1 + (part.frames - 1) // 4, part.height // 8, part.width // 8)
        latents = torch.randn(1, vae.config.z_dim, *shape, generator=generator)
        state["latents"] = latents.to(pipeline.device)
    needed = pipeline.cut.needs[part.role].of({})
    return params, encode_state({k: v for k, v in state.items() if k in needed and v is not None}, {})


def _measured(
    pipeline: RolePipeline, part: Part, params: dict[str, Any], handed: tuple[bytes, tuple[torch.Tensor, ...]]
) -> tuple[float, torch.Tensor]:
    """Median seconds of a step of the last of several equal requests, and its result in float32 on the host.

    A decode has one step, so as many are measured as a denoiser's request has; the first is not counted.
    """
    samples: list[float] = []
    result: StageResult | None = None
    denoises = part.role is Role.DENOISER
    for number in range(2 if denoises else 1 + part.steps):
        if denoises or number == 1:
            samples.clear()
        run = pipeline.start(part.role, params, [handed], ())
        result = None
        while result is None:
            begun = time.perf_counter()
            result = run.advance()
            if part.device == "cuda":
                torch.cuda.synchronize()
            samples.append(time.perf_counter() - begun)
    assert result is not None
    if denoises:
        made = max((t for output in result.outputs for t in output.tensors), key=torch.Tensor.numel)
    else:
        made = torch.from_numpy(np.asarray(result.clips[0].frames))
    return statistics.median(samples), made.float().cpu().contiguous()


def main() -> int:
    """Measure what standard input says."""
    faulthandler.register(signal.SIGUSR1)
    part = msgspec.json.decode(sys.stdin.buffer.read(), type=Part)
    try:
        for line in measure(part):
            say(line)
    except (TriptychError, RanksApart, torch.OutOfMemoryError) as error:
        say(Failed(reason=error.message if isinstance(error, TriptychError) else f"{type(error).__name__}: {error}"))
        return 1
    return 0


if __name__ == "__main__":
    exit_now(main())
