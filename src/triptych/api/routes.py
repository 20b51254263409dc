"""What the endpoints share: the errors that they declare, and the refusal of query parameters that nothing reads."""

from __future__ import annotations

from typing import Any

from fastapi import Depends, Request
from fastapi.routing import APIRoute

from triptych.api.shapes import ErrorBody
from triptych.api.validation import unknown_fields
from triptych.errors import BadRequest

_REASONS = {
    400: "The request can never succeed as it stands; `param` names the field.",
    404: "There is no such thing.",
    408: "The body stopped coming.",
    409: "The job's state does not allow it.",
    413: "The body, or what it asks for, is too large.",
    415: "The body's content type is not read here.",
    416: "The byte range lies outside the file.",
    422: "Instances died of the request; it is not tried again.",
    429: "Too much is waiting; try again later.",
    500: "The server or an instance failed.",
    503: "Not ready yet; try again later.",
    504: "The job's time ran out.",
    507: "There is no room for finished media.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The ``responses`` of a route that can end in these statuses."""
    return {status: {"model": ErrorBody, "description": _REASONS[status]} for status in statuses}


def known_query(request: Request) -> None:
    """Raise `BadRequest` for a query parameter that the route does not declare, or that is given twice."""
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    known = {field.alias for field in route.dependant.query_params}
    seen: set[str] = set()
    unknown = [name for name in request.query_params if name not in known]
    if unknown:
        raise _unknown(unknown, known)
    for name, _ in request.query_params.multi_items():
        if name in seen:
            raise BadRequest(name, f"{name}: given more than once", code="duplicate_field")
        seen.add(name)


def _unknown(names: list[str], known: set[str]) -> BadRequest:
    if known:
        return unknown_fields(names, known)
    name = names[0]
    return BadRequest(name[:60], f"{name[:60]!r}: this endpoint takes no query parameters", code="unknown_field")


STRICT = [Depends(known_query)]
"""Dependencies of every route under /v1."""
