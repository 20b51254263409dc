"""Every family of models: how its tiny checkpoint is built, and how it is asked. Pictures and clips stand as such."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from tests.pipeline.checkpoints import BUILDERS
from tests.pipeline.classic_checkpoints import CLASSIC_BUILDERS
from tests.pipeline.classic_harness import REQUESTS as CLASSIC
from tests.pipeline.modular_image_checkpoints import IMAGE_BUILDERS
from tests.pipeline.modular_video_checkpoints import VIDEO_BUILDERS
from tests.pipeline.parity import Film, picture, png
from tests.pipeline.qwen_checkpoints import QWEN_BUILDERS
from tests.pipeline.test_modular_families import MAY_HAVE_PICTURES
from tests.pipeline.test_modular_families import REQUESTS as MODULAR
from tests.pipeline.wan_checkpoints import WAN_BUILDERS

BUILD: Mapping[str, Callable[[Path], None]] = {
    **BUILDERS, **IMAGE_BUILDERS, **VIDEO_BUILDERS, **WAN_BUILDERS, **QWEN_BUILDERS, **CLASSIC_BUILDERS
}  # fmt: skip

VIDEO: dict[str, Any] = {
    "prompt": "a cat runs", "negative_prompt": "bad dog", "height": 32, "width": 48, "num_frames": 9,
    "max_sequence_length": 512, "num_inference_steps": 3, "guidance_scale": 5.0,
}  # fmt: skip
IMAGE: dict[str, Any] = {
    "prompt": "a cat", "height": 64, "width": 48, "max_sequence_length": 64, "num_inference_steps": 3,
    "guidance_scale": 4.0,
}  # fmt: skip
EDIT: dict[str, Any] = {
    "prompt": "a red cat", "num_inference_steps": 2, "guidance_scale": 3.0, "negative_prompt": "bad",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a family is asked."""

    request: Mapping[str, Any]
    keeps: tuple[str, ...] = ()
    """Weights that its encoder needs besides those of text and image encoders."""

    @property
    def door(self) -> str:
        """Where a client posts it."""
        return "videos" if "num_frames" in self.request else "images"

    def asked(self) -> tuple[dict[str, Any], list[bytes]]:
        """The request as roles get it, and the files that it refers to."""
        files: list[bytes] = []

        def filed(value: Any) -> Any:
            if isinstance(value, list):
                return [filed(item) for item in value]
            if not isinstance(value, Image.Image | Film):
                return value
            files.append(png(value) if isinstance(value, Image.Image) else value.file)
            return {"blob": len(files) - 1}

        return {"seed": 11, **{name: filed(value) for name, value in self.request.items()}}, files


def started_from(request: Mapping[str, Any], **more: Any) -> Case:
    """A model that begins with a picture, which its encoder looks at through the VAE."""
    return Case(
        request={**request, "image": picture({"height": 32, "width": 48, **request}, 1), **more}, keeps=("vae",)
    )


CASES: dict[str, Case] = {
    "wan_t2v": Case(request=VIDEO),
    "wan22_t2v": Case(request=VIDEO | {"guidance_scale_2": 2.0}),
    "wan_i2v": started_from(VIDEO),
    "wan22_i2v": started_from(VIDEO),
    "wan_flf2v": started_from(VIDEO, last_image=picture(VIDEO, 2)),
    "wan_vace": Case(request=VIDEO | {"video": Film.of(VIDEO)}, keeps=("vae",)),
    "wan22_ti2v": Case(request=VIDEO | {"width": 64}),
    "wan_distilled": Case(request=VIDEO | {"guidance_scale": 1.0}),
    "wan22_distilled": Case(request=VIDEO | {"guidance_scale": 1.0}),
    # Of fewer tokens the template leaves none to the prompt.
    "qwen_t2i": Case(request=IMAGE | {"negative_prompt": "bad", "max_sequence_length": 512}),
    "qwen_distilled": Case(request=IMAGE | {"guidance_scale": 1.0, "max_sequence_length": 512}),
    "flux": Case(request=IMAGE),
    "z_image": Case(request=IMAGE | {"negative_prompt": "bad"}),
    **{
        name: Case(request=request, keeps=("vae",) if name in MAY_HAVE_PICTURES else ())
        for name, request in MODULAR.items()
    },
    **{
        name: started_from({key: value for key, value in request.items() if key != "image"})
        if "image" in request
        else Case(request=request)
        for name, request in CLASSIC.items()
    },
}
EDITS: dict[str, Case] = {
    "qwen_edit": started_from(EDIT),
    "qwen_edit_plus": Case(request=EDIT | {"image": [picture(VIDEO, 1), picture(VIDEO, 2)]}, keeps=("vae",)),
    "qwen_layered": started_from(EDIT, layers=2),
}
