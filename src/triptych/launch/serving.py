"""Runs the DiffusionServer: HTTP door and router in one asyncio loop, until a signal asks it to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from types import FrameType
from typing import Any

from triptych.config import ServerConfig, host_port
from triptych.launch.ports import listen

log = logging.getLogger(__name__)

DESCRIPTORS = 65536
"""Open files and connections that a server may have, as far as its user may: four for each instance, one a client."""


LEAVE_SECONDS = 0.7
"""How long the end of a loop, and that of a process, may take once everything has been closed."""


def leave_within(seconds: float) -> threading.Timer:
    """End the process with status 0 in ``seconds`` unless the timer is cancelled or the process is over before.

    A thread that waits for a store or a disk would otherwise keep it: neither asyncio nor the interpreter leaves before
    all threads have ended.
    """
    timer = threading.Timer(seconds, _leave)
    timer.daemon = True
    timer.start()
    return timer


def _leave() -> None:
    log.critical("something hangs: leaving without it; what it had to store is with its decoders and in the journal")
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_server(config: ServerConfig, *, on_started: Callable[[], None] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit status. Once asked to stop, also while it still starts, it takes
    less than ten seconds, after which a group kills: connections have five (`http_settings`), the service three
    (`CLOSE_SECONDS`); then the process ends with status 0, whatever hangs. The caller calls `leave_within` when it has
    done everything else.

    ``on_started`` is called once every port is bound. Raises `ConfigError` for a port that is in use.
    """
    import uvloop

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, DESCRIPTORS)), hard))
    with ExitStack() as leaving:
        return uvloop.run(_serve(config, on_started, leaving))


async def _serve(config: ServerConfig, on_started: Callable[[], None] | None, leaving: ExitStack) -> int:
    import uvicorn

    from triptych.api.app import create_app
    from triptych.api.connection import http_settings
    from triptych.server.service import CLOSE_SECONDS, DiffusionService

    flags = ["--port", *["--metrics-port"] * bool(config.metrics_port)]
    flags += ["--task-ports"] * (len(config.http_ports) - len(flags))
    doors = [listen(config.host, port, flag) for port, flag in zip(config.http_ports, flags, strict=True)]
    service = DiffusionService(config)
    app = create_app(service, config, stopping=lambda: server.should_exit)
    loop, asked = asyncio.get_running_loop(), asyncio.Event()

    def tell(number: int) -> None:
        if not server.should_exit:
            log.info("stopping on %s", signal.Signals(number).name)

    def stop(number: int, _frame: FrameType | None) -> None:
        tell(number)
        server.should_exit = True
        loop.call_soon_threadsafe(asked.set)

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            tell(sig)
            super().handle_exit(sig, frame)

    server = Server(http_settings(app, config.forwarded_allow_ips))
    # uvicorn handles signals itself while it serves, then raises them again for the handlers that stood before: these.
    # Without them the process would end before the service has closed.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        if await _unless(asked, service.start()):
            for port in config.http_ports:
                log.info("listening on http://%s", host_port(config.host, port))
            if on_started is not None:
                on_started()
            await server.serve(sockets=doors)
    finally:
        leaving.callback(leave_within(CLOSE_SECONDS + LEAVE_SECONDS).cancel)
        await asyncio.shield(service.close())
        for door in doors:
            door.close()
    return 0


async def _unless(asked: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do ``work``, which may take for ever, unless ``asked`` to stop meanwhile; whether it was done."""
    doing, stopping = asyncio.ensure_future(work), asyncio.ensure_future(asked.wait())
    await asyncio.wait((doing, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not doing.done():
        doing.cancel()  # what it waits for in a thread goes on there until the process ends
        return False
    doing.result()
    return True
