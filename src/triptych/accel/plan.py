"""Decides what makes a loaded model faster on this machine, does it, and says what was chosen and why."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from triptych.accel import attention, flash3, quant, qwen_dit, text_keys, wan_vae
from triptych.accel import step_cache as step_caching
from triptych.accel.batching import ForwardBatcher
from triptych.accel.compiling import Overflow, allow_many_graphs
from triptych.accel.cuda_graphs import CudaGraphs
from triptych.accel.denoisers import denoises
from triptych.accel.fp8_products import fuse_fp8
from triptych.accel.gelu import fuse_gelu
from triptych.accel.prompts import PromptCache
from triptych.accel.prompts import install as install_prompts
from triptych.accel.ragged import ALONE, EVEN, ragged_of
from triptych.accel.sizes import Sizes
from triptych.accel.step_cache import StepMemory
from triptych.accel.tally import Tally
from triptych.config import Profile
from triptych.errors import ConfigError

log = logging.getLogger(__name__)

_BENCH_TOKENS = 32768
"""Sequence length of the attention micro-benchmark: that of a video, where attention is most of the time. At a quarter
of it backends that are 15 % apart in a video look alike."""
_BENCH_HEADS = 16
"""At most so many heads there: more change no rank and take memory that the model may need."""


_TEXT_KEYS_SHARE = 8
"""One part in so many of a GPU's memory may be taken by the keys and values of texts, for each model."""
_TEXT_KEYS_BYTES = 2 << 30
"""What they may take of host memory."""
_FP8_ATTENTION = "flash3-fp8"
_QWEN = "QwenImageTransformer2DModel"
_TEXT_OF_ANY_LENGTH = frozenset({_QWEN, "ZImageTransformer2DModel"})
"""Models whose pipelines do not pad the text, so that nearly every prompt has a length of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Technique:
    """One way to be faster, whether it is on, and why."""

    name: str
    on: bool
    why: str
    exact: bool = False
    """Whether results are the same bytes with it as without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Setting:
    """Where models are made faster, and what may be done for it; see `accelerate`."""

    device: torch.device
    dtype: torch.dtype
    profile: Profile
    sizes: Sizes
    tally: Tally


def accelerate(
    modules: Mapping[str, nn.Module],
    *,
    device: torch.device,
    dtype: torch.dtype,
    profile: Profile,
    backend: str = "auto",
    quantised: Collection[str] = (),
    prompts: PromptCache | None = None,
    batcher: ForwardBatcher | None = None,
    step_cache: float = 0.0,
    memory: StepMemory | None = None,
    tally: Tally | None = None,
    cache_dir: Path | None = None,
    agree: Callable[[str], str] = str,
) -> tuple[Technique, ...]:
    """Apply what ``profile`` allows and the machine has to the real (not weightless) models of a role, in place.

    ``backend`` names an attention backend, or several of which the first that is present is taken (with commas
    between), or is ``auto``; it is about denoisers, and roles without one have nothing to change. ``quantised`` names
    models that are so already. ``prompts`` are kept embeddings for text encoders; ``batcher`` joins forwards.
    ``step_cache`` is the threshold of step caching, 0 for none, and ``memory`` where whoever runs the steps gives it
    room. Measurements are kept in ``cache_dir``; ``agree`` turns what was measured to be best here into what all ranks
    of an instance take. Sizes that are rehearsed afterwards (`triptych.accel.sizes`) get graphs of their own.
    Raises `ConfigError` when what is asked for by name cannot take effect.

    A denoiser's are put around each other in one order, whatever the model. Innermost is what computes: attention,
    quantised layers, fused kernels, compiled blocks. Then the text's keys, which blocks ask for and the forward finds
    by the text's tensor; step caching, which passes over blocks in the middle of a forward, and so cannot be recorded;
    CUDA graphs, which record all of that, and so keep no text's keys; the masks, whose numbers no recording can see;
    and joining, so that a joined forward has all of it.
    """
    setting = _Setting(device=device, dtype=dtype, profile=profile, sizes=Sizes(), tally=tally or Tally())
    text_encoders = {name: model for name, model in modules.items() if _is_text_encoder(model)}
    done = _texts(modules, text_encoders, prompts, batcher)
    wish, backend = backend.partition(",")[0], attention.preferred(backend, device)
    denoisers = {name: model for name, model in modules.items() if _has_blocks(name, model)}
    others = sorted(modules.keys() - denoisers.keys() - text_encoders.keys())
    unknown = [name for name in others if denoises(name)]
    for name in (*denoisers, *unknown):
        done += _attention(name, modules[name], setting, backend, cache_dir, agree)
        if backend != wish:
            own = attention.in_use(modules[name])
            log.warning("attention-backend %s is not on this machine: %s uses %s", wish, name, own)
    for name, model in denoisers.items():
        if profile != "stock":
            done += _kernels(name, model, setting, quantised=name in quantised)
        if step_cache:
            done.append(_step_cache(name, model, step_cache, memory, setting.tally))
        elif profile != "stock":
            done.append(_graphs(name, model, setting))
        if profile != "stock" and type(model).__name__ not in _TEXT_OF_ANY_LENGTH:
            setting.sizes.install(name, model)
        if profile != "stock" and _fusible(device, dtype) and type(model).__name__ == _QWEN:
            qwen_dit.leave_out_masks(model)
        if batcher is not None:
            done.append(_batching(name, model, batcher))
    if profile != "stock":
        done += [_passed_over(name, modules[name]) for name in unknown]
    if batcher is not None:  # which needs no blocks of a kind that is known
        done += [_batching(name, modules[name], batcher) for name in others if name.startswith("transformer")]
    for name, model in modules.items():
        if wan_vae.supports(model) and profile != "stock":
            done.append(_vae(name, model, setting))
    return tuple(done)


def _texts(
    modules: Mapping[str, nn.Module],
    text_encoders: Mapping[str, nn.Module],
    prompts: PromptCache | None,
    batcher: ForwardBatcher | None,
) -> list[Technique]:
    """What is done to text encoders, and what is not to other models in their place."""
    done: list[Technique] = []
    if batcher is not None:
        done += [_batching(name, model, batcher) for name, model in text_encoders.items()]
    if prompts is not None:
        done += [_prompts(name, model, prompts) for name, model in text_encoders.items()]
        rest = sorted(modules.keys() - text_encoders.keys())
        done += [_no_prompts(name, modules[name]) for name in rest if name.startswith("text_encoder")]
    return done


def _kernels(name: str, model: nn.Module, setting: _Setting, *, quantised: bool) -> list[Technique]:
    """What a denoiser computes with, from its layers to its blocks, and the keys of its text."""
    done: list[Technique] = []
    quantises = setting.profile == "fast" and not quantised
    if quantises:
        layers = quant.quantise([model], "fp8", setting.device)
        done.append(Technique(name=f"{name}: fp8", on=True, why=f"{layers} linear layers"))
    done += _fuse_and_compile(name, model, setting, plain=not quantises and not quantised)
    if text_keys.supports(model):
        done.append(_text_keys(name, model, setting.device, compiled=done[-1].on))
    return done


def _is_text_encoder(model: nn.Module) -> bool:
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel) and getattr(model, "main_input_name", "input_ids") == "input_ids"


def _has_blocks(name: str, model: nn.Module) -> bool:
    """Whether a denoiser's work is in blocks that are known, be they named by Diffusers or the entries of its lists."""
    return bool(quant.repeated_blocks(model) or (denoises(name) and quant.blocks(model)))


def _passed_over(name: str, model: nn.Module) -> Technique:
    why = f"{type(model).__name__} has no blocks, so it runs as it is"
    return Technique(name=f"{name}: kernels and compile", on=False, why=why)


def _batching(name: str, model: nn.Module, batcher: ForwardBatcher) -> Technique:
    kind = type(model).__name__
    if kind in ALONE:
        raise ConfigError(f"batching: {kind} computes each request by itself: {ALONE[kind]}")
    batcher.install(model)
    alike = "one size, whatever their texts" if ragged_of(model) is not EVEN else "equal shapes"
    why = f"forwards of up to {batcher.most} requests of {alike}, where that is faster"
    return Technique(name=f"{name}: batching", on=True, why=why)


def _prompts(name: str, model: nn.Module, cache: PromptCache) -> Technique:
    install_prompts(model, cache, name)
    why = f"up to {cache.max_bytes >> 20} MiB of what is read of its answers"
    return Technique(name=f"{name}: prompt cache", on=True, why=why, exact=True)


def _no_prompts(name: str, model: nn.Module) -> Technique:
    why = f"{type(model).__name__} is no Transformers model that takes tokens"
    return Technique(name=f"{name}: prompt cache", on=False, why=why)


def _text_keys(name: str, model: nn.Module, device: torch.device, *, compiled: bool) -> Technique:
    on_gpu = device.type == "cuda"
    most = torch.cuda.get_device_properties(device).total_memory // _TEXT_KEYS_SHARE if on_gpu else _TEXT_KEYS_BYTES
    blocks = text_keys.TextKeys(most).install(model)
    why = f"computed once for each request in {blocks} blocks, up to {most >> 20} MiB"
    # Apart from a compiled block they are rounded as the stock model rounds them, within it as its kernels do.
    return Technique(name=f"{name}: text keys and values", on=True, why=why, exact=not compiled)


def _step_cache(name: str, model: nn.Module, threshold: float, memory: StepMemory | None, tally: Tally) -> Technique:
    if memory is None:
        raise ConfigError(f"step-cache={threshold}: this model's steps are its pipeline's own, which gives it no room")
    step_caching.install(model, name, threshold, memory, tally)
    return Technique(name=f"{name}: step cache", on=True, why=f"threshold {threshold}")


def _graphs(name: str, model: nn.Module, setting: _Setting) -> Technique:
    if setting.device.type != "cuda":
        return Technique(name=f"{name}: CUDA graphs", on=False, why="needs CUDA")
    if ragged_of(model).lists:
        return Technique(name=f"{name}: CUDA graphs", on=False, why="its forwards take lists of tensors")
    CudaGraphs(sizes=setting.sizes).install(model)
    return Technique(name=f"{name}: CUDA graphs", on=True, why="for shapes that are measured to gain", exact=True)


def _attention(
    name: str,
    model: nn.Module,
    setting: _Setting,
    backend: str,
    cache_dir: Path | None,
    agree: Callable[[str], str],
) -> list[Technique]:
    device, dtype, profile = setting.device, setting.dtype, setting.profile
    own, shape = attention.in_use(model), attention.widest(model)
    if backend == "auto" and (own is None or profile == "stock" or dtype != torch.bfloat16 or shape is None):
        if own is None:
            why = "its own, which is not dispatched"
        else:
            known = "profile stock" if profile == "stock" else "only measured for bfloat16 models of known head size"
            why = f"{own}, {known}"
        return [Technique(name=f"{name}: attention", on=False, why=why)]
    kept = None if cache_dir is None else cache_dir / attention.KEPT
    heads, width = shape or (_BENCH_HEADS, 128)
    heads = min(heads, _BENCH_HEADS)
    backend, remark = _tried(name, model, setting, backend, heads, width)
    choice = attention.choose(device, heads=heads, head_dim=width, tokens=_BENCH_TOKENS, requested=backend, kept=kept)
    backend = agree(choice.backend)
    attention.use_backend(model, backend)
    measured = ", ".join(f"{k} {v * 1e3:.2f} ms" for k, v in choice.seconds.items())
    why = f"{backend}, {choice.reason}" + (f" ({measured})" if measured else "") + remark
    return [Technique(name=f"{name}: attention", on=True, why=why)]


def _tried(name: str, model: nn.Module, setting: _Setting, backend: str, heads: int, width: int) -> tuple[str, str]:
    """``backend``, or the FP8 one that the profile would rather have where a small call to it works, and a remark.

    Raises `ConfigError` when one that was asked for by name does not work.
    """
    device = setting.device
    rather = backend == "auto" and setting.profile == "fast" and _FP8_ATTENTION in attention.present(device)
    wish = _FP8_ATTENTION if rather else backend
    if wish in ("auto", "native"):  # which run wherever torch does
        return wish, ""
    lacking = _lacking(device) if wish == _FP8_ATTENTION else ""
    if wish == _FP8_ATTENTION and not lacking:
        overflow = Overflow(f"{name}: FP8 attention", setting.tally)
        flash3.compile_quantising(overflow, setting.sizes)
    if rather and lacking:
        return backend, f"; not {wish}: {lacking}"
    trouble = attention.trouble(wish, device, setting.dtype, heads, width)
    if trouble and not rather:
        raise ConfigError(f"attention-backend={wish!r}: does not compute {heads} heads of {width} here: {trouble}")
    if trouble:
        return backend, f"; not {wish}: {trouble}"
    return wish, f"; quantises without compiled kernels: {lacking}" if lacking else ""


def _fuse_and_compile(name: str, model: nn.Module, setting: _Setting, *, plain: bool) -> list[Technique]:
    """``plain``: none of its layers is quantised."""
    device = setting.device
    if not _has_triton(device):
        return [Technique(name=f"{name}: compile", on=False, why=_lacking(device))]
    done: list[Technique] = []
    if _fusible(device, setting.dtype):
        changed = _fuse(model) + fuse_gelu(model) + fuse_fp8(model)
        done.append(Technique(name=f"{name}: fused kernels", on=changed > 0, why=f"{changed} modules"))
    compile_blocks(model, setting.sizes, tuned=plain, overflow=Overflow(name, setting.tally))
    own = "" if type(model).__name__ in _TEXT_OF_ANY_LENGTH else "one graph for each size of the warm-up and "
    why = f"{len(quant.blocks(model))} blocks, {own}one for all {'others' if own else 'sizes'}"
    return [*done, Technique(name=f"{name}: compile", on=True, why=why)]


def _has_triton(device: torch.device) -> bool:
    return not _lacking(device)


def _lacking(device: torch.device) -> str:
    """What keeps kernels from being built on this machine; nothing, where they can be."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return "needs CUDA and Triton"
    from triptych.accel.kernels.probe import trouble

    return trouble(device)


def _fusible(device: torch.device, dtype: torch.dtype) -> bool:
    return _has_triton(device) and dtype == torch.bfloat16


def _fuse(model: nn.Module) -> int:
    """What is known to slow down the attention of one class of models, put right; how many modules changed."""
    match type(model).__name__:
        case "WanTransformer3DModel":
            from triptych.accel import wan_dit

            return wan_dit.fuse(model)
        case "QwenImageTransformer2DModel":
            return qwen_dit.fuse(model)
        case _:
            return 0


def compile_blocks(model: nn.Module, sizes: Sizes, *, tuned: bool, overflow: Overflow) -> None:
    """Compile a denoiser's blocks; see `Overflow.compiled_for`.

    Quantised layers bring so many pointwise kernels that to have them ``tuned`` takes minutes, for less than a
    hundredth of the time. ``overflow`` takes the shapes that may have no graph any more.
    """
    from triptych.accel.row_reductions import keep_rows_in_registers  # the compiler, which takes long to import

    allow_many_graphs()
    keep_rows_in_registers()
    compiled = overflow.compiled_for(_called, sizes, tuned=tuned)
    for block in quant.blocks(model):
        made: Any = block
        made._compiled_call_impl = partial(compiled, block)


def _called(block: Any, *args: Any, **kwargs: Any) -> Any:
    """A block's call with its hooks, not compiled."""
    return block._call_impl(*args, **kwargs)


def _vae(name: str, model: Any, setting: _Setting) -> Technique:
    device = setting.device
    if device.type != "cuda" or setting.dtype != torch.bfloat16:
        return Technique(name=f"{name}: fast decode", on=False, why="needs CUDA and bfloat16")
    if model.use_tiling:  # slicing is what it does anyway
        return Technique(name=f"{name}: fast decode", on=False, why="tiling was asked for")
    allow_many_graphs()
    overflow = Overflow(name, setting.tally) if _has_triton(device) else None
    decoder = wan_vae.WanVaeDecoder(model, sizes=setting.sizes, overflow=overflow, align=64)
    wan_vae.install(model, decoder)
    graphs = "compiled for sizes that were warmed up"
    return Technique(name=f"{name}: fast decode", on=True, why=f"chunks of {decoder.chunk} latent frames, {graphs}")
