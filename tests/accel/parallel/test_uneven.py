"""Tokens that do not divide by the ranks that share them, in every class whose tokens can be shared."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from diffusers.models.attention_dispatch import AttentionBackendName
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

Calls: TypeAlias = Iterator[dict[str, Any]]
"""Arguments of one forward after another."""

HEADS = 12  # which 2, 3 and 4 divide
LAYOUTS: dict[int, tuple[tuple[int, int], ...]] = {
    2: ((1, 2), (2, 1)), 3: ((1, 3), (3, 1)), 4: ((1, 2), (1, 4), (2, 2))
}  # fmt: skip
"""Ranks to how many of them are around a ring, and how many share the heads; two groups of two where that is all."""


def wan() -> tuple[nn.Module, Calls]:
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    model = WanTransformer3DModel(
        num_layers=2, num_attention_heads=HEADS, attention_head_dim=12, ffn_dim=16, text_dim=8, freq_dim=16
    )
    calls = (
        {
            "hidden_states": torch.randn(1, 16, frames, height, width),
            "timestep": torch.tensor([500]),
            "encoder_hidden_states": torch.randn(1, 7, 8),
        }
        for frames, height, width in ((1, 6, 6), (3, 2, 10), (2, 4, 12), (1, 2, 2))
    )
    return model, calls


def chrono_edit() -> tuple[nn.Module, Calls]:
    from diffusers.models.transformers.transformer_chronoedit import ChronoEditTransformer3DModel

    model = ChronoEditTransformer3DModel(
        num_layers=2, num_attention_heads=HEADS, attention_head_dim=12, ffn_dim=16, text_dim=8, freq_dim=16
    )
    return model, wan()[1]


def helios() -> tuple[nn.Module, Calls]:
    from diffusers.models.transformers.transformer_helios import HeliosTransformer3DModel

    model = HeliosTransformer3DModel(
        num_layers=2, num_attention_heads=HEADS, attention_head_dim=12, ffn_dim=16, text_dim=8, freq_dim=16,
        rope_dim=(4, 4, 4), guidance_cross_attn=True,
    )  # fmt: skip
    calls = (
        {
            "hidden_states": torch.randn(1, 16, 1, height, width),
            "timestep": torch.tensor([500]),
            "encoder_hidden_states": torch.randn(1, 7, 8),
            "indices_hidden_states": torch.arange(2, 3)[None],
            "indices_latents_history_short": torch.arange(2)[None],
            "latents_history_short": torch.randn(1, 16, 2, height, width),
        }
        for height, width in ((6, 6), (2, 10))
    )
    return model, calls


def qwen(*, masked: bool = True) -> tuple[nn.Module, Calls]:
    from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        num_layers=2, num_attention_heads=HEADS, attention_head_dim=16, joint_attention_dim=24,
        axes_dims_rope=(4, 6, 6), in_channels=16, out_channels=4,
    )  # fmt: skip

    def calls() -> Calls:
        """Texts of several lengths, of which some tokens are hidden or none, before pictures of several sizes."""
        for text, hidden, (height, width) in (
            (10, 2, (4, 4)), (7, 0, (3, 5)), (8, 3, (4, 4)), (9, 1, (6, 4)), (2, 1, (5, 5)), (13, 1, (2, 6))
        ):  # fmt: skip
            mask = torch.ones(1, text, dtype=torch.bool)
            mask[:, text - hidden :] = False
            yield {
                "hidden_states": torch.randn(1, height * width, 16),
                "timestep": torch.tensor([0.5]),
                "encoder_hidden_states": torch.randn(1, text, 24),
                "encoder_hidden_states_mask": mask if masked else None,
                "img_shapes": [[(1, height, width)]],
            }

    return model, calls()


def flux() -> tuple[nn.Module, Calls]:
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=HEADS,
        joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    calls = (
        {
            "hidden_states": torch.randn(1, tokens, 16),
            "encoder_hidden_states": torch.randn(1, text, 8),
            "pooled_projections": torch.randn(1, 8),
            "timestep": torch.tensor([0.5]),
            "img_ids": torch.randn(tokens, 3),
            "txt_ids": torch.randn(text, 3),
        }
        for text, tokens in ((8, 25), (7, 24), (5, 7), (9, 17))
    )
    return model, calls


def flux2() -> tuple[nn.Module, Calls]:
    from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel

    model = Flux2Transformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=HEADS,
        joint_attention_dim=8, timestep_guidance_channels=16, axes_dims_rope=(4, 4, 4, 4),
    )  # fmt: skip
    calls = (
        {
            "hidden_states": torch.randn(1, tokens, 16),
            "encoder_hidden_states": torch.randn(1, text, 8),
            "timestep": torch.tensor([0.5]),
            "guidance": torch.tensor([1.0]),
            "img_ids": torch.randn(1, tokens, 4),
            "txt_ids": torch.randn(1, text, 4),
        }
        for text, tokens in ((8, 25), (7, 24), (5, 7))
    )
    return model, calls


def ltx() -> tuple[nn.Module, Calls]:
    from diffusers.models.transformers.transformer_ltx import LTXVideoTransformer3DModel

    model = LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=HEADS, attention_head_dim=8, cross_attention_dim=HEADS * 8,
        num_layers=2, caption_channels=8,
    )  # fmt: skip

    def calls() -> Calls:
        for text, (height, width) in ((12, (5, 5)), (7, (4, 6)), (7, (3, 5)), (12, (3, 11))):
            mask = torch.ones(1, text)
            mask[:, -2:] = 0
            yield {
                "hidden_states": torch.randn(1, height * width, 8),
                "encoder_hidden_states": torch.randn(1, text, 8),
                "encoder_attention_mask": mask,
                "timestep": torch.tensor([500]),
                "num_frames": 1,
                "height": height,
                "width": width,
            }

    return model, calls()


MODELS: dict[str, Callable[[], tuple[nn.Module, Calls]]] = {
    "Wan": wan, "ChronoEdit": chrono_edit, "Helios": helios, "Qwen-Image": qwen, "LTX": ltx, "Flux": flux,
    "Flux 2": flux2, "Qwen-Image without masks": functools.partial(qwen, masked=False),
}  # fmt: skip
MASKED = ("Qwen-Image", "LTX")
"""Which a ring cannot have."""


class Together:
    """One rank among others that are processes of this test."""

    def __init__(self, number: int, ranks: int, folder: str) -> None:
        from triptych.accel.parallel.degrees import Layout
        from triptych.accel.parallel.sequence import context
        from triptych.accel.tally import Tally

        torch.set_grad_enabled(False)
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=number, world_size=ranks)
        self.tally = Tally()
        self.ways: dict[tuple[int, int], Any] = {}
        for ring, ulysses in LAYOUTS[ranks]:
            shape = (ranks // (ring * ulysses), ring, ulysses)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("cfg", "ring", "ulysses"))
            layout = Layout(ring=ring, ulysses=ulysses)
            self.ways[ring, ulysses] = context(mesh, layout, torch.device("cpu"))

    def build(self, name: str) -> tuple[nn.Module, list[dict[str, Any]]]:
        """A model and its calls, the same on all ranks."""
        torch.manual_seed(0)
        model, calls = MODELS[name]()
        for weights in model.eval().parameters():
            nn.init.normal_(weights, std=0.1)
        return model, list(calls)

    def share(self, model: nn.Module) -> Callable[[tuple[int, int], dict[str, Any]], Tensor]:
        """Have the ranks compute forwards of ``model`` together, in a layout, until the next one is shared."""
        from triptych.accel.parallel.exchange import install
        from triptych.accel.parallel.ring import RingAttention
        from triptych.accel.parallel.sequence import TokenSharing

        tokens, around = TokenSharing(model, self.tally), RingAttention(model, torch.device("cpu"))
        install()

        def forward(layout: tuple[int, int], call: dict[str, Any]) -> Tensor:
            with around.used() if layout[0] > 1 else nullcontext(), tokens.using(self.ways[layout]):
                return model(**call, return_dict=False)[0]

        return forward


def start(part: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
    """Have so many processes do ``part``, forked off one that has imported what they need: that costs as much as what
    they compute."""
    get_context("forkserver").set_forkserver_preload([__name__, "triptych.accel.parallel.sequence"])
    processes.start_processes(part, arguments, nprocs=ranks, start_method="forkserver")


def every_class(number: int, ranks: int, folder: str) -> None:
    """Each forward of each class, alone and in each layout, written down by the first rank."""
    together = Together(number, ranks, folder)
    made: list[tuple[str, Tensor, Tensor]] = []
    for name in MODELS:
        model, calls = together.build(name)
        alone = [model(**call, return_dict=False)[0] for call in calls]
        forward = together.share(model)
        made += [
            (f"{name}, ring {layout[0]}, ulysses {layout[1]}, {index}", expected, forward(layout, call))
            for layout in together.ways
            if layout[0] == 1 or name not in MASKED
            for index, (call, expected) in enumerate(zip(calls, alone, strict=True))
        ]
    if number == 0:
        torch.save([made, together.tally.unshared_forwards], f"{folder}/made.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [3, 4])
def test_what_ranks_make_of_tokens_that_do_not_divide_is_what_one_makes(ranks: int, tmp_path: Path) -> None:
    start(every_class, (ranks, str(tmp_path)), ranks)
    made, unshared = torch.load(tmp_path / "made.pt")
    assert not unshared
    for which, expected, shared in made:
        assert torch.allclose(shared, expected, rtol=1e-4, atol=1e-5), which


def two(number: int, folder: str) -> None:
    """Compiled blocks, Diffusers' own way where tokens divide, and what cannot be shared."""
    from diffusers.hooks.context_parallel import apply_context_parallel
    from diffusers.models._modeling_parallel import ParallelConfig

    from triptych.accel.compiling import allow_many_graphs, count_compilations

    together = Together(number, 2, folder)
    made: dict[str, Any] = {"dividing": [], "compiled": [], "graphs": {}}
    for layout, way in together.ways.items():
        model, (call, *_) = together.build("Wan")
        call["hidden_states"] = torch.randn(1, 16, 2, 6, 6)
        ours = together.share(model)(layout, call)
        model, _ = together.build("Wan")
        together.share(model)
        for module in model.modules():
            processor: Any = getattr(module, "processor", None)
            if processor is not None:
                processor._parallel_config = ParallelConfig(context_parallel_config=way.context)
                processor._attention_backend = AttentionBackendName("_native_math") if layout[0] > 1 else None
        plan: Any = model._cp_plan
        apply_context_parallel(model, way.context, plan)
        made["dividing"].append((ours, model(**call, return_dict=False)[0]))

    model, (call, *_) = together.build("LTX")
    call |= {"hidden_states": torch.randn(1, 8, 8), "height": 2, "width": 4}
    call |= {"encoder_hidden_states": torch.randn(1, 7, 8), "encoder_attention_mask": torch.ones(1, 7)}
    alone = model(**call, return_dict=False)[0]
    made["apart"] = (alone, together.share(model)((1, 2), call))
    made["unshared"] = together.tally.unshared_forwards

    count_compilations(together.tally)
    allow_many_graphs()
    model, (first, *_) = together.build("Qwen-Image without masks")
    texts = [torch.randn(1, length, 24) for length in (10, 7, 8, 9, *range(4, 16))]
    calls = [first | {"encoder_hidden_states": text} for text in texts]
    alone = [model(**call, return_dict=False)[0] for call in calls]
    compiled: Any = model
    compiled.compile_repeated_blocks(fullgraph=True, dynamic=None, backend="eager")
    forward = together.share(model)
    for layout in together.ways:
        graphs: list[int] = []
        for call, expected in zip(calls, alone, strict=True):
            made["compiled"].append((expected, forward(layout, call)))
            graphs.append(together.tally.compilations)
        made["graphs"][layout] = graphs
    made["unshared of compiled ones"] = together.tally.unshared_forwards - made["unshared"]
    if number == 0:
        torch.save(made, f"{folder}/made.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks made."""
    folder = tmp_path_factory.mktemp("two")
    start(two, (str(folder),), 2)
    return torch.load(folder / "made.pt")


def test_tokens_that_divide_are_shared_as_diffusers_does(of_two: dict[str, Any]) -> None:
    for ours, theirs in of_two["dividing"]:
        assert torch.equal(ours, theirs)


def test_compiled_blocks_share_texts_of_all_lengths_with_a_graph_for_those_that_divide_and_one_for_others(
    of_two: dict[str, Any],
) -> None:
    """Symptom: with compiled blocks every second text of Qwen-Image was computed whole by each GPU of two."""
    for expected, shared in of_two["compiled"]:
        assert torch.allclose(shared, expected, rtol=1e-4, atol=1e-5)
    assert not of_two["unshared of compiled ones"]
    for compilations in of_two["graphs"].values():
        assert len({*compilations[3:]}) == 1, "two lengths of each kind are enough for all"


def test_streams_that_cannot_be_told_apart_are_computed_whole(of_two: dict[str, Any]) -> None:
    """Seven tokens of a text and eight of a picture are four on each of two ranks."""
    expected, made = of_two["apart"]
    assert torch.equal(made, expected)
    assert of_two["unshared"] == 1
