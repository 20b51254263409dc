"""The server's end of the control plane: the frontend, the three result ports, and a push to each work port."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from triptych.config import parse_tcp_url
from triptych.errors import ConfigError, WireError
from triptych.ids import ROLES, InstanceId
from triptych.transport.control.guard import Guard
from triptych.transport.control.keys import Keys
from triptych.transport.control.line import Line
from triptych.transport.control.sockets import (
    ANSWER_HWM,
    FRONTEND_HWM,
    MEMBER_MAX_BYTES,
    RESULT_HWM,
    RESULT_MAX_BYTES,
    WORK_HWM,
    WORK_MAX_BYTES,
    Blobs,
    DropCounter,
    Outbox,
    bind,
    open_socket,
)
from triptych.transport.control.watch import Watch
from triptych.wire.codec import decode_from_instance
from triptych.wire.messages import FromInstance, Goodbye, ToInstance

RECEIVE_LIMIT = 256
"""ZMQ messages taken from each socket in one `ServerControl.receive`, so that no sender starves the others."""
WATCHED_LINES = 512
"""Connections to work ports that are watched; each takes two more descriptors."""
MAX_SOCKETS = 8192
"""Of ZMQ's, monitors included."""
MEMBER_LIMIT = 4096
"""Members whose address is remembered; past it the one silent for longest is forgotten."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inbound:
    """A message of an instance and the raw frames that came with it."""

    message: FromInstance
    blobs: tuple[bytes, ...] = ()


class ServerControl:
    """Binds ``scheduler_port`` (membership) and the next three (results of encoder, denoiser, decoder).

    Nothing blocks. Messages are queued by `send_member` and `send_work` and leave at `flush`, all that wait for one
    peer in one frame. What cannot be read or sent is counted in `dropped`, never raised. Not thread-safe.

    With ``keys`` every socket is encrypted and only instances with the known key get in, or get work.

    Raises `ConfigError` that names the port and its flag when one of the four is taken; then none stays bound.
    """

    def __init__(self, host: str, scheduler_port: int, *, keys: Keys | None = None) -> None:
        self._context = zmq.Context()
        self._context.max_sockets = MAX_SOCKETS
        self._guard = Guard(self._context, keys)
        self._receivers: dict[str, zmq.Socket[bytes]] = {}
        self._drops = DropCounter()
        self._members: dict[InstanceId, bytes] = {}
        self._member_outboxes: dict[InstanceId, Outbox] = {}
        self._work: dict[str, Line] = {}
        self._dirty: dict[str, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._callback: Callable[[], None] | None = None
        self._watch: Watch | None = None
        self._check_scheduled = False
        self._closed = False
        try:
            self._frontend = self._bind("frontend", zmq.ROUTER, host, scheduler_port, 0, "membership")
            for offset, role in enumerate(ROLES, 1):
                self._bind(role.value, zmq.PULL, host, scheduler_port, offset, f"{role} results")
        except ConfigError:
            self._close_sockets()
            raise
        # Without it a message to a member that has gone vanishes; with it the drop is counted.
        self._frontend.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A second connection under one routing id takes the place of the first. Otherwise libzmq keeps it unread, with
        # all that it sends, and for ever once it is gone.
        self._frontend.setsockopt(zmq.ROUTER_HANDOVER, 1)

    def _bind(
        self, where: str, kind: int, host: str, scheduler_port: int, offset: int, purpose: str
    ) -> zmq.Socket[bytes]:
        frontend = offset == 0
        sock = open_socket(
            self._context,
            kind,
            max_bytes=MEMBER_MAX_BYTES if frontend else RESULT_MAX_BYTES,
            hwm=FRONTEND_HWM if frontend else RESULT_HWM,
        )
        if frontend:
            sock.setsockopt(zmq.SNDHWM, ANSWER_HWM)
        self._receivers[where] = sock
        self._guard.protect_bound(sock)
        flag = f"--scheduler-port {scheduler_port}" + (f" + {offset}" if offset else "")
        bind(sock, host, scheduler_port + offset, host_flag="host", port_flag=f"{flag} ({purpose})")
        return sock

    @property
    def dropped(self) -> dict[str, int]:
        """Drops so far: malformed frames by socket (frontend, encoder, denoiser, decoder), undeliverable messages by
        direction (send_member, send_work), and peers without the right key (unknown_peer)."""
        return self._drops.counts | self._guard.counts

    # -- receiving ---------------------------------------------------------------------------------------------

    def receive(self) -> list[Inbound]:
        """What has arrived, in order per sender; empty when nothing has. Bounded, so call again while readable."""
        arrived: list[Inbound] = []
        for where, sock in self._receivers.items():
            for _ in range(RECEIVE_LIMIT):
                try:
                    frames = sock.recv_multipart(zmq.DONTWAIT)
                except zmq.Again:
                    break
                self._decode(where, frames, arrived)
        self._check_later()
        return arrived

    def _decode(self, where: str, frames: list[bytes], arrived: list[Inbound]) -> None:
        identity = frames.pop(0) if where == "frontend" else None
        try:
            if not frames:
                raise WireError("a message without a frame")
            batch, *blobs = frames
            messages = decode_from_instance(batch)
            if blobs and len(messages) != 1:
                raise WireError(f"{len(blobs)} raw frames with a batch of {len(messages)} messages")
        except WireError as error:
            self._drops.add(where, error)
            return
        for message in messages:
            if identity is not None:
                self._remember(message, identity)
            arrived.append(Inbound(message=message, blobs=tuple(blobs)))

    def _remember(self, message: FromInstance, identity: bytes) -> None:
        if isinstance(message, Goodbye):
            return
        self._members.pop(message.instance, None)
        self._members[message.instance] = identity
        if len(self._members) > MEMBER_LIMIT:
            oldest = next(iter(self._members))
            del self._members[oldest]
            self._member_outboxes.pop(oldest, None)

    # -- sending -----------------------------------------------------------------------------------------------

    def send_member(self, instance: InstanceId, message: ToInstance) -> None:
        """Queue an answer to the connection on which ``instance`` was last heard."""
        if instance not in self._members:
            self._drops.add("send_member", f"{instance} has not been heard of")
            return
        outbox = self._member_outboxes.setdefault(instance, Outbox())
        if len(outbox) < ANSWER_HWM:
            outbox.put(message)
        else:
            self._drops.add("send_member", f"{instance} asks too much at once")

    def send_work(self, work_url: str, message: ToInstance, blobs: Blobs = ()) -> None:
        """Queue work for the instance that binds ``work_url``; connects at first use."""
        work = self._work.get(work_url) or self._connect_work(work_url)
        if work is not None:
            work.outbox.put(message, blobs)
            self._dirty[work_url] = None

    def connect(self, work_url: str) -> None:
        """Connect to a work port before there is work, so that its end is noticed; known ones are ignored."""
        if work_url not in self._work:
            self._connect_work(work_url)

    def _connect_work(self, work_url: str) -> Line | None:
        try:
            address = parse_tcp_url("work_url", work_url)
            work = Line(
                self._context,
                self._guard,
                zmq.PUSH,
                address,
                max_bytes=WORK_MAX_BYTES,
                hwm=WORK_HWM,
                observe=self._observer(work_url, address),
            )
        except (ConfigError, zmq.ZMQError) as error:
            self._drops.add("send_work", f"{work_url}: {error}")
            return None
        self._work[work_url] = work
        return work

    def _observer(self, work_url: str, address: tuple[str, int]) -> Callable[[zmq.Socket[bytes]], None] | None:
        watch = self._watch
        if watch is None or len(self._work) >= WATCHED_LINES:
            return None
        failed = functools.partial(watch.failed, work_url, address, wanted=lambda: work_url in self._work)
        return lambda sock: self._guard.watch_attempts(sock, failed)

    def flush(self) -> None:
        """Send everything that is queued."""
        outboxes, self._member_outboxes = self._member_outboxes, {}
        for instance, outbox in outboxes.items():
            outbox.flush(self._frontend, [self._members[instance]], "send_member", self._drops)
        dirty, self._dirty = self._dirty, {}
        for work_url in dirty:
            self._work[work_url].flush("send_work", self._drops)
        if outboxes:
            self._check_later()

    def disconnect(self, work_url: str) -> None:
        """Close the connection to a work port and forget what waits for it. Unknown ones are ignored."""
        work = self._work.pop(work_url, None)
        self._dirty.pop(work_url, None)
        if self._watch is not None:
            self._watch.forget(work_url)
        if work is not None:
            work.sock.close()

    # -- asyncio -----------------------------------------------------------------------------------------------

    def attach(
        self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None], gone: Callable[[str], None]
    ) -> None:
        """Have ``loop`` call ``callback`` whenever `receive` would return something, until `close`; and ``gone`` with a
        work port that was connected to since, when nobody listens there any more.

        A ZMQ file descriptor tells of changes, not of state, and any call on the socket may swallow one; so the
        state is looked at again after every receive and send on a receiving socket.
        """
        self._loop = loop
        self._callback = callback
        self._watch = Watch(loop, gone)
        for sock in self._receivers.values():
            loop.add_reader(sock.fileno(), self._check_now)
        self._check_later()

    def _check_later(self) -> None:
        if self._loop is not None and not self._check_scheduled:
            self._check_scheduled = True
            self._loop.call_soon(self._check_scheduled_now)

    def _check_scheduled_now(self) -> None:
        self._check_scheduled = False
        self._check_now()

    def _check_now(self) -> None:
        if self._closed or self._callback is None:
            return
        # Every socket must be asked: reading EVENTS is what takes the notice off its descriptor.
        readable = [int(sock.getsockopt(zmq.EVENTS)) & zmq.POLLIN for sock in self._receivers.values()]
        if any(readable):
            self._check_later()
            self._callback()

    def close(self) -> None:
        """Close every socket at once; what waits to be sent is discarded."""
        if self._closed:
            return
        self._closed = True
        if self._watch is not None:
            self._watch.close()
        if self._loop is not None and not self._loop.is_closed():
            for sock in self._receivers.values():
                self._loop.remove_reader(sock.fileno())
        self._close_sockets()

    def _close_sockets(self) -> None:
        for sock in (*self._receivers.values(), *(work.sock for work in self._work.values())):
            sock.close()
        self._guard.close()
        self._context.term()
