"""Attention backends: what this machine has, which is fastest, and how a Diffusers model is told to use it.

Diffusers' own dispatcher serves every model that goes through `dispatch_attention_fn`. Its FlashAttention-3 entry wants
a package that must be built from source, so the forward-only wheel is put behind that entry here. A call with a mask,
which FlashAttention does not take, goes to the native backend.
"""

# diffusers has no public way to add a backend to its registry.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from triptych.accel import flash3, sage
from triptych.accel.denoisers import denoises
from triptych.accel.measurements import measured, read_measurements, write_measurements
from triptych.accel.shortage import free_memory, is_out_of_memory
from triptych.errors import ConfigError

log = logging.getLogger(__name__)

EXACT = ("flash3", "cudnn", "flash2", "native")
"""Backends that compute the same as stock attention up to rounding, fastest first where all are present."""
LOSSY = ("flash3-fp8", "sage")
COMPILING = frozenset({"flash3-fp8"})
"""Backends that compile a part of theirs, whatever the profile."""

KEPT = "attention.json"
"""The file of a cache folder that measurements are kept in."""
_SHORTER = (4, 16)
"""By what the sequence is made shorter where there is no memory to measure it."""

_PROBED_TOKENS = 2048
"""So many that FP8 attention computes in FP8."""
_WARM_CALLS = 3
_TIMED_CALLS = 5
_MOST_ROUNDS = 10
_ALIKE = 1.05
"""A time is taken for true once it was seen twice, up to this factor: other roles may load and compile on the same GPU
meanwhile, which a slow time may be due to, and a fast one not."""

_ENTRY = {
    "native": "native",
    "flash2": "_native_flash",
    "cudnn": "_native_cudnn",
    "flash3": "_flash_3",
    "flash3-fp8": "_flash_varlen_3",
    "sage": "sage",
}
"""Name here to the entry of diffusers' registry that it stands behind."""
_RING = "_native_math"
"""The entry that ring attention stands behind; see `triptych.accel.parallel.ring`."""

_HEADS = ("heads", "num_heads", "num_attention_heads")
_QUERIES = ("to_q", "to_query")
"""What Diffusers' attention modules call the number of their heads, and their projection to queries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A chosen backend, why, and what was measured for it: backend to seconds for one call."""

    backend: str
    reason: str
    seconds: dict[str, float]


def present(device: torch.device) -> tuple[str, ...]:
    """Backends that can run on ``device``, exact ones first."""
    if device.type != "cuda":
        return ("native",)
    has_flash3 = flash3.available(device)
    there = {
        "flash3": has_flash3,
        "cudnn": torch.backends.cudnn.is_available(),
        "flash2": torch.backends.cuda.is_flash_attention_available(),
        "native": True,
        "flash3-fp8": has_flash3,
        "sage": sage.available(device),
    }
    return tuple(name for name, is_there in there.items() if is_there)


def preferred(requested: str, device: torch.device) -> str:
    """The first of the backends in ``requested``, with commas between, that is present on ``device``; it may be auto.

    Raises `ConfigError` when none is, naming those that are.
    """
    have = present(device)
    for name in requested.split(","):
        if name == "auto" or name in have:
            return name
    raise ConfigError(f"attention-backend={requested!r}: not on this machine; present: {', '.join(have)}")


def in_use(model: nn.Module) -> str | None:
    """The backend that the dispatched attention of ``model`` runs on; None when it has no such attention."""
    from diffusers.models import attention_dispatch as dispatch

    names = {entry: name for name, entry in _ENTRY.items()} | {_RING: "ring"}
    default: Any = dispatch._AttentionBackendRegistry.get_active_backend()[0]
    for module in _dispatched(model):
        entry = str((module.processor._attention_backend or default).value)
        return names.get(entry, entry)
    return None


def widest(model: nn.Module) -> tuple[int, int] | None:
    """Heads and their width in the widest dispatched attention of ``model``, which has the most work of a model with
    several (video beside audio or text); None when it has none that says.

    Told by the modules: half of the families' configs name heads in ways of their own, or not at all.
    """
    shapes = [shape for module in _dispatched(model) if (shape := _shape(module)) is not None]
    return max(shapes, key=math.prod, default=None)


def _shape(module: Any) -> tuple[int, int] | None:
    heads = next((getattr(module, name) for name in _HEADS if hasattr(module, name)), None)
    query = next((getattr(module, name) for name in _QUERIES if hasattr(module, name)), None)
    if not heads:
        return None
    width = getattr(module, "head_dim", None) or getattr(query, "out_features", 0) // heads
    return (heads, width) if width else None


def _dispatched(model: nn.Module) -> Iterator[Any]:
    """The modules of ``model`` whose attention goes through Diffusers' dispatcher."""
    for module in model.modules():
        if hasattr(getattr(module, "processor", None), "_attention_backend"):
            yield module


def backends(components: Mapping[str, Any]) -> dict[str, str]:
    """Denoiser models among ``components`` whose attention is dispatched, with what it runs on."""
    found = {
        name: in_use(model) for name, model in components.items() if isinstance(model, nn.Module) and denoises(name)
    }
    return {name: backend for name, backend in found.items() if backend is not None}


def choose(
    device: torch.device,
    *,
    heads: int,
    head_dim: int,
    tokens: int,
    requested: str = "auto",
    kept: Path | None = None,
) -> Choice:
    """The fastest exact backend for self-attention of that shape in bfloat16, or the requested one if it is present.

    What is measured is written to the file ``kept`` and not measured again on an equal machine. For want of memory a
    shorter sequence is tried; what is found then is not written, nor what other work on the GPU disturbed. Raises
    `ConfigError` for a backend that this machine does not have, naming those it has.
    """
    have = present(device)
    if requested != "auto":
        if requested not in have:
            raise ConfigError(f"attention-backend={requested!r}: not on this machine; present: {', '.join(have)}")
        return Choice(backend=requested, reason="requested", seconds={})
    candidates = [name for name in have if name in EXACT]
    if len(candidates) == 1:
        return Choice(backend=candidates[0], reason="the only one present", seconds={})
    key = f"{_machine(device)}, {heads} x {head_dim}, {tokens} tokens: {' '.join(candidates)}"
    known = read_measurements(kept, key) if kept is not None else None
    if known is not None:
        return _fastest(known, tokens)
    for length in (tokens, *(tokens // short for short in _SHORTER)):
        seconds, starved, steady = _measure_all(candidates, device, heads, head_dim, length)
        if not starved:
            if not steady:
                log.warning("attention was measured beside other work on the GPU: the next start measures it again")
            elif kept is not None and length == tokens and seconds:
                write_measurements(kept, key, seconds)
            return _fastest(seconds, length)
        log.warning("there was no memory to measure attention of %d tokens with %s", length, ", ".join(starved))
    return Choice(backend="native", reason="there was no memory to measure", seconds={})


def kept_measurements(device: torch.device, kept: Path) -> dict[str, dict[str, float]]:
    """What the file ``kept`` holds of this machine: the shape in words to the seconds of each backend."""
    machine = f"{_machine(device)}, "
    found: dict[str, dict[str, float]] = {}
    for key in measured(kept):
        seconds = read_measurements(kept, key)
        if key.startswith(machine) and seconds is not None:
            found[key.removeprefix(machine).partition(":")[0]] = seconds
    return found


def _fastest(seconds: dict[str, float], tokens: int) -> Choice:
    if not seconds:
        return Choice(backend="native", reason="no other takes this shape", seconds={})
    best = min(seconds, key=seconds.__getitem__)
    return Choice(backend=best, reason=f"fastest of {len(seconds)} at {tokens} tokens", seconds=seconds)


def _machine(device: torch.device) -> str:
    """Everything that a measurement depends on besides its shape."""
    return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"


def use_backend(model: nn.Module, backend: str) -> int:
    """Make every dispatched attention of ``model`` run on ``backend``; returns how many attention modules changed.

    Raises `ConfigError` when the model has none, because the option would silently do nothing.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName

    _register(backend)
    entry = AttentionBackendName(_ENTRY[backend])
    changed = 0
    for module in _dispatched(model):
        module.processor._attention_backend = entry
        changed += 1
    if not changed:
        raise ConfigError(f"attention-backend={backend!r}: {type(model).__name__} has no dispatched attention")
    return changed


def _register(backend: str) -> None:
    """Put our operator behind diffusers' registry entry of that backend."""
    from diffusers.models import attention_dispatch as dispatch

    operators = {"flash3": flash3.flash3, "flash3-fp8": flash3.flash3_fp8, "sage": sage.sage}
    if backend not in operators and backend != "flash2":
        return
    entry = dispatch.AttentionBackendName(_ENTRY[backend])
    native = dispatch._AttentionBackendRegistry._backends[dispatch.AttentionBackendName.NATIVE]
    own: Any = dispatch._native_flash_attention
    made = _unmasked(own, native) if backend == "flash2" else _entry_function(operators[backend], native)
    dispatch._AttentionBackendRegistry.register(entry)(made)


def _unmasked(own: Callable[..., Tensor], native: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Diffusers' function ``own``, which refuses masks, with the native one for calls that have some."""

    @functools.wraps(own)
    def attend(*args: Any, attn_mask: Tensor | None = None, **settings: Any) -> Tensor:
        return (own if attn_mask is None else native)(*args, attn_mask=attn_mask, **settings)

    return attend


def _entry_function(operator: Callable[..., Tensor], native: Callable[..., Tensor]) -> Callable[..., Tensor]:
    from diffusers.models import attention_dispatch as dispatch

    def local(context: object, query: Tensor, key: Tensor, value: Tensor, *settings: Any, **_: Any) -> Tensor:
        """This rank's heads, between the exchanges of Ulysses attention."""
        _mask, _dropout, is_causal, scale, *_more = settings
        return operator(query, key, value, scale or query.shape[-1] ** -0.5, is_causal)

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        _parallel_config: Any = None,
    ) -> Tensor:
        if attn_mask is not None or query.dtype != torch.bfloat16:
            return native(
                query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
                enable_gqa=enable_gqa, _parallel_config=_parallel_config,
            )  # fmt: skip
        if _parallel_config is not None:
            settings = (None, dropout_p, is_causal, scale, enable_gqa, False)
            exchange: Any = dispatch._templated_context_parallel_attention
            ways = {"forward_op": local, "backward_op": None, "_parallel_config": _parallel_config}
            return exchange(query, key, value, *settings, **ways)
        return operator(query, key, value, scale or query.shape[-1] ** -0.5, is_causal)

    return attend


def _measure_all(
    backends: Sequence[str], device: torch.device, heads: int, head_dim: int, tokens: int
) -> tuple[dict[str, float], list[str], bool]:
    """Seconds of each backend that takes this shape, and those for which there was no memory, of which nothing is
    known; and whether the seconds are to be relied on. A kernel that does not take the shape says so when it is called.

    Each has its turn in several rounds, and the best of its times counts. Those of the first round do not: a GPU that
    has rested has a higher clock than it can keep, so what it does then is not seen again.
    """
    times: dict[str, list[float]] = {name: [] for name in backends}
    starved: list[str] = []
    for number in range(_MOST_ROUNDS):
        for name in list(times):
            try:
                seconds = _measure(name, device, heads, head_dim, tokens)
                if number:
                    times[name].append(seconds)
            except (RuntimeError, TypeError, ImportError, OSError, MemoryError) as error:
                del times[name]
                if is_out_of_memory(error):
                    free_memory(error)
                    starved.append(name)
                else:
                    log.info("attention backend %s does not take %d heads of %d: %s", name, heads, head_dim, error)
        if starved or all(map(_seen_twice, times.values())):
            break
    return {name: min(seen) for name, seen in times.items() if seen}, starved, all(map(_seen_twice, times.values()))


def _seen_twice(seconds: list[float]) -> bool:
    best = sorted(seconds)[:2]
    return len(best) == 2 and best[1] <= best[0] * _ALIKE


def trouble(backend: str, device: torch.device, dtype: torch.dtype, heads: int, head_dim: int) -> str:
    """Why a CUDA ``device`` computes no small self-attention of that shape with ``backend``; nothing when it did."""
    try:
        _call(backend, device, dtype, heads, head_dim, _PROBED_TOKENS)()
        torch.cuda.synchronize(device)
    except Exception as error:  # of the kernel, of what builds it, or of the driver
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return ""


def _measure(backend: str, device: torch.device, heads: int, head_dim: int, tokens: int) -> float:
    """Median seconds of one self-attention call, once the GPU has come to speed."""
    attend = _call(backend, device, torch.bfloat16, heads, head_dim, tokens)
    samples: list[float] = []
    for _ in range(_WARM_CALLS + _TIMED_CALLS):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        attend()
        torch.cuda.synchronize(device)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples[_WARM_CALLS:])


def _call(
    backend: str, device: torch.device, dtype: torch.dtype, heads: int, head_dim: int, tokens: int
) -> Callable[[], Tensor]:
    """A self-attention to be computed."""
    from diffusers.models import attention_dispatch as dispatch

    _register(backend)
    function = dispatch._AttentionBackendRegistry._backends[dispatch.AttentionBackendName(_ENTRY[backend])]
    q, k, v = (torch.randn(1, tokens, heads, head_dim, device=device, dtype=dtype) for _ in range(3))
    return lambda: function(q, k, v)
