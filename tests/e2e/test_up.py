"""`triptych up` and `launch_pool_disagg_server`: a whole deployment that leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

import triptych
from tests.e2e.conftest import Spawn
from tests.e2e.harness import Api, Process, running, until
from tests.e2e.nursery import forking
from triptych.launch.ports import free_ports
from triptych.transport.data.segments import segments


def family(process: Process) -> list[int]:
    """Process ids of all that a process started."""
    return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]


def listening(pids: list[int]) -> set[int]:
    """Ports that processes listen on."""
    connections = (one for pid in pids for one in psutil.Process(pid).net_connections("tcp"))
    return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}


def start_up(spawn: Spawn, *words: str, device: str = "cpu", forked: bool = False) -> tuple[Process, Api]:
    port, scheduler, *_ = free_ports(5)
    process = spawn("up", "up", "tiny", "--device", device, "--port", str(port), "--scheduler-port", str(scheduler),
                    *words, forked=forked)  # fmt: skip
    until(lambda: "ready on http://" in process.output() or process.status is not None, "up being ready")
    assert process.status is None, process.output()
    return process, Api(f"http://127.0.0.1:{port}")


def shared(pids: list[int]) -> set[str]:
    """The shared-memory segments that processes have open or mapped."""
    return set().union(*map(segments, pids))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill-9"])
def test_up_leaves_no_process_no_socket_and_no_segment(spawn: Spawn, number: signal.Signals) -> None:
    process, api = start_up(spawn, "--encoders", "1", "--denoisers", "1", "--decoders", "1")
    api.make()
    api.close()
    children = family(process)
    ports = listening(children)
    assert len(ports) >= 5
    assert len(children) >= 4
    memory = shared(children)
    assert len(memory) == 3  # a pool of each role
    if number == signal.SIGINT:
        assert process.stop(number) == 0
    else:
        process.kill()
    until(lambda: not any(running(pid) for pid in children), "the end of every child")
    assert not memory & shared(psutil.pids())
    assert not list(Path("/dev/shm").glob("*triptych*"))
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):  # nobody listens there any more
            pass


def test_up_starts_a_died_instance_again(spawn: Spawn) -> None:
    process, api = start_up(spawn, "--replicas", "1")
    (pid,) = re.findall(r"replica-0 +pid (\d+) ", process.output())
    os.kill(int(pid), signal.SIGKILL)
    until(lambda: len(set(re.findall(r"replica-0 +pid (\d+) ", process.output()))) == 2, "the restart")
    assert "killed by SIGKILL" in process.output()
    until(lambda: "instance_lost" in process.output(), "the server missing it")
    assert "process exited: nobody listens at" in process.output()  # not by its silence, which takes seconds
    until(api.ready, "being ready again")
    api.make()
    api.close()
    assert process.stop(signal.SIGINT) == 0


def test_up_serves_on_when_nobody_reads_what_it_prints(folder: Path) -> None:
    """Symptom: `triptych up ... 2>&1 | grep -m1 ready` froze all its processes, or ended them with a traceback."""
    port, scheduler, *_ = free_ports(5)
    command = [sys.executable, "-m", "triptych.cli.main", "up", "tiny", "--device", "cpu", "--replicas", "1",
               "--port", str(port), "--scheduler-port", str(scheduler), "--output-dir", str(folder)]  # fmt: skip
    reading, writing = os.pipe()
    process = subprocess.Popen(command, stdout=writing, stderr=writing, env=os.environ | {"OMP_NUM_THREADS": "1"})
    os.close(writing)
    try:
        with open(reading) as lines:
            ready = next(line for line in lines if "ready on" in line)
        api = Api(ready.split()[-1])
        api.make()
        api.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("steps", "words"),
    [(100, ()), (40, ("--encoder-decoders", "1", "--denoisers", "1"))],
    ids=["three, longer than a child has to stop", "two"],
)
def test_up_finishes_what_runs_before_it_stops_when_it_may(spawn: Spawn, steps: int, words: tuple[str, ...]) -> None:
    """Symptom: --drain-timeout was accepted, and running work thrown away all the same."""
    process, api = start_up(spawn, "--drain-timeout", "120", *words, forked=True)
    job = api.submit(size="128x128", num_frames=9, num_inference_steps=steps)
    until(lambda: (api.job(job)["step"] or 0) >= 2, "the second step")
    process.signal(signal.SIGTERM)
    until(lambda: process.status is not None, "the end of up", 150)
    api.close()
    assert process.status == 0
    assert f"done: request {job}" in process.output()


def test_up_with_a_model_that_is_not_there_ends_with_the_reason(spawn: Spawn) -> None:
    port, scheduler, *_ = free_ports(5)
    process = spawn("up", "up", "no-such-folder", "--device", "cpu", "--port", str(port),
                    "--scheduler-port", str(scheduler))  # fmt: skip
    until(lambda: process.status is not None, "the end of up")
    assert process.status == 2
    last = process.output().splitlines()[-1]
    assert last.startswith("triptych up: error: ")
    assert "'no-such-folder': no such folder" in last


def test_a_pool_from_python(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port, scheduler, *_ = free_ports(5)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    args = triptych.ServerArgs.from_kwargs(
        model_path="tiny", device="cpu", port=port, scheduler_port=scheduler, output_dir=folder
    )
    with (
        forking(),
        triptych.launch_pool_disagg_server(args, encoder_gpus=[[0]], denoiser_gpus=[[0]], decoder_gpus=[[0]]) as pool,
    ):
        api = Api(pool.wait_ready(120).url)
        assert api.make()[4:8] == b"ftyp"
        api.close()
        pids = [status.pid for status in pool.statuses()]
    assert not any(running(pid) for pid in pids if pid)


def has_ipv6() -> bool:
    """Whether this machine has the loopback of IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="needs the loopback of IPv6")
@pytest.mark.parametrize("plane", ["auto", "mooncake"])
def test_a_pool_on_ipv6(folder: Path, monkeypatch: pytest.MonkeyPatch, plane: str) -> None:
    """Symptom: an instance at an IPv6 address announced one that nobody could read, and every request hung."""
    port, scheduler, *_ = free_ports(5)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    args = triptych.ServerArgs.from_kwargs(
        model_path="tiny", device="cpu", host="::1", disagg_p2p_hostname="::1", port=port, scheduler_port=scheduler,
        output_dir=folder, disagg_transfer=plane,
    )  # fmt: skip
    with (
        forking(),
        triptych.launch_pool_disagg_server(args, encoder_gpus=[[0]], denoiser_gpus=[[0]], decoder_gpus=[[0]]) as pool,
    ):
        assert pool.url == f"http://[::1]:{port}"
        api = Api(pool.wait_ready(120).url)
        assert api.make()[4:8] == b"ftyp"
        assert {one["work_url"].rpartition(":")[0] for one in api.info()["instances"]} == {"tcp://[::1]"}
        api.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill-9"])
def test_up_leaves_no_gpu_memory(spawn: Spawn, number: signal.Signals) -> None:
    def free() -> int:
        return torch.cuda.mem_get_info()[0]

    before = free()
    process, api = start_up(spawn, "--disagg-transfer-gpu-pool-size", "64MiB", "--profile", "stock", device="cuda")
    api.make()
    assert 'triptych_handoff_bytes_total{plane="cuda-ipc"}' in api.metrics()
    api.close()
    assert free() < before - 3 * (64 << 20)
    children = family(process)
    if number == signal.SIGINT:
        assert process.stop(number) == 0
    else:
        process.kill()
    until(lambda: not any(running(pid) for pid in children), "the end of every child")
    until(lambda: free() >= before - (16 << 20), "the GPU memory being free again", seconds=10)
