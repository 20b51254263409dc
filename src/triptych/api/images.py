"""The OpenAI images API: generate, wait, answer; a client that hangs up stops the work."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from anyio import to_thread
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from triptych.api.body import read_body
from triptych.api.context import Context
from triptych.api.errors import CLIENT_CLOSED
from triptych.api.idempotency import HEADER
from triptych.api.orders import Order, picture_params
from triptych.api.ready import need_schema
from triptych.api.routes import STRICT, errors
from triptych.api.shapes import ImageData, Images
from triptych.api.validation import INT64_MAX
from triptych.api.views import timings_of
from triptych.api.waiting import Place, Waiting
from triptych.errors import BadRequest, NotReady, StageError
from triptych.server.records import JobRecord, StoredFile
from triptych.wire.schema import RequestSchema

GRACE_SECONDS = 30.0
"""Beyond a job's own limits of waiting and running, for storing and for the router's clock."""


class ImageRoutes:
    """The endpoints under /v1/images."""

    def __init__(self, context: Context) -> None:
        self._service = context.service
        self._desk = context.desk
        self._waiting = Waiting(context.service, context.events.stopping)

    def add_to(self, app: FastAPI) -> None:
        """Add the routes. An edit is a generation that must start from a picture."""
        for path, handler, summary in (
            ("/v1/images/generations", self.generate, "Make images and wait for them"),
            ("/v1/images/edits", self.edit, "Make images from a picture and wait for them"),
        ):
            app.add_api_route(
                path,
                handler,
                methods=["POST"],
                summary=summary,
                response_model=Images,
                responses=errors(400, 404, 408, 409, 413, 415, 422, 429, 500, 503, 504, 507),
                dependencies=STRICT,
                tags=["images"],
            )

    async def generate(self, request: Request) -> Response:
        """Make ``n`` images of one prompt."""
        return await self._made(request, await self._desk.read(request, await read_body(request), "image"))

    async def edit(self, request: Request) -> Response:
        """Make ``n`` images of one prompt and a picture. Raises `BadRequest` when there is none."""
        order = await self._desk.read(request, await read_body(request), "image")
        if not order.images:
            schema = need_schema(self._service)
            takes_none = f"model {schema.model!r} ({schema.task}) takes no image"
            reason = "is required for an edit" if picture_params(schema, "image") else takes_none
            raise BadRequest("image", f"image: {reason}; or use POST /v1/images/generations", code="missing_field")
        return await self._made(request, order)

    async def _made(self, request: Request, order: Order) -> Response:
        async with self._jobs(request, need_schema(self._service), order) as places:
            assert order.timeouts is not None  # the desk has set them
            jobs = [place.job for place in places]
            records = await self._waiting.outcome(request, jobs, order.timeouts.total + GRACE_SECONDS)
            if records is None:
                return Response(status_code=CLIENT_CLOSED)
            files = [file for record in records for file in record.files]  # more where an output has layers
            if len(files) < order.count:
                raise StageError(f"{order.count} images were asked for and {len(files)} were made")
            data = await self._data(request, order, records)
            if order.response_format == "url":
                for place in places:
                    place.keep()
        return JSONResponse(_images(order, records, files[0], data).model_dump())

    @asynccontextmanager
    async def _jobs(self, request: Request, schema: RequestSchema, order: Order) -> AsyncGenerator[list[Place]]:
        """Places at the jobs of an order; jobs that nobody waits for after the block, and nobody kept, are gone again
        with everything that they made.

        A pipeline that makes several images of one prompt gets one job; else every image is a job of its own, with
        the next seed (0 after the largest), and instances share them. None begins unless there is room for all.
        """
        jobs = 1 if schema.param("n") is not None else order.count
        if jobs > 1:
            await self._desk.expect(request, order, jobs)
        places: list[Place] = []
        try:
            for index in range(jobs):
                params = dict(order.params)
                if index and "seed" in params:
                    params["seed"] = (params["seed"] + index) % (INT64_MAX + 1)
                job = await self._desk.submit(request, order, "image", params=params, part=index)
                places.append(self._waiting.join(job))
            try:
                yield places
            except NotReady:  # the server stops: who comes again with the same key finds what was made
                for place in places if HEADER in request.headers else ():
                    place.keep()
                raise
        finally:
            await self._waiting.forget(*[place.job.id for place in places if place.leave()])

    async def _data(self, request: Request, order: Order, records: Sequence[JobRecord]) -> list[ImageData]:
        found: list[ImageData] = []
        for record in records:
            seed = record.params.get("seed")
            for file in record.files:
                url, pixels = None, None
                if order.response_format == "url":
                    url = f"{request.base_url}v1/files/{file.name}"
                else:
                    path = await self._service.fetch(file)
                    pixels = await to_thread.run_sync(lambda path=path: base64.b64encode(path.read_bytes()).decode())
                found.append(ImageData(url=url, b64_json=pixels, revised_prompt=None, seed=seed))
        return found


def _images(order: Order, records: Sequence[JobRecord], first: StoredFile, data: list[ImageData]) -> Images:
    return Images(
        created=int(records[0].created_at),
        data=data,
        output_format=order.params["output_format"],
        size=f"{first.width}x{first.height}",
        seed=records[0].params.get("seed"),
        timings=[timings_of(record.view) for record in records],
    )
