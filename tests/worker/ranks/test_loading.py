"""Ranks that load: the quick wait for the slow one, for one that is gone nobody does, and all load the same."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.e2e.nursery import forking
from triptych.config import InstanceConfig, ModelConfig, TransferConfig
from triptych.errors import ConfigError
from triptych.ids import ROLES
from triptych.models import EMBEDDED
from triptych.parallelism import Parallelism
from triptych.pipeline.load import load_cold
from triptych.pipeline.weights import load_component
from triptych.worker.jobs import Post
from triptych.worker.ranks import leader as module
from triptych.worker.ranks.leader import Leader, RanksApart
from triptych.worker.ranks.orders import Join

CONFIG = InstanceConfig(
    roles=ROLES,
    server_addr="tcp://127.0.0.1:5555",
    work_port=1,
    transfer=TransferConfig(),
    model=ModelConfig(path="tiny", device="cpu", attention_backend="native"),
    gpu_ids=(0, 1),
    parallel=Parallelism(),
)


@contextmanager
def led(config: InstanceConfig = CONFIG) -> Iterator[Leader]:
    posts: SimpleQueue[Post] = SimpleQueue()
    with forking():
        leader = Leader(config, "loading", posts.put)
    try:
        yield leader
    finally:
        leader.close()
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.slow
def test_rank_0_may_load_for_longer_than_a_collective_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: with a text encoder that came slowly off a disk or the Hub, the follower ended, and rank 0 with it."""
    monkeypatch.setattr(module, "COLLECTIVE_SECONDS", 8.0)

    def slowly(folder: Any, name: str, *more: Any) -> Any:
        if name == "text_encoder":  # which rank 0 alone loads
            time.sleep(12.0)
        return load_component(folder, name, *more)

    with led() as leader:
        load_cold(CONFIG.model, CONFIG.roles, "cpu", team=leader.join(), component=slowly)
        leader.await_ready()


def test_nobody_waits_for_a_rank_that_dies_while_it_loads() -> None:
    with led() as leader:
        team = leader.join()
        (follower,) = leader.followers
        follower.process.kill()
        with pytest.raises((RanksApart, RuntimeError)):  # the latter where it had come to a collective by then
            load_cold(CONFIG.model, CONFIG.roles, "cpu", team=team)


def test_what_an_operator_must_mend_of_a_follower_is_said_as_that() -> None:
    """Symptom: rank 0 stood in a collective, which ended with words of a connection."""
    elsewhere = replace(CONFIG, model=replace(CONFIG.model, path="nowhere/to/be/found"))
    with led(elsewhere) as leader:
        team = leader.join()
        with pytest.raises(ConfigError, match="rank 1: model 'nowhere/to/be/found': no such folder"):
            load_cold(CONFIG.model, CONFIG.roles, "cpu", team=team)


def followers_load(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Have them load something else than rank 0."""

    def other(model: ModelConfig, **more: Any) -> Join:
        return Join(model=replace(model, **changes), **more)

    monkeypatch.setattr(module, "Join", other)


def test_an_instance_does_not_start_on_two_trainings_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: half of each step was of other weights, under the fingerprint of rank 0's."""
    shutil.copytree(EMBEDDED["tiny"], tmp_path / "tiny")
    (file,) = (tmp_path / "tiny" / "transformer").glob("*.safetensors")
    save_file({name: tensor + 0.01 for name, tensor in load_file(file).items()}, file)
    followers_load(monkeypatch, path=str(tmp_path / "tiny"))
    with led() as leader, pytest.raises(RanksApart, match="rank 1 has loaded something else than rank 0: model: 'cont"):
        load_cold(CONFIG.model, CONFIG.roles, "cpu", team=leader.join())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vae_tiling": True}, "vae: 'tiling.*', not ''"),
        ({"attention_backend": "auto"}, "at: 'the weights', not 'a choice'"),
    ],
)
def test_nor_on_two_ways_to_compute_it(changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    followers_load(monkeypatch, **changes)
    with led(replace(CONFIG, parallel=Parallelism(decoder_tp=2))) as leader, pytest.raises(RanksApart, match=words):
        load_cold(CONFIG.model, CONFIG.roles, "cpu", team=leader.join())
