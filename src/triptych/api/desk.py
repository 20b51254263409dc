"""Where every door hands in its orders: reads them, keeps within the limits, and remembers the pictures of remixes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from anyio import to_thread
from starlette.requests import Request

from triptych.api.body import Body, refuse_repeated
from triptych.api.darkroom import Darkroom
from triptych.api.idempotency import key_of
from triptych.api.keys import CALLER
from triptych.api.limits import Limits
from triptych.api.orders import (
    Order,
    Output,
    accepted,
    check_handoff,
    clip_fields,
    picture_fields,
    picture_params,
    read_order,
)
from triptych.api.ready import need_schema
from triptych.api.references import References
from triptych.api.room import share_of
from triptych.api.timeouts import read_timeouts
from triptych.api.views import metadata_of
from triptych.config import MIB, ServerConfig
from triptych.errors import BadRequest, StorageFailed
from triptych.ids import RequestId
from triptych.server.records import JobRecord
from triptych.server.service import DiffusionService
from triptych.wire.schema import RequestSchema

PICTURE_BYTES = 64 * MIB
"""Memory for the pictures of past requests; the oldest go first."""


class Desk:
    """The one way from a request's body to a job."""

    def __init__(self, service: DiffusionService, config: ServerConfig) -> None:
        self._service = service
        self._config = config
        self.limits = Limits(service, config)
        self._references = References(config)
        self._darkroom = Darkroom()
        self._pictures: OrderedDict[RequestId, tuple[bytes, ...]] = OrderedDict()

    async def read(
        self, request: Request, body: Body, output: Output, *, paths: bool = False, adaptive: bool = False
    ) -> Order:
        """The order in ``body``; raises `BadRequest` or kin, and `NotReady` while no model is known.

        With ``paths`` pictures may be named by path and be plain base64; ``adaptive``: where no size is given, the
        picture to start from gives the shape. Pictures are fetched and decoded only for an order that has nothing else
        wrong with it, while there is room for it; raises `TooBusy` when there is none.
        """
        schema = need_schema(self._service)
        draft = self._references.draft(body, picture_fields(schema, output))
        plain = body if draft is None else draft
        refuse_repeated(plain)
        timeouts, plain = read_timeouts(plain, self._config)
        order = await to_thread.run_sync(read_order, schema, plain, output)
        check_handoff(schema, order.params, self._service.largest_pool)
        if draft is not None:
            repeated = await self._is_repeated(request)
            with nullcontext() if repeated else self.limits.looking(_caller(request), timeouts):
                order = await self._read_pictures(request, schema, body, output, paths=paths, adaptive=adaptive)
            check_handoff(schema, order.params, self._service.largest_pool)
        return replace(order, timeouts=timeouts)

    async def _read_pictures(
        self, request: Request, schema: RequestSchema, body: Body, output: Output, *, paths: bool, adaptive: bool
    ) -> Order:
        """The order in ``body`` with its pictures, each of which is fetched, if it has to be, and checked."""
        took = share_of(request.scope).take
        body = await self._references.resolve(body, picture_fields(schema, output), paths=paths, took=took)
        _, body = read_timeouts(body, self._config)
        sizes = await self._darkroom.check(request, body.uploads, clip_fields(schema, output))
        return await self._darkroom.run(
            partial(read_order, schema, body, output, sizes=sizes if adaptive else None), request
        )

    async def expect(self, request: Request, order: Order, count: int) -> None:
        """Look whether ``count`` jobs of an order may be submitted, before the first of them begins.

        Raises `BadRequest` for more than are ever taken at once, and `TooBusy` for more than are now.
        """
        caller = _caller(request)
        most, setting = self.limits.most(caller)
        if count > most:
            raise BadRequest(
                "n", f"n={count}: each is a request of its own for this model, and {most} are taken at once ({setting})"
            )
        if await self._is_repeated(request):
            return
        assert order.timeouts is not None  # `read` has set them
        self.limits.check(caller, order.timeouts, count)

    async def submit(
        self,
        request: Request,
        order: Order,
        output: Output,
        *,
        params: Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
        part: int = 0,
    ) -> JobRecord:
        """Start a job for ``order``, with ``params`` instead of its own if given; ``part`` counts those of one request.

        A request with an Idempotency-Key gets the job of that key if there is one. Raises `TooBusy` and `KeyReused`.
        """
        key = key_of(request, part)
        if key is not None and (known := await self._service.repeated(key)) is not None:
            return known  # however busy the server is
        caller = _caller(request)
        timeouts = order.timeouts
        assert timeouts is not None  # `read` has set them
        with self.limits.entering(caller, timeouts) as enter:
            record = await self._service.submit(
                dict(order.params if params is None else params),
                output=output,
                images=order.images,
                metadata=metadata_of(order) | dict(metadata or {}) | ({} if caller is None else {CALLER: caller}),
                queue_timeout=timeouts.queue,
                run_timeout=timeouts.run,
                idempotency_key=key,
            )
            enter(record.id)
        self._remember(record.id, order.images)
        return record

    async def remix(self, request: Request, source: JobRecord, body: Body) -> Order:
        """The order of ``source`` once more, with the fields of ``body`` in place of its own.

        Raises `BadRequest` when it started from a picture that is no longer remembered and ``body`` has none.
        """
        schema = need_schema(self._service)
        changed = {name: value for name, value in body.fields.items() if value is not None}
        if schema.param("prompt") is not None and "prompt" not in changed:
            raise BadRequest("prompt", "prompt: is required", code="missing_field")
        spoken = picture_fields(schema, source.output)
        pictures = picture_params(schema, source.output)
        known = accepted(schema, source.output)
        fields: dict[str, Any] = {k: v for k, v in source.params.items() if k in known and k not in pictures}
        fields["model"] = source.metadata.get("model")
        replaced = {"size": ("width", "height"), "seconds": ("num_frames",)}
        for name in changed.keys() & replaced.keys():
            for old in replaced[name]:
                fields.pop(old, None)
        uploads = dict(body.uploads)
        given = {spoken.get(name, name) for name in (*uploads, *changed)}
        for name in pictures:
            if name in source.params and name not in given:
                uploads[name] = await self._recall(request, source, name)
        text = {k: v if isinstance(v, str) else str(v).lower() for k, v in fields.items() if v is not None}
        # Also the nulls of the body, so that an unknown field is refused whatever its value is.
        whole = Body(fields=body.fields | (text if body.form else fields) | changed, uploads=uploads, form=body.form)
        order = await self.read(request, whole, source.output)
        if changed.keys().isdisjoint(("seconds", "num_frames", "fps")):
            order = replace(order, seconds=source.metadata.get("seconds", order.seconds))  # as its client once said it
        return order

    async def _is_repeated(self, request: Request) -> bool:
        """Whether the job of a request is there already, so that no limit applies to it."""
        key = key_of(request)
        return key is not None and await self._service.repeated(key) is not None

    def _remember(self, job: RequestId, pictures: tuple[bytes, ...]) -> None:
        if not pictures:
            return
        self._pictures[job] = pictures
        held = sum(len(picture) for group in self._pictures.values() for picture in group)
        while held > PICTURE_BYTES:
            _, group = self._pictures.popitem(last=False)
            held -= sum(map(len, group))

    async def _recall(self, request: Request, source: JobRecord, name: str) -> list[bytes]:
        held = self._pictures.get(source.id)
        if held is None:
            with suppress(StorageFailed):
                held = await self._service.images(source.id)
                share_of(request.scope).take(sum(map(len, held)))
        if not held:
            raise BadRequest(
                "input_reference",
                f"input_reference: the picture that {source.id} started from is no longer kept; send it again",
                code="missing_field",
            )
        value = source.params[name]
        return [held[item["blob"]] for item in (value if isinstance(value, list) else [value])]


def _caller(request: Request) -> str | None:
    return request.scope.get(CALLER)
