"""A deployment with keys, by the commands of a user."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import zmq

from tests.e2e.conftest import Spawn
from tests.e2e.harness import ROLES, Api, Deployment, until
from triptych.launch.ports import free_ports


def keygen(folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "triptych.cli.main", "keygen", str(folder)], check=True, capture_output=True)


def test_up_passes_the_keys_on_and_a_stranger_is_counted(spawn: Spawn, folder: Path) -> None:
    keygen(folder / "keys")
    port, scheduler, *_ = free_ports(5)
    up = spawn(
        "up", "up", "tiny", "--device", "cpu", "--replicas", "1", "--port", str(port), "--scheduler-port",
        str(scheduler), "--disagg-key-dir", str(folder / "keys"), forked=True,
    )  # fmt: skip
    until(lambda: "ready on http://" in up.output() or up.status is not None, "up being ready")
    assert up.status is None, up.output()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(f"tcp://127.0.0.1:{scheduler}")
        api = Api(f"http://127.0.0.1:{port}")
        until(lambda: 'triptych_dropped_frames_total{socket="unknown_peer"}' in api.metrics(), "the stranger's count")
        assert api.make()
        api.close()
    assert up.stop() == 0


def test_an_instance_without_the_key_is_not_let_in_and_one_with_it_joins_later(folder: Path) -> None:
    keygen(folder / "keys")
    keygen(folder / "others")
    with Deployment(folder) as pool:
        server = pool.start_server("--disagg-key-dir", str(folder / "keys"))
        strangers = [
            pool.start("encoder-0", "--disagg-role", "encoder,denoiser,decoder"),
            pool.start(
                "encoder-1", "--disagg-role", "encoder,denoiser,decoder", "--disagg-key-dir", str(folder / "others")
            ),
        ]
        for stranger in strangers:
            until(lambda log=stranger: "were not given the same keys" in log.output(), f"{stranger.name} to say so")
        until(lambda: "came without the right keys" in server.output(), "the server to say so")
        assert pool.registered() == {}
        for stranger in strangers:
            assert stranger.stop() == 0
        pool.instances.clear()
        for role in ROLES:
            pool.start(f"{role}-7", "--disagg-key-dir", str(folder / "keys"))
        pool.wait_ready()
        assert pool.api.make()


def test_a_key_that_is_missing_is_named_at_once(spawn: Spawn, folder: Path) -> None:
    port, *_ = free_ports(5)
    keys = ["--disagg-key-dir", str(folder / "none")]
    server = spawn("server", "serve", "--disagg-role", "server", "--port", str(port), *keys)
    instance = spawn(
        "instance", "serve", "tiny", "--device", "cpu", "--disagg-role", "encoder", "--disagg-server-addr",
        "tcp://127.0.0.1:1", "--scheduler-port", str(port), *keys,
    )  # fmt: skip
    for process, name in ((server, "server.secret"), (instance, "instance.secret")):
        assert process.end() == 2
        assert f"{name} is missing" in process.output()
        assert "triptych keygen" in process.output()
