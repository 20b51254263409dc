"""What the pipeline tests share: folders that hold one role's weights only, and requests carried through bytes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from triptych.config import ModelConfig, Task
from triptych.ids import ROLES, Role
from triptych.pipeline.load import load_pipeline
from triptych.pipeline.modular import ModularRolePipeline
from triptych.pipeline.stage import Clip, StageOutput, StageResult, StageRun

Inbox = dict[Role, list[tuple[bytes, list[torch.Tensor]]]]

ROLE_WEIGHTS = {
    Role.ENCODER: (
        "text_encoder", "text_encoder_2", "text_encoder_3", "image_encoder", "vision_language_encoder", "connectors",
    ),
    Role.DENOISER: ("transformer", "transformer_2", "unet", "controlnet"),
    Role.DECODER: ("vae", "audio_vae", "vocoder", "safety_checker"),
}  # fmt: skip


def lone_folder(model: Path, role: Role, target: Path, *, keeps: Sequence[str] = ()) -> Path:
    """A copy of ``model`` in which the other roles' weight files do not exist; ``keeps`` are also this role's."""
    shutil.copytree(model, target)
    kept = {*ROLE_WEIGHTS[role], *keeps}
    for file in target.rglob("*.safetensors"):
        if file.parent.name not in kept:
            file.unlink()
    return target


class Trio:
    """A model as three processes would hold it: one pipeline a role, each from a folder with that role's weights."""

    def __init__(
        self, model: Path, work: Path, *, dtype: Any = None, encoder_keeps: Sequence[str] = (), task: Task | None = None
    ) -> None:
        self.pipelines: dict[Role, ModularRolePipeline] = {}
        for role in ROLES:
            keeps = encoder_keeps if role is Role.ENCODER else ()
            folder = lone_folder(model, role, work / role, keeps=keeps)
            config = ModelConfig(path=str(folder), device="cpu", dtype=dtype, task=task)
            self.pipelines[role] = load_pipeline(config, (role,), "cpu")

    @classmethod
    def of(cls, pipelines: dict[Role, ModularRolePipeline]) -> Trio:
        """Of pipelines that are loaded already."""
        trio = cls.__new__(cls)
        trio.pipelines = pipelines
        return trio

    def start(self, role: Role, params: Mapping[str, Any], inbox: Inbox, images: Sequence[bytes] = ()) -> StageRun:
        return self.pipelines[role].start(role, params, inbox[role], images if role is Role.ENCODER else ())

    def stage(self, role: Role, params: Mapping[str, Any], inbox: Inbox, images: Sequence[bytes] = ()) -> StageResult:
        """One stage from start to end; what it hands on is in ``inbox`` afterwards."""
        result = finish(self.start(role, params, inbox, images))
        post(result, inbox)
        return result

    def encoded(self, params: Mapping[str, Any], images: Sequence[bytes] = ()) -> Inbox:
        """The inbox of the later roles after the encoder."""
        inbox: Inbox = {role: [] for role in ROLES}
        self.stage(Role.ENCODER, params, inbox, images)
        return inbox

    def generate(self, params: Mapping[str, Any], images: Sequence[bytes] = ()) -> tuple[Clip, ...]:
        """A whole request."""
        inbox = self.encoded(params, images)
        self.stage(Role.DENOISER, params, inbox)
        return self.stage(Role.DECODER, params, inbox).clips


def finish(run: StageRun) -> StageResult:
    """Advance to the end."""
    while (result := run.advance()) is None:
        pass
    return result


def post(result: StageResult, inbox: Inbox) -> None:
    """Deliver a result's outputs the way a wire would: as bytes."""
    for output in result.outputs:
        inbox[output.consumer].append((output.tree, list(through_bytes(output))))


def through_bytes(output: StageOutput) -> Iterator[torch.Tensor]:
    """The tensors after a trip as raw bytes, dtype and shape."""
    for tensor in output.tensors:
        raw = bytearray(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        yield flat.view(tensor.dtype).reshape(tensor.shape)


def latents(inbox: Inbox) -> torch.Tensor:
    """The one tensor that the denoiser handed to the decoder."""
    (tensor,) = (tensor for _, tensors in inbox[Role.DECODER] for tensor in tensors)
    return tensor


def frames_of(images: Any) -> np.ndarray[Any, Any]:
    """PIL images as [frames, height, width, channels]."""
    return np.stack([np.asarray(image) for image in images])
