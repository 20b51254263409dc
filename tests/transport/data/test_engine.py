"""Starting the Mooncake engine: what is really used, and what an operator is told when it cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from triptych.transport.data import engine
from triptych.transport.data.engine import Engine, Transfer
from triptych.transport.data.settings import EngineSettings

OPEN = """
import sys
from triptych.config import TransferConfig
from triptych.errors import ConfigError
from triptych.transport.data.plane import open_plane
try:
    plane = open_plane(TransferConfig({arguments}), "i", "e", "cpu")
except ConfigError as error:
    print("refused:", error)
else:
    print("planes:", *plane.planes)
    plane.close()
"""


def opened(arguments: str, *, path: Path | None = None, **env: str) -> str:
    """What comes of opening a plane in a fresh process."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MC_", "MOONCAKE_"))}
    if path is not None:
        clean["PYTHONPATH"] = os.pathsep.join([str(path), clean.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", OPEN.format(arguments=arguments)],
        env={**clean, **env, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout + done.stderr


def wheel(root: Path, engine: str | None) -> Path:
    """A stand-in for an installed Mooncake whose engine module is ``engine``; none: it has no such module."""
    package = root / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    if engine is not None:
        (package / "engine.py").write_text(engine)
    return root


def test_an_adapter_that_is_not_there_is_refused_and_not_replaced_by_tcp() -> None:
    output = opened("kind='mooncake', ib_device='mlx5_99'")
    assert "refused: Mooncake does not start on 127.0.0.1 over rdma: no RDMA adapter" in output
    assert "mlx5_99" in output


def test_rdma_that_the_environment_asks_for_is_not_replaced_by_tcp_either() -> None:
    output = opened("kind='mooncake'", MOONCAKE_PROTOCOL="rdma")
    assert "refused: " in output
    assert "over rdma: no RDMA adapter" in output or "Mooncake found no adapter" in output
    assert "refused: MOONCAKE_PROTOCOL='efa'" in opened("kind='auto'", MOONCAKE_PROTOCOL="efa")


def test_a_local_hostname_of_the_environment_is_what_peers_are_told(tmp_path: Path) -> None:
    (tmp_path / "mooncake.json").write_text('{"local_hostname": "127.0.0.3", "protocol": "tcp"}')
    assert "planes: local shm mooncake\n" in opened("kind='auto'", MOONCAKE_CONFIG_PATH=str(tmp_path / "mooncake.json"))
    assert "planes: shm\n" in opened("kind='shm'", MOONCAKE_PROTOCOL="efa")  # nothing that shared memory reads


def test_rdma_and_forced_tcp_contradict_each_other() -> None:
    assert "refused: MC_FORCE_TCP is set" in opened("kind='mooncake', ib_device='mlx5_0'", MC_FORCE_TCP="1")


@pytest.mark.parametrize(
    ("problem", "remedy"),
    [
        ("libibverbs.so.1: cannot open shared object file", "apt-get install libibverbs1"),
        ("libcudart.so.13: cannot open shared object file", "triptych[cpu]"),
    ],
)
def test_a_missing_library_is_named_with_its_remedy(tmp_path: Path, problem: str, remedy: str) -> None:
    output = opened("kind='mooncake'", path=wheel(tmp_path, f"raise ImportError({problem!r})"))
    assert f"refused: the Mooncake Transfer Engine does not load: {problem}" in output
    assert remedy in output


def test_a_missing_engine_is_named_with_its_extras(tmp_path: Path) -> None:
    output = opened("kind='mooncake'", path=wheel(tmp_path, None))
    assert "refused: --disagg-transfer mooncake needs the Mooncake Transfer Engine: install triptych[cpu]" in output


def test_auto_uses_the_engine_only_when_other_hosts_can_reach_the_instance(tmp_path: Path) -> None:
    assert "planes: local shm\n" in opened("kind='auto'")
    assert "planes: local shm mooncake\n" in opened("kind='auto', hostname='127.0.0.2'")
    without = opened("kind='auto', hostname='127.0.0.2'", path=wheel(tmp_path, None))
    assert "planes: local shm\n" in without
    assert "only peers of this host can pull from 127.0.0.2" in without


class Patient:
    """Stands in for an engine whose every transfer is done the second time that it is asked about."""

    def __init__(self) -> None:
        self._asked: dict[int, int] = {}

    def initialize(self, *_: object) -> int:
        return 0

    register_memory = unregister_memory = initialize

    def get_rpc_port(self) -> int:
        return 15000

    def batch_transfer_async_read(self, *_: object) -> int:
        self._asked[len(self._asked) + 1] = 0
        return len(self._asked)

    def transfer_check_status(self, batch: int) -> int:
        self._asked[batch] += 1
        return int(self._asked[batch] > 1)


def test_a_transfer_is_asked_about_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the thread that asks is held up for longer than its nap just before it: shorter naps make that common.

    A SimpleQueue of Python 3.11 or 3.12 then waits for its next item, whatever the timeout.
    """
    monkeypatch.setattr(engine, "_loaded", ("tcp", SimpleNamespace(TransferEngine=Patient)))
    monkeypatch.setattr(engine, "_in_use", False)
    monkeypatch.setattr(engine, "_FAST_NAP", 1e-9)
    opened = Engine(EngineSettings(hostname="here", transport="tcp", devices=None), torch.zeros(64, dtype=torch.uint8))
    try:
        for _ in range(40_000):
            transfer = Transfer(session="there:1", remote=0, local=0, nbytes=64, on_late=lambda _: None)
            opened.start(transfer)
            opened.wait(transfer, deadline=time.monotonic() + 30, cancelled=lambda: False, what="a transfer")
    finally:
        opened.close()


PULL = """
import sys, time
import msgspec
from triptych.config import TransferConfig
from triptych.transport.data.plane import open_plane
from triptych.wire.manifest import Manifest
plane = open_plane(TransferConfig(kind="auto", hostname="127.0.0.2", pool_bytes=1 << 24), "i", "e", "cpu")
manifest = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=Manifest)
replace = msgspec.structs.replace
elsewhere = replace(manifest, locators=tuple(replace(locator, host="elsewhere") for locator in manifest.locators))
for copy in (manifest, elsewhere):
    print(plane.pull(copy, deadline=time.monotonic() + 60, cancelled=lambda: False).plane, flush=True)
plane.close()
import os
os._exit(0)
"""


def test_on_one_host_nothing_goes_through_mooncake_unless_forced(send: Callable[..., Any]) -> None:
    sender = send(env={"MOONCAKE_LOCAL_HOSTNAME": "127.0.0.2"})
    manifest = sender.stage()
    assert [locator.plane for locator in manifest.locators] == ["local", "shm", "mooncake"]
    words = [sys.executable, "-c", PULL, msgspec.msgpack.encode(manifest).hex()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.split() == ["shm", "mooncake"], done.stderr
