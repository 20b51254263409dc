"""Birth and death of the role process: its name, its signals, and how it leaves."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final, NoReturn

from triptych.ids import Epoch, InstanceId, Role

log = logging.getLogger(__name__)

EXIT_OPERATOR: Final = 2
"""Exit code of a process that has not served because the operator must mend something; whoever supervises it need not
start it again."""


def instance_id(roles: Sequence[Role], host: str, work_url: str) -> InstanceId:
    """The name of the instance that serves ``roles`` at ``work_url`` on the machine ``host``, over all its lives."""
    place = hashlib.blake2s(f"{host} {work_url}".encode(), digest_size=4).hexdigest()
    return InstanceId(f"{'-'.join(roles)}-{work_url.rpartition(':')[2]}-{place}")


def new_epoch() -> Epoch:
    """A name for this one life of the process."""
    return Epoch(secrets.token_hex(8))


def on_stop_signals(stop: Callable[[str], None]) -> None:
    """Call ``stop`` with the signal's name at the first SIGTERM or SIGINT; the second ends the process on the spot.

    Signals reach the main thread only; in any other thread this does nothing, and whoever runs the process stops it.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    asked = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            os._exit(128 + number)
        asked = True
        stop(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def exit_by(seconds: float, code: int) -> threading.Timer:
    """Make sure that the process is over in ``seconds``, whatever hangs, with ``code`` or 1 in place of 0."""
    timer = threading.Timer(seconds, _give_up, (seconds, code or 1))
    timer.daemon = True
    timer.start()
    return timer


def exit_now(code: int) -> NoReturn:
    """End the process without the interpreter's own clean-up, which aborts or hangs on live native threads."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _give_up(seconds: float, code: int) -> None:
    log.critical("not shut down after %.0f s: leaving as it is", seconds)
    exit_now(code)
