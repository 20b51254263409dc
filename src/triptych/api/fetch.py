"""Fetches a picture from the web for a client, without letting the client reach what only this machine can reach."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from typing import Any, Final, TypeAlias
from urllib.parse import urljoin, urlsplit

import httpx

from triptych.api.lookups import Lookups
from triptych.errors import BadRequest

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

FETCH_SECONDS: Final = 20.0
"""For the whole of a picture, redirects included."""
HOPS: Final = 3
"""Redirects that are followed; each is checked like the first address."""
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_INSIDE: Final = (
    ipaddress.ip_network("168.63.129.16/32"),  # Azure's machine service
    ipaddress.ip_network("192.0.0.0/24"),  # protocol assignments, Oracle's machine service among them
    ipaddress.ip_network("fec0::/10"),  # site-local
    ipaddress.ip_network("3fff::/20"),  # documentation
)
"""Networks that Python's tables take for global."""


def is_public(address: Address) -> bool:
    """Whether an address lies on the public internet: not private, loopback, link-local, multicast or reserved.

    IPv6 addresses that carry an IPv4 address are judged by it too.
    """
    if not address.is_global or address.is_multicast or address.is_reserved or address.is_unspecified:
        return False
    if any(address in network for network in _INSIDE):
        return False
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if address.teredo is not None:
            return False
        return inner is None or is_public(inner)
    return True


class Fetcher:
    """GETs pictures of at most ``max_bytes``. The address that was checked is the one that is connected to, so that
    a name cannot point elsewhere the second time; ``permits`` judges it."""

    def __init__(self, max_bytes: int, permits: Callable[[Address], bool] = is_public) -> None:
        self._max_bytes = max_bytes
        self._permits = permits
        self._lookups = Lookups()

    async def fetch(self, field: str, url: str, took: Callable[[int], None] = lambda _: None) -> bytes:
        """The bytes at ``url``; raises `BadRequest` that names ``field``, `TooBusy` when too many other hosts are
        looked up, or what ``took`` raises, which is told of every piece that comes."""
        try:
            async with (
                asyncio.timeout(FETCH_SECONDS),
                httpx.AsyncClient(trust_env=False, timeout=FETCH_SECONDS) as http,
            ):
                for _ in range(HOPS + 1):
                    data, target = await self._once(http, field, url, took)
                    if target is None:
                        return data
                    url = urljoin(url, target)
        except TimeoutError as error:
            raise BadRequest(field, f"{field}: the picture did not come within {FETCH_SECONDS:g} seconds") from error
        except (httpx.InvalidURL, ValueError) as error:  # of the client's, or of a redirect; UnicodeError is one too
            raise BadRequest(field, f"{field}: the address, or one that it redirects to, is not a URL") from error
        except httpx.HTTPError as error:
            raise BadRequest(field, f"{field}: the picture could not be fetched: {type(error).__name__}") from error
        raise BadRequest(field, f"{field}: the address redirects more than {HOPS} times")

    async def _once(
        self, http: httpx.AsyncClient, field: str, url: str, took: Callable[[int], None]
    ) -> tuple[bytes, str | None]:
        """The bytes, or the address that a redirect names."""
        host, secure = _parts(field, url)
        address = await self._resolve(field, host)
        target = httpx.URL(url).copy_with(host=str(address), fragment=None)
        extensions: dict[str, Any] = {"sni_hostname": host} if secure else {}
        # Without compression the limit on what is read is the limit on what is held.
        headers = {"host": httpx.URL(url).netloc.decode(), "accept": "image/*", "accept-encoding": "identity"}
        async with http.stream("GET", target, headers=headers, extensions=extensions) as response:
            if response.has_redirect_location:
                return b"", response.headers["location"]
            if response.status_code != 200:
                raise BadRequest(field, f"{field}: the address answered {response.status_code}")
            if "content-encoding" in response.headers:
                raise BadRequest(field, f"{field}: the address answered with a compressed body")
            data = bytearray()
            async for chunk in response.aiter_raw():
                took(len(chunk))
                data += chunk
                if len(data) > self._max_bytes:
                    raise BadRequest(field, f"{field}: the picture has more than {self._max_bytes} bytes")
            return bytes(data), None

    async def _resolve(self, field: str, host: str) -> Address:
        try:
            found = await self._lookups.addresses(host)
        except (OSError, UnicodeError) as error:
            raise BadRequest(field, f"{field}: the host {host[:60]!r} is not known") from error
        addresses = [ipaddress.ip_address(address.partition("%")[0]) for address in found]
        # All of them: a name with one public and one private address is a trap.
        if not addresses or not all(self._permits(address) for address in addresses):
            raise BadRequest(field, f"{field}: the host {host[:60]!r} is not on the public internet")
        return addresses[0]


def _parts(field: str, url: str) -> tuple[str, bool]:
    """Host, and whether it is https."""
    try:
        url.encode()
        parts = urlsplit(url)
        _, host = parts.port, parts.hostname  # a port that is none raises
    except ValueError as error:
        raise BadRequest(field, f"{field}={url[:60]!r}: is not a URL") from error
    if parts.scheme not in ("http", "https") or not host:
        raise BadRequest(field, f"{field}={url[:60]!r}: must be an http or https URL")
    if parts.username is not None or parts.password is not None:
        raise BadRequest(field, f"{field}: the URL must not hold a user name or password")
    return host, parts.scheme == "https"
