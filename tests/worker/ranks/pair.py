"""Rank 0 in the test's process and followers in their own, beside a pipeline that is alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.e2e.nursery import forking
from tests.pipeline.harness import Inbox, finish, latents, post
from triptych.accel.cuda_graphs import is_alone
from triptych.accel.tally import Tally
from triptych.config import DeviceType, InstanceConfig, Lora, ModelConfig, Shape, TransferConfig
from triptych.ids import ROLES, Role
from triptych.parallelism import Parallelism
from triptych.pipeline.load import load_cold, load_pipeline
from triptych.pipeline.stage import Resumable
from triptych.worker.jobs import Post, ThreadDied
from triptych.worker.ranks.leader import Leader
from triptych.worker.ranks.lockstep import LockstepPipeline

WAIT = 180.0
SMALL = {"prompt": "a red circle on a blue background", "seed": 7, "height": 64, "width": 64, "num_frames": 5}


class Ranks:
    """Rank 0 in this process, followers in their own, and a pipeline that is alone."""

    def __init__(
        self,
        parallel: Parallelism,
        *,
        path: str = "tiny",
        roles: tuple[Role, ...] = ROLES,
        warmup: tuple[Shape, ...] = (),
        loras: tuple[Lora, ...] = (),
        device: DeviceType = "cpu",
    ) -> None:
        config = InstanceConfig(
            roles=roles,
            server_addr="tcp://127.0.0.1:5555",
            work_port=1,
            transfer=TransferConfig(),
            model=ModelConfig(path=path, device=device, warmup=warmup, loras=loras),
            gpu_ids=(0, 1),
            parallel=parallel,
        )
        self.posts: SimpleQueue[Post] = SimpleQueue()
        self.tally = Tally()
        with forking():
            self.leader = Leader(config, "pair", self.posts.put, self.tally)
        try:
            self.alone: Any = load_pipeline(replace(config.model, warmup=()), ROLES, config.torch_device)
            self.team = self.leader.join()
            self.rank0: Any
            self.rank0, self._warm_up = load_cold(config.model, roles, config.torch_device, self.tally, self.team)
            self.leader.await_ready()
        except BaseException:
            self.close()
            raise
        self.shared = LockstepPipeline(self.rank0, self.leader, config.shared_roles)

    def compared(
        self, role: Role, request: Mapping[str, Any], images: Sequence[bytes] = ()
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of all that a role makes of a request: what one process makes, and what these ranks make."""
        inbox: Inbox = {role: [] for role in ROLES}
        for before in ROLES[: ROLES.index(role)]:
            post(finish(self.alone.start(before, request, inbox[before], images)), inbox)
            images = ()
        made: list[list[torch.Tensor]] = []
        for pipeline in (self.alone, self.shared):
            result = finish(pipeline.start(role, request, inbox[role], images))
            made.append([tensor for output in result.outputs for tensor in output.tensors])
            made[-1] += [torch.from_numpy(clip.frames) for clip in result.clips if isinstance(clip.frames, np.ndarray)]
        return list(zip(*made, strict=True))

    def warm_up(self) -> None:
        """Run what a start runs, for each declared shape."""
        self._warm_up(self.shared)

    def close(self) -> None:
        """End the followers."""
        self.leader.close()
        if dist.is_initialized():
            dist.destroy_process_group()  # this process goes on afterwards

    def lost(self) -> ThreadDied:
        """What is posted of a lost rank."""
        post = self.posts.get(timeout=WAIT)
        assert isinstance(post, ThreadDied)
        return post


class Pair(Ranks):
    """Two ranks with the embedded model, whose work is watched."""

    def __init__(self, parallel: Parallelism, loras: tuple[Lora, ...] = (), device: DeviceType = "cpu") -> None:
        super().__init__(parallel, warmup=(Shape(width=64, height=64, frames=5),), loras=loras, device=device)
        self.orders: list[Any] = []
        """All that the follower was told."""
        self._tell, self.leader.tell = self.leader.tell, self._noted
        self.forwards = 0
        block = self.rank0.component(Role.DENOISER, "transformer").blocks[1]
        block.register_forward_pre_hook(self._count)

    def _noted(self, order: Any, tensors: Any = ()) -> None:
        self.orders.append(order)
        self._tell(order, tensors)

    def _count(self, _module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self.forwards += 1
        self.tokens = args[0].shape[1]
        self.recordable = is_alone()

    def encoded(self, **params: Any) -> tuple[dict[str, Any], Inbox]:
        """Parameters, and what the denoiser gets."""
        whole = SMALL | params
        inbox: Inbox = {role: [] for role in ROLES}
        post(finish(self.alone.start(Role.ENCODER, whole, [], [])), inbox)
        return whole, inbox

    def both(self, **params: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents of one process, and of two."""
        whole, inbox = self.encoded(**params)
        made: list[torch.Tensor] = []
        for pipeline in (self.alone, self.shared):
            inbox[Role.DECODER] = []
            post(finish(pipeline.start(Role.DENOISER, whole, inbox[Role.DENOISER], [])), inbox)
            made.append(latents(inbox))
        return made[0], made[1]

    def cancel_one_of_two(self, **params: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents of one process, and of a run of two that another one beside it was cancelled of."""
        whole, inbox = self.encoded(**params, num_inference_steps=4)
        other, other_inbox = self.encoded(**params, num_inference_steps=9, seed=1)
        expected, _ = self.both(**params, num_inference_steps=4)
        run = self.shared.start(Role.DENOISER, whole, inbox[Role.DENOISER], [])
        cancelled = self.shared.start(Role.DENOISER, other, other_inbox[Role.DENOISER], [])
        for _ in range(2):
            assert run.advance() is None
            assert cancelled.advance() is None
        cancelled.cancel()
        cancelled.cancel()
        post(finish(run), inbox)
        return expected, latents(inbox)

    def there_and_back(self, **params: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents of one process, and of a request that one began, two continued and one ended, by checkpoints."""
        whole, inbox = self.encoded(**params, num_inference_steps=5)
        expected, _ = self.both(**params, num_inference_steps=5)
        legs: list[tuple[Any, int]] = [(self.alone, 2), (self.shared, 2), (self.alone, 1)]
        frozen: Any = None
        result = None
        for pipeline, steps in legs:
            run = pipeline.start(Role.DENOISER, whole, inbox[Role.DENOISER], [])
            assert isinstance(run, Resumable)
            if frozen is not None:
                run.restore(*frozen)
            for _ in range(steps):
                result = run.advance()
            frozen = run.checkpoint()
            run.cancel()
        assert result is not None
        post(result, inbox)
        return expected, latents(inbox)
