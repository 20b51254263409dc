"""What a client is told when a role ran out of memory."""

from __future__ import annotations

import pytest
import torch

from triptych.errors import OutOfMemory
from triptych.ids import Role
from triptych.launch.options import BY_NAME
from triptych.pipeline.guard import guarded


@pytest.mark.parametrize(
    ("role", "sizes", "options"),
    [
        (Role.ENCODER, "max_sequence_length", {"offload"}),
        (Role.DENOISER, "height, width, num_frames or n", {"offload", "max_running_requests"}),
        (Role.DECODER, "height, width, num_frames or n", {"offload", "vae_tiling"}),
    ],
)
def test_the_advice_names_the_sizes_and_the_options_that_help(role: Role, sizes: str, options: set[str]) -> None:
    with pytest.raises(OutOfMemory, match=f"the {role} ran out of memory: lower {sizes}") as caught, guarded(role):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert all(BY_NAME[name].flag in caught.value.message for name in options)
    assert "2.00 GiB" in caught.value.message
