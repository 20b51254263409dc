"""Pictures and clips of a request: parameters for those that a pipeline takes, and the files opened for it."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from triptych.errors import BadRequest
from triptych.pictures import FORMATS, objection, upright
from triptych.pipeline.clips import clip_frames
from triptych.pipeline.families import Pictures
from triptych.pipeline.names import CONTROL, LAST, MASK
from triptych.wire.clips import clip_format
from triptych.wire.schema import Param

MAX_PIXELS = 64 << 20

REFERENCES = "reference_images"
VIDEO = "video"
CLIP_MASK = "mask"

_CLIPS = {
    VIDEO: "The clip to start from; a still picture stands for a clip of it.",
    CLIP_MASK: "Where the clip is made anew: white; a still picture holds for all frames.",
}


def picture_params(
    pictures: Pictures,
    declared: Collection[str],
    given: Collection[str],
    *,
    paired: bool,
    optional: Collection[str] = (),
) -> Iterator[Param]:
    """The parameters for pictures and clips among the inputs that a pipeline has ``declared``.

    ``given`` are those that it cannot do without, ``optional`` others that it begins with where they are there.
    ``paired``: the model goes from a first picture to a last one.
    """
    if "image" in given or "image" in optional:
        needed = "image" in given
        if pictures.most > 1:
            yield Param(name="image", type="images", required=needed, nullable=not needed, max_length=pictures.most,
                        description="The pictures to start from, in the order of the prompt.")  # fmt: skip
        else:
            yield Param(name="image", type="image", required=needed, nullable=not needed,
                        description="The picture to start from.")  # fmt: skip
    if MASK in given:
        yield Param(name=MASK, type="image", required=True,
                    description="Where the picture is made anew: white, or transparent.")  # fmt: skip
    if CONTROL in given:
        yield Param(name=CONTROL, type="image", required=True,
                    description="The picture that steers: edges, depth, a pose.")  # fmt: skip
    if LAST in declared and "image" in given and (paired or pictures.pair_setting is None):
        yield Param(name=LAST, type="image", required=paired, nullable=not paired,
                    description="The picture to end with.")  # fmt: skip
    if REFERENCES in declared and pictures.references:
        yield Param(name=REFERENCES, type="images", nullable=True, max_length=pictures.references,
                    description="Pictures of what is to be seen.")  # fmt: skip
    for name, needed in pictures.clips.items():
        if name in declared:
            needs = VIDEO if name == CLIP_MASK else ""
            yield Param(
                name=name, type="video", required=needed, nullable=not needed, needs=needs, description=_CLIPS[name]
            )


def opened(pictures: Pictures, params: Mapping[str, Any], files: Sequence[bytes]) -> dict[str, Any]:
    """The pictures among ``params`` upright and as the pipeline takes them.

    Pipelines that do not resize them by themselves would take height and width for an area and keep the picture's own
    aspect, so they are cut to the requested aspect and size. Raises `BadRequest` for a file that cannot be read.
    """
    size = None if pictures.whole else (params["width"], params["height"])
    found: dict[str, Any] = {}
    for name, value in params.items():
        match value:
            case {"blob": blob} if name in pictures.clips and size is not None:
                found[name] = _clip(name, _file(name, blob, files), size, params.get("num_frames"))
            case {"blob": blob}:
                found[name] = _fitting(pictures, name, _picture(name, _file(name, blob, files), pictures.mode, size))
            case [*references] if references:
                several = (_picture(name, _file(name, item["blob"], files), pictures.mode, size) for item in references)
                found[name] = [_fitting(pictures, name, picture) for picture in several]
            case _:
                continue
    return found


def _fitting(pictures: Pictures, name: str, picture: Image.Image) -> Image.Image:
    short, long = sorted(picture.size)
    if short < pictures.least_side or long > pictures.most_aspect * short:
        raise BadRequest(
            name,
            f"{name}: the picture is {picture.width}x{picture.height}; this model takes those of at least "
            f"{pictures.least_side} pixels a side, one at most {pictures.most_aspect:g} times the other",
        )
    return picture


def _clip(name: str, data: bytes, size: tuple[int, int], frames: int | None) -> list[Image.Image]:
    kind = clip_format(data)
    if kind is not None:
        return clip_frames(name, data, kind, size, frames, MAX_PIXELS)
    return [_picture(name, data, "RGB", size)] * (frames or 1)


def _file(name: str, blob: Any, files: Sequence[bytes]) -> bytes:
    if not isinstance(blob, int) or not 0 <= blob < len(files):
        raise BadRequest(name, f"{name}: blob {blob!r} of {len(files)}")
    return files[blob]


def _picture(name: str, data: bytes, mode: str, size: tuple[int, int] | None) -> Image.Image:
    if (reason := objection(data)) is not None:
        raise BadRequest(name, f"{name}: {reason}")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise BadRequest(name, f"{name}: {image.width}x{image.height} exceeds {MAX_PIXELS} pixels")
        image = _eight_bit(upright(image))
        image = _grey(image) if name == MASK else image.convert(mode)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadRequest(name, f"{name}: cannot be decoded: {error}") from error
    return image if size is None else ImageOps.fit(image, size, Image.Resampling.LANCZOS)


def _eight_bit(image: Image.Image) -> Image.Image:
    """Of a grey picture with 16 bits a pixel, as depth maps are, the one of 8; Pillow would clip it to white."""
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray(((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8))


def _grey(mask: Image.Image) -> Image.Image:
    """A mask whose white is made anew. Of one with transparency, as OpenAI's clients send it, that is what is clear."""
    if mask.has_transparency_data:  # in a channel, or in the palette
        alpha = mask.convert("RGBA").getchannel("A")
        if alpha.getextrema() != (255, 255):
            return ImageOps.invert(alpha)
    return mask.convert("L")
