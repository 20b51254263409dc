"""Pictures decoded in strips: each rank makes its own rows, and they are those of the whole picture."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from triptych.accel.parallel.decoder import DecodeSharing, Strip, pack, unpack
from triptych.accel.wan_vae import WanVaeDecoder


@pytest.fixture(scope="module")
def vae() -> AutoencoderKLWan:
    torch.manual_seed(0)
    return AutoencoderKLWan(
        base_dim=8, z_dim=4, dim_mult=[1, 2, 2, 2], num_res_blocks=1, temperal_downsample=[False, True, True]
    ).eval()


def decoded(vae: AutoencoderKLWan, latents: Tensor, sharing: DecodeSharing | None) -> Tensor:
    decoder = WanVaeDecoder(vae)
    decoder.sharing = sharing
    with torch.no_grad():
        return decoder.decode(latents)


def alone(own: Tensor, strip: Strip) -> Tensor:
    return own


@pytest.mark.parametrize(("height", "width", "ranks"), [(26, 6, 2), (5, 40, 3)])
def test_strips_are_the_rows_of_the_whole_picture(vae: AutoencoderKLWan, height: int, width: int, ranks: int) -> None:
    latents = torch.randn(1, 4, 2, height, width, generator=torch.Generator().manual_seed(1))
    whole = decoded(vae, latents, None)
    strips = [decoded(vae, latents, DecodeSharing(vae.decoder, rank, ranks, alone)) for rank in range(ranks)]
    assert max(strip.numel() for strip in strips) < 1.2 * whole.numel() / ranks
    dim = 3 if height > width else 4
    lengths = [strip.shape[dim] for strip in strips]
    packed = [pack(strip, dim, max(lengths)) for strip in strips]
    assert len({(part.shape, part.stride()) for part in packed}) == 1  # as they must be to be sent in one collective
    torch.testing.assert_close(unpack(packed, dim, lengths), whole, rtol=1e-4, atol=1e-5)


def test_a_strip_keeps_what_is_left_to_see_and_no_more(vae: AutoencoderKLWan) -> None:
    sharing = DecodeSharing(vae.decoder, 0, 4, alone)
    strip = sharing.strip(torch.zeros(1, 4, 1, 4, 128))
    assert strip is not None
    rows, of = [], torch.zeros(1, 1, 1, 1, 128)
    for level in range(4):
        of = strip.before(of, level)
        rows.append(of.shape[4] / 2**level)
        of = of.repeat_interleave(2, 4) if level < 3 else of
    assert rows == sorted(rows, reverse=True)  # in rows of latents
    assert 32 < rows[-1] < 33
    assert rows[0] < 43


def test_pictures_with_fewer_rows_than_ranks_are_made_whole_by_each(vae: AutoencoderKLWan) -> None:
    asked: list[Tensor] = []
    gather: Callable[[Tensor, Strip], Tensor] = lambda own, strip: asked.append(own) or own  # noqa: E731
    latents = torch.randn(1, 4, 1, 2, 3)
    sharing = DecodeSharing(vae.decoder, 1, 4, gather)
    assert torch.equal(decoded(vae, latents, sharing), decoded(vae, latents, None))
    assert not asked
