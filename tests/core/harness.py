"""A router on a bench: hand-made messages go in, actions come out, the books are checked after every event."""

from __future__ import annotations

from typing import Any, TypeVar

from triptych.config import RouterConfig
from triptych.core.events import (
    CancelRequest,
    Count,
    FilesStored,
    JobView,
    Received,
    RouterAction,
    RouterEvent,
    SendMember,
    SendWork,
    StoreFiles,
    Submit,
    Tick,
    Update,
)
from triptych.core.router import Router
from triptych.ids import ROLES, CopyId, Epoch, InstanceId, RequestId, Role
from triptych.wire.manifest import Manifest
from triptych.wire.messages import (
    PROTOCOL_VERSION,
    ErrorInfo,
    Fetched,
    Finished,
    FromInstance,
    Heartbeat,
    Hello,
    Lease,
    MediaFile,
    Output,
    Progress,
    Pull,
    RunStage,
    Staged,
    StageFailed,
    Started,
    Stopped,
)
from triptych.wire.schema import RequestSchema

SERVER = Epoch("server-1")
SCHEMA = RequestSchema(model="m", pipeline="P", split="modular", task="text-to-video", output="video", params=())
URLS = {role: f"tcp://127.0.0.1:{number}" for number, role in enumerate(ROLES, 5556)}
FILE = MediaFile(blob=0, mime="video/mp4", suffix=".mp4", width=8, height=8, frames=5, fps=8.0, checksum=1)

A = TypeVar("A", bound=RouterAction)
M = TypeVar("M")


def hello(name: str, *roles: Role, life: int = 1, **fields: Any) -> Hello:
    """The hello of an instance."""
    values: dict[str, Any] = {
        "instance": InstanceId(name),
        "epoch": Epoch(f"{name}/{life}"),
        "server_epoch": None,
        "protocol": PROTOCOL_VERSION,
        "roles": roles or (Role(name.rstrip("0123456789-")),),
        "work_url": f"tcp://{name}:19000",
        "host": "boot",
        "slots": 1,
        "pool_bytes": 1 << 20,
        "planes": ("local",),
        "schema": SCHEMA,
        "fingerprint": "f",
        "device": "cpu",
    }
    return Hello(**(values | fields))


def manifest(copy: str, request: RequestId, producer: str, *, nbytes: int = 64, life: int = 1) -> Manifest:
    """The manifest of a staged copy."""
    return Manifest(
        copy=CopyId(copy),
        request=request,
        producer=InstanceId(producer),
        epoch=Epoch(f"{producer}/{life}"),
        nbytes=nbytes,
        checksum=0,
        tensors=(),
        tree=b"",
        locators=(),
    )


class Bench:
    """Feeds a router; ``out`` holds the actions of the last event, ``updates`` all views ever shown."""

    def __init__(self, **config: Any) -> None:
        self.router = Router(RouterConfig(**config), SERVER, URLS)
        self.now = 100.0
        self.out: list[RouterAction] = []
        self.updates: dict[RequestId, list[JobView]] = {}
        self.lives: dict[str, int] = {}
        self._sequence = 0

    # -- feeding ---------------------------------------------------------------------------------------------------

    def feed(self, event: RouterEvent) -> list[RouterAction]:
        self.out = self.router.handle(event, self.now)
        self.router.check_integrity()
        for update in self.all(Update):
            self.updates.setdefault(update.view.request, []).append(update.view)
        return self.out

    def receive(self, message: FromInstance) -> list[RouterAction]:
        return self.feed(Received(message=message))

    def join(self, name: str, *roles: Role, life: int = 1, **fields: Any) -> None:
        self.lives[name] = life
        self.receive(hello(name, *roles, life=life, **fields))

    def pool(self, slots: int = 1) -> None:
        """One instance of each role."""
        for role in ROLES:
            self.join(role, slots=slots)

    def submit(
        self, name: str, *, queue_timeout: float = 600.0, run_timeout: float = 600.0, **params: Any
    ) -> RequestId:
        request = RequestId(name)
        self.feed(Submit(request=request, params=params, queue_timeout=queue_timeout, run_timeout=run_timeout))
        return request

    def cancel(self, request: RequestId) -> list[RouterAction]:
        return self.feed(CancelRequest(request=request))

    def wait(self, seconds: float, *, alive: bool = True) -> None:
        """Time passes with its ticks; the instances send heartbeats that list what the router expects if ``alive``."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            if alive:
                for view in self.router.instances():
                    self.beat(view.instance, view.leases)
            self.feed(Tick())

    def beat(self, name: str, leases: tuple[Lease, ...] = (), **fields: Any) -> list[RouterAction]:
        self._sequence += 1
        values: dict[str, Any] = {"sequence": self._sequence, "pool_used": 0, "resident_bytes": 0}
        if "copies" not in fields:
            fields["copies"] = tuple(self.copies_at(name))
        return self.receive(Heartbeat(**self._signed(name), leases=leases, **(values | fields)))

    def copies_at(self, name: str) -> list[CopyId]:
        """What the router believes that an instance keeps."""
        member = self.router._ledger.members.get(InstanceId(name))
        return [] if member is None else list(member.copies)

    def _signed(self, name: str) -> dict[str, Any]:
        epoch = Epoch(f"{name}/{self.lives.get(name, 1)}")
        return {"instance": InstanceId(name), "epoch": epoch, "server_epoch": SERVER}

    # -- reports ---------------------------------------------------------------------------------------------------

    def fetched(self, name: str, lease: Lease) -> list[RouterAction]:
        return self.receive(Fetched(**self._signed(name), lease=lease, seconds=0.25, nbytes=64, plane="shm"))

    def started(self, name: str, lease: Lease) -> list[RouterAction]:
        return self.receive(Started(**self._signed(name), lease=lease))

    def progress(self, name: str, lease: Lease, step: int, steps: int = 10, preview: bytes = b"") -> list[RouterAction]:
        return self.receive(Progress(**self._signed(name), lease=lease, step=step, steps=steps, preview=preview))

    def staged(
        self, name: str, lease: Lease, *copies: tuple[str, Role], nbytes: int = 64, pull: Pull | None = None
    ) -> list[RouterAction]:
        """``copies``: pairs of copy id and consumer; one for the next role if none are given."""
        after = lease.role.next or Role.DECODER
        made = copies or ((f"{lease.request}/{lease.role}.{lease.attempt}", after),)
        life = self.lives.get(name, 1)
        outputs = tuple(
            Output(consumer=role, manifest=manifest(copy, lease.request, name, nbytes=nbytes, life=life))
            for copy, role in made
        )
        return self.receive(
            Staged(
                **self._signed(name), lease=lease, outputs=outputs, compute_seconds=1.0, stage_seconds=0.125, pull=pull
            )
        )

    def finished(self, name: str, lease: Lease) -> list[RouterAction]:
        message = Finished(**self._signed(name), lease=lease, files=(FILE,), compute_seconds=1.0, encode_seconds=0.5)
        return self.receive(message)

    def failed(
        self, name: str, lease: Lease, *lost: str, retryable: bool = True, code: str = "stage_failed", **info: Any
    ) -> list[RouterAction]:
        values: dict[str, Any] = {"message": "it broke", "blame": "instance"}
        error = ErrorInfo(code=code, retryable=retryable, **(values | info))
        copies = tuple(CopyId(copy) for copy in lost)
        return self.receive(StageFailed(**self._signed(name), lease=lease, error=error, lost_copies=copies))

    def stopped(self, name: str, lease: Lease) -> list[RouterAction]:
        return self.receive(Stopped(**self._signed(name), lease=lease))

    def stored(self, lease: Lease) -> list[RouterAction]:
        return self.feed(FilesStored(request=lease.request, attempt=lease.attempt))

    # -- looking ---------------------------------------------------------------------------------------------------

    def all(self, kind: type[A]) -> list[A]:
        """The actions of a kind that the last event caused."""
        return [action for action in self.out if isinstance(action, kind)]

    def sent(self, name: str, kind: type[M]) -> list[M]:
        """The messages of a kind that the last event sent to an instance."""
        sends = [action for action in self.out if isinstance(action, SendWork | SendMember)]
        return [send.message for send in sends if send.instance == name and isinstance(send.message, kind)]

    def run(self, name: str) -> RunStage:
        """The only stage that the last event gave to an instance."""
        (message,) = self.sent(name, RunStage)
        return message

    def counted(self, name: str) -> int:
        return sum(count.name == name for count in self.all(Count))

    def view(self, request: RequestId) -> JobView:
        """The latest view of a request, its end included."""
        return self.updates[request][-1]

    def states(self, request: RequestId) -> list[str]:
        return [str(view.state) for view in self.updates[request]]

    # -- driving ---------------------------------------------------------------------------------------------------

    def encode(self, request: RequestId, name: str = "encoder", *copies: tuple[str, Role], attempt: int = 1) -> None:
        """Let the encoder stage that ``name`` holds succeed."""
        lease = Lease(request, Role.ENCODER, attempt)
        self.started(name, lease)
        self.staged(name, lease, *copies)

    def denoise(self, request: RequestId, name: str = "denoiser", attempt: int = 1) -> None:
        """Let the denoiser stage that ``name`` holds succeed."""
        lease = Lease(request, Role.DENOISER, attempt)
        self.fetched(name, lease)
        self.started(name, lease)
        self.staged(name, lease)

    def decode(self, request: RequestId, name: str = "decoder", attempt: int = 1) -> None:
        """Let the decoder stage that ``name`` holds succeed and its files be stored."""
        lease = Lease(request, Role.DECODER, attempt)
        self.fetched(name, lease)
        self.started(name, lease)
        self.finished(name, lease)
        assert self.all(StoreFiles)
        self.stored(lease)
