"""A work port at which nobody listens any more is told of at once; anything else that keeps silent is not."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from triptych.transport.control.instance import InstanceControl
from triptych.transport.control.server import ServerControl
from triptych.transport.control.watch import Watch

Join = Callable[..., tuple[InstanceControl, str]]

HOST = "127.0.0.1"
WAIT = 60.0


class Heard:
    """What a watch says, and a way to wait for it."""

    def __init__(self) -> None:
        self.urls: asyncio.Queue[str] = asyncio.Queue()

    async def next(self) -> str:
        return await asyncio.wait_for(self.urls.get(), WAIT)


@pytest.mark.parametrize("worked", [False, True], ids=["idle", "with-work"])
async def test_an_instance_that_closes_is_told_of_and_one_that_lives_is_not(
    server: tuple[ServerControl, int], join: Join, worked: bool
) -> None:
    control, port = server
    heard = Heard()
    control.attach(asyncio.get_running_loop(), control.receive, heard.urls.put_nowait)
    dies, its_url = join(port)
    _, other_url = join(port)
    for url in (its_url, other_url):
        control.connect(url)
    if worked:
        control.connect(its_url)  # once more changes nothing
    dies.close()
    assert await heard.next() == its_url
    control.disconnect(its_url)
    assert heard.urls.empty()
    control.close()


async def test_a_port_at_which_nobody_ever_listened_is_told_of(
    server: tuple[ServerControl, int], free_port: Callable[[], int]
) -> None:
    control, _ = server
    heard = Heard()
    control.attach(asyncio.get_running_loop(), control.receive, heard.urls.put_nowait)
    url = f"tcp://{HOST}:{free_port()}"
    control.connect(url)
    assert await heard.next() == url
    control.close()


async def test_a_process_that_is_stopped_refuses_nothing_and_one_that_is_killed_does(
    server: tuple[ServerControl, int], free_port: Callable[[], int]
) -> None:
    control, port = server
    heard = Heard()
    control.attach(asyncio.get_running_loop(), control.receive, heard.urls.put_nowait)
    work_port = free_port()
    code = (
        "from triptych.transport.control.instance import InstanceControl;"
        f"control = InstanceControl(bind_host='{HOST}', work_port={work_port}, server_addr='tcp://{HOST}:{port}');"
        "print('bound', flush=True)\nwhile True: control.poll(10)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"bound\n"
        control.connect(f"tcp://{HOST}:{work_port}")
        os.kill(process.pid, signal.SIGSTOP)
        watch = Watch(asyncio.get_running_loop(), heard.urls.put_nowait)
        watch.failed("stopped", (HOST, work_port), wanted=lambda: True)
        watch.failed("nobody", (HOST, free_port()), wanted=lambda: True)
        assert await heard.next() == "nobody"
        process.kill()
        assert await heard.next() == f"tcp://{HOST}:{work_port}"
    control.close()


async def test_who_is_of_no_interest_any_more_is_not_told_of(free_port: Callable[[], int]) -> None:
    heard = Heard()
    watch = Watch(asyncio.get_running_loop(), heard.urls.put_nowait)
    watch.failed("left", (HOST, free_port()), wanted=lambda: False)
    watch.failed("forgotten", (HOST, free_port()), wanted=lambda: True)
    await asyncio.sleep(0)  # the question is put
    watch.forget("forgotten")
    watch.failed("known", (HOST, free_port()), wanted=lambda: True)
    assert await heard.next() == "known"
    assert heard.urls.empty()
    watch.close()


async def test_a_host_that_cannot_be_found_has_not_refused(free_port: Callable[[], int]) -> None:
    heard = Heard()
    watch = Watch(asyncio.get_running_loop(), heard.urls.put_nowait)
    watch.failed("nowhere", ("nowhere.invalid", 1), wanted=lambda: True)
    with socket.create_server((HOST, 0)) as there:
        watch.failed("there", (HOST, there.getsockname()[1]), wanted=lambda: True)
        watch.failed("gone", (HOST, free_port()), wanted=lambda: True)
        assert await heard.next() == "gone"
    watch.close()
