"""The names that every layer shares: roles, and the ids that tie messages to one life of one thing."""

from __future__ import annotations

import enum
import re
from typing import NewType


class Role(enum.StrEnum):
    """One third of a pipeline. The order of the members is the order in which a request passes them."""

    ENCODER = "encoder"
    DENOISER = "denoiser"
    DECODER = "decoder"

    @property
    def next(self) -> Role | None:
        """The role that a request goes to after this one; None after the decoder."""
        return {Role.ENCODER: Role.DENOISER, Role.DENOISER: Role.DECODER, Role.DECODER: None}[self]


ROLES: tuple[Role, ...] = tuple(Role)
"""All roles in the order in which a request passes them."""

RequestId = NewType("RequestId", str)
"""Minted by the server when a request is accepted; travels with every message about it."""

InstanceId = NewType("InstanceId", str)
"""Names an instance over all its lives; chosen by the instance, stable over restarts of the same work address."""

Epoch = NewType("Epoch", str)
"""Random id of one life of a process. A message that carries another epoch than the known one is stale."""

CopyId = NewType("CopyId", str)
"""Names one staged set of tensors in one instance's pool, for ever unique."""

ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""What a LoRA adapter may be called, at launch and in requests."""

MAX_ADAPTER_SCALE = 10.0
"""Largest scale of an adapter, of either sign."""
