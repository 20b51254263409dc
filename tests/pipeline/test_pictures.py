"""The files of a request as a pipeline takes them."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from triptych.pipeline.families import Pictures
from triptych.pipeline.names import MASK
from triptych.pipeline.pictures import opened

SIZE = (16, 8)


def clear_below(mode: str) -> bytes:
    """A black PNG of a mode whose lower half is transparent."""
    made = np.zeros((SIZE[1], SIZE[0], 4), np.uint8)
    made[: SIZE[1] // 2, :, 3] = 255
    picture = Image.fromarray(made)
    if mode == "P":
        picture = picture.quantize(4)
    if mode == "LA":
        picture = picture.convert("LA")
    buffer = io.BytesIO()
    if mode == "L":  # one shade of grey stands for what is clear
        shades = np.zeros((SIZE[1], SIZE[0]), np.uint8)
        shades[SIZE[1] // 2 :] = 7
        Image.fromarray(shades).save(buffer, "PNG", transparency=7)
    else:
        picture.save(buffer, "PNG")
    with Image.open(io.BytesIO(buffer.getvalue())) as saved:
        assert saved.mode == mode
    return buffer.getvalue()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L"])
def test_what_is_transparent_in_a_mask_is_made_anew_however_it_is_stored(mode: str) -> None:
    params = {"width": SIZE[0], "height": SIZE[1], MASK: {"blob": 0}}
    mask = np.asarray(opened(Pictures(), params, [clear_below(mode)])[MASK])
    assert (mask[: SIZE[1] // 2] == 0).all()
    assert (mask[SIZE[1] // 2 :] == 255).all()


@pytest.mark.parametrize("mode", ["RGB", "L", "P"])
def test_a_mask_without_transparency_is_made_anew_where_it_is_white(mode: str) -> None:
    made = Image.new("RGB", SIZE)
    made.paste((255, 255, 255), (0, 4, 16, 8))
    buffer = io.BytesIO()
    (made.quantize(4) if mode == "P" else made.convert(mode)).save(buffer, "PNG")
    params = {"width": SIZE[0], "height": SIZE[1], MASK: {"blob": 0}}
    mask = np.asarray(opened(Pictures(), params, [buffer.getvalue()])[MASK])
    assert (mask[:4] == 0).all()
    assert (mask[4:] == 255).all()
