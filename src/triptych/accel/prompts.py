"""Prompt embeddings are computed once: what a text encoder answered is kept, by its tokens, and given again.

Most requests of a service share their negative prompt, and many their prompt. The cache stands before the model itself
and compares what the model would be given, token for token, so an answer from it is the bytes that the model would have
made. Calls with anything but whole numbers in them (pictures for a language model) go to the model.
"""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from triptych.accel.tally import Tally

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


@dataclass(kw_only=True, slots=True)
class PromptCache:
    """Answers of text encoders, the least recently used going first. ``max_bytes`` bounds their tensors' memory,
    which is on the encoder's device."""

    max_bytes: int
    tally: Tally
    used_bytes: int = 0
    _answers: OrderedDict[bytes, tuple[list[Any], Any, int]] = field(
        default_factory=OrderedDict[bytes, tuple[list[Any], Any, int]]
    )
    """Key to the leaves of an answer, how they go together, and their bytes."""

    def answer(self, key: bytes, compute: Callable[[], Any]) -> Any:
        """The answer kept under ``key``, or what ``compute`` gives, which is kept if it is not too large.

        Each caller gets tensors of its own, for the blocks after it may write to them.
        """
        known = self._answers.get(key)
        if known is None:
            self.tally.prompt_misses += 1
            fresh = compute()
            self._keep(key, fresh)
            return fresh
        self.tally.prompt_hits += 1
        self._answers.move_to_end(key)
        leaves, spec, _ = known
        return pytree.tree_unflatten([_copied(leaf) for leaf in leaves], spec)

    def _keep(self, key: bytes, answer: Any) -> None:
        if key in self._answers:  # two requests came to the same prompt at once
            return
        leaves, spec = pytree.tree_flatten(answer)
        nbytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        if nbytes > self.max_bytes or not all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
            return
        self._answers[key] = ([_copied(leaf) for leaf in leaves], spec, nbytes)
        self.used_bytes += nbytes
        while self.used_bytes > self.max_bytes:
            _, (_, _, freed) = self._answers.popitem(last=False)
            self.used_bytes -= freed


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def install(encoder: nn.Module, cache: PromptCache, name: str) -> None:
    """Have calls of ``encoder`` answered from ``cache`` where they can be; ``name`` keeps two encoders apart."""
    compute: Callable[..., Any] = encoder.forward

    @functools.wraps(compute)
    def forward(*args: Any, **kwargs: Any) -> Any:
        key = _key(name, args, kwargs)
        return compute(*args, **kwargs) if key is None else cache.answer(key, lambda: compute(*args, **kwargs))

    encoder.forward = forward


def _key(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes | None:
    """A digest of everything that a call's answer depends on; None when it holds more than tokens."""
    digest = hashlib.blake2b(name.encode(), digest_size=20)
    for part in _parts(args, kwargs):
        if isinstance(part, Tensor):
            if part.is_floating_point() or part.is_complex():
                return None
            digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
            digest.update(part.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, _PLAIN):
            digest.update(f"{type(part).__name__} {part!r}".encode())
        else:
            return None
        digest.update(b"\0")
    return digest.digest()


def _parts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    yield from args
    for name in sorted(kwargs):
        yield name
        yield kwargs[name]
