"""Tasks that come in three posts, one for each role: which posts belong together, and what became of them.

Posts are matched by what they say and whence they come, and by the task id where the client gives one; never by their
order. So clients that interleave get their own pictures.

Equal posts are either equal tasks at once, which are worth the same whichever of them a post goes to, or a client that
starts again after a sequence that broke, and polls its newest task. So a post goes to the newest task that lacks it. A
task whose posts went to an equal one, because that one's own never came, ends as that one does.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from triptych.api.errors import TaskExists, TooBusy
from triptych.api.orders import Output
from triptych.ids import RequestId

Part: TypeAlias = Literal["encoder", "transformer", "decoder"]
PARTS: Final[tuple[Part, ...]] = ("encoder", "transformer", "decoder")

PATIENCE_SECONDS: Final = 60.0
"""How long a post waits for the others."""
MOST_OPEN: Final = 1000
MOST_KEPT: Final = 10_000


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a ticket will never become a job."""

    code: str
    message: str


@dataclass(kw_only=True, slots=True)
class Ticket:
    """A task that is no job (yet): posts that wait for each other, or a name whose job is being submitted."""

    id: str
    output: Output
    save_path: str
    created: float
    """Unix seconds."""
    opened: float
    """Seconds of the steady clock that `Tickets` is given."""
    key: tuple[str, ...] = ()
    parts: set[Part] = field(default_factory=set[Part])
    job: RequestId | None = None
    """What it became, or stands for."""
    equal: RequestId | None = None
    """The job of an equal task while this one waits: what it stands for if its own posts never come."""
    reason: Reason | None = None
    ended: float | None = None
    """Unix seconds."""

    @property
    def open(self) -> bool:
        """Whether it waits for posts."""
        return self.job is None and self.reason is None

    @property
    def missing(self) -> list[Part]:
        """The posts that have not come."""
        return [part for part in PARTS if part not in self.parts]


class Tickets:
    """All tickets that somebody may ask for. A job that has a ticket's name is found by that, and needs no ticket.

    Times come in as arguments: ``now`` of a steady clock, ``clock`` in Unix seconds.
    """

    def __init__(self) -> None:
        self._tickets: OrderedDict[str, Ticket] = OrderedDict()

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._tickets.values())

    def get(self, id: str) -> Ticket | None:
        """The ticket of that id, or None."""
        return self._tickets.get(id)

    def post(
        self, part: Part, key: tuple[str, ...], *, task_id: str | None, output: Output, save_path: str, now: float,
        clock: float,
    ) -> Ticket:  # fmt: skip
        """The ticket that a post belongs to: the newest open one with the same key that lacks this part, or a new one.

        With a task id it is the open ticket of that id, also for a part that came before: then its time begins anew.
        Raises `TaskExists` for a task id that other posts have taken, `TooBusy` when too many wait.
        """
        self.expire(now, clock)
        for ticket in reversed(self._tickets.values()):
            if not ticket.open or ticket.key != key or not ticket.missing:
                continue
            if part in ticket.parts:
                if task_id is None:
                    continue
                ticket.opened = now
            ticket.parts.add(part)
            return ticket
        if sum(ticket.open for ticket in self._tickets.values()) >= MOST_OPEN:
            raise TooBusy(f"{MOST_OPEN} tasks wait for the posts of their other roles")
        ticket = self.name(task_id, output=output, save_path=save_path, now=now, clock=clock)
        ticket.key = key
        ticket.parts.add(part)
        return ticket

    def name(self, task_id: str | None, *, output: Output, save_path: str, now: float, clock: float) -> Ticket:
        """A new ticket; raises `TaskExists`."""
        id = task_id or f"task_{secrets.token_hex(16)}"
        if id in self._tickets:
            raise taken(id)
        ticket = Ticket(id=id, output=output, save_path=save_path, created=clock, opened=now)
        self._tickets[id] = ticket
        while len(self._tickets) > MOST_KEPT:
            del self._tickets[next(id for id, old in self._tickets.items() if not old.open)]
        return ticket

    def forget(self, ticket: Ticket) -> None:
        """Drop a ticket."""
        self._tickets.pop(ticket.id, None)

    def expire(self, now: float, clock: float) -> None:
        """Give up tickets whose posts did not all come in time, but for those whose equal became a job meanwhile."""
        for ticket in self._tickets.values():
            if not (ticket.open and ticket.parts and ticket.missing and now - ticket.opened >= PATIENCE_SECONDS):
                continue
            if ticket.equal is not None:
                ticket.job = ticket.equal
                continue
            ports = " and ".join(ticket.missing)
            why = f"no equal post came to the {ports} port within {PATIENCE_SECONDS:g} seconds"
            self.fail(ticket, Reason("unmatched", why), clock)

    def started(self, ticket: Ticket, job: RequestId) -> None:
        """A ticket has become a job."""
        ticket.job = job
        for other in self._tickets.values():
            if other.open and other.parts and other.key == ticket.key:
                other.equal = job

    def put_off(self, ticket: Ticket, part: Part, now: float, seconds: float) -> None:
        """Have a ticket wait for its last post once more, whose client was told to come again in ``seconds``."""
        ticket.parts.discard(part)
        ticket.opened = now + seconds

    def fail(self, ticket: Ticket, reason: Reason, clock: float) -> None:
        """End a ticket without a job."""
        ticket.reason, ticket.ended = reason, clock


def taken(id: str) -> TaskExists:
    """The error of a task id that is another task's."""
    return TaskExists("task_id", f"task_id={id[:60]!r}: a task of that id exists")
