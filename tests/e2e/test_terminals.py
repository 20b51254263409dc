"""The documented session: three roles and a server, each in its own terminal, in any order, and a client with curl."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import asking
from tests.e2e.harness import Api, Process, stop_all, until
from triptych.launch.ports import free_ports
from triptych.models import tiny_path

PORTS = {"19655": "frontend", "19000": "encoder", "19001": "denoiser", "19002": "decoder", "22000": "http"}

TERMINALS = {
    "encoder": "triptych serve --model-path MODEL --disagg-role encoder  "
    "--disagg-server-addr tcp://127.0.0.1:19655 --scheduler-port 19000 --num-gpus 1 --base-gpu-id 0",
    "denoiser": "triptych serve --model-path MODEL --disagg-role denoiser "
    "--disagg-server-addr tcp://127.0.0.1:19655 --scheduler-port 19001 --num-gpus 1 --base-gpu-id 1",
    "decoder": "triptych serve --model-path MODEL --disagg-role decoder  "
    "--disagg-server-addr tcp://127.0.0.1:19655 --scheduler-port 19002 --num-gpus 1 --base-gpu-id 2",
    "server": "triptych serve --model-path MODEL --disagg-role server --encoder-urls tcp://127.0.0.1:19000 "
    "--denoiser-urls tcp://127.0.0.1:19001 --decoder-urls tcp://127.0.0.1:19002 "
    "--host 0.0.0.0 --port 22000 --scheduler-port 19655 --insecure",
}
"""As documented; the tests only put free ports in place of the documented ones."""

CURL = (
    "curl http://127.0.0.1:22000/v1/videos -sS -H",
    "Content-Type: application/json",
    '{"model": "MODEL", "prompt": "A curious raccoon exploring a garden, cinematic", "size": "SIZE", '
    '"num_frames": FRAMES, "num_inference_steps": STEPS}',
)


DOCUMENTED_SIZE = "832x480"


class Session:
    """The terminals of one session."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(tiny_path(), folder / "MODEL")  # any local model folder
        frontend = free_ports(4)[0]
        chosen = {"frontend": frontend, "http": free_ports(1)[0]}
        chosen |= {role: free_ports(1)[0] for role in ("encoder", "denoiser", "decoder")}
        self._ports = {documented: str(chosen[what]) for documented, what in PORTS.items()}
        self.api = Api(self.here("http://127.0.0.1:22000"))
        self.open: dict[str, Process] = {}

    def here(self, text: str) -> str:
        """The documented text with this session's ports."""
        for documented, port in self._ports.items():
            text = text.replace(documented, port)
        return text

    def type(self, terminal: str) -> Process:
        """Start what is documented for a terminal."""
        words = self.here(TERMINALS[terminal]).split()[1:]
        self.open[terminal] = Process(terminal, words, self.folder, forked=terminal != "server")
        return self.open[terminal]

    def curl(self, size: str = "64x64", frames: int = 5, steps: int = 2) -> str:
        """The documented request, of another size and length; the job's id."""
        command, header, body = CURL
        body = body.replace("SIZE", size).replace("FRAMES", str(frames)).replace("STEPS", str(steps))
        answer = subprocess.run(
            [*self.here(command).split(), header, "-d", body], check=True, capture_output=True, text=True
        )
        return json.loads(answer.stdout)["id"]

    def close(self) -> None:
        self.api.close()
        stop_all(self.open.values(), signal.SIGINT)


@pytest.fixture
def session(folder: Path) -> Iterator[Session]:
    session = Session(folder)
    yield session
    session.close()


def test_the_documented_session_works_with_the_server_last(session: Session) -> None:
    for terminal in ("encoder", "denoiser", "decoder", "server"):
        session.type(terminal)
    until(session.api.ready, "the session being ready")
    job = session.curl(DOCUMENTED_SIZE, frames=1, steps=1)
    video = session.api.done(job)
    assert video["size"] == DOCUMENTED_SIZE
    assert "attention of transformer runs on native" in session.open["denoiser"].output()
    found = re.search(r"metrics on (http://\S+)", session.open["denoiser"].output())
    assert found
    figures = asking.get(found[1], trust_env=False).text
    assert "triptych_instance_steps_total 1.0" in figures
    assert 'triptych_attention_backend_info{backend="native",model="transformer"} 1.0' in figures
    assert video["prompt"] == "A curious raccoon exploring a garden, cinematic"
    assert session.api.content(job)[4:8] == b"ftyp"


def test_the_server_may_come_first_and_a_role_and_the_server_may_be_restarted(session: Session) -> None:
    for terminal in ("server", "decoder", "encoder", "denoiser"):
        session.type(terminal)
    until(session.api.ready, "the session being ready")
    session.api.done(session.curl())
    for terminal in ("denoiser", "server"):
        assert session.open[terminal].stop(signal.SIGINT) == 0
        until(lambda: not session.api.ready(), f"the loss of the {terminal} being noticed")
        session.type(terminal)
        until(session.api.ready, f"the session being ready again with a new {terminal}")
        session.api.done(session.curl())
