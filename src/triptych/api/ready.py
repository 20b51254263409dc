"""What the door must know of the service before it takes a request: the model's schema and the room for tensors."""

from __future__ import annotations

from triptych.errors import NotReady
from triptych.server.service import DiffusionService
from triptych.wire.schema import RequestSchema


def need_schema(service: DiffusionService) -> RequestSchema:
    """The schema of the served model; raises `NotReady` until an instance has told it."""
    schema = service.schema()
    if schema is None:
        reasons = "; ".join(service.readiness().reasons) or "no instance has said hello"
        raise NotReady(f"the server does not know its model yet: {reasons}")
    return schema
