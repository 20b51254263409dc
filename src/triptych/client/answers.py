"""What the client gives back, and how its calls fail."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import httpx

from triptych.errors import Blame, TriptychError


class ServerUnreachable(TriptychError):
    """No answer came: wrong address, server down, or connection lost."""

    blame = Blame.OPERATOR
    status = 503
    code = "server_unreachable"


class ConnectionBroken(ServerUnreachable):
    """The connection was lost when something had been sent: what was asked for may have been done."""


class AnswerBroken(ConnectionBroken):
    """It was lost in the middle of the answer."""


class ClientTimeout(TriptychError):
    """The deadline of the call passed."""

    status = 504
    code = "client_timeout"


class RequestRefused(TriptychError):
    """The server answered with an error; ``message`` is its own, ``param`` the field that it blames.

    ``retry_after``: seconds after which it wants to be asked again; None where it does not say so.
    """

    blame = Blame.CALLER
    code = "request_refused"

    def __init__(
        self,
        message: str,
        *,
        http_status: int,
        param: str | None,
        error_code: str | None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.http_status = http_status
        self.param = param
        self.error_code = error_code
        self.retry_after = retry_after


class JobFailed(TriptychError):
    """The job was accepted and ended without a result; ``job`` is its last state."""

    code = "job_failed"

    def __init__(self, job: Job) -> None:
        super().__init__(job.error or f"the job ended as {job.stage}")
        self.job = job


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A video job as the server last told it."""

    id: str
    status: Literal["queued", "in_progress", "completed", "failed"]
    stage: str
    """State in the words of the request life, e.g. ``denoising_running``."""
    progress: int
    """Per cent."""
    step: int
    steps: int
    attempt: int
    position: int | None
    """Place in the queue, from 0, while waiting for an instance."""
    error: str | None
    raw: dict[str, Any]
    """The whole answer."""

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self.status in ("completed", "failed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a job is; given to ``on_progress`` whenever something changed."""

    job_id: str
    stage: str
    step: int
    steps: int
    percent: int
    position: int | None
    attempt: int
    elapsed_seconds: float
    """Since the wait began."""
    eta_seconds: float | None
    """Until the last step, from the pace seen so far; None while there is none."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Result:
    """One finished file: in memory (``data``) or on disk (``path``)."""

    id: str
    """Of the job; empty for an image, whose job is gone with the answer."""
    data: bytes | None
    path: Path | None
    media_type: str
    seed: int | None
    """Asking again with it makes the same; images that one job made together have one seed, and need the same ``n``."""
    seconds: float
    """From the request to the end of the download, as the caller saw it."""
    timings: list[dict[str, Any]]
    """The server's figures for every stage; see the server's OpenAPI document."""

    def __repr__(self) -> str:
        """One short line: a file has millions of bytes."""
        where = f"data=<{len(self.data)} bytes>" if self.data is not None else f"path={str(self.path)!r}"
        return (
            f"Result(id={self.id!r}, {where}, media_type={self.media_type!r}, seed={self.seed}, "
            f"seconds={self.seconds:.2f})"
        )

    def read(self) -> bytes:
        """The file's bytes."""
        if self.data is not None:
            return self.data
        assert self.path is not None
        return self.path.read_bytes()


def read_job(response: httpx.Response) -> Job:
    """The job in an answer; raises `RequestRefused` when it holds none."""
    raw = read_object(response)
    try:
        error = raw["error"]
        return Job(
            id=raw["id"],
            status=raw["status"],
            stage=raw["stage"],
            progress=raw["progress"],
            step=raw["step"],
            steps=raw["steps"],
            attempt=raw["attempt"],
            position=raw["position"],
            error=None if error is None else str(error["message"]),
            raw=raw,
        )
    except KeyError as missing:
        raise _no_triptych(response, f"its video object has no {missing}") from missing


def read_object(response: httpx.Response) -> dict[str, Any]:
    """The JSON object in an answer; raises `RequestRefused` when it is none."""
    try:
        value = response.json()
    except ValueError as error:
        raise _no_triptych(response, "the answer is not JSON") from error
    if not isinstance(value, dict):
        raise _no_triptych(response, "the answer is not a JSON object")
    return cast(dict[str, Any], value)


def raise_for(response: httpx.Response) -> None:
    """Raise `RequestRefused` with the server's own words unless the answer is a success."""
    if response.is_success:
        return
    error: Any = None
    try:
        error = response.json()["error"]
        message = str(error["message"])
    except (ValueError, KeyError, TypeError):
        raise _no_triptych(response, f"it answered {response.status_code} {response.reason_phrase}") from None
    path = response.request.url.path
    if response.status_code == 404 and ("/v1/v1/" in path or path.endswith(("/v1/ready", "/v1/server_info"))):
        message = f"{message}; the address of a Triptych server is given without /v1"
    raise RequestRefused(
        message,
        http_status=response.status_code,
        param=error.get("param"),
        error_code=error.get("code"),
        retry_after=_retry_after(response),
    )


def _no_triptych(response: httpx.Response, why: str) -> RequestRefused:
    text = f"{response.request.url.copy_with(query=None)} does not answer like a Triptych server: {why}"
    after = _retry_after(response)
    return RequestRefused(text, http_status=response.status_code, param=None, error_code=None, retry_after=after)


def _retry_after(response: httpx.Response) -> float | None:
    """The header's seconds; None without it, and for a date."""
    said = response.headers.get("retry-after", "")
    return float(said) if said.isascii() and said.isdecimal() and len(said) < 10 else None
