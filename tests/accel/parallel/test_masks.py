"""Masks of texts under Ulysses on three ranks, where neither text nor picture divides by them."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

RANKS = 3


def forwards(model: torch.nn.Module) -> list[Tensor]:
    """Texts of several lengths, of which some tokens are hidden or none, before pictures of several sizes."""
    made: list[Tensor] = []
    generator = torch.Generator().manual_seed(1)
    for text, hidden, (height, width) in ((10, 2, (4, 4)), (7, 0, (3, 5)), (8, 3, (4, 4)), (9, 1, (6, 4))):
        mask = torch.ones(1, text, dtype=torch.bool)
        mask[:, text - hidden :] = False
        made += model(
            hidden_states=torch.randn(1, height * width, 16, generator=generator),
            timestep=torch.tensor([0.5]),
            encoder_hidden_states=torch.randn(1, text, 24, generator=generator),
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, height, width)]],
            return_dict=False,
        )
    return made


def rank(number: int, folder: str) -> None:
    """Each forward alone and shared, written down by the first rank."""
    from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel

    from triptych.accel.parallel.degrees import Layout
    from triptych.accel.parallel.sequence import TokenSharing, context, put_masks_together

    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=number, world_size=RANKS)
    torch.manual_seed(0)
    model = QwenImageTransformer2DModel(
        num_layers=2, num_attention_heads=RANKS, attention_head_dim=16, joint_attention_dim=24,
        axes_dims_rope=(4, 6, 6), in_channels=16, out_channels=4,
    ).eval()  # fmt: skip
    for weights in model.parameters():
        torch.nn.init.normal_(weights, std=0.1)
    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("ring", "ulysses"))
    config = context(mesh, Layout(ulysses=RANKS), torch.device("cpu"))
    alone = forwards(model)
    put_masks_together()
    sharing = TokenSharing(model)
    compute = model.forward

    def shared(*args: object, **kwargs: object) -> object:
        with sharing.using(config):
            return compute(*args, **kwargs)

    model.forward = shared
    made = forwards(model)
    if number == 0:
        torch.save([alone, made], f"{folder}/made.pt")
    dist.destroy_process_group()


def test_what_a_mask_hides_is_hidden_however_the_tokens_divide(tmp_path: Path) -> None:
    """Symptom: with three ranks or more, padding came between the ranks' parts of the mask, and other tokens than the
    hidden ones were left out."""
    processes.start_processes(rank, (str(tmp_path),), nprocs=RANKS, start_method="spawn")
    alone, made = torch.load(tmp_path / "made.pt")
    for expected, shared in zip(alone, made, strict=True):
        torch.testing.assert_close(shared, expected, rtol=1e-4, atol=1e-5)
