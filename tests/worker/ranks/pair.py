"""Rank 0 in the test's process and rank 1 in one of its own, beside a pipeline that is alone."""

from __future__ import annotations

from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from tests.pipeline.harness import Inbox, finish, latents, post
from triptych.config import InstanceConfig, ModelConfig, Shape, TransferConfig
from triptych.ids import ROLES, Role
from triptych.parallelism import Parallelism
from triptych.pipeline.load import load_cold, load_pipeline
from triptych.pipeline.modular import ModularRolePipeline
from triptych.worker.jobs import Post, ThreadDied
from triptych.worker.ranks.leader import Leader
from triptych.worker.ranks.lockstep import LockstepPipeline

WAIT = 60.0
SMALL = {"prompt": "a red circle on a blue background", "seed": 7, "height": 64, "width": 64, "num_frames": 5}


class Pair:
    """Rank 0 in this process, rank 1 in one of its own, and a pipeline that is alone."""

    def __init__(self, parallel: Parallelism) -> None:
        config = InstanceConfig(
            roles=ROLES,
            server_addr="tcp://127.0.0.1:5555",
            work_port=1,
            transfer=TransferConfig(),
            model=ModelConfig(path="tiny", device="cpu", warmup=(Shape(width=64, height=64, frames=5),)),
            gpu_ids=(0, 1),
            parallel=parallel,
        )
        self.posts: SimpleQueue[Post] = SimpleQueue()
        self.leader = Leader(config, "pair", self.posts.put)
        self.alone: ModularRolePipeline = load_pipeline(replace(config.model, warmup=()), ROLES, "cpu")
        self.team = self.leader.join()
        rank0, self._warm_up = load_cold(config.model, ROLES, "cpu", team=self.team)
        assert isinstance(rank0, ModularRolePipeline)
        self.rank0 = rank0
        self.leader.await_ready()
        self.shared = LockstepPipeline(self.rank0, self.leader, config.shared_roles)
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

    def warm_up(self) -> None:
        """Run what a start runs, for the shape of the requests here."""
        self._warm_up(self.shared)

    def close(self) -> None:
        """End rank 1."""
        self.leader.close()
        dist.destroy_process_group()  # this process goes on afterwards

    def lost(self) -> ThreadDied:
        """What is posted of a lost rank."""
        post = self.posts.get(timeout=WAIT)
        assert isinstance(post, ThreadDied)
        return post
