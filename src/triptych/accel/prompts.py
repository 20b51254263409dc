"""Prompt embeddings are computed once: what is read of a text encoder's answer is kept, by its tokens, and given again.

Most requests of a service share their negative prompt, and many their prompt. The cache stands before the model itself
and compares what the model would be given, token for token, so an answer from it is the bytes that the model would have
made. Only what a pipeline reads of an answer is kept (`triptych.accel.answers`); where a later request reads more of
it, the model computes after all. Calls with more in them than tokens (pictures for a language model) go to it, too.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from triptych.accel.answers import PLAIN, Form, Path, form_of, part_of, shown
from triptych.accel.tally import Tally

log = logging.getLogger(__name__)

_MOST_KEY_BYTES = 1 << 20
"""Tensors of a call that are looked at at most: tokens and masks are smaller by far, and pictures larger."""


@dataclass(kw_only=True, slots=True)
class PromptCache:
    """Answers of text encoders, the least recently used going first. ``max_bytes`` bounds their tensors' memory,
    which is on the encoder's device."""

    max_bytes: int
    tally: Tally
    used_bytes: int = 0
    _answers: OrderedDict[bytes, _Kept] = field(default_factory=OrderedDict[bytes, "_Kept"])
    _told: set[str] = field(default_factory=set[str])

    def answer(self, name: str, key: bytes, compute: Callable[[], Any]) -> Any:
        """The answer of the encoder ``name`` that is kept under ``key``, or what ``compute`` gives.

        Each caller gets tensors of its own, for the blocks after it may write to them. What it reads of them is kept,
        if it is not too large.
        """
        known = self._answers.get(key)
        if known is not None:
            self.tally.prompt_hits += 1
            self._answers.move_to_end(key)
            return shown(known.form, _Call(self, name, key, known.form, compute).part)
        fresh = self.computed(compute)
        form = form_of(fresh)
        return shown(form, _Call(self, name, key, form, compute, [fresh]).part)

    def computed(self, compute: Callable[[], Any]) -> Any:
        """What ``compute`` gives, which is counted."""
        self.tally.prompt_misses += 1
        return compute()

    def kept(self, key: bytes, path: Path) -> Tensor | None:
        """A tensor of the answer under ``key`` as it was computed; None where it is not kept."""
        known = self._answers.get(key)
        return None if known is None else known.parts.get(path)

    def keep(self, name: str, key: bytes, form: Form, path: Path, part: Any) -> None:
        """Keep a part that has been read, or say once why that cannot be."""
        if not isinstance(part, Tensor):
            self._tell(name, f"what is read of its answers is a {type(part).__name__}")
            return
        if part.nbytes > self.max_bytes:
            self._tell(name, f"an answer of {part.nbytes >> 20} MiB is larger than all {self.max_bytes >> 20} MiB")
            return
        known = self._answers.setdefault(key, _Kept(form))
        if path in known.parts:  # two requests came to the same prompt at once
            return
        known.parts[path] = part.clone()
        self.used_bytes += part.nbytes
        self._answers.move_to_end(key)
        while self.used_bytes > self.max_bytes:
            oldest, given_up = self._answers.popitem(last=False)
            self.used_bytes -= sum(tensor.nbytes for tensor in given_up.parts.values())
            if oldest == key:
                self._tell(name, f"what is read of an answer is larger than all {self.max_bytes >> 20} MiB")

    def _tell(self, name: str, why: str) -> None:
        if name not in self._told:
            self._told.add(name)
            log.warning("%s: prompt cache is of no use where %s", name, why)


@dataclass(slots=True)
class _Kept:
    """What was read of one answer."""

    form: Form
    parts: dict[Path, Tensor] = field(default_factory=dict[Path, Tensor])


@dataclass(slots=True)
class _Call:
    """One caller's answer. ``fresh`` holds what the model computed for it, if it had to."""

    cache: PromptCache
    name: str
    key: bytes
    form: Form
    compute: Callable[[], Any]
    fresh: list[Any] = field(default_factory=list[Any])
    given: dict[Path, Any] = field(default_factory=dict[Path, Any])

    def part(self, path: Path) -> Any:
        """What is at ``path``, the same object each time."""
        if path not in self.given:
            kept = None if self.fresh else self.cache.kept(self.key, path)
            part = self._computed(path) if kept is None else kept
            self.given[path] = part.clone() if isinstance(part, Tensor) else part
        return self.given[path]

    def _computed(self, path: Path) -> Any:
        if not self.fresh:  # nobody has read this part before
            self.fresh.append(self.cache.computed(self.compute))
        part = part_of(self.fresh[0], path)
        self.cache.keep(self.name, self.key, self.form, path, part)
        return part


def install(encoder: nn.Module, cache: PromptCache, name: str) -> None:
    """Have calls of ``encoder`` answered from ``cache`` where they can be; ``name`` keeps two encoders apart."""
    compute: Callable[..., Any] = encoder.forward

    @functools.wraps(compute)
    def forward(*args: Any, **kwargs: Any) -> Any:
        key = _key(name, args, kwargs)
        if key is None:
            return compute(*args, **kwargs)
        return cache.answer(name, key, lambda: compute(*args, **kwargs))

    encoder.forward = forward


def _key(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes | None:
    """A digest of everything that a call's answer depends on; None when it holds more than tokens."""
    digest = hashlib.blake2b(name.encode(), digest_size=20)
    room = _MOST_KEY_BYTES
    for part in _parts(args, kwargs):
        if isinstance(part, Tensor):
            room -= part.nbytes
            if room < 0:
                return None
            digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
            digest.update(part.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, PLAIN):
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
