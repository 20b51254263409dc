"""Attention for ring layouts, which pass keys and values around and join partial results by their log-sum-exp.

Of the backends that compute the same as stock attention, torch's cuDNN attention says the log-sum-exp on a GPU, and its
flash attention on a CPU. Both stand behind one entry of Diffusers' registry here.
"""

# Diffusers has no public names for the parts of its context parallelism.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.models import attention_dispatch as dispatch
from torch import Tensor, nn

from triptych.accel.attention import in_use
from triptych.errors import ConfigError, StageError

log = logging.getLogger(__name__)

_ENTRY = dispatch.AttentionBackendName._NATIVE_MATH


class RingAttention:
    """Attention of a model that can take part in a ring, whatever was chosen for it."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Says what cannot be taken in a ring, and why. Raises `ConfigError`."""
        if device.type == "cuda" and not torch.backends.cudnn.is_available():
            raise ConfigError("a ring of GPUs needs cuDNN, whose attention says its log-sum-exp; torch has none here")
        # Diffusers gathers keys and values by a name that newer torch deprecates.
        warnings.filterwarnings("ignore", "`torch.distributed._functional_collectives.all_gather_tensor`")
        dispatch._AttentionBackendRegistry.register(_ENTRY, supports_context_parallel=True)(_attend)
        chosen, ours = in_use(model), "cudnn" if device.type == "cuda" else "flash attention of the CPU"
        if chosen not in (None, ours):
            log.warning(
                "in a ring, attention of %s runs on %s, not on %s, which does not say the log-sum-exp that joins "
                "partial results",
                type(model).__name__,
                ours,
                chosen,
            )
        self._processors: list[Any] = [
            processor
            for processor in (getattr(module, "processor", None) for module in model.modules())
            if hasattr(processor, "_attention_backend")
        ]

    def use(self) -> None:
        """From now on."""
        for processor in self._processors:
            processor._attention_backend = _ENTRY

    @contextmanager
    def used(self) -> Generator[None]:
        """For one forward: others, in no ring, keep what was chosen for them."""
        chosen = [processor._attention_backend for processor in self._processors]
        self.use()
        try:
            yield
        finally:
            for processor, its in zip(self._processors, chosen, strict=True):
                processor._attention_backend = its


def _attend(
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
    """Attention of [batch, tokens, heads, width]; among ranks where a configuration says so."""
    if _parallel_config is None:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return out.transpose(1, 2)
    if attn_mask is not None:
        raise StageError("ring attention takes no mask, which this model uses: say denoiser-ulysses instead")
    forward = dispatch._cudnn_attention_forward_op if query.is_cuda else _forward_on_cpu
    settings = (None, dropout_p, is_causal, scale, enable_gqa, False)
    ways = {"forward_op": forward, "backward_op": None, "_parallel_config": _parallel_config}
    exchange: Any = dispatch._templated_context_parallel_attention
    return exchange(query, key, value, *settings, **ways)


def _forward_on_cpu(_context: object, query: Tensor, key: Tensor, value: Tensor, *settings: Any, **_: Any) -> Any:
    """Attention on the CPU, and if asked for its log-sum-exp [batch, tokens, heads]."""
    _mask, dropout, is_causal, scale, _gqa, return_lse = settings
    flipped = (x.transpose(1, 2).contiguous() for x in (query, key, value))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*flipped, dropout, is_causal, scale=scale)
    out = out.transpose(1, 2)
    return (out, lse.transpose(1, 2)) if return_lse else out
