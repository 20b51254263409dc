"""Memory for what clients send: bodies while their requests are answered, what decoding their pictures takes, and
pictures until their jobs have ended."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

from starlette.types import Scope

from triptych.api.errors import BodyTooLarge, TooBusy

SHARE: Final = "triptych.share"
"""Entry of an ASGI scope with the request's share of the room."""


class Room:
    """At most ``most`` bytes: what is taken here, and what ``held`` says that live jobs hold."""

    def __init__(self, most: int, held: Callable[[], int]) -> None:
        self.most = most
        self._held = held
        self._taken = 0

    def share(self) -> Share:
        """The part of one request, empty at first."""
        return Share(self)

    def take(self, nbytes: int) -> None:
        """Count bytes that are being received. Raises `TooBusy` when there is no room for them."""
        if nbytes and self._taken + self._held() + nbytes > self.most:
            raise TooBusy(f"requests hold almost {self.most} bytes, as many as they may (--max-upload-memory)")
        self._taken += nbytes

    def give_back(self, nbytes: int) -> None:
        """They are no longer held."""
        self._taken -= nbytes


class Share:
    """What one request holds."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._nbytes = 0

    def take(self, nbytes: int) -> None:
        """Hold more. Raises `TooBusy`."""
        self._room.take(nbytes)
        self._nbytes += nbytes

    @contextmanager
    def lending(self, field: str, nbytes: int) -> Generator[None]:
        """Hold more for as long as a picture of ``field`` is decoded. Raises `TooBusy`, and `BodyTooLarge` for what is
        more than there would be if nobody else held any."""
        if self._nbytes + nbytes > self._room.most:
            raise BodyTooLarge(
                field,
                f"{field}: decoding the picture takes {nbytes} bytes; requests may hold {self._room.most} in all "
                "(--max-upload-memory)",
            )
        self._room.take(nbytes)
        try:
            yield
        finally:
            self._room.give_back(nbytes)

    def close(self) -> None:
        """Hold nothing any more."""
        self._room.give_back(self._nbytes)
        self._nbytes = 0


def share_of(scope: Scope) -> Share:
    """The share of a request that came through the gate."""
    share = scope[SHARE]
    assert isinstance(share, Share)
    return share
