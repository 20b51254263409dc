"""A link between two network namespaces that loses, delays and cuts: `Link`, for a process that may make namespaces.

Both ends are TUN devices, and a thread carries each IP packet from one to the other, or does not. So the TCP of ZMQ and
of Mooncake meets real loss and real silence, also where the kernel has no netem.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_MTU = 1500
HERE, THERE = "10.99.0.1", "10.99.0.2"
"""Addresses of the two ends."""

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _tun(address: str) -> int:
    """A TUN device in the present namespace; its descriptor works in every other one too."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", b"tun0", _IFF_TUN | _IFF_NO_PI))
    for words in (["link", "set", "lo", "up"], ["addr", "add", f"{address}/24", "dev", "tun0"],
                  ["link", "set", "tun0", "mtu", str(_MTU), "up"]):  # fmt: skip
        subprocess.run(["ip", *words], check=True)
    return fd


@dataclass
class Weather:
    """What happens to packets at present; seconds and a share."""

    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    cut: bool = False


class Link:
    """Between the namespace of the thread that makes it and a new one, which `there` enters."""

    def __init__(self) -> None:
        self.weather = Weather()
        self.carried = self.lost = 0
        self._random = random.Random(5)
        self._here = Path("/proc/thread-self/ns/net")
        self._home = os.open(self._here, os.O_RDONLY)
        ends = [_tun(HERE)]
        _check(_libc.unshare(_CLONE_NEWNET))
        self._away = os.open(self._here, os.O_RDONLY)
        ends.append(_tun(THERE))
        _check(_libc.setns(self._home, _CLONE_NEWNET))
        self._ends = (ends[0], ends[1])
        threading.Thread(target=self._carry_or_end, daemon=True).start()

    @contextlib.contextmanager
    def there(self) -> Iterator[None]:
        """Processes that this thread starts meanwhile live at the other end."""
        _check(_libc.setns(self._away, _CLONE_NEWNET))
        try:
            yield
        finally:
            _check(_libc.setns(self._home, _CLONE_NEWNET))

    def _carry_or_end(self) -> None:
        """A link that nobody carries packets over is no weather: say why, and end the whole test."""
        try:
            self._carry()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def _carry(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        number = 0
        while True:
            patience = None if not waiting else max(0.0, waiting[0][0] - time.monotonic())
            for source in select.select(self._ends, (), (), patience)[0]:
                target = self._ends[source == self._ends[0]]
                packet = os.read(source, 2 * _MTU)
                weather = self.weather
                if weather.cut or self._random.random() < weather.loss:
                    self.lost += 1
                    continue
                number += 1
                when = time.monotonic() + weather.delay + self._random.random() * weather.jitter
                heapq.heappush(waiting, (when, number, target, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(waiting)
                self.carried += 1
                with contextlib.suppress(BlockingIOError):  # a full device loses packets as well
                    os.write(target, packet)
