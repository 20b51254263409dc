"""What no file of the package does: run or unpickle what came from outside, or take an uploaded name for a path."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import triptych
from tests.e2e.harness import Api, Process, until
from triptych.launch.ports import free_ports

ROOT = Path(triptych.__file__).parent

CALLS = {"eval", "exec", "__import__", "compile"}
"""Builtins that run text."""

ATTRIBUTES = {
    "filename",  # of an upload: a name that a client chose
    "recv_pyobj",
    "send_pyobj",
    "read_pickle",
    "broadcast_object_list",  # torch.distributed moves objects by pickle
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "full_load",
    "unsafe_load",
    "CLoader",
    "FullLoader",
    "Loader",
    "UnsafeLoader",
    "allow_pickle",
}
"""Attributes and functions that unpickle, run what they read, or hand over a name of a client."""

MODULES = {"joblib", "jsonpickle", "multiprocessing", "pty", "telnetlib", "xmlrpc", "yaml"}
"""Modules that unpickle what arrives, or whose plain use is unsafe."""

EXCEPTIONS = {
    ("launch/sources.py", "yaml"),  # the operator's own files, by a SafeLoader
    ("sim/sweep.py", "multiprocessing"),  # a simulator's own children, on no path from a socket
    ("worker/ranks/follower.py", "multiprocessing.connection"),  # whole frames of bytes, decoded by msgspec
    ("worker/ranks/leader.py", "multiprocessing.connection"),
}
"""Files and modules that one of them may import, and what makes that safe."""

UNPICKLES = {"recv", "recv_pyobj", "load"}
"""What a file with such an exception must not call: of these modules it is what unpickles."""

FORBIDDEN_KEYWORDS = {("trust_remote_code", True), ("shell", True), ("allow_pickle", True), ("verify", False)}
"""Keywords that run code of a checkpoint or of a shell, or skip the check of a certificate."""


def files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def dotted(node: ast.expr) -> str:
    """``torch.load`` of the expression that says so."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def offences(tree: ast.AST, file: str = "") -> Iterator[str]:
    for node in ast.walk(tree):
        where = f"line {getattr(node, 'lineno', '?')}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (
                f"{where}: import {name}"
                for name in names
                if name.partition(".")[0] in MODULES and (file, name) not in EXCEPTIONS
            )
        if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            yield f"{where}: .{node.attr}"
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            keywords = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
            if name in CALLS or name in ("os.system", "os.popen"):
                yield f"{where}: {name}()"
            if (file, "multiprocessing.connection") in EXCEPTIONS and name.rpartition(".")[2] in UNPICKLES:
                yield f"{where}: {name}()"
            if name == "yaml.load" and len(node.args) != 2:
                yield f"{where}: {name}() without a loader"
            if name == "torch.load" and keywords.get("weights_only") is not True:
                yield f"{where}: {name}() without weights_only=True"
            yield from (f"{where}: {k}={v}" for k, v in keywords.items() if (k, v) in FORBIDDEN_KEYWORDS)


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_runs_or_unpickles_what_comes_from_outside(path: Path) -> None:
    assert list(offences(ast.parse(path.read_text()), path.relative_to(ROOT).as_posix())) == []


@pytest.mark.parametrize(
    "text",
    [
        "eval('1')",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "socket.recv_pyobj()",
        "upload.filename",
        "import yaml",
        "yaml.load(text)",
        "yaml.load(text, yaml.Loader)",
        "from multiprocessing.connection import Listener",
        "subprocess.run(words, shell=True)",
        "load(path, trust_remote_code=True)",
    ],
)
def test_each_of_these_would_be_found(text: str) -> None:
    assert list(offences(ast.parse(text)))


def test_a_file_that_may_import_connections_must_not_unpickle_from_one() -> None:
    text = "from multiprocessing.connection import Connection\nconnection.{}()"
    assert not list(offences(ast.parse(text.format("recv_bytes")), "worker/ranks/leader.py"))
    assert list(offences(ast.parse(text.format("recv")), "worker/ranks/leader.py"))


DISARM = """
import pickle

def refuse(*_args, **_kwargs):
    raise AssertionError("something was unpickled")

class Refused:
    def __init__(self, *_args, **_kwargs):
        refuse()

for name in ("load", "loads", "_load", "_loads"):
    setattr(pickle, name, refuse)
pickle.Unpickler = pickle._Unpickler = Refused
"""

NOTE = """
import os, pathlib
pathlib.Path(__file__).with_name(f"disarmed-{os.getpid()}").touch()
"""

ROUND = """
import asyncio, pathlib, sys, tempfile, threading
from triptych.bench.noop import NoopInstance
from triptych.config import ServerConfig
from triptych.ids import ROLES
from triptych.launch.ports import free_ports
from triptych.server.service import DiffusionService

async def main(folder):
    port, *_ = free_ports(8)
    service = DiffusionService(ServerConfig(port=port, scheduler_port=port + 1, output_dir=pathlib.Path(folder)))
    await service.start()
    instance = NoopInstance(server_addr=f"tcp://127.0.0.1:{port + 1}", work_url=f"tcp://127.0.0.1:{port + 6}",
                            roles=ROLES, slots=1, media=b"film")
    thread = threading.Thread(target=instance.run)
    thread.start()
    while not service.readiness().ready:
        await asyncio.sleep(0.01)
    job = await service.submit({"prompt": "x"}, output="video")
    print((await service.wait(job.id)).view.state.value)
    instance.stop()
    thread.join()
    await service.close()

with tempfile.TemporaryDirectory() as folder:
    asyncio.run(main(folder))
"""


def test_a_request_goes_from_door_to_file_with_unpickling_disarmed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DISARM + ROUND], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.strip() == "done", done.stderr[-3000:]


def test_a_model_is_loaded_and_serves_in_real_processes_with_unpickling_disarmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(DISARM + NOTE)  # which Python runs at the start of each process
    others = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *([others] if others else [])]))
    scheduler, *_ = free_ports(4)
    (port,) = free_ports(1)
    words = ["serve", "tiny", "--device", "cpu", "--port", str(port), "--scheduler-port", str(scheduler)]
    process = Process("serve", words, tmp_path)
    api = Api(f"http://127.0.0.1:{port}")
    try:
        until(lambda: api.ready() or process.status is not None, "the server being ready")
        assert process.status is None, process.output()[-3000:]
        assert api.make()
        assert len(list(tmp_path.glob("disarmed-*"))) >= 2, "server and instance"
        assert process.stop() == 0, process.output()[-3000:]
        assert "unpickled" not in process.output()
    finally:
        api.close()
        process.kill()
