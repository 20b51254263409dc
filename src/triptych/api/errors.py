"""Every way an HTTP request can end badly, in the one shape that OpenAI clients read."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.routing import Route

from triptych.api.shapes import ErrorBody, ErrorObject
from triptych.errors import BadRequest, Blame, NotReady, OutOfMemory, StorageFull, TooLarge, TriptychError

log = logging.getLogger(__name__)

CLIENT_CLOSED = 499
"""What log and metrics see of a client that hung up; nobody else does."""

RETRY_SECONDS = "5"
"""Retry-After of answers that time alone may change, when nothing better is known."""

LONGEST_RETRY = 3600
"""Seconds; forecasts beyond it are guesses."""


class ModelNotFound(BadRequest):
    """The request names a model that this server does not serve."""

    status = 404
    code = "model_not_found"


class WrongMediaType(BadRequest):
    """The body is of a content type that the endpoint does not read."""

    status = 415
    code = "unsupported_media_type"


class BodyTooLarge(BadRequest):
    """The request body, or what the request asks for, is larger than the server can hold."""

    status = 413
    code = "too_large"


class BodyStalled(BadRequest):
    """The request body stopped coming."""

    status = 408
    code = "body_stalled"


class NotFinished(BadRequest):
    """The content of a job was asked for before the job ended."""

    status = 409
    code = "not_finished"


class NoContent(BadRequest):
    """A job ended without the file that was asked for."""

    status = 404
    code = "no_content"


class RangeNotSatisfiable(BadRequest):
    """A byte range that lies outside the file of ``size`` bytes."""

    status = 416
    code = "range_not_satisfiable"

    def __init__(self, value: str, size: int) -> None:
        super().__init__("Range", f"Range={value!r}: the file has {size} bytes")
        self.size = size


class TaskExists(BadRequest):
    """A task id that is taken."""

    status = 409
    code = "task_exists"


class TooBusy(TriptychError):
    """Too much is waiting already; the message says what. ``retry_after``: seconds, as far as one can tell."""

    blame = Blame.CALLER
    status = 429
    code = "too_busy"

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(f"{message}; try again later")
        self.retry_after = retry_after


class JobEnded(TriptychError):
    """A job ended without a result. It was tried as often as there was sense in that: a client that sent the same
    request again by itself, as OpenAI's does on many a status, would only have it fail once more."""


class JobFailed(JobEnded):
    """A job failed with ``code``, which `JOB_STATUS` turns into a status; ``blame`` is the word of the job's error."""

    def __init__(self, code: str, message: str, *, blame: str) -> None:
        super().__init__(message)
        self.error_code = code
        self.error_status = JOB_STATUS.get(code, 400 if blame == Blame.CALLER else 500)


JOB_STATUS: Final[Mapping[str, int]] = {
    TooLarge.code: TooLarge.status,
    OutOfMemory.code: 413,  # something smaller fits
    "poison": 422,  # the request is what instances died of
    StorageFull.code: StorageFull.status,
}
"""HTTP status by what a job failed of, where its blame does not say enough."""


class JobCancelled(JobEnded):
    """Somebody deleted the job that a request was waiting for."""

    blame = Blame.CALLER
    status = 409
    code = "cancelled"


class DeadlinePassed(JobEnded):
    """A job did not end within its limits of waiting and running."""

    status = 504
    code = "deadline_passed"


def error_type(status: int) -> str:
    """OpenAI's word for the family of an error of this HTTP status."""
    match status:
        case 429:
            return "rate_limit_error"
        case _ if status >= 500:
            return "server_error"
        case _:
            return "invalid_request_error"


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """The error object as a response. Half of a surrogate pair, which JSON lets through and UTF-8 not, is escaped."""
    message, param = _printable(message), None if param is None else _printable(param)
    body = ErrorBody(error=ErrorObject(message=message, type=error_type(status), param=param, code=code))
    return JSONResponse(body.model_dump(), status_code=status, headers=dict(headers or {}))


def _printable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def retry_seconds(error: TriptychError) -> int:
    """When to come again after an error that time may mend."""
    if isinstance(error, TooBusy) and error.retry_after is not None:
        return min(LONGEST_RETRY, max(1, math.ceil(error.retry_after)))
    return int(RETRY_SECONDS)


def typed_response(error: TriptychError) -> JSONResponse:
    """The response of an error that Triptych raised on purpose."""
    headers: dict[str, str] = {}
    if isinstance(error, NotReady | TooBusy):
        headers["retry-after"] = str(retry_seconds(error))
    if isinstance(error, RangeNotSatisfiable):
        headers["content-range"] = f"bytes */{error.size}"
    if isinstance(error, BodyStalled):
        headers["connection"] = "close"  # the rest of the body, if it ever comes, must not be read as a request
    if isinstance(error, JobEnded):
        headers["x-should-retry"] = "false"
    if isinstance(error, JobFailed):
        return error_response(error.error_status, error.message, code=error.error_code, headers=headers)
    if isinstance(error, BadRequest):
        return error_response(error.status, error.message, param=error.field, code=error.error_code, headers=headers)
    return error_response(error.status, error.message, code=error.code, headers=headers)


def allowed_methods(app: FastAPI, path: str) -> str:
    """The methods that any route of the application has for ``path``, as an Allow header lists them."""
    routes = [route for route in app.routes if isinstance(route, Route) and route.path_regex.match(path)]
    return ", ".join(sorted({method for route in routes for method in route.methods or ()}))


def _http_response(app: FastAPI, request: Request, error: HTTPException) -> JSONResponse:
    """404 and 405 of the router, and what Starlette refuses in a body."""
    where = f"{request.method} {request.url.path}"
    match error.status_code:
        case 404:
            return error_response(404, f"{where}: there is nothing here", code="not_found")
        case 405:
            allow = allowed_methods(app, request.url.path)
            return error_response(
                405,
                f"{where}: the method is not one of {allow}",
                code="method_not_allowed",
                headers={"allow": allow},
            )
        case status:
            return error_response(status, str(error.detail), code="bad_request", headers=error.headers)


def _query_response(error: RequestValidationError) -> JSONResponse:
    """What FastAPI found wrong with a query or path parameter: the first finding."""
    first = error.errors()[0]
    field = str(first["loc"][-1])
    value = repr(first.get("input"))[:80]
    return error_response(400, f"{field}={value}: {first['msg']}", param=field, code="invalid_value")


def install(app: FastAPI) -> None:
    """Answer every error of ``app`` in the one shape."""

    async def typed(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, TriptychError)
        response = typed_response(error)
        if response.status_code >= 500:
            log.warning("%s: %s", error.error_code if isinstance(error, JobFailed) else error.code, error)
        return response

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return _http_response(app, request, error)

    async def query(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return _query_response(error)

    app.add_exception_handler(TriptychError, typed)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, query)
