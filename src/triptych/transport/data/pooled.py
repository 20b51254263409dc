"""The pooled data plane: one registered pool of shared memory, reached by several carriers."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from triptych.config import TransferConfig
from triptych.errors import TransferError
from triptych.ids import CopyId, Epoch, InstanceId, RequestId
from triptych.page_lock import page_lock, page_unlock
from triptych.transport.data import layout
from triptych.transport.data.carrier import Carrier
from triptych.transport.data.carriers import Carriers
from triptych.transport.data.chunked import reserve_bytes
from triptych.transport.data.gpu_memory import GpuMemory
from triptych.transport.data.gpu_pool import Shown
from triptych.transport.data.pieces import Intake, checksum, hands_for
from triptych.transport.data.pool import Pool
from triptych.transport.data.protocol import Payload, PoolFigures, Pull
from triptych.transport.data.settings import EngineSettings
from triptych.transport.data.shm import Segment
from triptych.wire.manifest import Locator, Manifest

_log = logging.getLogger(__name__)


class PooledPlane:
    """A `DataPlane` over one pool of shared memory, which all carriers serve.

    With a ``gpu`` the pool and the pulled payloads are page-locked, so that copies to and from it run at the speed of
    the bus. With ``shared`` there is a second pool, in that GPU memory. Payloads come on the CPU, or by ``cuda-ipc``
    and ``gpudirect`` on the GPU. With ``between_hosts`` peers of other hosts reach it by an engine of these settings.
    """

    def __init__(
        self,
        config: TransferConfig,
        instance: InstanceId,
        epoch: Epoch,
        *,
        gpu: torch.device | None,
        shared: GpuMemory | None = None,
        between_hosts: EngineSettings | None = None,
    ) -> None:
        self._instance = instance
        self._epoch = epoch
        self._gpu = gpu
        self._lock = threading.Lock()
        self._manifests: dict[CopyId, Manifest] = {}
        self._numbers = itertools.count()
        self._closed = False
        self._hands = hands_for(len(os.sched_getaffinity(0)))
        self._segment = Segment(config.pool_bytes)
        self._pool = Pool(config.pool_bytes, reserve_bytes(config.pool_bytes) if between_hosts else 0)
        with contextlib.ExitStack() as undo:
            undo.callback(self._segment.close)
            self._carriers = Carriers(
                config,
                epoch,
                pool=self._pool,
                lock=self._lock,
                segment=self._segment,
                shared=shared,
                between_hosts=between_hosts,
            )
            undo.pop_all()
        self._gpu_pool = self._carriers.gpu_pool
        self._locked_for = gpu if gpu is not None and _page_lock(self._segment.memory, gpu) else None
        self.pool_bytes = self._pool.stage_capacity
        self.planes: tuple[str, ...] = tuple(carrier.plane for carrier in self._carriers.all)

    # -- staging -----------------------------------------------------------------------------------------------

    def stage(self, request: RequestId, payload: Payload, *, spare: bool = False) -> Manifest:
        """Copy the payload into the pool and describe it. Raises `TooLarge` or `PoolFull`.

        Tensors on a GPU are read on the calling thread's current stream, which is waited for.
        """
        entries, nbytes = layout.plan(payload.tensors)
        copy = CopyId(f"{self._epoch}.{next(self._numbers)}")
        with self._lock:
            block = self._pool.stage(copy, nbytes, spare=spare)
            self._forget_gone()
        shown: Shown | None = None
        try:
            if self._gpu_pool is not None and not spare:  # a spare copy waits for a death, and hardly ever travels on
                shown = self._gpu_pool.show(copy, payload.tensors, entries, nbytes)
            memory = self._segment.memory[block.offset : block.offset + nbytes]
            layout.write(payload.tensors, entries, memory)
            layout.settle(payload.tensors)
            summed = shown.checksum() if shown is not None else 0
            manifest = Manifest(
                copy=copy,
                request=request,
                producer=self._instance,
                epoch=self._epoch,
                nbytes=nbytes,
                checksum=checksum(memory.numpy(), self._hands),
                tensors=entries,
                tree=payload.tree,
                locators=(
                    *(carrier.locator(shown.offset, summed) for carrier in self._carriers.of_gpu if shown is not None),
                    *(carrier.locator(block.offset) for carrier in self._carriers.of_host),
                ),
            )
        except BaseException:
            with self._lock:
                self._pool.release(copy)
                self._pool.unpin(copy)
            if self._gpu_pool is not None:
                self._gpu_pool.release([copy])
            raise
        finally:
            if self._gpu_pool is not None and shown is not None:
                self._gpu_pool.written(copy)
        with self._lock:
            self._manifests[copy] = manifest
            self._pool.unpin(copy)
            self._forget_gone()
        return manifest

    # -- pulling -----------------------------------------------------------------------------------------------

    def pull(self, manifest: Manifest, *, deadline: float, cancelled: Callable[[], bool]) -> Pull:
        """Fetch a copy by the best plane that both ends have, and verify it. Raises `TransferError`."""
        started = time.monotonic()
        layout.check(manifest)
        for carrier, locator in self._ways(manifest):
            what = f"{carrier.plane}: copy {manifest.copy} ({manifest.nbytes} bytes) of {manifest.producer}"
            if cancelled():
                raise TransferError(f"{what}: the pull was cancelled")
            if time.monotonic() >= deadline:
                raise TransferError(f"{what}: the deadline passed before the pull began")
            if manifest.nbytes:
                got = carrier.fetch(manifest, locator, self._allocate, deadline=deadline, cancelled=cancelled)
            else:
                got = self._allocate(0)
            if got is None:
                continue
            if isinstance(got, Intake):
                if got.checksum() != manifest.checksum:
                    raise TransferError(f"{what}: the checksum is wrong: it was overwritten or damaged on the way")
                got = got.memory
            payload = Payload(tree=manifest.tree, tensors=layout.read(manifest.tensors, got))
            seconds = time.monotonic() - started
            return Pull(payload=payload, plane=carrier.plane, nbytes=manifest.nbytes, seconds=seconds)
        offered = ", ".join(locator.plane for locator in manifest.locators) or "none"
        raise TransferError(
            f"no data plane in common with {manifest.producer}: it offers {offered}, this instance has "
            f"{', '.join(self.planes)}; planes other than gpudirect and mooncake need one host"
        )

    def _ways(self, manifest: Manifest) -> Iterator[tuple[Carrier, Locator]]:
        """How the copy can be had, best first."""
        for carrier in self._carriers.all:
            for locator in manifest.locators:
                if carrier.reaches(locator):
                    yield carrier, locator

    def _allocate(self, nbytes: int) -> Intake:
        try:
            memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._gpu is not None)
        except RuntimeError as error:  # of the allocator, or of CUDA where the memory is pinned
            raise MemoryError(f"no memory for a handoff of {nbytes} bytes: {error}") from error
        return Intake(memory, self._hands)

    # -- books -------------------------------------------------------------------------------------------------

    def release(self, copies: Sequence[CopyId]) -> None:
        """Free copies; unknown ones are ignored."""
        with self._lock:
            for copy in copies:
                self._pool.release(copy)
            self._forget_gone()

    def copies(self) -> tuple[Manifest, ...]:
        """The copies that are staged now."""
        with self._lock:
            return tuple(self._manifests.values())

    def take_dropped(self) -> tuple[CopyId, ...]:
        """Copies that were dropped under pressure since the last call."""
        with self._lock:
            self._forget_gone()
            return self._pool.take_dropped()

    def _forget_gone(self) -> None:
        gone = self._manifests.keys() - set(self._pool.staged())
        for copy in gone:
            del self._manifests[copy]
        if self._gpu_pool is not None:
            self._gpu_pool.release(tuple(gone))

    @property
    def figures(self) -> PoolFigures:
        """How full the pool is and was."""
        with self._lock:
            pool = self._pool
            return PoolFigures(used=pool.used_bytes, peak=pool.peak_bytes, refusals=pool.refusals)

    @property
    def used_bytes(self) -> int:
        """Bytes of the pool that are staged, being received, or held back for unfinished transfers."""
        with self._lock:
            return self._pool.used_bytes

    @property
    def gpu_used_bytes(self) -> int:
        """The same of the pool in GPU memory; 0 without one."""
        return self._gpu_pool.used_bytes if self._gpu_pool is not None else 0

    def check_integrity(self) -> None:
        """Raise AssertionError when the books do not add up."""
        with self._lock:
            self._pool.check_integrity()
            if self._gpu_pool is not None:
                self._gpu_pool.check_integrity()
            assert self._manifests.keys() <= set(self._pool.staged()), "a manifest without a copy"

    def close(self) -> None:
        """Give everything back; peers that still pull get an error."""
        if self._closed:
            return
        self._closed = True
        self._carriers.close()
        self._hands.close()
        if self._locked_for is not None:
            page_unlock(self._segment.memory, self._locked_for)
        self._segment.close()


def _page_lock(memory: torch.Tensor, gpu: torch.device) -> bool:
    """Have the GPU copy to and from a pool at full speed; whether that was possible."""
    status = page_lock(memory, gpu)
    if status != 0:
        _log.warning("CUDA cannot page-lock the transfer pool (error %d): staging from the GPU will be slower", status)
    return status == 0
