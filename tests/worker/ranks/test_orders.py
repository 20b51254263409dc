"""Orders come out of the socket as they went in."""

from __future__ import annotations

from pathlib import Path

from triptych.config import ModelConfig
from triptych.ids import Role
from triptych.parallelism import Parallelism
from triptych.worker.ranks.orders import Begin, Join, Sent, Shape, decode_order, encode


def test_a_model_is_loaded_by_a_follower_with_the_settings_of_rank_0() -> None:
    join = Join(
        who="denoiser-1",
        rank=1,
        size=2,
        device="cuda:1",
        model=ModelConfig(path="tiny", components={"vae": "file"}, profile="lossless", cache_dir=Path("/cache")),
        roles=(Role.ENCODER, Role.DENOISER),
        parallel=Parallelism(cfg=1, ring=2),
        store="/folder/store",
        seconds=1.0,
    )
    assert decode_order(encode(join)) == join


def test_a_run_begins_with_parameters_and_the_shapes_of_what_follows() -> None:
    begin = Begin(
        run=3,
        role=Role.DENOISER,
        params={"seed": 2**40, "guidance_scale": 5.0, "image": {"blob": 0}, "negative_prompt": None},
        inputs=(Sent(tree=b"tree", tensors=(Shape(shape=(1, 2), dtype="bfloat16"), Shape(shape=(), dtype="int64"))),),
        images=(b"png",),
    )
    assert decode_order(encode(begin)) == begin
