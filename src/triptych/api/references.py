"""Pictures that a request names instead of uploading: data URLs, web addresses, and files under the operator's root."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Collection
from typing import Any, cast
from urllib.parse import unquote_to_bytes

from anyio import to_thread

from triptych.api.body import MAX_FILES, Body
from triptych.api.fetch import Fetcher
from triptych.api.validation import refuse
from triptych.config import ServerConfig
from triptych.errors import BadRequest, ConfigError
from triptych.server.paths import contained

_DATA_URL = re.compile(r"data:(?:(?:image|video)/[a-z0-9.+-]+)?(?:;[a-z0-9-]+=[^;,]*)*(;base64)?,", re.IGNORECASE)
_HEAD = 1024
"""Characters of a data URL that stand before its data, at most."""
_ESCAPES = 1 << 18
"""Percent escapes of a picture that are decoded; each costs more than a hundred bytes of base64 do."""
_BASE64_ESCAPES = (("%2B", "+"), ("%2b", "+"), ("%2F", "/"), ("%2f", "/"), ("%3D", "="), ("%3d", "="))
TINY = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg==")
"""A PNG of one pixel."""
_ACCEPTED = "a data URL, an http(s) URL, or {'image_url': one of these}"


class References:
    """Turns references into uploads. ``paths`` of a call: plain base64 and paths under ``input_root`` count too.

    Raises `ConfigError` when that is not there.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._limit = config.max_upload_bytes
        self._root = config.input_root
        if self._root is not None and not self._root.is_dir():
            raise ConfigError(f"--input-root {self._root}: there is no such folder")
        self._fetcher = Fetcher(config.max_upload_bytes) if config.allow_image_urls else None

    def draft(self, body: Body, names: Collection[str]) -> Body | None:
        """What `resolve` would make of ``body``, with a tiny picture for each; None when there is none.

        So an order can be read, and refused, before any picture is decoded or another machine is asked for one.
        """
        found = _found(body, names)
        if not found and not body.uploads:
            return None
        uploads = {name: [TINY] * len(files) for name, files in body.uploads.items()}
        for name, value in found.items():
            uploads.setdefault(name, []).extend([TINY] * len(_several(name, value)))
        return _replaced(body, found, uploads)

    async def resolve(
        self,
        body: Body,
        names: Collection[str],
        *,
        paths: bool = False,
        took: Callable[[int], None] = lambda _: None,
    ) -> Body:
        """``body`` with every field of ``names`` that holds references among its uploads instead.

        ``took`` is told of bytes as they are fetched. Raises `BadRequest` that names the field, or what that raises.
        """
        found = _found(body, names)
        if not found:
            return body
        uploads = {name: list(files) for name, files in body.uploads.items()}
        for name, value in found.items():
            for one in _several(name, value):
                uploads.setdefault(name, []).append(await self._read(name, one, paths, took))
        return _replaced(body, found, uploads)

    async def _read(self, field: str, value: Any, paths: bool, took: Callable[[int], None]) -> bytes:
        text = _address(field, value)
        match text[:6].partition(":")[0].lower():
            case "data":
                return await to_thread.run_sync(_decoded, field, text)
            case "http" | "https":
                if self._fetcher is None:
                    raise BadRequest(
                        field,
                        f"{field}: this server fetches no pictures from the web (--allow-image-urls); "
                        "send the file itself or a data URL",
                    )
                return await self._fetcher.fetch(field, text, took)
            case _ if not paths:
                refuse(field, text, _ACCEPTED)
            case _:
                if len(text) > 255 or text.startswith(("iVBOR", "/9j/", "UklGR")):  # how PNG, JPEG and WebP begin
                    return await to_thread.run_sync(_plain, field, text)
                return await to_thread.run_sync(self._from_root, field, text)

    def _from_root(self, field: str, text: str) -> bytes:
        if self._root is None:
            raise BadRequest(
                field,
                f"{field}={text[:60]!r}: paths are not accepted, because the operator named no folder for them "
                "(--input-root); send the file itself or a data URL",
            )
        path = contained(self._root, field, text)
        try:
            if not path.is_file():
                raise BadRequest(field, f"{field}={text[:60]!r}: there is no such file under the input folder")
            with path.open("rb") as file:
                data = file.read(self._limit + 1)
        except OSError as error:
            raise BadRequest(field, f"{field}={text[:60]!r}: cannot be read: {error.strerror}") from error
        if len(data) > self._limit:
            raise BadRequest(field, f"{field}: the file has more than {self._limit} bytes")
        return data


def _found(body: Body, names: Collection[str]) -> dict[str, Any]:
    return {name: body.fields[name] for name in names if body.fields.get(name) is not None}


def _replaced(body: Body, found: Collection[str], uploads: dict[str, list[bytes]]) -> Body:
    fields = {name: value for name, value in body.fields.items() if name not in found}
    return Body(fields=fields, uploads=uploads, form=body.form)


def _several(field: str, value: Any) -> list[Any]:
    """The references of a field. Raises `BadRequest` for none and for too many."""
    values = cast("list[Any]", value) if isinstance(value, list) else [value]
    if not 0 < len(values) <= MAX_FILES:
        raise BadRequest(field, f"{field}: has {len(values)} pictures; 1 to {MAX_FILES} are accepted")
    return values


def _decoded(field: str, url: str) -> bytes:
    """The bytes of a data URL."""
    head = _DATA_URL.match(url[:_HEAD])
    if head is None:
        raise BadRequest(field, f"{field}={url[:40]!r}: must be a data URL of an image")
    rest = url[head.end() :]
    return _plain(field, rest) if head[1] else _unescaped(field, rest)


def _plain(field: str, text: str) -> bytes:
    """The bytes of base64."""
    if "%" in text:
        for escape, character in _BASE64_ESCAPES:
            text = text.replace(escape, character)
    try:
        return base64.b64decode(_unescaped(field, text) if "%" in text else text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(field, f"{field}: is not valid base64: {error}") from error


def _unescaped(field: str, text: str) -> bytes:
    if text.count("%") > _ESCAPES:
        raise BadRequest(field, f"{field}: has more than {_ESCAPES} percent escapes in its data URL; send it as base64")
    try:
        return unquote_to_bytes(text)
    except UnicodeEncodeError as error:
        raise BadRequest(field, f"{field}: has half of a surrogate pair in its data URL") from error


def _address(field: str, value: Any) -> str:
    """The text of a reference in any of the forms that clients send."""
    if isinstance(value, dict):
        wrapped = cast("dict[str, Any]", value)
        if set(wrapped) != {"image_url"}:
            names = ", ".join(sorted(map(str, wrapped)))[:60] or "nothing"
            raise BadRequest(field, f"{field}: has {names}; must be {_ACCEPTED}")
        value = wrapped["image_url"]
        if isinstance(value, dict) and set(cast("dict[str, Any]", value)) == {"url"}:
            value = cast("dict[str, Any]", value)["url"]
    if not isinstance(value, str) or not value:
        refuse(field, value, _ACCEPTED)
    return value
