"""Hello, heartbeat and goodbye: who is in, and whether both sides hold the same leases and copies."""

from __future__ import annotations

from collections import OrderedDict, deque

from triptych.config import parse_tcp_url
from triptych.core.events import Connect, SendMember
from triptych.core.ledger import Ledger
from triptych.core.members import Member
from triptych.core.options import joined, objection
from triptych.core.returns import Returns
from triptych.errors import ConfigError
from triptych.ids import Epoch, InstanceId, Role
from triptych.wire.messages import (
    PROTOCOL_VERSION,
    Goodbye,
    Heartbeat,
    Hello,
    Refused,
    Unknown,
    Welcome,
)
from triptych.wire.schema import RequestSchema

_GRACE = 1.0
"""Seconds that a grant or a release may be under way before a heartbeat that does not show it means anything."""

_MISSES = 2
"""Successive heartbeats that must agree before the server believes that something was lost on the way."""


_REASON = 300
"""Characters of the longest refusal: it repeats what the peer said."""


def _bare(schema: RequestSchema) -> RequestSchema:
    """What any instance of the model takes, without defaults and without what it was launched with."""
    return schema.with_options(()).without_defaults()


class _Lives:
    """Lives of instances that something is known about; the latest few of the latest instances."""

    def __init__(self) -> None:
        self._epochs: OrderedDict[InstanceId, deque[Epoch]] = OrderedDict()

    def add(self, member: Member) -> None:
        self._epochs.setdefault(member.id, deque(maxlen=8)).append(member.epoch)
        self._epochs.move_to_end(member.id)
        if len(self._epochs) > 1024:
            self._epochs.popitem(last=False)

    def __contains__(self, message: Hello) -> bool:
        return message.epoch in self._epochs.get(message.instance, ())


class Membership:
    """The doors of the ledger: lets instances in and out, and compares books with them at each heartbeat."""

    def __init__(self, ledger: Ledger, returns: Returns, result_urls: dict[Role, str]) -> None:
        self._ledger = ledger
        self._returns = returns
        self._result_urls = result_urls
        self._over = _Lives()
        """Lives that said goodbye."""
        self._replaced = _Lives()
        """Lives that another one of the same instance has displaced. A late hello must not displace the successor; but
        which of the two is the later one is a guess, so that it counts only as long as the successor is heard of."""

    # -- joining ------------------------------------------------------------------------------------------------

    def hello(self, message: Hello) -> None:
        """Let an instance in, welcome it again, or refuse it."""
        ledger = self._ledger
        member = ledger.members.get(message.instance)
        another = member is not None and member.epoch != message.epoch
        if message in self._over or (another and message in self._replaced):
            ledger.count("stale_message", "hello of a life that is over", message.instance)
            return
        if member is not None and another:
            self._replaced.add(member)
            ledger.lose(member, "restarted", crashed=True)
            member = None
        if member is None:
            if reason := self._objection(message):
                self._refuse(message, reason, passing=False)
                return
            if reason := self._objection_of_others(message):
                self._refuse(message, reason, passing=True)
                return
            member = self._join(message)
            self._welcome(member)
            ledger.release_ids(member, self._returns.reclaim(member, message))
        else:
            self._welcome(member)
        self._alive(member)
        for lease in message.leases:
            if lease not in member.grants:
                ledger.cancel(member, lease)

    def _refuse(self, message: Hello, reason: str, *, passing: bool) -> None:
        ledger, reason = self._ledger, reason[:_REASON]
        refused = Refused(server_epoch=ledger.server_epoch, epoch=message.epoch, reason=reason, passing=passing)
        ledger.out.append(SendMember(instance=message.instance, message=refused))
        if ledger.roster.refuse(message, reason):
            ledger.count("instance_refused", reason, message.instance)

    def _objection(self, message: Hello) -> str:
        """What is wrong with an instance, whoever else is there; empty when nothing is."""
        if message.protocol != PROTOCOL_VERSION:
            return f"protocol={message.protocol}: this server speaks version {PROTOCOL_VERSION}"
        if not message.roles or message.slots < 1:
            return f"roles={list(message.roles)}, slots={message.slots}: at least one of each is needed"
        try:
            parse_tcp_url("work_url", message.work_url)
        except ConfigError as error:
            return error.message
        if (model := self._ledger.config.model) is not None and not message.schema.is_called(model):
            return f"model={message.schema.model!r}: this server is for {model!r}"
        return ""

    def _objection_of_others(self, message: Hello) -> str:
        """Why an instance cannot serve beside those that are there, of whom any may be the wrong one."""
        ledger = self._ledger
        schema, mine = self._schema_of_others(message)
        if schema is not None and not schema.agrees(mine) and (ledger.members or ledger.jobs):
            others = f"model={message.schema.model!r}: the others serve {schema.model!r}"
            if not schema.is_called(message.schema.model):
                return others
            return f"{others} with other request parameters: {', '.join(schema.differing(mine))}"
        return objection(message, ledger.members.values())

    def _schema_of_others(self, message: Hello) -> tuple[RequestSchema | None, RequestSchema]:
        """What an instance's schema must equal, and what of its own. Only encoders must agree on defaults: theirs
        apply, and other roles are often started without them."""
        ledger = self._ledger
        if Role.ENCODER in message.roles and ledger.roster.serving[Role.ENCODER]:
            return None if ledger.schema is None else ledger.schema.with_options(()), message.schema.with_options(())
        known = ledger.schema or next((member.hello.schema for member in ledger.members.values()), None)
        return (None if known is None else _bare(known)), _bare(message.schema)

    def _join(self, message: Hello) -> Member:
        ledger = self._ledger
        known = ledger.schema
        if Role.ENCODER in message.roles:
            own = message.schema.with_options(())
            if known is None or not known.with_options(()).agrees(own):  # clients go on with the name that they know
                ledger.schema = own
        elif known is not None and not _bare(known).agrees(_bare(message.schema)):
            ledger.schema = None  # all who served that model are gone
        prints = {m.hello.fingerprint for role in message.roles for m in ledger.roster.serving[role].values()}
        if prints - {message.fingerprint}:
            detail = f"{message.fingerprint} beside {', '.join(sorted(prints))}: results may differ in the last bits"
            ledger.count("fingerprint_differs", detail, message.instance)
        mine = message.schema.commit
        others = {m.hello.schema.commit: m.id for m in ledger.members.values() if m.hello.schema.commit}
        if mine and (unlike := {commit: id for commit, id in others.items() if commit != mine}):
            detail = f"model at commit {mine} beside {', '.join(f'{commit} of {id}' for commit, id in unlike.items())}"
            ledger.count("revision_differs", f"{detail}: launch all with the same --revision", message.instance)
        member = Member(
            id=message.instance,
            epoch=message.epoch,
            hello=message,
            ordinal=ledger.roster.next_ordinal(),
            seen=ledger.now,
        )
        ledger.join(member)
        if ledger.schema is not None:
            ledger.schema = joined(ledger.schema, ledger.members.values())
        ledger.out.append(Connect(instance=member.id, work_url=message.work_url))
        for job in ledger.jobs.values():
            if job.faults:
                job.acquit(member.epoch)
        ledger.count("instance_joined", f"{', '.join(message.roles)} at {message.work_url}", message.instance)
        return member

    def _welcome(self, member: Member) -> None:
        ledger = self._ledger
        welcome = Welcome(
            server_epoch=ledger.server_epoch,
            epoch=member.epoch,
            result_urls=self._result_urls,
            heartbeat_interval=ledger.config.heartbeat_interval,
        )
        ledger.out.append(SendMember(instance=member.id, message=welcome))

    def _alive(self, member: Member) -> None:
        member.seen = self._ledger.now
        self._ledger.member_deadlines.set(member.id, member.seen + self._ledger.config.lease_timeout)

    # -- staying ------------------------------------------------------------------------------------------------

    def heartbeat(self, message: Heartbeat) -> None:
        """A sign of life, with the instance's own view of what it holds."""
        ledger = self._ledger
        member = ledger.members.get(message.instance)
        if member is None or message.server_epoch != ledger.server_epoch:
            unknown = Unknown(server_epoch=ledger.server_epoch, epoch=message.epoch)
            ledger.out.append(SendMember(instance=message.instance, message=unknown))
            ledger.count("unknown_instance", "heartbeat without a hello to this server", message.instance)
            return
        if member.epoch != message.epoch or message.sequence <= member.sequence:
            ledger.count("stale_message", f"heartbeat {message.sequence}", message.instance)
            return
        member.sequence = message.sequence
        member.pool_used = message.pool_used
        member.resident_bytes = message.resident_bytes
        member.device_bytes = message.device_bytes
        member.counts = message.counts
        self._alive(member)
        self._compare_leases(member, message)
        self._compare_copies(member, message)

    def _compare_leases(self, member: Member, message: Heartbeat) -> None:
        ledger = self._ledger
        listed = frozenset(message.leases)
        for grant in list(member.grants.values()):
            if grant.lease in listed or grant.storing:
                grant.missed = 0
                if grant.job is None:
                    ledger.cancel(member, grant.lease)  # the first one may have been lost
                elif grant.suspending:
                    ledger.suspend(grant)
            elif self._overdue(grant.granted):
                grant.missed += 1
                if grant.missed >= _MISSES:
                    ledger.free(grant)
                    if grant.job is not None:
                        ledger.cancel(member, grant.lease)
                        ledger.count("lease_lost", f"{grant.lease.role}", member.id, grant.lease.request)
                        ledger.requeue(grant.job, grant, "lost on the way", charged=False)
        odd = frozenset(lease for lease in listed if lease not in member.grants)
        for lease in message.leases:  # not in the order of a set, which differs from process to process
            if lease in odd and lease in member.odd_leases:
                ledger.cancel(member, lease)
        member.odd_leases = odd

    def _compare_copies(self, member: Member, message: Heartbeat) -> None:
        ledger = self._ledger
        listed = frozenset(message.copies)
        unacknowledged = frozenset(message.leases)
        lost = []
        for copy in member.copies.values():
            if copy.manifest.copy in listed or copy.lease in unacknowledged:
                copy.missed = 0
            elif self._overdue(copy.staged):
                copy.missed += 1
                if copy.missed >= _MISSES:
                    lost.append(copy)
        ledger.lose_copies(lost, "no longer listed by its instance")
        odd = frozenset(copy for copy in listed if copy not in member.copies)
        ledger.release_ids(member, sorted(odd & member.odd_copies))
        member.odd_copies = odd

    def _overdue(self, since: float) -> bool:
        return self._ledger.now - since > max(_GRACE, 2 * self._ledger.config.heartbeat_interval)

    # -- leaving ------------------------------------------------------------------------------------------------

    def goodbye(self, message: Goodbye) -> None:
        """An instance leaves of its own will, or because something in it broke."""
        member = self._ledger.members.get(message.instance)
        if member is None or member.epoch != message.epoch:
            self._ledger.count("stale_message", "goodbye", message.instance)
            return
        self._over.add(member)
        self._ledger.lose(member, message.reason, crashed=message.failed)

    def exited(self, instance: InstanceId) -> None:
        """Nobody listens at an instance's work port: its process has ended. One that has not, behind a network that
        refuses in its name, is welcome again once it can be reached."""
        if (member := self._ledger.members.get(instance)) is not None:
            self._ledger.lose(member, f"process exited: nobody listens at {member.hello.work_url}", crashed=True)

    def expire(self) -> None:
        """Lose the instances that were silent for too long; they may come back."""
        ledger = self._ledger
        for instance in ledger.member_deadlines.pop_due(ledger.now):
            member = ledger.members[instance]
            reason = f"silent for {ledger.now - member.seen:.1f} s"
            for grant in member.grants.values():
                heard = grant.granted < member.seen or grant.fetched or grant.started is not None or grant.storing
                if grant.job is not None and not heard:  # what silenced the instance was there before it
                    ledger.requeue(grant.job, grant, f"instance lost: {reason}", charged=True, silent=member.epoch)
            ledger.lose(member, reason, crashed=True)

    def forgive(self) -> None:
        """The server itself stood still: nobody's silence during that time counts."""
        for member in self._ledger.members.values():
            self._alive(member)
