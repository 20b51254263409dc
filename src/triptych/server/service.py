"""The DiffusionService: what the HTTP door calls. Jobs go in, their state and files come out."""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from prometheus_client import CollectorRegistry

import triptych
from triptych.config import ServerConfig, tcp_url
from triptych.core.events import (
    CancelRequest,
    Count,
    JobState,
    JobView,
    MigrateRequest,
    Note,
    PauseRequest,
    ResumeRequest,
    Submit,
)
from triptych.core.forecast import Outlook
from triptych.core.journal import Paused
from triptych.core.router import Router
from triptych.core.states import TERMINAL
from triptych.errors import NotMovable, NotReady
from triptych.ids import ROLES, Epoch, RequestId, Role
from triptych.server.acceptance import Order
from triptych.server.idempotency import IdempotencyKey
from triptych.server.info import life_of
from triptych.server.keeper import Keeper
from triptych.server.metrics import Gauges, Metrics
from triptych.server.notices import Notices
from triptych.server.pool import PoolView
from triptych.server.readiness import Readiness
from triptych.server.records import TASK_ID, Entry, JobRecord, OutputKind, StoredFile, turn
from triptych.server.shell import Shell
from triptych.transport.control.keys import load_keys
from triptych.transport.control.server import ServerControl
from triptych.wire.messages import MediaFile
from triptych.wire.schema import RequestSchema

__all__ = ["DiffusionService", "JobRecord", "OutputKind", "Readiness", "StoredFile"]


CLOSE_SECONDS = 3.0
"""How long `DiffusionService.close` may take."""
_JOURNAL_SECONDS = 1.0
"""Of them, for the last words of the journal."""


class DiffusionService:
    """One DiffusionServer without its HTTP door. All methods belong to the thread of the loop that ran `start`.

    Timeouts are in seconds, times of records in Unix seconds. Ids that nobody knows raise `NotFound`.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._epoch = Epoch(secrets.token_hex(8))
        self._created = time.monotonic()
        self._keeper = Keeper(config)
        self._records = self._keeper.records
        self.saved = self._keeper.saved
        self._router = Router(config.router, self._epoch, self._result_urls())
        self._pool = PoolView(self._router, config.instance_urls)
        self._metrics = Metrics(self._gauges)
        self._notices = Notices()
        self._control: ServerControl | None = None
        self._shell: Shell | None = None
        self._closed = False

    # -- life --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open media store and journal, take up the jobs of earlier lives, bind the four scheduler ports and listen.

        Raises `ConfigError` for a port that is taken, a key that is missing or a state folder in use, and
        `StorageFailed` for a folder that cannot be used.
        """
        remembered = await self._keeper.open()
        try:
            keys = None if self._config.key_dir is None else load_keys(self._config.key_dir, "server")
            self._control = ServerControl(self._config.host, self._config.scheduler_port, keys=keys)
        except BaseException:
            await self._keeper.close(CLOSE_SECONDS)
            raise
        self._keeper.start()
        self._shell = Shell(self._router, self._control, self)
        for job in remembered:
            if (entry := self._keeper.revive(job)) is not None:
                if job.images:
                    self._shell.blobs[entry.id] = job.images
                self._shell.feed(job.history.restore())
                if job.history.paused:
                    self._shell.feed(PauseRequest(request=entry.id))
        self._shell.start()

    async def close(self) -> None:
        """Stop listening, finish files that are being written, and wake everybody who still waits. Idempotent.

        Takes `CLOSE_SECONDS` at the most, even where a store or a disk does not answer.
        """
        if self._closed:
            return
        self._closed = True
        for entry in self._records:
            entry.wake_all()
        clock = asyncio.get_running_loop().time
        end = clock() + CLOSE_SECONDS - _JOURNAL_SECONDS
        await self._keeper.rest(end - clock())
        if self._shell is not None:
            await self._shell.close(max(0.0, end - clock()))
            for clocks in self._router.clocks(parked=True):
                self._keeper.note(clocks)
        await self._keeper.rest(max(0.0, end - clock()))
        if self._control is not None:
            self._control.close()
        await self._keeper.close(_JOURNAL_SECONDS)

    # -- jobs --------------------------------------------------------------------------------------------------

    async def submit(
        self,
        params: dict[str, Any],
        *,
        output: OutputKind,
        images: Sequence[bytes] = (),
        metadata: Mapping[str, str] | None = None,
        queue_timeout: float | None = None,
        run_timeout: float | None = None,
        idempotency_key: IdempotencyKey | None = None,
    ) -> JobRecord:
        """Accept a request whose parameters were validated against `schema`; it cannot be lost from then on.

        ``params`` name image ``i`` of ``images`` (encoded files) as ``{"blob": i}``. A key that stands for a job
        already gives that job. Raises `KeyReused` when that was another order, `NotReady` before an instance has said
        what it accepts and while stopping, and `StorageFull` while media or journal could not be kept.
        """
        self._live_shell()
        order = Order(
            output,
            params,
            dict(metadata or {}),
            tuple(images),
            self._config.queue_timeout if queue_timeout is None else queue_timeout,
            self._config.run_timeout if run_timeout is None else run_timeout,
        )
        if idempotency_key is not None:
            id = await self._keeper.keys.once(idempotency_key, functools.partial(self._accept, order, idempotency_key))
        elif self._config.state_dir is None:
            id = await self._accept(order, None)
        else:
            # Whoever hangs up meanwhile does not leave a job behind that is written down and not run.
            id = await asyncio.shield(self._keeper.spawn(self._accept(order, None)))
        return self.get(id)

    async def repeated(self, key: IdempotencyKey) -> JobRecord | None:
        """The job that a key stands for already, or None. Raises `KeyReused`."""
        id = await self._keeper.keys.repeated(key)
        return None if id is None else self.get(id)

    async def _accept(self, order: Order, key: IdempotencyKey | None) -> RequestId:
        shell = self._live_shell()
        if self.schema() is None:
            raise NotReady("no encoder has registered yet, so it is not known what the model accepts")
        entry = await self._keeper.accept(order, key)
        if order.images:
            shell.blobs[entry.id] = order.images
        submit = Submit(
            request=entry.id,
            params=order.params,
            queue_timeout=order.queue_timeout,
            run_timeout=order.run_timeout,
        )
        try:
            shell.feed(submit)
        except BaseException:  # not accepted, so it must not be listed either
            shell.blobs.pop(entry.id, None)
            await self._keeper.erase(entry)
            raise
        self._notices.accepted(entry.id)
        return entry.id

    def get(self, id: RequestId) -> JobRecord:
        """The job as it is now; raises `NotFound`."""
        return self._record(self._records.get(id))

    async def images(self, id: RequestId) -> tuple[bytes, ...]:
        """What was uploaded with a job, if it is kept: of videos, as long as they are, where there is a state folder.
        Raises `NotFound` or `StorageFailed`."""
        return await self._keeper.images(self._records.get(id))

    async def shared_file(self, id: RequestId, name: str) -> StoredFile | None:
        """A file of a job that this server does not know, from a media store that it shares with the one that does;
        None when there is none. Raises `StorageFailed`."""
        return await self._keeper.find(id, name)

    async def fetch(self, file: StoredFile) -> Path:
        """Where a file lies on this machine, once it does. Raises `FileNotFoundError` or `StorageFailed`."""
        return await self._keeper.fetch(file)

    def named(self, name: str) -> JobRecord | None:
        """The newest job to which its client gave that name (`TASK_ID`); None when there is none."""
        found = self._records.having(TASK_ID, name)
        return self._record(found[-1]) if found else None

    def page(
        self, *, output: OutputKind, after: RequestId | None, limit: int, order: Literal["asc", "desc"]
    ) -> tuple[list[JobRecord], bool]:
        """At most ``limit`` jobs of one kind by age, from behind the cursor ``after`` on, and whether more follow."""
        page, more = self._records.page(output=output, after=after, limit=limit, order=order)
        return [self._record(entry) for entry in page], more

    def live(self) -> list[JobRecord]:
        """Every job that has not ended, oldest first."""
        return [self._record(entry) for entry in self._records if not entry.ended]

    def states(self) -> Mapping[JobState, int]:
        """How many remembered jobs are in each state."""
        return self._records.states

    def paused(self) -> Mapping[RequestId, JobState]:
        """Live jobs that are paused, and their states."""
        return self._router.paused()

    async def wait(self, id: RequestId) -> JobRecord:
        """The job once it has ended; one that is deleted meanwhile ends as cancelled. Raises `NotFound`, and
        `NotReady` when the server stops before."""
        entry = self._records.get(id)
        while not entry.ended:
            self._live_shell()
            await turn(entry.waiters)
        return entry.record()

    def watch(self, id: RequestId) -> AsyncIterator[JobRecord]:
        """The job now and after every change, ending with its final state. A slow reader misses states in between
        and costs no memory. Raises `NotFound` at once, and `NotReady` when the server stops."""
        return self._watch(self._records.get(id))

    async def _watch(self, entry: Entry) -> AsyncIterator[JobRecord]:
        shown: JobView | None = None
        while True:
            while entry.view is shown:
                self._live_shell()
                await turn(entry.watchers)
            shown = entry.view
            yield self._record(entry)
            if shown.state in TERMINAL:
                return

    async def cancel(self, id: RequestId) -> JobRecord:
        """Ask for the job to stop; nothing happens when it has ended. Raises `NotFound`."""
        entry = self._records.get(id)
        if not entry.ended:
            self._live_shell().feed(CancelRequest(request=id))
            await self._keeper.settle()
        return self._record(entry)

    def pause(self, id: RequestId) -> JobRecord:
        """Have the job wait until `resume`, a denoising one from the next step on; its clocks stand still meanwhile.

        Nothing happens when it has ended, or when nothing is left but to store its files. Raises `NotFound`.
        """
        entry = self._records.get(id)
        if not entry.ended:
            self._live_shell().feed(PauseRequest(request=id))
            if entry.view.paused:
                self._keeper.note(Paused(request=id, paused=True))
        return self._record(entry)

    def resume(self, id: RequestId) -> JobRecord:
        """Let a paused job go on, from the step that it has reached if it can. Raises `NotFound`."""
        entry = self._records.get(id)
        if not entry.ended:
            self._live_shell().feed(ResumeRequest(request=id))
            self._keeper.note(Paused(request=id, paused=False))
        return self._record(entry)

    def migrate(self, id: RequestId) -> JobRecord:
        """Have another denoiser go on with the job from the next step on. Raises `NotFound`, and `NotMovable` when none
        can.
        """
        entry = self._records.get(id)
        reason = self._router.immovable(id)
        if reason is not None:
            raise NotMovable(f"job {id} cannot be moved: {reason}")
        self._live_shell().feed(MigrateRequest(request=id))
        return self._record(entry)

    def free_key(self, id: RequestId) -> None:
        """Have the Idempotency-Key of a job that is about to be deleted stand for nothing. Raises `NotFound`."""
        self._keeper.free_key(self._records.get(id))

    async def delete(self, id: RequestId) -> JobRecord:
        """Forget a job and its media, stopping it first when it is live; returns its last state."""
        self.free_key(id)
        await self.cancel(id)
        entry = self._records.get(id)
        record = self._record(entry)
        await self._keeper.erase(entry)
        return record

    # -- the server itself -------------------------------------------------------------------------------------

    @property
    def registry(self) -> CollectorRegistry:
        """The metrics. To be rendered on the loop's thread, because a scrape reads the router."""
        return self._metrics.registry

    @property
    def upload_bytes(self) -> int:
        """Bytes of the pictures that live jobs hold in memory."""
        blobs = {} if self._shell is None else self._shell.blobs
        return sum(len(image) for images in blobs.values() for image in images)

    def schema(self) -> RequestSchema | None:
        """What the model accepts; None until an encoder has said hello."""
        return self._router.schema

    def largest_pool(self, role: Role) -> int | None:
        """Bytes of the largest transfer pool of a role's instances; None while there is none."""
        return self._pool.largest(role)

    def outlook(self, id: RequestId) -> Outlook:
        """When the job will start and end, as far as that is known."""
        return self._router.outlook(id)

    def predicted_wait(self) -> float | None:
        """Seconds that a job which came now would wait in all; None when that is not known."""
        return self._router.predicted_wait()

    def readiness(self) -> Readiness:
        """Whether every role has a live instance, every named instance has come once, and jobs can be written down;
        reasons name what is missing, also what can be done without."""
        return self._keeper.state().judge(self._pool.readiness())

    def info(self) -> dict[str, Any]:
        """Roles, instances, slots, queues and memory as plain JSON values, for people and dashboards."""
        readiness = self.readiness()
        # Who knows the epoch of an instance can speak in its name where the control plane has no keys.
        name = str if self._config.api_keys else life_of
        about = {
            "version": triptych.__version__,
            "server_epoch": name(self._epoch),
            "uptime_seconds": time.monotonic() - self._created,
            "ready": readiness.ready,
            "reasons": list(readiness.reasons),
            "requests": {state.value: count for state, count in self._records.states.items() if count},
            "dropped": {} if self._control is None else self._control.dropped,
        }
        return about | self._pool.describe(name)

    # -- called by the shell -----------------------------------------------------------------------------------

    def updated(self, view: JobView) -> None:
        """A request changed: remember it, measure it, and tell who waits."""
        entry = self._records.find(view.request)
        if view.state in TERMINAL:
            self._metrics.end(view.state, None if entry is None else max(0.0, time.time() - entry.created_at))
            if self._shell is not None:
                self._shell.blobs.pop(view.request, None)
            self._notices.ended(view)
        if entry is None:
            return
        timings = view.timings
        while entry.timings_seen < len(timings):
            self._metrics.stage(timings[entry.timings_seen])
            entry.timings_seen += 1
        self._keeper.update(entry, view)

    def noted(self, entry: Note) -> None:
        """What a next life of the server needs to know of a live job."""
        self._keeper.note(entry)

    def counted(self, count: Count) -> None:
        """The router found something worth counting."""
        self._metrics.count(count)
        self._notices.add(count)

    async def store(self, request: RequestId, files: Sequence[tuple[MediaFile, bytes]]) -> None:
        """Keep the files of a job that is about to end; raises `StorageFull` or `StorageFailed`."""
        await self._keeper.store(request, files)

    def ticked(self) -> None:
        """About once a second: see who is there and look up host names, count what was dropped, forget what expired,
        see whether files can be stored, audit the books."""
        if self._control is not None:
            self._metrics.dropped = self._control.dropped
        self._keeper.expire()
        self._keeper.look()
        self._audit()
        self._notices.flush()
        if self._pool.look():
            self._keeper.spawn(self._pool.resolve())

    # -- inside ------------------------------------------------------------------------------------------------

    def _record(self, entry: Entry) -> JobRecord:
        # Places in a queue and clocks move without an update, so a live job is looked at anew.
        view = None if entry.ended else self._router.view(entry.id)
        return entry.record(view)

    def _audit(self) -> None:
        """While nothing is live, say whether the router still holds something, or holds it twice."""
        if not any(count for state, count in self._records.states.items() if state not in TERMINAL):
            try:
                self._router.check_integrity()
            except AssertionError as error:
                self.counted(Count(name="books_wrong", detail=str(error)))

    def _gauges(self) -> Gauges:
        return self._pool.gauges(self._records.states, self._keeper.state().failing)

    def _live_shell(self) -> Shell:
        if self._closed or self._shell is None:
            raise NotReady("the server is stopping" if self._closed else "the server has not started")
        return self._shell

    def _result_urls(self) -> dict[Role, str]:
        return {role: tcp_url(self._config.host, self._config.result_port(role)) for role in ROLES}
