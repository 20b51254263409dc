"""Attention is measured and chosen for every model whose attention is dispatched, in the shape that it computes.

Symptom: Z-Image, and whatever else says in words of its own how many heads it has, kept the stock attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models import attention_dispatch as dispatch
from torch import Tensor

from triptych.accel import attention
from triptych.config import ModelConfig
from triptych.ids import ROLES
from triptych.pipeline.load import load_pipeline, quiet_libraries

from .cases import BUILD, CASES
from .classic_harness import TOLERATED
from .harness import Trio

pytestmark = [*TOLERATED, pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")]

OFTEN = ("z_image", "ltx2")
"""Whose config says nothing of heads; that has narrower attention beside its widest."""


def check(family: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet_libraries()
    BUILD[family](folder)
    chosen: set[tuple[int, int]] = set()
    choose: Callable[..., attention.Choice] = attention.choose

    def noting(*args: Any, heads: int, head_dim: int, **more: Any) -> attention.Choice:
        chosen.add((heads, head_dim))
        return choose(*args, heads=heads, head_dim=head_dim, **more)

    computed: set[tuple[int, int]] = set()
    native: Callable[..., Tensor] = dispatch._AttentionBackendRegistry._backends[dispatch.AttentionBackendName.NATIVE]

    def attend(query: Tensor, *args: Any, **more: Any) -> Tensor:
        computed.add((query.shape[2], query.shape[3]))
        return native(query, *args, **more)

    monkeypatch.setattr(attention, "choose", noting)
    monkeypatch.setitem(dispatch._AttentionBackendRegistry._backends, dispatch.AttentionBackendName.NATIVE, attend)
    config = ModelConfig(path=str(folder), device="cpu", dtype="bfloat16", profile="lossless")
    trio = Trio.of(dict.fromkeys(ROLES, load_pipeline(config, ROLES, "cpu")))  # type: ignore[arg-type]
    asked, files = CASES[family].asked()
    trio.generate(asked | {"num_inference_steps": 2}, files)
    assert chosen == ({max(computed, key=math.prod)} if computed else set())


@pytest.mark.parametrize("family", OFTEN)
def test_a_family_whose_attention_is_dispatched_gets_a_choice(family: str, tmp_path: Path, monkeypatch: Any) -> None:
    check(family, tmp_path / "model", monkeypatch)


@pytest.mark.families
@pytest.mark.parametrize("family", [name for name in CASES if name not in OFTEN])
def test_all_families_do(family: str, tmp_path: Path, monkeypatch: Any) -> None:
    check(family, tmp_path / "model", monkeypatch)


@pytest.mark.parametrize(
    ("kind", "settings", "shape"),
    [
        ("BriaFibo2Transformer2DModel", {"n_layers": 1, "injection_layer_ids": ()}, (28, 128)),
        ("Cosmos3OmniTransformer", {"num_hidden_layers": 1}, (32, 128)),
        ("ErnieImageTransformer2DModel", {"num_layers": 1}, (24, 128)),
        ("Flux2Transformer2DModel", {"num_layers": 1, "num_single_layers": 1}, (48, 128)),
        ("JoyImageEditTransformer3DModel", {"num_layers": 1}, (24, 128)),
        ("Kandinsky5Transformer3DModel", {"num_text_blocks": 1, "num_visual_blocks": 1}, (32, 64)),
        ("Krea2Transformer2DModel", {"num_layers": 1}, (48, 128)),
        ("NucleusMoEImageTransformer2DModel", {"num_layers": 1}, (16, 128)),
        ("PRXTransformer2DModel", {"depth": 1}, (28, 64)),
        ("WanAnimate2Transformer3DModel", {"num_layers": 1}, (40, 128)),
    ],
)
def test_models_say_how_wide_their_attention_is(kind: str, settings: dict[str, Any], shape: tuple[int, int]) -> None:
    """Those of whom no tiny checkpoint is at hand, as wide as they are trained, without their numbers."""
    with torch.device("meta"):
        model = getattr(diffusers, kind)(**settings)
    assert attention.widest(model) == shape
    assert attention.in_use(model) == "native"
