"""The two clients: `Client` blocks, `AsyncClient` awaits. Both only perform what the operations ask for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import httpx

from triptych.client import operations
from triptych.client.answers import AnswerBroken, ClientTimeout, ConnectionBroken, Job, Result, ServerUnreachable
from triptych.client.operations import Call, OnProgress, Pause, Pictures, Steps
from triptych.errors import ConfigError

T = TypeVar("T")

JOB_SECONDS = 1260.0
"""Default deadline of a whole generation: the server's own limits of waiting and running, and a little."""


class Client:
    """Blocking client of the server at ``base_url``, e.g. ``http://127.0.0.1:30000``.

    All calls have a deadline in seconds and raise `RequestRefused`, `ServerUnreachable` or `ClientTimeout`. Further
    keywords (``size``, ``num_frames``, ``num_inference_steps``, ``seed``, ...) go to the server as they are; it refuses
    what it does not know, and `models` tells what it knows. Bytes are sent as files: ``last_frame=...``, or several in
    a list: ``reference_images=[..., ...]``. ``api_key`` is for servers that ask for one.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        self._http = httpx.Client(base_url=_address(base_url), headers=_headers(api_key))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def generate(
        self,
        prompt: str | None,
        *,
        image: Pictures | None = None,
        path: Path | None = None,
        timeout: float = JOB_SECONDS,
        on_progress: OnProgress | None = None,
        **params: Any,
    ) -> Result:
        """Make a video and fetch it, into ``path`` if that is given. Raises `JobFailed` when the server fails to.

        Of several (``n``) the first is fetched; `download` has the others under the result's ``id``.
        A timeout or Ctrl-C also stops the job on the server. What stands between (a proxy's 502, 503 or 504, a
        connection that breaks) is waited out; when it lasts too long, the error names the job, which goes on.
        """
        return self._run(
            operations.generate(prompt, image=image, path=path, timeout=timeout, on_progress=on_progress, params=params)
        )

    def generate_images(self, prompt: str, *, timeout: float = JOB_SECONDS, **params: Any) -> list[Result]:
        """Make one image, or ``n`` of them."""
        return self._run(operations.generate_images(prompt, timeout, params))

    def edit_images(
        self, prompt: str, image: Pictures, *, mask: bytes | None = None, timeout: float = JOB_SECONDS, **params: Any
    ) -> list[Result]:
        """Make one image, or ``n`` of them, from a picture or several; within ``mask`` only, if that is given."""
        return self._run(operations.edit_images(prompt, image, mask, timeout, params))

    def create(self, prompt: str | None, *, image: Pictures | None = None, **params: Any) -> Job:
        """Start a video job and return at once."""
        return self._run(operations.create(prompt, image, params))

    def remix(self, job_id: str, prompt: str | None = None, *, image: Pictures | None = None, **params: Any) -> Job:
        """Start a job like an existing one, its seed and pictures included, with what is given changed; return at once.

        ``prompt``: None for a model that takes none.
        """
        return self._run(operations.remix(job_id, prompt, image, params))

    def retrieve(self, job_id: str) -> Job:
        """The job as it is now."""
        return self._run(operations.retrieve(job_id))

    def list(self, *, after: str | None = None, limit: int = 20, order: Literal["asc", "desc"] = "desc") -> list[Job]:
        """One page of jobs by age."""
        return self._run(operations.page(after, limit, order))

    def wait(self, job_id: str, *, timeout: float = JOB_SECONDS, on_progress: OnProgress | None = None) -> Job:
        """The job once it has ended, well or not."""
        return self._run(operations.wait(job_id, timeout, on_progress))

    def download(
        self, job_id: str, path: Path | None = None, *, index: int = 0, timeout: float = 300.0
    ) -> bytes | None:
        """The finished file's bytes, or None when they went to ``path``.

        ``index``: which of them, from 0, where ``n`` of the request was more than 1.
        """
        return self._run(operations.download(job_id, path, index, timeout))[0]

    def pause(self, job_id: str) -> Job:
        """Have the job wait until `resume`; what the denoiser has done is kept."""
        return self._run(operations.tell(job_id, "pause"))

    def resume(self, job_id: str) -> Job:
        """Let a paused job go on."""
        return self._run(operations.tell(job_id, "resume"))

    def migrate(self, job_id: str) -> Job:
        """Have another denoiser go on with the job; refused with status 409 where none can."""
        return self._run(operations.tell(job_id, "migrate"))

    def delete(self, job_id: str) -> None:
        """Stop the job if it is live, and remove it with its file."""
        self._run(operations.delete(job_id))

    def models(self) -> dict[str, Any]:
        """The served models and their parameters."""
        return self._run(operations.describe("/v1/models"))

    def server_info(self) -> dict[str, Any]:
        """The server's own view of itself."""
        return self._run(operations.describe("/server_info"))

    def readiness(self) -> tuple[bool, list[str]]:
        """Whether the server is ready, and why not."""
        return self._run(operations.readiness())

    def wait_ready(self, timeout: float) -> None:
        """Return when the server is ready; raises `ClientTimeout` with what is missing."""
        self._run(operations.wait_ready(timeout))

    def _run(self, steps: Steps[T]) -> T:
        advance: Callable[[], Call | Pause] = partial(next, steps)
        while True:
            try:
                step = advance()
            except StopIteration as stop:
                return stop.value
            try:
                reply = self._perform(step)
            except BaseException as error:
                advance = partial(steps.throw, error)  # the operation decides; what it does not handle is raised above
            else:
                advance = partial(steps.send, reply)

    def _perform(self, step: Call | Pause) -> httpx.Response | None:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return None
        deadline, answered = time.monotonic() + step.seconds, False
        try:
            with self._http.stream(step.method, step.path, **_arguments(step)) as response:
                answered = True
                if step.save_to is None or not response.is_success:
                    chunks: list[bytes] = []
                    for chunk in response.iter_bytes():
                        _check(deadline, step)
                        chunks.append(chunk)
                    return _whole(response, b"".join(chunks))
                part = _part(step.save_to)
                try:
                    with part.open("wb") as file:
                        for chunk in response.iter_bytes():
                            _check(deadline, step)
                            file.write(chunk)
                    part.replace(step.save_to)
                finally:
                    part.unlink(missing_ok=True)
                return _whole(response, b"")
        except httpx.HTTPError as error:
            raise _failure(error, step, str(self._http.base_url), answered=answered) from error


class AsyncClient:
    """`Client` for asyncio programs; see there."""

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        self._http = httpx.AsyncClient(base_url=_address(base_url), headers=_headers(api_key))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def generate(
        self,
        prompt: str | None,
        *,
        image: Pictures | None = None,
        path: Path | None = None,
        timeout: float = JOB_SECONDS,
        on_progress: OnProgress | None = None,
        **params: Any,
    ) -> Result:
        """See `Client.generate`; cancelling the task also stops the job on the server."""
        return await self._run(
            operations.generate(prompt, image=image, path=path, timeout=timeout, on_progress=on_progress, params=params)
        )

    async def generate_images(self, prompt: str, *, timeout: float = JOB_SECONDS, **params: Any) -> list[Result]:
        """See `Client.generate_images`."""
        return await self._run(operations.generate_images(prompt, timeout, params))

    async def edit_images(
        self, prompt: str, image: Pictures, *, mask: bytes | None = None, timeout: float = JOB_SECONDS, **params: Any
    ) -> list[Result]:
        """See `Client.edit_images`."""
        return await self._run(operations.edit_images(prompt, image, mask, timeout, params))

    async def create(self, prompt: str | None, *, image: Pictures | None = None, **params: Any) -> Job:
        """See `Client.create`."""
        return await self._run(operations.create(prompt, image, params))

    async def remix(
        self, job_id: str, prompt: str | None = None, *, image: Pictures | None = None, **params: Any
    ) -> Job:
        """See `Client.remix`."""
        return await self._run(operations.remix(job_id, prompt, image, params))

    async def retrieve(self, job_id: str) -> Job:
        """See `Client.retrieve`."""
        return await self._run(operations.retrieve(job_id))

    async def list(
        self, *, after: str | None = None, limit: int = 20, order: Literal["asc", "desc"] = "desc"
    ) -> list[Job]:
        """See `Client.list`."""
        return await self._run(operations.page(after, limit, order))

    async def wait(self, job_id: str, *, timeout: float = JOB_SECONDS, on_progress: OnProgress | None = None) -> Job:
        """See `Client.wait`."""
        return await self._run(operations.wait(job_id, timeout, on_progress))

    async def download(
        self, job_id: str, path: Path | None = None, *, index: int = 0, timeout: float = 300.0
    ) -> bytes | None:
        """See `Client.download`."""
        return (await self._run(operations.download(job_id, path, index, timeout)))[0]

    async def pause(self, job_id: str) -> Job:
        """See `Client.pause`."""
        return await self._run(operations.tell(job_id, "pause"))

    async def resume(self, job_id: str) -> Job:
        """See `Client.resume`."""
        return await self._run(operations.tell(job_id, "resume"))

    async def migrate(self, job_id: str) -> Job:
        """See `Client.migrate`."""
        return await self._run(operations.tell(job_id, "migrate"))

    async def delete(self, job_id: str) -> None:
        """See `Client.delete`."""
        await self._run(operations.delete(job_id))

    async def models(self) -> dict[str, Any]:
        """See `Client.models`."""
        return await self._run(operations.describe("/v1/models"))

    async def server_info(self) -> dict[str, Any]:
        """See `Client.server_info`."""
        return await self._run(operations.describe("/server_info"))

    async def readiness(self) -> tuple[bool, list[str]]:
        """See `Client.readiness`."""
        return await self._run(operations.readiness())

    async def wait_ready(self, timeout: float) -> None:
        """See `Client.wait_ready`."""
        await self._run(operations.wait_ready(timeout))

    async def _run(self, steps: Steps[T]) -> T:
        advance: Callable[[], Call | Pause] = partial(next, steps)
        while True:
            try:
                step = advance()
            except StopIteration as stop:
                return stop.value
            try:
                reply = await self._perform(step)
            except BaseException as error:
                advance = partial(steps.throw, error)
            else:
                advance = partial(steps.send, reply)

    async def _perform(self, step: Call | Pause) -> httpx.Response | None:
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return None
        deadline, answered = time.monotonic() + step.seconds, False
        try:
            async with self._http.stream(step.method, step.path, **_arguments(step)) as response:
                answered = True
                if step.save_to is None or not response.is_success:
                    chunks: list[bytes] = []
                    async for chunk in response.aiter_bytes():
                        _check(deadline, step)
                        chunks.append(chunk)
                    return _whole(response, b"".join(chunks))
                part = _part(step.save_to)
                try:
                    with part.open("wb") as file:
                        async for chunk in response.aiter_bytes():
                            _check(deadline, step)
                            file.write(chunk)
                    part.replace(step.save_to)
                finally:
                    part.unlink(missing_ok=True)
                return _whole(response, b"")
        except httpx.HTTPError as error:
            raise _failure(error, step, str(self._http.base_url), answered=answered) from error


def _address(base_url: str) -> str:
    """The address of a server, if it is one. Raises `ConfigError`."""
    if not base_url.lower().startswith(("http://", "https://")):
        raise ConfigError(f"{base_url!r} is no address of a server: must begin with http:// or https://")
    return base_url


def _headers(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"authorization": f"Bearer {api_key}"}


def _arguments(call: Call) -> dict[str, Any]:
    """A call in httpx's words."""
    arguments: dict[str, Any] = {"timeout": httpx.Timeout(call.seconds, connect=min(5.0, call.seconds))}
    if call.json is not None:
        arguments["json"] = dict(call.json)
    if call.form is not None:
        arguments["data"] = dict(call.form)
    if call.uploads:
        arguments["files"] = [(name, ("image", data)) for name, data in call.uploads]
    if call.query is not None:
        arguments["params"] = dict(call.query)
    if call.key is not None:
        arguments["headers"] = {"idempotency-key": call.key}
    return arguments


def _part(path: Path) -> Path:
    """Where a file grows, so that ``path`` is never half a file."""
    return path.with_name(f".{path.name}.part")


def _check(deadline: float, call: Call) -> None:
    """httpx bounds each read, not their sum; this bounds the sum."""
    if time.monotonic() > deadline:
        raise ClientTimeout(f"{call.method} {call.path} did not end within {call.seconds:g} seconds")


def _whole(response: httpx.Response, data: bytes) -> httpx.Response:
    """The response with the body that was read from it."""
    headers = [(k, v) for k, v in response.headers.multi_items() if k.lower() not in ("content-encoding",)]
    return httpx.Response(response.status_code, headers=headers, content=data, request=response.request)


def _failure(error: httpx.HTTPError, call: Call, base_url: str, *, answered: bool) -> ServerUnreachable | ClientTimeout:
    """What it means that a call failed. ``answered``: the answer had begun."""
    if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
        return ClientTimeout(f"{call.method} {call.path}: no answer within {call.seconds:g} seconds")
    text = str(error) or type(error).__name__
    if isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError) and not isinstance(error, httpx.ConnectError):
        broken = AnswerBroken if answered else ConnectionBroken
        return broken(f"the connection to {base_url} was lost: {text}")
    return ServerUnreachable(f"{base_url} cannot be reached: {text}")
