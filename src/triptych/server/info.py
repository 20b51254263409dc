"""The pool of instances as plain JSON values: what ``/server_info`` shows."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from triptych.core.events import InstanceView
from triptych.ids import ROLES, Epoch, Role


def describe_pool(
    instances: Sequence[InstanceView], queues: Mapping[Role, int], name: Callable[[Epoch], str]
) -> dict[str, Any]:
    """Each role with its instances, slots and queue, and each instance with its leases and memory (bytes).

    ``name``: what to call a life of an instance.

    An instance with several roles counts in full for each, because any of its slots can go to any of them.
    """
    roles: dict[str, Any] = {}
    for role in ROLES:
        serving = [instance for instance in instances if role in instance.roles]
        roles[role.value] = {
            "instances": [instance.instance for instance in serving],
            "slots": sum(instance.slots for instance in serving),
            "free_slots": sum(instance.free_slots for instance in serving),
            "queue_depth": queues[role],
        }
    return {"roles": roles, "instances": [_describe(instance, name) for instance in instances]}


def _describe(instance: InstanceView, name: Callable[[Epoch], str]) -> dict[str, Any]:
    fields = {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
    leases = [{"request": x.request, "role": x.role, "attempt": x.attempt} for x in instance.leases]
    return msgspec.to_builtins(fields | {"leases": leases, "epoch": name(instance.epoch)})


def life_of(epoch: Epoch) -> str:
    """A name for one life of a process that tells it from others, and does not let a reader speak in its name."""
    return hashlib.blake2s(epoch.encode(), digest_size=4).hexdigest()
