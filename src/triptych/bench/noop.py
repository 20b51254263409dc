"""An instance whose stages do nothing: the real machine and the real sockets without a model, a GPU or torch."""

from __future__ import annotations

import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, assert_never

import xxhash

from triptych.config import parse_tcp_url
from triptych.core.events import Count, Tick
from triptych.core.instance import InstanceMachine
from triptych.core.instance_events import (
    Abort,
    ComputeStarted,
    ConnectResults,
    Ended,
    Forget,
    FromServer,
    Halt,
    InstanceAction,
    InstanceEvent,
    KeepCopy,
    Pulled,
    ReleaseCopies,
    Report,
    Say,
    StartCompute,
    StartPull,
    Stop,
    Suspend,
)
from triptych.ids import CopyId, Epoch, InstanceId, Role
from triptych.transport.control.instance import InstanceControl
from triptych.transport.control.keys import Keys
from triptych.wire.manifest import Manifest
from triptych.wire.messages import (
    PROTOCOL_VERSION,
    Finished,
    Hello,
    Lease,
    MediaFile,
    Outcome,
    Output,
    Staged,
    Stopped,
)
from triptych.wire.schema import Param, RequestSchema

SCHEMA = RequestSchema(
    model="noop",
    pipeline="NoopPipeline",
    split="modular",
    task="text-to-video",
    output="video",
    params=(Param(name="prompt", type="string", required=True),),
)
"""What a no-op instance says that it accepts."""


class NoopInstance:
    """One instance, run by the thread that calls `run`. What it keeps of a lease ends with that lease.

    ``media``: bytes of the one file of each finished request; empty means no file. Subclasses may override `work`.
    """

    def __init__(
        self,
        *,
        server_addr: str,
        work_url: str,
        roles: tuple[Role, ...],
        slots: int,
        media: bytes = b"",
        schema: RequestSchema = SCHEMA,
        keys: Keys | None = None,
    ) -> None:
        host, port = parse_tcp_url("work_url", work_url)
        self.instance = InstanceId(f"noop-{port}")
        self.epoch = Epoch(secrets.token_hex(8))
        self.media = media
        self._made = 0
        self._control = InstanceControl(bind_host=host, work_port=port, server_addr=server_addr, keys=keys)
        self._machine = InstanceMachine(
            Hello(
                instance=self.instance,
                epoch=self.epoch,
                server_epoch=None,
                protocol=PROTOCOL_VERSION,
                roles=roles,
                work_url=work_url,
                host="noop",
                slots=slots,
                pool_bytes=1 << 20,
                planes=("local",),
                schema=schema,
                fingerprint="noop",
                device="none",
            )
        )
        self._posted: deque[InstanceEvent] = deque()
        self._files: dict[Lease, tuple[bytes, ...]] = {}
        self._dead = False
        self.halted: Halt | None = None
        """Why the machine ended; None while it runs, and for ever after `die`."""

    # -- life --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until the machine halts or `die` is called. Sockets are closed on return."""
        control, machine, posted = self._control, self._machine, self._posted
        try:
            self._feed(Tick())
            while self.halted is None and not self._dead:
                control.flush()
                now = time.monotonic()
                deadline = machine.next_deadline(now)
                deliveries = control.poll(max(0.0, deadline - now))
                while posted:
                    self._feed(posted.popleft())
                for message, blobs in deliveries:
                    self._feed(FromServer(message=message, blobs=blobs))
                if time.monotonic() >= deadline:
                    self._feed(Tick())
        finally:
            control.close()

    def post(self, event: InstanceEvent) -> None:
        """Give the machine an event. Safe from any thread while `run` runs."""
        self._posted.append(event)
        self._control.wake()

    def stop(self) -> None:
        """Leave with a goodbye."""
        self.post(Stop(reason="asked to stop"))

    def die(self) -> None:
        """Leave as a killed process does: without a word."""
        self._dead = True
        self._control.wake()

    # -- stages ------------------------------------------------------------------------------------------------

    def work(self, lease: Lease, params: dict[str, Any], blobs: tuple[bytes, ...]) -> Outcome | None:
        """What a stage leaves; None leaves it running until it is aborted or its `Ended` is posted."""
        return self.outcome(lease)

    def outcome(self, lease: Lease) -> Staged | Finished:
        """The success of a stage: an empty copy for the next role, or the media file."""
        consumer = lease.role.next
        if consumer is None:
            files = (_describe(self.media),) if self.media else ()
            if files:
                self._files[lease] = (self.media,)
            return Finished(
                instance=self.instance,
                epoch=self.epoch,
                server_epoch=None,
                lease=lease,
                files=files,
                compute_seconds=0.0,
                encode_seconds=0.0,
            )
        self._made += 1
        manifest = Manifest(
            copy=CopyId(f"{self.instance}-{self.epoch}-{self._made}"),
            request=lease.request,
            producer=self.instance,
            epoch=self.epoch,
            nbytes=0,
            checksum=0,
            tensors=(),
            tree=b"",
            locators=(),
        )
        return Staged(
            instance=self.instance,
            epoch=self.epoch,
            server_epoch=None,
            lease=lease,
            outputs=(Output(consumer=consumer, manifest=manifest),),
            compute_seconds=0.0,
            stage_seconds=0.0,
        )

    # -- inside ------------------------------------------------------------------------------------------------

    def _feed(self, event: InstanceEvent) -> None:
        events: deque[InstanceEvent] = deque((event,))
        while events:
            actions = self._machine.handle(events.popleft(), time.monotonic())
            for action in actions:
                events.extend(self._do(action))

    def _do(self, action: InstanceAction) -> Iterable[InstanceEvent]:
        match action:
            case Report():
                self._report(action)
            case StartPull():
                return (Pulled(lease=action.lease, seconds=0.0, nbytes=0, plane="local"),)
            case StartCompute():
                outcome = self.work(action.lease, action.params, action.blobs)
                started = ComputeStarted(lease=action.lease)
                return (started,) if outcome is None else (started, Ended(outcome=outcome))
            case Say():
                self._control.say(action.message)
            case ConnectResults():
                self._control.connect_results(action.urls)
            case Abort():
                return (Ended(outcome=self._stopped(action.lease)),)
            case Forget():
                self._files.pop(action.lease, None)
            case Halt():
                self.halted = action
            case ReleaseCopies() | Count():
                pass
            case Suspend() | KeepCopy():  # a stage here has no steps to stop between, and a copy no bytes to keep
                pass
            case _:
                assert_never(action)
        return ()

    def _report(self, action: Report) -> None:
        message = action.message
        blobs = self._files.get(message.lease, ()) if isinstance(message, Finished) else ()
        self._control.report(action.role, message, blobs)

    def _stopped(self, lease: Lease) -> Stopped:
        return Stopped(instance=self.instance, epoch=self.epoch, server_epoch=None, lease=lease)


def _describe(data: bytes) -> MediaFile:
    checksum = xxhash.xxh3_64_intdigest(data)
    return MediaFile(blob=0, mime="video/mp4", suffix=".mp4", width=64, height=64, frames=1, fps=8.0, checksum=checksum)


def main(arguments: list[str]) -> int:
    """Run one instance until standard input ends: ``SERVER_ADDR WORK_URL ROLE[,ROLE...] SLOTS``."""
    server_addr, work_url, roles, slots = arguments
    instance = NoopInstance(
        server_addr=server_addr,
        work_url=work_url,
        roles=tuple(Role(role) for role in roles.split(",")),
        slots=int(slots),
    )

    def follow_parent() -> None:
        sys.stdin.buffer.read()
        instance.stop()

    threading.Thread(target=follow_parent, name="follow-parent", daemon=True).start()
    instance.run()
    return 0 if instance.halted is not None and instance.halted.error is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
