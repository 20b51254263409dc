"""The instances of one router: who lives, who serves which role, and who of them has room."""

from __future__ import annotations

from triptych.core.members import Member
from triptych.ids import ROLES, InstanceId, Role
from triptych.wire.messages import Hello

_MOST_REFUSED = 64
"""Refused instances that are remembered; whoever reaches the port can be one."""


class Roster:
    """Instances by id, and by role. Whoever changes the slots or copies of one has it looked at again: `refresh`."""

    def __init__(self) -> None:
        self.members: dict[InstanceId, Member] = {}
        self.serving: dict[Role, dict[InstanceId, Member]] = {role: {} for role in ROLES}
        self.open: dict[Role, dict[InstanceId, Member]] = {role: {} for role in ROLES}
        """Instances that have room for a stage of a role."""
        self.last_lost: dict[Role, str] = {}
        """How each role last lost an instance, or did not get one."""
        self.refused: dict[str, str] = {}
        """Work ports of instances that were refused, and why; the latest last."""
        self._joined = 0

    def next_ordinal(self) -> int:
        """Joining number for a new member."""
        self._joined += 1
        return self._joined

    def join(self, member: Member) -> None:
        """Enter a new life of an instance."""
        self.members[member.id] = member
        self.refused.pop(member.hello.work_url, None)
        for role in member.hello.roles:
            self.serving[role][member.id] = member
        self.refresh(member)

    def refuse(self, hello: Hello, reason: str) -> bool:
        """Remember that an instance could not join; whether that is news: it asks again and again."""
        known = self.refused.pop(hello.work_url, None)
        self.refused[hello.work_url] = reason
        if len(self.refused) > _MOST_REFUSED:
            del self.refused[next(iter(self.refused))]
        for role in hello.roles:
            if not self.serving[role]:
                self.last_lost[role] = f"{hello.instance} was refused: {reason}"
        return reason != known

    def withdraw(self, member: Member, reason: str) -> None:
        """Give a member no more work from now on."""
        member.draining = True
        self._unlist(member, reason)
        self.refresh(member)

    def remove(self, member: Member, reason: str) -> None:
        """Strike out a member that is gone."""
        del self.members[member.id]
        self._unlist(member, reason)
        for role in member.hello.roles:
            self.open[role].pop(member.id, None)

    def _unlist(self, member: Member, reason: str) -> None:
        for role in member.hello.roles:
            self.serving[role].pop(member.id, None)
            self.last_lost[role] = f"{member.id}: {reason}"

    def unserved(self) -> dict[Role, str]:
        """Roles that no member serves, each with how that came, as far as it is known."""
        return {
            role: self.last_lost.get(role, "none has joined") for role, members in self.serving.items() if not members
        }

    def refresh(self, member: Member) -> None:
        """Keep the sets of open instances true after a change of slots or copies."""
        for role in member.hello.roles:
            if member.has_room(role):
                self.open[role][member.id] = member
            else:
                self.open[role].pop(member.id, None)

    def eligible(self, role: Role, nbytes: int, now: float) -> set[InstanceId]:
        """Who may get a stage, with room for it now or later: whose pool can hold its output, and is to be trusted.

        One in quarantine is, while there is no other.
        """
        large = {id: member for id, member in self.serving[role].items() if member.hello.pool_bytes >= nbytes}
        return {id for id, member in large.items() if member.health.until <= now} or set(large)
