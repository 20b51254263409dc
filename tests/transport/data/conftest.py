"""Data planes of this process, and of others that can be frozen and killed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.freezing import freeze
from triptych.config import TransferConfig
from triptych.ids import Epoch, InstanceId
from triptych.transport.data.plane import open_plane
from triptych.transport.data.protocol import DataPlane, Pull
from triptych.wire.manifest import Manifest

MIB = 1 << 20
SENDER = Path(__file__).with_name("sender.py")


class Sender:
    """Another process that stages tensors."""

    def __init__(self, epoch: str, kind: str, pool_bytes: int, port: int | None, env: dict[str, str]) -> None:
        arguments = [sys.executable, str(SENDER), epoch, kind, str(pool_bytes), *([str(port)] if port else [])]
        self.process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        )
        assert self._answer() == "ready"

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def _ask(self, **order: Any) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def stage(self, seed: int = 1, nbytes: int = MIB, tensors: bool = True) -> Manifest:
        answer = self._ask(seed=seed, nbytes=nbytes, tensors=tensors)
        return msgspec.msgpack.decode(bytes.fromhex(answer), type=Manifest)

    def release(self, manifest: Manifest) -> int:
        """Bytes that its pool uses after."""
        return int(self._ask(release=manifest.copy))

    def freeze(self) -> None:
        freeze(self.process.pid)

    def wake(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> int:
        """End it in an orderly way; its exit status."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
        self.process.stdin.close()
        status = self.process.wait(60)
        self.process.stdout.close()
        return status


@pytest.fixture
def send() -> Iterator[Callable[..., Sender]]:
    senders: list[Sender] = []

    def start(
        epoch: str = "sender-1",
        kind: str = "auto",
        pool_bytes: int = 16 * MIB,
        port: int | None = None,
        env: dict[str, str] | None = None,
    ) -> Sender:
        sender = Sender(epoch, kind, pool_bytes, port, env or {})
        senders.append(sender)
        return sender

    yield start
    for sender in senders:
        sender.close()


@pytest.fixture(scope="session")
def start() -> type[Sender]:
    """Start a sender; whoever does must close it."""
    return Sender


@pytest.fixture(scope="module")
def sender() -> Iterator[Sender]:
    """One that no test kills, shared because a process takes seconds to start."""
    sender = Sender("shared-sender", "auto", 16 * MIB, None, {})
    yield sender
    assert sender.close() == 0


@pytest.fixture
def open_here() -> Iterator[Callable[..., DataPlane]]:
    """Open a plane in this process; its books are checked and it is closed at the end."""
    planes: list[DataPlane] = []

    def start(kind: str = "auto", pool_bytes: int = 16 * MIB, epoch: str = "receiver-1") -> DataPlane:
        config = TransferConfig(kind=kind, pool_bytes=pool_bytes)  # type: ignore[arg-type]
        plane = open_plane(config, InstanceId("receiver"), Epoch(epoch), "cpu")
        planes.append(plane)
        return plane

    yield start
    for plane in planes:
        plane.check_integrity()
        plane.close()


@pytest.fixture(scope="session")
def pull() -> Callable[..., Pull]:
    def pull(plane: DataPlane, manifest: Manifest, seconds: float = 60.0) -> Pull:
        return plane.pull(manifest, deadline=time.monotonic() + seconds, cancelled=lambda: False)

    return pull


@pytest.fixture(scope="session")
def tensors() -> Callable[[int, int], tuple[torch.Tensor, ...]]:
    """What a sender stages for a seed and a size."""
    spec = importlib.util.spec_from_file_location("sender", SENDER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.tensors


@pytest.fixture(scope="session")
def same() -> Callable[..., bool]:
    def same(left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> bool:
        return len(left) == len(right) and all(
            a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in zip(left, right, strict=True)
        )

    return same


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))
