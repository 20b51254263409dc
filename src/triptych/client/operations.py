"""What the client does, without any input or output: generators that ask for calls and pauses and are sent the answers.

A shell performs each `Call` and `Pause` and sends the response back, or throws the failure in; so one text serves
blocking and asyncio programs alike.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import httpx

from triptych.client.answers import (
    ClientTimeout,
    ConnectionBroken,
    Job,
    JobFailed,
    Progress,
    RequestRefused,
    Result,
    ServerUnreachable,
    raise_for,
    read_job,
    read_object,
)
from triptych.client.outages import PASSING, Failure, Outage

T = TypeVar("T")

Pictures: TypeAlias = bytes | Sequence[bytes]
"""The file of one picture, or those of several in their order."""

CALL_SECONDS = 30.0
"""Deadline of a call that the server answers at once."""
POLL_SECONDS = 10.0
"""Deadline of one look at a job, of which there will be others."""
_GATEWAY = frozenset({502, 504})
"""Statuses of a proxy that does not know what became of a request."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 1.0
"""Seconds between two looks at a job: short at first, so that quick jobs are not held up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One HTTP exchange. ``save_to``: stream a success into this file instead of memory."""

    method: str
    path: str
    json: Mapping[str, Any] | None = None
    form: Mapping[str, list[str]] | None = None
    uploads: tuple[tuple[str, bytes], ...] = ()
    """Form field and contents of each file sent with ``form``."""
    query: Mapping[str, str | int] | None = None
    save_to: Path | None = None
    seconds: float = CALL_SECONDS
    key: str | None = None
    """Its Idempotency-Key: what is started under one key is started once."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Do nothing for so many seconds."""

    seconds: float


Steps: TypeAlias = Generator[Call | Pause, httpx.Response | None, T]
OnProgress: TypeAlias = Callable[[Progress], None]


def ask(call: Call) -> Steps[httpx.Response]:
    """One call; raises `RequestRefused` unless it succeeds."""
    response = yield call
    assert response is not None
    raise_for(response)
    return response


def post(path: str, fields: Mapping[str, Any], seconds: float = CALL_SECONDS) -> Call:
    """The call that sends ``fields``, without those that are None: as JSON, or as a form where any holds bytes.

    A field of bytes is a file, one of several bytes is several files of that name.
    """
    values = {name: _several(value) for name, value in fields.items() if value is not None}
    if not any(isinstance(item, bytes) for items in values.values() for item in items):
        given = {name: value for name, value in fields.items() if value is not None}
        return Call(method="POST", path=path, json=given, seconds=seconds)
    form: dict[str, list[str]] = {}
    uploads: list[tuple[str, bytes]] = []
    for name, items in values.items():
        files = [item for item in items if isinstance(item, bytes)]
        if len(files) == len(items):
            uploads += [(name, data) for data in files]
        else:
            form[name] = [_word(item) for item in items]
    return Call(method="POST", path=path, form=form, uploads=tuple(uploads), seconds=seconds)


def _several(value: Any) -> list[Any]:
    return list(cast("Sequence[Any]", value)) if isinstance(value, list | tuple) else [value]


def _word(value: Any) -> str:
    """A value as a form has it; bytes among addresses as an address, because a field is either text or files."""
    if isinstance(value, bytes):
        return f"data:;base64,{base64.b64encode(value).decode()}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def create(prompt: str | None, image: Pictures | None, params: Mapping[str, Any], key: str | None = None) -> Steps[Job]:
    """Start a video job. ``prompt``: None for a model that takes none."""
    fields = {"prompt": prompt, "input_reference": image, **params}
    return read_job((yield from ask(replace(post("/v1/videos", fields), key=key))))


def _create_once(prompt: str | None, image: Pictures | None, params: Mapping[str, Any], timeout: float) -> Steps[Job]:
    """Start a video job, and ask again, under the same key, where it is not known whether that was done. A server that
    is not there, or refuses, has started nothing."""
    key, doubtful = secrets.token_hex(16), False

    def bears(error: Failure) -> bool:
        nonlocal doubtful
        if isinstance(error, ConnectionBroken | ClientTimeout):
            doubtful = True
        elif isinstance(error, RequestRefused):
            doubtful = doubtful or error.http_status in _GATEWAY
        return doubtful

    return (
        yield from _persist(
            lambda _left: create(prompt, image, params, key),
            bears,
            Outage("the job that was to be started"),
            timeout,
            f"it is not known after {timeout:g} seconds whether the job was started",
        )
    )


def _persist(
    attempt: Callable[[float], Steps[T]], bears: Callable[[Failure], bool], outage: Outage, timeout: float, late: str
) -> Steps[T]:
    """What ``attempt`` gives, which is told the seconds that are left, made again after failures that the caller
    ``bears``. Raises `ClientTimeout` that says ``late`` after ``timeout`` seconds."""
    begun = time.monotonic()
    pause = FIRST_PAUSE
    while True:
        now = time.monotonic()
        try:
            return (yield from attempt(begun + timeout - now))
        except (ServerUnreachable, RequestRefused, ClientTimeout) as error:
            if not bears(error):
                raise
            rest = max(pause, outage.bear(error, now, time.monotonic()))
        if time.monotonic() + rest >= begun + timeout:
            raise ClientTimeout(late)
        yield Pause(rest)
        pause = min(LONGEST_PAUSE, pause * 1.3)


def remix(job_id: str, prompt: str | None, image: Pictures | None, params: Mapping[str, Any]) -> Steps[Job]:
    """Start a job like an existing one, its seed included, with what is given changed."""
    fields = {"prompt": prompt, "input_reference": image, **params}
    return read_job((yield from ask(post(f"/v1/videos/{job_id}/remix", fields))))


def retrieve(job_id: str, seconds: float = CALL_SECONDS) -> Steps[Job]:
    """The job as it is now."""
    return read_job((yield from ask(Call(method="GET", path=f"/v1/videos/{job_id}", seconds=seconds))))


def page(after: str | None, limit: int, order: str) -> Steps[list[Job]]:
    """One page of jobs."""
    query: dict[str, str | int] = {"limit": limit, "order": order}
    if after is not None:
        query["after"] = after
    call = Call(method="GET", path="/v1/videos", query=query)
    response = yield from ask(call)
    jobs = read_object(response)["data"]
    return [read_job(httpx.Response(200, json=job, request=response.request)) for job in jobs]


def tell(job_id: str, verb: str) -> Steps[Job]:
    """Have a job do something: pause, resume or migrate; the job after that."""
    return read_job((yield from ask(Call(method="POST", path=f"/v1/videos/{job_id}/{verb}"))))


def delete(job_id: str) -> Steps[None]:
    """Stop and remove a job."""
    yield from ask(Call(method="DELETE", path=f"/v1/videos/{job_id}"))


def download(job_id: str, path: Path | None, index: int, seconds: float) -> Steps[tuple[bytes | None, str]]:
    """A finished file, into ``path`` if that is given, and its media type."""
    query: dict[str, str | int] | None = {"index": index} if index else None
    call = Call(method="GET", path=f"/v1/videos/{job_id}/content", query=query, save_to=path, seconds=seconds)
    response = yield from ask(call)
    media_type = response.headers.get("content-type", "application/octet-stream")
    return (None if path is not None else response.content), media_type


def _fetch(job_id: str, path: Path | None, timeout: float) -> Steps[tuple[bytes | None, str]]:
    """The first file of a job that was seen finished, begun anew where the connection breaks."""
    return (
        yield from _persist(
            lambda left: download(job_id, path, 0, left),
            lambda error: not isinstance(error, ClientTimeout),
            Outage(f"the file of job {job_id}"),
            timeout,
            f"the file of job {job_id} could not be fetched within {timeout:g} seconds",
        )
    )


class Pace:
    """Estimates when the last step comes from the steps seen so far."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None

    def remaining(self, job: Job, now: float) -> float | None:
        """Seconds until the last step; None while no pace is known. ``now`` is on any steady clock."""
        if job.stage != "denoising_running":
            self._first = None  # waiting says nothing of the pace, and another attempt may run elsewhere
            return None
        if self._first is None or job.step < self._first[1]:
            self._first = (now, job.step)
        begun, first = self._first
        if job.step == first:
            return None
        return (now - begun) / (job.step - first) * (job.steps - job.step)


def wait(job_id: str, timeout: float, on_progress: OnProgress | None, begun: float | None = None) -> Steps[Job]:
    """The job once it has ended. Raises `ClientTimeout` ``timeout`` seconds after ``begun`` (None: now), and
    `ServerUnreachable` when nothing was heard of it for long; the job goes on then."""
    begun = time.monotonic() if begun is None else begun
    outage = Outage(f"job {job_id}")
    pause = FIRST_PAUSE
    pace, shown = Pace(), None
    while True:
        now = time.monotonic()
        if now - begun >= timeout:
            raise ClientTimeout(f"job {job_id} did not end within {timeout:g} seconds")
        rest = 0.0
        try:
            job = yield from retrieve(job_id, min(POLL_SECONDS, begun + timeout - now))
        except (ServerUnreachable, RequestRefused, ClientTimeout) as error:
            rest = outage.bear(error, now, time.monotonic())
        else:
            outage.over()
            now = time.monotonic()
            eta = pace.remaining(job, now)
            seen = (job.stage, job.step, job.position, job.attempt)
            if on_progress is not None and seen != shown:
                shown = seen
                on_progress(_progress(job, now - begun, eta))
            if job.ended:
                return job
        yield Pause(min(max(pause, rest), max(0.0, begun + timeout - time.monotonic())))
        pause = min(LONGEST_PAUSE, pause * 1.3)


def _progress(job: Job, elapsed: float, eta: float | None) -> Progress:
    return Progress(
        job_id=job.id,
        stage=job.stage,
        step=job.step,
        steps=job.steps,
        percent=job.progress,
        position=job.position,
        attempt=job.attempt,
        elapsed_seconds=elapsed,
        eta_seconds=eta,
    )


def generate(
    prompt: str | None,
    *,
    image: Pictures | None,
    path: Path | None,
    timeout: float,
    on_progress: OnProgress | None,
    params: Mapping[str, Any],
) -> Steps[Result]:
    """From prompt to file. A caller who breaks it off (by ``timeout``, Ctrl-C) also stops the job on the server. Where
    the server or the way to it fails, the job goes on, and can be fetched under its id later."""
    begun = time.monotonic()
    job = yield from _create_once(prompt, image, params, timeout)
    try:
        job = yield from wait(job.id, timeout, on_progress, begun)
        if job.status == "failed":
            raise JobFailed(job)
        left = max(CALL_SECONDS, timeout - (time.monotonic() - begun))
        data, media_type = yield from _fetch(job.id, path, left)
    except (GeneratorExit, JobFailed, ServerUnreachable, RequestRefused):
        raise
    except BaseException as error:
        if not (job.ended and isinstance(error, OSError)):  # a finished film is not lost for a disk that is full here
            with suppress(ServerUnreachable, RequestRefused, ClientTimeout):  # the first failure is the one to tell
                yield from delete(job.id)
        raise
    return Result(
        id=job.id,
        data=data,
        path=path,
        media_type=media_type,
        seed=job.raw.get("seed"),
        seconds=time.monotonic() - begun,
        timings=job.raw.get("timings", []),
    )


def generate_images(prompt: str, timeout: float, params: Mapping[str, Any]) -> Steps[list[Result]]:
    """Images of one prompt; the server stops the work when the call is broken off."""
    return _images("/v1/images/generations", {**params, "prompt": prompt}, timeout)


def edit_images(
    prompt: str, image: Pictures, mask: bytes | None, timeout: float, params: Mapping[str, Any]
) -> Steps[list[Result]]:
    """Images of one prompt and pictures; the server stops the work when the call is broken off."""
    return _images("/v1/images/edits", {**params, "prompt": prompt, "image": image, "mask": mask}, timeout)


def _images(path: str, fields: Mapping[str, Any], timeout: float) -> Steps[list[Result]]:
    begun = time.monotonic()
    response = yield from ask(post(path, {**fields, "response_format": "b64_json"}, timeout))
    answer = read_object(response)
    seconds = time.monotonic() - begun
    try:
        pictures = [(base64.b64decode(item["b64_json"], validate=True), item["seed"]) for item in answer["data"]]
        timings = [timing for job in answer["timings"] for timing in job]
        kind = answer["output_format"]
    except (KeyError, TypeError, binascii.Error) as error:
        text = f"the server's images cannot be read: {error!r}"
        raise RequestRefused(text, http_status=response.status_code, param=None, error_code=None) from error
    return [
        Result(
            id="",
            data=data,
            path=None,
            media_type=f"image/{kind}",
            seed=seed,
            seconds=seconds,
            timings=timings,
        )
        for data, seed in pictures
    ]


def describe(path: str) -> Steps[dict[str, Any]]:
    """Any JSON object that the server shows at ``path``."""
    return read_object((yield from ask(Call(method="GET", path=path))))


def readiness() -> Steps[tuple[bool, list[str]]]:
    """Whether the server is ready, and why not."""
    response = yield Call(method="GET", path="/ready")
    assert response is not None
    if response.status_code != 503:
        raise_for(response)
    answer = read_object(response)
    return bool(answer.get("ready")), list(answer.get("reasons", []))


def wait_ready(timeout: float) -> Steps[None]:
    """Return when the server is ready; raises `ClientTimeout` with what is missing."""
    begun = time.monotonic()
    while True:
        try:
            ready, reasons = yield from readiness()
        except (ServerUnreachable, ClientTimeout) as error:
            ready, reasons = False, [error.message]
        except RequestRefused as error:
            if error.http_status not in PASSING:
                raise
            ready, reasons = False, [error.message]
        if ready:
            return
        if time.monotonic() - begun >= timeout:
            raise ClientTimeout(f"the server was not ready within {timeout:g} seconds: {'; '.join(reasons)}")
        yield Pause(0.2)
