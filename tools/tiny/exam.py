"""Has the saved pipeline generate clips for held-out prompts, and lets the judge look at them."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import WanPipeline
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from tools.tiny import judge
from tools.tiny.recipe import Clip, Recipe

log = logging.getLogger(__name__)

_TRIAL_SEED, _JUDGED_SEED = 101, 202
EXAMPLE = "a red circle moving right on a blue background"
_SHEET = (
    EXAMPLE,
    "a yellow star rotating on a purple background",
    "a small white square moving up on a black background",
    "a large green triangle moving left on a white background",
    "an orange circle growing on a gray background",
    "a black star falling on a yellow background",
    "a blue square shrinking on an orange background",
    "a purple triangle standing still on a green background",
    "a white square spinning on a red background",
    "a big red ball slowly drifting to the left against a white background",
)
_COMPLAINT = "blurry, worst quality, jpeg artifacts, static, ugly"

Frames = NDArray[np.float32]


class Examiner:
    def __init__(self, folder: Path, recipe: Recipe, device: torch.device) -> None:
        self._pipe: Any = WanPipeline.from_pretrained(folder, dtype=torch.float32).to(device)
        self._pipe.set_progress_bar_config(disable=True)
        self._recipe = recipe

    def generate(
        self, prompts: Sequence[str], guidance: float, *, clip: Clip | None = None, **options: Any
    ) -> list[Frames]:
        """One clip [frames, height, width, 3] in [0, 1] a prompt; prompt number i has seed i."""
        clip = clip or self._recipe.judged_clip
        settings = {"num_inference_steps": self._recipe.steps, "max_sequence_length": 64} | options
        negative = settings.pop("negative_prompt", None)
        made: list[Frames] = []
        for start in range(0, len(prompts), self._recipe.judge_batch):
            part = list(prompts[start : start + self._recipe.judge_batch])
            made += list(
                self._pipe(
                    prompt=part,
                    negative_prompt=negative and [negative] * len(part),
                    guidance_scale=guidance,
                    num_frames=clip.frames,
                    height=clip.height,
                    width=clip.width,
                    generator=[torch.Generator().manual_seed(start + i) for i in range(len(part))],
                    output_type="np",
                    **settings,
                ).frames
            )
        return made

    def best_guidance(self) -> tuple[float, dict[str, Any]]:
        """The guidance with the most clips right in everything, on prompts that are not judged later."""
        prompts, truth = judge.prompts(self._recipe.trial_prompts, _TRIAL_SEED)
        tried = {}
        for guidance in self._recipe.guidances:
            sights = [judge.look(clip) for clip in self.generate(prompts, guidance)]
            tried[guidance] = judge.accuracy(sights, truth)
            log.info("guidance %.1f: %s", guidance, tried[guidance])
        best = max(tried, key=lambda g: (tried[g]["all"], tried[g]["outline_overlap"]))
        return best, {str(guidance): result for guidance, result in tried.items()}

    def judged(self, guidance: float, count: int | None = None, **options: Any) -> dict[str, Any]:
        prompts, truth = judge.prompts(count or self._recipe.judged_prompts, _JUDGED_SEED)
        sights = [judge.look(clip) for clip in self.generate(prompts, guidance, **options)]
        return judge.accuracy(sights, truth) | {"prompts": len(prompts), "mistakes": judge.confusions(sights, truth)}

    def variations(self, guidance: float) -> dict[str, Any]:
        """The same exam under other settings, on fewer prompts."""
        few, main = self._recipe.varied_prompts, self._recipe.judged_clip
        cases: dict[str, dict[str, Any]] = {
            "10 steps": {"num_inference_steps": self._recipe.steps // 2},
            "text padded to 512": {"max_sequence_length": 512},
            "with a negative prompt": {"negative_prompt": _COMPLAINT},
            "one frame": {"clip": main._replace(frames=1)},
            "9 frames": {"clip": main._replace(frames=9)},
            "33 frames": {"clip": main._replace(frames=33)},
            "a wide clip": {"clip": main._replace(height=main.height * 3 // 4, width=main.width * 5 // 4)},
        }
        results = {name: self.judged(guidance, few, **case) for name, case in cases.items()}
        return results | {"guidance 1 (none)": self.judged(1.0, few)}

    def contact_sheet(self, path: Path, guidance: float, columns: int = 6) -> None:
        """A row of frames for each of a few prompts, and a single image at the end."""
        rows = list(zip(_SHEET, self.generate(_SHEET, guidance), strict=True))
        image = self.generate(_SHEET[:1], guidance, clip=self._recipe.judged_clip._replace(frames=1))[0]
        rows.append((f"one frame: {_SHEET[0]}", image))
        height, width = image.shape[1:3]
        gap, heading = 4, 14
        line = height + heading + gap
        sheet = Image.new("RGB", (columns * (width + gap) + gap, len(rows) * line + gap), (30, 30, 30))
        draw = ImageDraw.Draw(sheet)
        for row, (prompt, clip) in enumerate(rows):
            draw.text((gap, gap + row * line), prompt, fill=(230, 230, 230))
            shown = np.linspace(0, len(clip) - 1, min(columns, len(clip))).round().astype(int)
            for column, frame in enumerate(clip[shown]):
                picture = Image.fromarray((frame.clip(0, 1) * 255).round().astype(np.uint8))
                sheet.paste(picture, (gap + column * (width + gap), gap + row * line + heading))
        sheet.save(path, optimize=True)
