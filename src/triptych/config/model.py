"""Which model is served and how it computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from triptych.config.checks import MIB
from triptych.errors import ConfigError
from triptych.ids import ADAPTER_NAME, MAX_ADAPTER_SCALE, Role

DeviceType = Literal["cuda", "cpu"]

DTypeName = Literal["float32", "bfloat16", "float16"]

Task = Literal["text-to-image", "image-to-image", "inpainting", "text-to-video", "image-to-video"]

Profile = Literal["stock", "lossless", "fast"]

ProfileChoice = Literal["auto", "stock", "lossless", "fast"]
"""A profile, or ``auto``: what the machine and the other options allow."""

Quantisation = Literal["none", "fp8", "int8"]

Offload = Literal["none", "model", "block", "layer"]

CFG = "cfg"
"""Among defaults of requests, the name of the switch of classifier-free guidance, whatever a model calls its scales."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Pixels and frames of an output, an image having one frame, and how many of them a request makes."""

    width: int
    height: int
    frames: int = 1
    count: int = 1

    def __str__(self) -> str:
        frames = f"x{self.frames}" if self.frames > 1 else ""
        return f"{self.width}x{self.height}{frames}" + (f"*{self.count}" if self.count > 1 else "")


def parse_shape(name: str, text: str, *, counted: bool = False) -> Shape:
    """``832x480x81`` or, of an image, ``1024x1024``; if ``counted``, with ``*2`` where a request makes two of them.

    Raises `ConfigError` that names the flag.
    """
    size, star, count = text.partition("*") if counted else (text, "", "")
    parts = size.split("x")
    numbers = [*parts, count] if star else parts
    if len(parts) not in (2, 3) or not all(number.isdecimal() and int(number) for number in numbers):
        several = ", with *2 for two outputs of one request" if counted else ""
        raise ConfigError(f"{name} {text!r}: must look like 832x480x81 (width x height x frames) or 1024x1024{several}")
    width, height, frames = (*map(int, parts), 1)[:3]
    return Shape(width=width, height=height, frames=frames, count=int(count or 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """A LoRA adapter that requests may name."""

    name: str
    path: str
    """A safetensors file."""
    second: str | None = None
    """A file for the second transformer of models that have two, where ``path`` does not hold its tensors as well."""
    scale: float = 1.0
    """Of requests that name it without one."""

    def __post_init__(self) -> None:
        if not ADAPTER_NAME.fullmatch(self.name):
            raise ConfigError(f"lora {self.name!r}: a name has up to 64 letters, digits, '-' and '_'")
        for path in self.files:
            if not path.endswith(".safetensors"):
                raise ConfigError(f"lora {self.name}={path}: must be a .safetensors file")
        if not abs(self.scale) <= MAX_ADAPTER_SCALE:
            raise ConfigError(f"lora {self.name}: scale {self.scale}: must lie within {MAX_ADAPTER_SCALE:g} of 0")

    def __str__(self) -> str:
        return f"{self.name}={','.join(self.files)}:{self.scale!r}"

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of all its files."""
        return (self.path,) if self.second is None else (self.path, self.second)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which model to load, and how."""

    path: str
    """A Diffusers-layout folder, a Hub id, or the name of an embedded model (``tiny``)."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id; None: its main branch."""
    task: Task | None = None
    """What to do with the weights, where Diffusers has a pipeline of the same family for it; None: what the model's
    index names."""
    device: DeviceType = "cuda"
    dtype: DTypeName | None = None
    """None: bfloat16 on CUDA, float32 on CPU."""
    components: dict[str, str] = field(default_factory=dict[str, str])
    """Component name to a folder or file whose weights replace that component's."""
    profile: ProfileChoice = "stock"
    """stock: Diffusers as it is. lossless: faster kernels, the same arithmetic up to rounding. fast: FP8 besides. auto:
    lossless where nothing is against it, which is settled when the model is loaded."""
    attention_backend: str = "auto"
    """auto, or a backend by name (`triptych.accel.attention`)."""
    defaults: dict[str, bool | int | float | str] = field(default_factory=dict[str, "bool | int | float | str"])
    """Request parameter to its value where a request does not say it, in place of the model's own (``--default``), and
    `CFG` to whether there is classifier-free guidance where a request does not ask for it."""
    quant: dict[Role, Quantisation] = field(default_factory=dict[Role, Quantisation])
    """Linear layers of a role's transformers in FP8 or INT8; lossy. Roles that are not named keep theirs."""
    offload: dict[Role, Offload] = field(default_factory=dict[Role, Offload])
    """What of a role's weights waits in host memory until it is computed with: whole models, blocks or layers."""
    vae_tiling: bool = False
    """Decode and encode large pictures in tiles; seams are blended, so pixels differ a little."""
    vae_slicing: bool = False
    """Decode and encode the outputs of one request one after another."""
    prompt_cache_bytes: int = 256 * MIB
    """Memory for embeddings of prompts that were seen before (``--prompt-cache``); 0: none are kept."""
    batching: bool = False
    """Join the forwards of requests that run at once, where that is faster (``--batching``); differs by rounding."""
    batch_guidance: bool = False
    """Compute the branches of guidance in one forward, where that is faster (``--batch-guidance``); differs by
    rounding."""
    step_cache: float = 0.0
    """Threshold under which a denoising step reuses the work of the one before; lossy. 0: every step is computed."""
    warmup: tuple[Shape, ...] = ()
    """Shapes of which each role runs a request before it says that it is there (``--warmup``)."""
    cache_dir: Path | None = None
    """Where compiled graphs and measurements outlive the process; None: ``triptych`` in the user's cache folder."""

    previews: bool = False
    """Let requests ask for small pictures of what is being denoised."""
    loras: tuple[Lora, ...] = ()
    """Adapters that requests may name, and no others."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("model-path='': a model folder, Hub id or embedded model name is needed")
        if not 0 <= self.step_cache < 1:
            raise ConfigError(f"step-cache={self.step_cache}: must be 0 (off) or a share below 1, e.g. 0.1")
        if self.batch_guidance and (self.batching or self.step_cache):
            other = "batching" if self.batching else "step-cache"
            raise ConfigError(f"batch-guidance and {other}: each decides in its own way which forwards are computed")
        names = [lora.name for lora in self.loras]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"lora {', '.join(sorted(twice))}: given twice")
        if self.loras and self.batching:
            raise ConfigError("lora and batching: requests that share a forward cannot have different adapters")
        if self.offload and self.profile in ("lossless", "fast"):
            raise ConfigError(f"offload: needs profile stock, not {self.profile!r}, whose kernels hold the weights")

    @property
    def writes_adapters(self) -> bool:
        """Whether adapters are written into the weights, where kernels and compiled blocks take none beside them."""
        return self.profile != "stock"

    @property
    def against_kernels(self) -> str:
        """What of it keeps profile ``auto`` from being ``lossless``; nothing, where nothing does."""
        if self.device != "cuda" or self.effective_dtype != "bfloat16":
            return f"{self.effective_dtype} on {self.device}"
        return "offload moves the weights" if self.offload else ""

    @property
    def effective_dtype(self) -> DTypeName:
        """The dtype that weights are loaded in."""
        return self.dtype or ("bfloat16" if self.device == "cuda" else "float32")
