"""A server with puppet instances: the real machines and sockets, with stages that wait until a test lets them end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from triptych.bench.noop import NoopInstance
from triptych.config import RouterConfig, ServerConfig
from triptych.core.events import JobState
from triptych.core.instance_events import Ended
from triptych.ids import ROLES, RequestId, Role
from triptych.launch.ports import free_ports
from triptych.server.service import DiffusionService, JobRecord
from triptych.wire.messages import Lease, Outcome

PATIENCE = 60.0
"""Seconds after which something that should have happened counts as not happening."""

MOST_PUPPETS = 5
"""Instances that one house has ports for."""

QUICK = RouterConfig(heartbeat_interval=0.1, lease_timeout=1.0)
"""Notices a dead instance within about a second."""


async def until(true: Callable[[], object], what: str) -> None:
    """Wait for a condition, or fail the test with its name."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, f"waited {PATIENCE:.0f} s in vain for: {what}"
        await asyncio.sleep(0.005)


class Puppet(NoopInstance):
    """A no-op instance on a thread of its own that remembers its stages and can hold them."""

    def __init__(self, *, server_port: int, port: int, roles: tuple[Role, ...], slots: int, media: bytes) -> None:
        super().__init__(
            server_addr=f"tcp://127.0.0.1:{server_port}",
            work_url=f"tcp://127.0.0.1:{port}",
            roles=roles,
            slots=slots,
            media=media,
        )
        self.port = port
        self.hold: frozenset[Role] = frozenset()
        self.held: list[Lease] = []
        self.seen: list[tuple[Lease, dict[str, Any], tuple[bytes, ...]]] = []
        self._thread = threading.Thread(target=self.run, name=f"puppet-{port}", daemon=True)
        self._thread.start()

    def work(self, lease: Lease, params: dict[str, Any], blobs: tuple[bytes, ...]) -> Outcome | None:
        self.seen.append((lease, params, blobs))
        if lease.role in self.hold:
            self.held.append(lease)
            return None
        return self.outcome(lease)

    def let_go(self) -> None:
        """End every stage that is held, and hold no more."""
        self.hold = frozenset()
        for lease in self.held:
            self.post(Ended(outcome=self.outcome(lease)))
        self.held.clear()

    def leave(self) -> None:
        """Go with a goodbye, and be gone on return."""
        if self._thread.is_alive():
            self.stop()
            self._thread.join(PATIENCE)

    def crash(self) -> None:
        """Be gone on return without a word to anybody."""
        if self._thread.is_alive():
            self.die()
            self._thread.join(PATIENCE)


class House:
    """One server and its puppets, on ports of their own."""

    def __init__(self, outputs: Path) -> None:
        self.outputs = outputs
        self.port, *_ = self._ports = free_ports(5 + MOST_PUPPETS)
        self.service: DiffusionService
        self.puppets: list[Puppet] = []
        self._next_port = self.port + 5

    def config(self, **settings: Any) -> ServerConfig:
        return ServerConfig(port=self.port, scheduler_port=self.port + 1, output_dir=self.outputs, **settings)

    async def open(self, **settings: Any) -> DiffusionService:
        """Start a server, instead of the one before if there was one."""
        self.service = DiffusionService(self.config(**settings))
        await self.service.start()
        return self.service

    def add(
        self, *roles: Role, slots: int = 2, media: bytes = b"film", port: int | None = None, hold: Role | None = None
    ) -> Puppet:
        """Start an instance; all roles unless some are named. A ``port`` used before means a new life there."""
        if port is None:
            port = self._next_port
            assert port in self._ports, f"more than {MOST_PUPPETS} puppets in one house"
            self._next_port += 1
        puppet = Puppet(server_port=self.port + 1, port=port, roles=roles or ROLES, slots=slots, media=media)
        puppet.hold = frozenset({hold} if hold else ())
        self.puppets.append(puppet)
        return puppet

    async def ready(self) -> None:
        await until(lambda: self.service.readiness().ready, "readiness")

    async def instances(self, count: int) -> None:
        await until(lambda: len(self.service.info()["instances"]) == count, f"{count} live instances")

    async def run(self, prompt: str = "a tree") -> JobRecord:
        """One request to its end."""
        record = await self.service.submit({"prompt": prompt}, output="video")
        return await asyncio.wait_for(self.service.wait(record.id), PATIENCE)

    async def end(self, request: RequestId) -> JobRecord:
        return await asyncio.wait_for(self.service.wait(request), PATIENCE)

    async def reach(self, request: RequestId, state: JobState) -> None:
        await until(lambda: self.service.get(request).view.state is state, f"{request} {state}")

    async def idle(self) -> None:
        """Every slot free and every queue empty, and books that add up."""

        def settled() -> bool:
            roles = self.service.info()["roles"].values()
            return all(role["slots"] == role["free_slots"] and not role["queue_depth"] for role in roles)

        await until(settled, "all slots to be free")
        self.service._router.check_integrity()

    async def close(self) -> None:
        for puppet in self.puppets:
            puppet.crash()
        await self.service.close()
