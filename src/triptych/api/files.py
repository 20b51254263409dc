"""Finished media over HTTP: whole or in byte ranges, straight from the store, found by job and never by path."""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath
from typing import Literal

from anyio import to_thread
from fastapi import FastAPI, Request
from starlette.responses import FileResponse, Response
from starlette.staticfiles import NotModifiedResponse

from triptych.api.errors import RangeNotSatisfiable
from triptych.api.routes import STRICT, errors
from triptych.errors import NotFound
from triptych.ids import RequestId
from triptych.server.records import StoredFile
from triptych.server.service import DiffusionService

_NAME = re.compile(r"((?:video|image)_[0-9a-f]{32})(?:-\d{1,3})?\.[a-z0-9]{1,8}")
_RANGE = re.compile(r"bytes=\s*(?:\d{1,18}-\d{0,18}|-\d{1,18})(?:\s*,\s*(?:\d{1,18}-\d{0,18}|-\d{1,18})){0,15}\s*")


def check_range(header: str, size: int) -> bool:
    """Whether a Range header is to be obeyed; one that is none is to be ignored, as HTTP says.

    Raises `RangeNotSatisfiable` for a range outside of ``size`` bytes.
    """
    if not _RANGE.fullmatch(header):
        return False
    for part in header.partition("=")[2].split(","):
        first, _, last = part.strip().partition("-")
        if first and last and int(last) < int(first):
            return False
        if (int(first) >= size) if first else (int(last) == 0 or size == 0):
            raise RangeNotSatisfiable(header[:60], size)
    return True


async def media_response(
    request: Request,
    service: DiffusionService,
    file: StoredFile,
    disposition: Literal["attachment", "inline"],
    *,
    place: str = "",
) -> Response:
    """The file as a response to ``request``, or 304 for a client that has it already.

    It is called as at ``place``, a path that was asked for, or as in the store. Raises `NotFound` when it is gone from
    the store, and `StorageFailed`.
    """
    try:
        status = await to_thread.run_sync(os.stat, await service.fetch(file))
    except FileNotFoundError as error:
        raise NotFound(f"{file.name} is no longer in the store") from error
    response = FileResponse(
        file.path,
        media_type=file.mime,
        filename=PurePosixPath(place).name or file.name,
        stat_result=status,
        content_disposition_type=disposition,
        headers={"x-content-type-options": "nosniff"},
    )
    if request.method in ("GET", "HEAD") and has_already(request, response.headers["etag"]):
        return NotModifiedResponse(response.headers)
    header = request.headers.get("range")
    if header is not None and not check_range(header, status.st_size):
        request.scope["headers"] = [pair for pair in request.scope["headers"] if pair[0] != b"range"]
    return response


def has_already(request: Request, etag: str) -> bool:
    """Whether the client says that it has what ``etag`` stands for. A range does not matter then, as HTTP says."""
    known = ",".join(request.headers.getlist("if-none-match")).split(",")
    return any(one.strip().removeprefix("W/") in (etag, "*") for one in known)


class Files:
    """Files of jobs by name."""

    def __init__(self, service: DiffusionService) -> None:
        self._service = service

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        app.add_api_route(
            "/v1/files/{name}",
            self.get,
            methods=["GET"],
            response_class=FileResponse,
            responses=errors(400, 404, 416, 500),
            dependencies=STRICT,
            tags=["files"],
            summary="Download a finished file by the name that its job gave it",
        )
        app.add_api_route("/v1/files/{name}", self.get, methods=["HEAD"], include_in_schema=False, dependencies=STRICT)
        app.add_api_route(
            "/v1/files/download/{name:path}",
            self.download,
            methods=["GET"],
            response_class=FileResponse,
            responses=errors(400, 404, 416, 500),
            dependencies=STRICT,
            tags=["files"],
            summary="Download a finished file by its name or by the path that its task asked for",
        )
        app.add_api_route(
            "/v1/files/download/{name:path}", self.download, methods=["HEAD"], include_in_schema=False,
            dependencies=STRICT,
        )  # fmt: skip

    async def get(self, request: Request, name: str) -> Response:
        """A finished file by its name in the store."""
        return await media_response(request, self._service, await self._find(name), "inline")

    async def download(self, request: Request, name: str) -> Response:
        """A finished file by either name; nothing else that lies in the output folder can be had."""
        file = self._service.saved.find(name) or await self._find(name)
        return await media_response(request, self._service, file, "attachment", place=name)

    async def _find(self, name: str) -> StoredFile:
        found = _NAME.fullmatch(name)
        if found is not None:
            id = RequestId(found[1])
            try:
                record = self._service.get(id)
            except NotFound:
                if (file := await self._service.shared_file(id, name)) is not None:
                    return file
                raise
            for file in record.files:
                if file.name == name:
                    return file
            if record.files and name == f"{record.id}{record.files[0].suffix}":
                return record.files[0]  # of several, as they were announced before their number was known
        raise NotFound(f"no file has the name {name[:80]!r}")
