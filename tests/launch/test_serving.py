"""What a server asks of its operating system, and how it leaves."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from triptych.launch.ports import free_ports

CODE = """
import resource, sys
from triptych.config import ServerConfig
from triptych.launch import serving
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 2048))
async def served(config, on_started, leaving):
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
    return 0
serving._serve = served
sys.exit(serving.run_server(ServerConfig()))
"""


def test_a_server_takes_as_many_descriptors_as_its_user_may_have() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout == "2048 2048\n"


HANGING = """
import asyncio, sys, time
from pathlib import Path
from triptych.config import ServerConfig
from triptych.launch import serving
from triptych.server.service import DiffusionService
real = DiffusionService.start
async def start(service):
    await real(service)
    keeper = service._keeper
    async def hang(work):
        await work
    keeper.spawn(hang(keeper.in_thread(time.sleep, 600)))
    keeper.spawn(hang(asyncio.to_thread(time.sleep, 600)))
DiffusionService.start = start
config = ServerConfig(port=int(sys.argv[1]), scheduler_port=int(sys.argv[2]), output_dir=Path(sys.argv[3]))
status = serving.run_server(config, on_started=lambda: print("started", flush=True))
serving.leave_within(serving.LEAVE_SECONDS)
sys.exit(status)
"""


def test_a_server_whose_store_hangs_leaves_all_the_same_when_it_is_asked_to(tmp_path: Path) -> None:
    frontend, *_, door = free_ports(5)
    command = [sys.executable, "-c", HANGING, str(door), str(frontend), str(tmp_path / "outputs")]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "started\n"
        server.send_signal(signal.SIGTERM)
        assert server.wait(15) == 0  # ten seconds are promised
    finally:
        server.kill()
        server.communicate()


STARTING = """
import sys, time
from pathlib import Path
from triptych.config import ServerConfig
from triptych.launch import serving
from triptych.server import archive, media_store
def hang(*_):
    print("starting", flush=True)
    time.sleep(600)
if sys.argv[4] == "media":
    media_store.LocalMedia.open = hang
else:
    archive.DiskArchive.open = hang
folder = Path(sys.argv[3])
config = ServerConfig(port=int(sys.argv[1]), scheduler_port=int(sys.argv[2]), output_dir=folder, state_dir=folder / "s")
status = serving.run_server(config)
serving.leave_within(serving.LEAVE_SECONDS)
sys.exit(status)
"""


@pytest.mark.parametrize("what", ["media", "journal"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_still_starts_leaves_when_it_is_asked_to(
    tmp_path: Path, what: str, number: signal.Signals
) -> None:
    """Symptom: a server whose store hung at the start was deaf to SIGTERM and Ctrl+C."""
    frontend, *_, door = free_ports(5)
    command = [sys.executable, "-c", STARTING, str(door), str(frontend), str(tmp_path / "outputs"), what]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "starting\n"
        server.send_signal(number)
        assert server.wait(15) == 0  # ten seconds are promised
    finally:
        server.kill()
        server.communicate()


UNSUPERVISED = """
import sys
from triptych.cli.main import main
from triptych.launch.group import _Child
def start(*_):
    raise RuntimeError("can't start new thread")
_Child.start = start
sys.exit(main(["serve", "tiny", "--device", "cpu", *sys.argv[1:]]))
"""


def test_a_server_whose_instance_nobody_can_watch_does_not_stay(tmp_path: Path) -> None:
    """Symptom: `triptych serve MODEL` went on without an instance, answered /health with 200 and never got one."""
    frontend, *_, door = free_ports(5)
    said = ["--port", str(door), "--scheduler-port", str(frontend), "--output-dir", str(tmp_path / "outputs")]
    done = subprocess.run(
        [sys.executable, "-c", UNSUPERVISED, *said], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    assert 'cannot be supervised: RuntimeError("can\'t start new thread")' in done.stderr.splitlines()[-1]
