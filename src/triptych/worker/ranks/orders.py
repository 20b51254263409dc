"""What rank 0 tells its followers and what they answer, over a socket pair that no one else can reach.

Rank 0 alone decides. Followers carry out its orders one after the other, so all ranks are in the same step of the same
request whenever they exchange tensors, and none waits for one that has left.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from triptych.config import ModelConfig
from triptych.ids import Role
from triptych.parallelism import Parallelism


class Shape(msgspec.Struct, frozen=True):
    """A tensor that is broadcast after the order, from host memory to host memory."""

    shape: tuple[int, ...]
    dtype: str


class Sent(msgspec.Struct, frozen=True):
    """A value tree, and the tensors that it refers to."""

    tree: bytes
    tensors: tuple[Shape, ...]


class Join(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first order: which rank the process is. It joins the others, loads the model and answers `Ready`.

    On the way it answers `Here` wherever it meets the others, and waits for `Meet`.
    """

    who: str
    """The instance, for the log."""
    rank: int
    size: int
    device: str
    model: ModelConfig
    roles: tuple[Role, ...]
    """What all ranks compute."""
    parallel: Parallelism
    store: str
    """File through which the ranks meet."""
    seconds: float
    """Bound of every collective."""


class Meet(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All ranks have come so far: go on loading. Not answered."""


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start a run; its tensors are broadcast next."""

    run: int
    role: Role
    params: dict[str, Any]
    inputs: tuple[Sent, ...]
    images: tuple[bytes, ...]
    rehearses: bool = False
    """Whether it is of a warm-up, whose sizes get graphs of their own on all ranks."""


class Resume(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Put a run that has not advanced into the state of a checkpoint; its tensors are broadcast next."""

    run: int
    saved: Sent


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Bring a run that has not advanced up to its first step."""

    run: int


class Advance(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Compute a run up to its next step boundary."""

    run: int


class Drop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Let go of a run, if there is such a one. Not answered."""

    run: int


Order: TypeAlias = Join | Meet | Begin | Resume | Prepare | Advance | Drop


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank has compiled since its last answer; see `Tally`."""

    compilations: int = 0
    seconds: float = 0.0
    uncompiled: int = 0


class Here(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The rank has loaded as far as it can without the others."""

    said: dict[str, str]
    """What it has, by name; see `Team.meet`."""
    compiled: Compiled = Compiled()


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model is loaded."""

    compiled: Compiled = Compiled()


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order was carried out. ``ended``: the run is over with it."""

    ended: bool = False
    compiled: Compiled = Compiled()


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order failed, and nothing of it is under way on the device any more."""

    reason: str
    mendable: bool = False
    """The operator must mend something."""
    short: bool = False
    """It was for want of memory."""
    compiled: Compiled = Compiled()


Answer: TypeAlias = Here | Ready | Done | Failed


def _plain(value: Any) -> str:
    """What stands for a value that MessagePack has no type for."""
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to a rank")


def _from_plain(kind: type[Any], value: Any) -> Any:
    if issubclass(kind, Path):
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} cannot be received by a rank")


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
decode_order = msgspec.msgpack.Decoder(Order, dec_hook=_from_plain).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
