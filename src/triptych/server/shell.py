"""The asyncio shell around the router: sockets, clock and files in, the router's actions out, on one thread."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol, assert_never

from triptych.core.events import (
    Clocks,
    Connect,
    Count,
    Disconnect,
    FilesStored,
    InstanceExited,
    JobView,
    LeaseGranted,
    Note,
    Received,
    RouterAction,
    RouterEvent,
    SendMember,
    SendWork,
    StageDone,
    StoreFailed,
    StoreFiles,
    Tick,
    Update,
)
from triptych.core.router import Router
from triptych.errors import StorageFailed, StorageFull
from triptych.ids import RequestId
from triptych.transport.control.server import Inbound, ServerControl
from triptych.wire.messages import ErrorInfo, MediaFile

log = logging.getLogger(__name__)

LONGEST_SLEEP = 1.0
"""Seconds after which the router gets a tick even when it asked for none."""


class ShellOwner(Protocol):
    """Who is told what the router decided. Called on the loop's thread; must not block."""

    def updated(self, view: JobView) -> None:
        """A request changed."""
        ...

    def noted(self, entry: Note) -> None:
        """Something is to be remembered beyond this life of the server."""
        ...

    def counted(self, count: Count) -> None:
        """Something was counted."""
        ...

    async def store(self, request: RequestId, files: Sequence[tuple[MediaFile, bytes]]) -> None:
        """Keep the files of a finished request. Raises `StorageFull` or `StorageFailed`."""
        ...

    def ticked(self) -> None:
        """About a second passed."""
        ...


class Shell:
    """Runs one router. Everything happens on the loop's thread; every turn of the loop ends in one flush.

    ``blobs`` holds the uploaded images of live requests; who submits puts them there and takes them out at the end,
    because a lost encoder output can bring a request back to the encoder at any time before.
    """

    def __init__(self, router: Router, control: ServerControl, owner: ShellOwner) -> None:
        self.router = router
        self.blobs: dict[RequestId, Sequence[bytes]] = {}
        self._control = control
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._storing: set[asyncio.Task[None]] = set()
        self._inbox: deque[Inbound] = deque()
        self._changed: dict[RequestId, JobView] = {}
        """Requests that changed and of which the owner has not been told: of one that changed more than once within a
        batch of messages it hears the last state only."""
        self._arrived: tuple[bytes, ...] = ()
        """Raw frames of the message that the router handles at the moment."""
        self._flushing = False
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._last_told = 0.0

    def start(self) -> None:
        """Listen to the sockets and the clock."""
        self._control.attach(self._loop, self._readable, self._gone)
        self._tick()

    async def close(self, seconds: float) -> None:
        """Let files that are being written be finished, and stop after ``seconds`` at the latest. Decoders keep what is
        not stored by then, and send it to the next server. The sockets stay the caller's."""
        if self._storing:
            await asyncio.wait(self._storing, timeout=seconds)
        if self._storing:
            log.warning("files of %d requests are left to the next server", len(self._storing))
        for task in self._storing:
            task.cancel()
        self._flush()
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def feed(self, event: RouterEvent) -> None:
        """Let the router handle an event now; what it sends leaves at the end of this turn of the loop."""
        try:
            self._perform(self.router.handle(event, self._loop.time()))
        finally:
            self._tell()
            if not self._flushing:
                self._flushing = True
                self._loop.call_soon(self._flush)

    def _readable(self) -> None:
        if self._closed:
            return
        self._inbox.extend(self._control.receive())
        self._drain()

    def _gone(self, work_url: str) -> None:
        if self._closed:
            return
        self._readable()  # its last words count
        for view in self.router.instances():
            if view.work_url == work_url:
                self.feed(InstanceExited(instance=view.instance))

    def _drain(self) -> None:
        inbox, handle = self._inbox, self.router.handle
        now = self._loop.time()
        try:
            while inbox:
                inbound = inbox.popleft()
                self._arrived = inbound.blobs
                self._perform(handle(Received(message=inbound.message), now))
        finally:
            # A message that breaks the router is reported by the loop; those behind it still get their turn.
            self._arrived = ()
            if inbox:
                self._loop.call_soon(self._drain)
            self._tell()
            self._flush()

    def _tell(self) -> None:
        changed, self._changed = self._changed, {}
        for view in changed.values():
            self._owner.updated(view)

    def _flush(self) -> None:
        if self._closed:
            return
        self._flushing = False
        self._control.flush()
        self._set_timer()

    def _set_timer(self) -> None:
        now = self._loop.time()
        deadline = min(self.router.next_deadline(now), now + LONGEST_SLEEP)
        if self._timer is not None:
            if self._timer.when() <= deadline:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.feed(Tick())
        now = self._loop.time()
        if now - self._last_told >= LONGEST_SLEEP:
            self._last_told = now
            self._owner.ticked()

    def _perform(self, actions: Iterable[RouterAction]) -> None:
        for action in actions:
            match action:
                case Update():
                    self._changed[action.view.request] = action.view
                case SendWork():
                    blobs = () if action.with_blobs is None else self.blobs.get(action.with_blobs, ())
                    self._control.send_work(action.work_url, action.message, blobs)
                case SendMember():
                    self._control.send_member(action.instance, action.message)
                case StoreFiles():
                    self._store(action)
                case LeaseGranted() | StageDone() | Clocks():
                    self._owner.noted(action)
                case Count():
                    self._owner.counted(action)
                case Connect():
                    self._control.connect(action.work_url)
                case Disconnect():
                    self._control.disconnect(action.work_url)
                case _:
                    assert_never(action)

    def _store(self, action: StoreFiles) -> None:
        lease = action.lease
        if not action.files:
            # Not at once: the router's other actions of this event come first.
            self._loop.call_soon(self.feed, FilesStored(request=lease.request, attempt=lease.attempt))
            return
        task = self._loop.create_task(self._store_and_tell(action, self._arrived))
        self._storing.add(task)
        task.add_done_callback(self._storing.discard)

    async def _store_and_tell(self, action: StoreFiles, blobs: tuple[bytes, ...]) -> None:
        lease = action.lease
        event: FilesStored | StoreFailed
        try:
            await self._owner.store(lease.request, _with_bytes(action.files, blobs))
            event = FilesStored(request=lease.request, attempt=lease.attempt)
        except Exception as error:  # whatever it is, it must not leave the request in storing
            event = StoreFailed(request=lease.request, attempt=lease.attempt, error=_why(error))
            if event.error.retryable:
                log.warning("files of %s cannot be stored yet: %s", lease.request, error)
            else:
                log.error("files of %s cannot be stored", lease.request, exc_info=error)
        self.feed(event)


def _with_bytes(files: Sequence[MediaFile], blobs: Sequence[bytes]) -> list[tuple[MediaFile, bytes]]:
    for file in files:
        if not 0 <= file.blob < len(blobs):
            raise StorageFailed(f"a media file without its bytes: frame {file.blob} of {len(blobs)}", retryable=False)
    return [(file, blobs[file.blob]) for file in files]


def _why(error: Exception) -> ErrorInfo:
    match error:
        case StorageFull():
            return ErrorInfo(code=error.code, message=error.message, blame=error.blame.value, retryable=True)
        case StorageFailed():
            return ErrorInfo(code=error.code, message=error.message, blame=error.blame.value, retryable=error.retryable)
        case _:
            return ErrorInfo(
                code=StorageFailed.code, message=f"the files could not be kept: {type(error).__name__}", blame="us"
            )
