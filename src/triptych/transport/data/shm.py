"""Shared memory between processes of one host: a pool in an anonymous file that peers open under /proc.

The pool is a sealed memfd. It has no name in any directory, so nothing is left behind however its owner dies, the size
limit of /dev/shm does not apply, and a peer gets at it only as the same user: through ``/proc/PID/fd/N``. The link
there carries a random token, which tells this pool from whatever a later process with the same PID has open.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import torch

from triptych.errors import ConfigError, TransferError
from triptych.transport.data.carrier import Allocate, within_pool
from triptych.transport.data.pieces import Bytes, Intake
from triptych.transport.data.segments import PREFIX
from triptych.transport.host import host_id
from triptych.wire.manifest import Locator, Manifest

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MAPPINGS = 64


def _link(token: str) -> str:
    return f"/memfd:{PREFIX}{token} (deleted)"


class Segment:
    """``nbytes`` of zeroed memory that processes of this host and user can map."""

    def __init__(self, nbytes: int) -> None:
        # The kernel would try, and kill whatever is largest on the machine on the way.
        available = psutil.virtual_memory().available
        if nbytes > available:
            raise ConfigError(f"disagg-transfer-pool-size={nbytes}: only {available} bytes of memory are available")
        token = secrets.token_hex(16)
        self.nbytes = nbytes
        self._fd = os.memfd_create(f"{PREFIX}{token}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self._fd, 0o600)
            # Taken now, because running out of memory later would be a fatal signal in the middle of a request.
            os.posix_fallocate(self._fd, 0, nbytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            mapping = mmap.mmap(self._fd, nbytes)
        except OSError as error:
            os.close(self._fd)
            raise ConfigError(
                f"disagg-transfer-pool-size={nbytes}: the memory cannot be had ({error.strerror})"
            ) from error
        self.memory = torch.frombuffer(mapping, dtype=torch.uint8)
        """uint8 [nbytes], writable."""
        self.address = f"{os.getpid()}:{self._fd}:{token}"
        """What a locator of this pool carries."""

    def close(self) -> None:
        """Give the memory back to the system once no tensor refers to it any more."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        os.close(self._fd)


class ShmCarrier:
    """Copies out of the pools of other processes of this host. Thread-safe."""

    plane = "shm"

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._lock = threading.Lock()
        self._mappings: dict[str, Bytes] = {}

    def locator(self, offset: int) -> Locator:
        """How a peer of this host finds the copy at ``offset``."""
        segment = self._segment
        return Locator(
            plane=self.plane, host=host_id(), address=segment.address, offset=offset, pool_bytes=segment.nbytes
        )

    def reaches(self, locator: Locator) -> bool:
        """Whether the copy is on this host."""
        return locator.plane == self.plane and locator.host == host_id()

    def fetch(
        self,
        manifest: Manifest,
        locator: Locator,
        allocate: Allocate,
        *,
        deadline: float,
        cancelled: Callable[[], bool],
    ) -> Intake:
        """The bytes of a copy: one pass in memory, so it is over before any deadline matters.

        Raises `TransferError` when the sender is gone or the copy would lie outside its pool.
        """
        with self._lock:
            memory = self._mapping(manifest, locator)
        within_pool(manifest, locator, memory.nbytes)
        out = allocate(manifest.nbytes)
        out.append(memory[locator.offset : locator.offset + manifest.nbytes])
        return out

    def _mapping(self, manifest: Manifest, locator: Locator) -> Bytes:
        # A mapping keeps a dead owner's memory alive, so those of the dead are let go of whenever one is looked up.
        for address in [address for address in self._mappings if not alive(address)]:
            del self._mappings[address]
        memory = self._mappings.pop(locator.address, None)
        if memory is None:
            memory = _map(manifest, locator)
        self._mappings[locator.address] = memory
        while len(self._mappings) > _MAPPINGS:
            del self._mappings[next(iter(self._mappings))]
        return memory

    def close(self) -> None:
        """Let go of all mappings."""
        with self._lock:
            self._mappings.clear()


def _parse(address: str) -> tuple[Path, str] | None:
    pid, _, rest = address.partition(":")
    fd, _, token = rest.partition(":")
    if not (address.isascii() and pid.isdecimal() and fd.isdecimal() and token.isalnum()):
        return None
    return Path(f"/proc/{pid}/fd/{fd}"), _link(token)


def alive(address: str) -> bool:
    """Whether the owner of the segment with this address still has it."""
    parsed = _parse(address)
    if parsed is None:
        return False
    path, link = parsed
    try:
        return str(path.readlink()) == link
    except OSError:
        return False


def _map(manifest: Manifest, locator: Locator) -> Bytes:
    parsed = _parse(locator.address)
    if parsed is None or not alive(locator.address):
        raise TransferError(f"shm: the pool of {manifest.producer} is gone: its process ended ({locator.address!r})")
    path, link = parsed
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise TransferError(f"shm: the pool of {manifest.producer} cannot be opened ({error.strerror})") from error
    try:
        # Asked again of the open descriptor: the owner may have died, and its PID been reused, in between.
        if str(Path(f"/proc/self/fd/{fd}").readlink()) != link:
            raise TransferError(f"shm: the pool of {manifest.producer} is gone: its process ended")
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise TransferError(f"shm: the pool of {manifest.producer} is not sealed: reading it could crash us")
        mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise TransferError(f"shm: the pool of {manifest.producer} cannot be mapped ({error})") from error
    finally:
        os.close(fd)
    return np.frombuffer(mapping, dtype=np.uint8)
