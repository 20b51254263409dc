"""Whether the server can serve: every role has a live instance, and every instance that was named has come."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import psutil

from triptych.ids import Role

_HERE = "127.0.0.1"
"""Stands for every address of this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Readiness:
    """The verdict; ``reasons`` name each role and address that is missing, and each instance that is in quarantine,
    which alone does not make the server unready."""

    ready: bool
    reasons: tuple[str, ...]


class LiveInstance(Protocol):
    """What readiness needs to know of an instance that is alive."""

    @property
    def roles(self) -> Sequence[Role]:
        """The roles that it serves."""
        ...

    @property
    def work_url(self) -> str:
        """Its work port as it announced it."""
        ...

    @property
    def instance(self) -> str:
        """Its name."""
        ...

    @property
    def quarantined(self) -> float:
        """Seconds for which others are preferred."""
        ...

    @property
    def failures(self) -> str:
        """What it is in quarantine for."""
        ...


class Addresses:
    """Compares ``tcp://host:port`` addresses by what they point at, not by how they are spelled.

    `match` never blocks: a host name counts only as itself until `resolve`, which does block, has looked it up.
    """

    def __init__(self) -> None:
        self._own: frozenset[str] = frozenset()
        self._resolved: dict[str, frozenset[str]] = {}
        self.unresolved: set[str] = set()
        """Host names that were asked for and are not looked up yet."""

    @property
    def stale(self) -> bool:
        """Whether there is something for `resolve` to do."""
        return not self._own or bool(self.unresolved)

    def resolve(self) -> None:
        """Look up the addresses of this machine and every name asked for so far. A name that is not known yet is
        asked for again the next time."""
        if not self._own:
            self._own = frozenset(a.address for card in psutil.net_if_addrs().values() for a in card)
        for name in tuple(self.unresolved):
            try:
                found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            except OSError:
                continue
            self._resolved[name] = frozenset(str(entry[4][0]) for entry in found)
            self.unresolved.discard(name)

    def match(self, one: str, other: str) -> bool:
        """Whether two addresses have the same port and a host address in common."""
        a, b = urlsplit(one), urlsplit(other)
        return a.port == b.port and not self._hosts(a.hostname or "").isdisjoint(self._hosts(b.hostname or ""))

    def _hosts(self, host: str) -> frozenset[str]:
        if host == "localhost":
            return frozenset({_HERE})
        try:
            addresses = frozenset({str(ipaddress.ip_address(host))})
        except ValueError:
            known = self._resolved.get(host)
            if known is None:
                self.unresolved.add(host)
                return frozenset({host})
            addresses = known
        return frozenset(_HERE if self._is_here(a) else a for a in addresses)

    def _is_here(self, address: str) -> bool:
        return address in self._own or ipaddress.ip_address(address.partition("%")[0]).is_loopback


def judge(
    instances: Iterable[LiveInstance],
    named: Mapping[Role, Sequence[str]],
    addresses: Addresses,
    missing: Mapping[Role, str],
) -> Readiness:
    """Readiness from the live instances and the addresses given as ``--encoder-urls`` and its like.

    ``missing`` says of each role that nobody serves how that came, as far as it is known.
    """
    live = tuple(instances)
    reasons = [f"no live instance serves the role {role}: {why}" for role, why in missing.items()]
    for role, urls in named.items():
        for url in urls:
            there = [i for i in live if addresses.match(i.work_url, url)]
            if not there:
                reasons.append(f"{role} instance {url} (--{role}-urls) has not registered or is gone")
            elif not any(role in i.roles for i in there):
                serves = ", ".join(role for i in there for role in i.roles)
                reasons.append(f"{role} instance {url} (--{role}-urls) serves {serves}, not {role}")
    doubts = [
        f"instance {i.instance} is in quarantine for {i.quarantined:.0f} s more, others are preferred: {i.failures}"
        for i in live
        if i.quarantined
    ]
    return Readiness(ready=not reasons, reasons=(*reasons, *doubts))
