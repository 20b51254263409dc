"""Whether the server can serve: every role has a live instance, every instance that was named has come once, and what
is accepted and made can be kept."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import psutil

from triptych.config import parse_tcp_url
from triptych.errors import ConfigError
from triptych.ids import ROLES, Role

_HERE = "127.0.0.1"
"""Stands for every address of this machine."""

LOOK_AGAIN_SECONDS = 5.0
"""Between two look-ups of host names, as long as there is reason to doubt what they gave."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Readiness:
    """The verdict; ``reasons`` name each role and address that is missing, each instance that is in quarantine, and
    each store that fails.

    A server that is ready may have reasons too: what it misses, but can do without."""

    ready: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageState:
    """What keeps jobs or files from being kept; empty texts when nothing does."""

    journal: str
    media: str
    refusing: bool
    """Whether every new request is refused for that. Else its work can be done, and is kept until the store is back."""

    @property
    def failing(self) -> dict[str, bool]:
        """Whether each of them fails."""
        return {"journal": bool(self.journal), "media": bool(self.media)}

    def judge(self, pool: Readiness) -> Readiness:
        """The verdict on the whole server. ``pool``: the one on its instances."""
        said = {"no job can be accepted": self.journal, "files cannot be stored": self.media}
        reasons = (f"{what}: {why}" for what, why in said.items() if why)
        return Readiness(ready=pool.ready and not self.refusing, reasons=(*pool.reasons, *reasons))


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
    def commit(self) -> str:
        """Of its model on the Hub; empty where that is a folder."""
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

    `points` never blocks: a host name counts only as itself until `resolve`, which does block, has looked it up.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._own: frozenset[str] = frozenset()
        self._resolved: dict[str, frozenset[str]] = {}
        self._asked: set[str] = set()
        self._looked_at: float | None = None
        self._doubted = True

    @property
    def stale(self) -> bool:
        """Whether there is something for `resolve` to do: a name never tried, or, some seconds after the last time, a
        doubt or a name that is not known yet."""
        if self._looked_at is None or not self._asked <= self._resolved.keys():
            return True
        doubted = self._doubted or not all(self._resolved.values())
        return doubted and self._clock() >= self._looked_at + LOOK_AGAIN_SECONDS

    def doubt(self) -> None:
        """Have every name looked up again: machines get other addresses when they are started anew."""
        self._doubted = True

    def resolve(self) -> None:
        """Look up the addresses of this machine and every name asked for since the last time. A name that is not known
        now keeps what it had."""
        self._doubted = False
        self._own = frozenset(a.address for card in psutil.net_if_addrs().values() for a in card)
        names, self._asked = self._asked, set()
        self._resolved = {name: _look_up(name) or self._resolved.get(name, frozenset()) for name in names}
        self._looked_at = self._clock()

    def points(self, url: str, *, ask: bool = True) -> frozenset[tuple[str, int]]:
        """The host addresses and ports that a URL points at; none when it is not ``tcp://host:port``. ``ask``: have
        `resolve` look up its name, if it is one."""
        try:
            host, port = parse_tcp_url("url", url)
        except ConfigError:
            return frozenset()
        return frozenset((address, port) for address in self._hosts(host, ask))

    def _hosts(self, host: str, ask: bool) -> frozenset[str]:
        if host == "localhost":
            return frozenset({_HERE})
        try:
            addresses = frozenset({str(ipaddress.ip_address(host))})
        except ValueError:
            if ask:
                self._asked.add(host)
            addresses = self._resolved.get(host)
            if not addresses:
                return frozenset({host})
        return frozenset(_HERE if self._is_here(a) else a for a in addresses)

    def _is_here(self, address: str) -> bool:
        return address in self._own or ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _look_up(name: str) -> frozenset[str]:
    """The addresses of a host; none when it is not known."""
    try:
        return frozenset(str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except (OSError, ValueError):  # not known, or not even a name
        return frozenset()


class Attendance:
    """Judges the live instances against the addresses given as ``--encoder-urls`` and its like.

    Named instances are waited for until each has come once. From then on one that is away is told among the reasons,
    and the server is ready for as long as every role is served: where others serve, it should get their work.
    """

    def __init__(self, named: Mapping[Role, Sequence[str]], addresses: Addresses) -> None:
        self._named = tuple((role, url) for role, urls in named.items() for url in urls)
        self._awaited = set(self._named)
        self._addresses = addresses

    def judge(
        self, instances: Iterable[LiveInstance], missing: Mapping[Role, str], refused: Mapping[str, str]
    ) -> Readiness:
        """Readiness now. ``missing`` says of each role that nobody serves how that came, as far as it is known, and
        ``refused`` of work ports why an instance there may not join."""
        live = tuple(instances)
        absent = self._absent(live, refused)
        if absent:
            self._addresses.doubt()
        self._awaited &= absent.keys()
        unserved = [f"no live instance serves the role {role}: {why}" for role, why in missing.items()]
        doubts = [
            f"instance {i.instance} is in quarantine for {i.quarantined:.0f} s more, others are preferred: {i.failures}"
            for i in live
            if i.quarantined
        ]
        doubts += _mixed(live)
        return Readiness(ready=not unserved and not self._awaited, reasons=(*unserved, *absent.values(), *doubts))

    def _absent(self, live: Sequence[LiveInstance], refused: Mapping[str, str]) -> dict[tuple[Role, str], str]:
        """The named instances that are not there, each with what there is to say of it."""
        if not self._named:
            return {}
        at: dict[tuple[str, int], set[Role]] = {}
        for instance in live:
            for point in self._addresses.points(instance.work_url):
                at.setdefault(point, set()).update(instance.roles)
        # Anybody can be refused, under any names, which are not worth the time that strangers' name servers take.
        objections = {point: why for url, why in refused.items() for point in self._addresses.points(url, ask=False)}
        absent: dict[tuple[Role, str], str] = {}
        for role, url in self._named:
            points = self._addresses.points(url)
            there = set[Role]().union(*(at.get(point, ()) for point in points))
            if role in there:
                continue
            serves = ", ".join(served for served in ROLES if served in there)
            objection = next((objections[point] for point in points if point in objections), None)
            if there:
                why = f"serves {serves}, not {role}"
            else:
                why = "has not registered or is gone" if objection is None else f"was refused: {objection}"
            absent[role, url] = f"{role} instance {url} (--{role}-urls) {why}"
        return absent


def _mixed(live: Sequence[LiveInstance]) -> list[str]:
    """That instances work with weights of different commits, which is no reason to stop: most commits change none."""
    at: dict[str, list[str]] = {}
    for instance in live:
        if instance.commit:
            at.setdefault(instance.commit, []).append(instance.instance)
    if len(at) < 2:
        return []
    said = "; ".join(f"{commit[:12]} by {', '.join(names)}" for commit, names in at.items())
    return [f"different commits of the model are served: {said}; launch all with the same --revision"]
