"""Checkpoints of random weights at the real sizes, so that anyone can measure speed without the real weights.

The sizes are the published configurations. Times do not depend on the values of the weights; pictures do. So two models
of one configuration, as Wan2.2 has for high and for low noise, may be the same numbers.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from triptych.errors import ConfigError
from triptych.models import tiny_path
from triptych.pipeline.weights import LoadComponent, load_component

_WAN_SCHEDULER = {
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "num_train_timesteps": 1000,
    "flow_shift": 3.0,
}
_QWEN_SCHEDULER = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}
_UMT5 = {
    "vocab_size": 256384,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
_CLIP = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "patch_size": 14,
    "image_size": 224,
}
_QWEN_TEXT = {
    "text_config": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "rope_parameters": {"mrope_section": [16, 24, 24], "rope_type": "default", "rope_theta": 1000000.0},
    },
    "vision_config": {"depth": 32, "hidden_size": 1280, "num_heads": 16, "out_hidden_size": 3584},
}
_WAN_1_3B = {"num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "num_layers": 30, "text_dim": 4096}
_WAN_14B = {"text_dim": 4096}
_WAN_22_I2V = {"text_dim": 4096, "in_channels": 36}
_WAN_I2V = {"text_dim": 4096, "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The components of one real model: name to (library, class, configuration)."""

    pipeline: str
    components: dict[str, tuple[str, str, dict[str, Any]]] = field(repr=False)
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """What else the pipeline is made with."""

    @property
    def index(self) -> dict[str, Any]:
        """The model's index, without its components."""
        return {"_class_name": self.pipeline, "_diffusers_version": "0.42.1", **self.settings}


def _wan(pipeline: str, transformer: dict[str, Any], **more: tuple[str, str, dict[str, Any]]) -> Size:
    components = {
        "text_encoder": ("transformers", "UMT5EncoderModel", _UMT5),
        "transformer": ("diffusers", "WanTransformer3DModel", transformer),
        "vae": ("diffusers", "AutoencoderKLWan", {}),
        "scheduler": ("diffusers", "UniPCMultistepScheduler", _WAN_SCHEDULER),
        "tokenizer": ("transformers", "T5Tokenizer", {}),
    }
    return Size(pipeline=pipeline, components={**components, **more})


def _wan_of_two(pipeline: str, transformer: dict[str, Any], boundary: float) -> Size:
    """``transformer`` for times above the ``boundary``, a share of all, and another of its kind for those below."""
    one = _wan(pipeline, transformer)
    components = {**one.components, "transformer_2": one.components["transformer"]}
    return Size(pipeline=pipeline, components=components, settings={"boundary_ratio": boundary})


SIZES: dict[str, Size] = {
    "wan2.1-t2v-1.3b": _wan("WanPipeline", _WAN_1_3B),
    "wan2.1-t2v-14b": _wan("WanPipeline", _WAN_14B),
    "wan2.1-i2v-14b": _wan(
        "WanImageToVideoPipeline",
        _WAN_I2V,
        image_encoder=("transformers", "CLIPVisionModel", _CLIP),
        image_processor=("transformers", "CLIPImageProcessorPil", {}),
    ),
    "wan2.2-t2v-a14b": _wan_of_two("WanPipeline", _WAN_14B, 0.875),
    "wan2.2-i2v-a14b": _wan_of_two("WanImageToVideoPipeline", _WAN_22_I2V, 0.9),
    "qwen-image": Size(
        pipeline="QwenImagePipeline",
        components={
            "text_encoder": ("transformers", "Qwen2_5_VLForConditionalGeneration", _QWEN_TEXT),
            "transformer": ("diffusers", "QwenImageTransformer2DModel", {}),
            "vae": ("diffusers", "AutoencoderKLQwenImage", {}),
            "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler", _QWEN_SCHEDULER),
            "tokenizer": ("transformers", "Qwen2Tokenizer", {}),
        },
    ),
}
"""Names that `build` and ``triptych synth`` know."""


def size_named(name: str) -> Size:
    """The size of that name; raises `ConfigError` naming the known ones."""
    if name not in SIZES:
        raise ConfigError(f"{name!r}: no such size; known: {', '.join(SIZES)}")
    return SIZES[name]


def build(name: str, component: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """One model of that size with random weights, made on ``device``, evaluating, without gradients.

    Parameters that Diffusers keeps in float32 stay there, as they would when loaded from a folder.
    """
    library, class_name, config = size_named(name).components[component]
    cls = _class(library, class_name)
    make: Callable[[], Any] = (
        (lambda: cls(**config)) if library == "diffusers" else (lambda: cls(cls.config_class(**config)))
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # a float32 copy of a large model would not fit beside the final one
    try:
        with torch.device(device):
            model: nn.Module = make()
    finally:
        torch.set_default_dtype(before)
    # Transformers keeps these in float32 only beside float16, Diffusers also beside bfloat16.
    kept = library == "diffusers" or dtype == torch.float16
    keep: list[str] = getattr(cls, "_keep_in_fp32_modules", None) or [] if kept else []
    for path, parameter in model.named_parameters():
        if any(part in keep for part in path.split(".")):
            parameter.data = parameter.data.float()
    for path, buffer in model.named_buffers():  # tables of frequencies are computed in float32 whatever the dtype
        if "freqs" in path:
            buffer.data = buffer.data.float()
    return model.eval().requires_grad_(False)


def write(
    name: str,
    out: Path,
    device: torch.device,
    dtype: torch.dtype,
    weights: Collection[str] | None = None,
    told: Callable[[Path], object] = lambda folder: None,
) -> list[Path]:
    """Write the size as a Diffusers-layout folder under ``out``; returns the component folders, each of which is
    ``told`` when it is there.

    One component is in memory at a time, and a second one of its configuration shares its files. Only those named in
    ``weights`` get any, the others their config alone; None: all. A T5 tokenizer has no random form: the embedded
    model's own takes its place, whose tokens the larger vocabulary has too. Other tokenizers are not written.
    """
    size = size_named(name)
    out.mkdir(parents=True, exist_ok=True)
    index = size.index
    folders: list[Path] = []
    written: list[str] = []
    for component, (library, class_name, config) in size.components.items():
        if class_name == "T5Tokenizer":
            shutil.copytree(tiny_path() / component, out / component, dirs_exist_ok=True)
            index[component] = [library, "PreTrainedTokenizerFast"]
            folders.append(out / component)
            told(folders[-1])
            continue
        index[component] = [library, class_name]
        folder = out / component
        cls: Any = _class(library, class_name)
        if issubclass(cls, nn.Module) and weights is not None and component not in weights:
            _write_config(cls, config, folder)
        elif issubclass(cls, nn.Module):
            alike = [other for other in written if size.components[other] == size.components[component]]
            if alike:
                _link(out / alike[0], folder)
            else:
                model: Any = build(name, component, device, dtype)
                model.save_pretrained(folder)
                del model
            written.append(component)
        elif _is_tokenizer(cls):
            continue
        else:
            cls(**config).save_pretrained(folder)
        folders.append(folder)
        told(folder)
    (out / "model_index.json").write_text(json.dumps(index, indent=2))
    return folders


def _link(folder: Path, other: Path) -> None:
    """Have what is in ``folder`` in ``other`` as well, where it takes no room of its own."""
    shutil.rmtree(other, ignore_errors=True)
    shutil.copytree(folder, other, copy_function=os.link)


def _write_config(cls: Any, config: dict[str, Any], folder: Path) -> None:
    if hasattr(cls, "config_class"):
        cls.config_class(**config).save_pretrained(folder)
        return
    with torch.device("meta"):
        cls(**config).save_config(folder)


def write_configs(name: str, out: Path) -> None:
    """Write the size as a Diffusers-layout folder without weights, with a tokenizer that reads letter by letter."""
    size = size_named(name)
    out.mkdir(parents=True, exist_ok=True)
    index = size.index
    for component, (library, class_name, config) in size.components.items():
        index[component] = [library, class_name]
        cls: Any = _class(library, class_name)
        if _is_tokenizer(cls):
            index[component] = ["transformers", "PreTrainedTokenizerFast"]
            _letters().save_pretrained(out / component)
        elif not _is_model(cls):
            cls(**config).save_pretrained(out / component)
        else:
            _write_config(cls, config, out / component)
    (out / "model_index.json").write_text(json.dumps(index, indent=2))


def random_weights(name: str, made_on: torch.device) -> LoadComponent:
    """Gives components of that size random weights instead of a folder's, made on ``made_on``, which is the faster."""
    size = size_named(name)

    def component(
        folder: Path, part: str, entry: tuple[str, str], override: str | None, dtype: torch.dtype, device: torch.device
    ) -> Any:
        if part in size.components and issubclass(_class(*size.components[part][:2]), nn.Module):
            return build(name, part, made_on, dtype).to(device)
        return load_component(folder, part, entry, override, dtype, device)

    return component


def _is_model(cls: Any) -> bool:
    return issubclass(cls, nn.Module)


def _is_tokenizer(cls: Any) -> bool:
    from transformers import PreTrainedTokenizerBase

    return issubclass(cls, PreTrainedTokenizerBase)


def _letters() -> Any:
    """A tokenizer that makes one unknown token of every letter, so that any prompt has a real length."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    letter: Any = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.pre_tokenizer = letter
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def _class(library: str, class_name: str) -> Any:
    if library == "diffusers":
        import diffusers as module
    else:
        import transformers as module
    return getattr(module, class_name)
