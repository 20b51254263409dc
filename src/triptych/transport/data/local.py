"""Handoffs inside one process: the reference data plane, and the plane of an instance that serves all roles.

Tensors stay on their device. They are copied when staged and again when pulled: a stage may change its inputs in place,
and a copy that is pulled a second time after a failed attempt must still hold the bytes that were staged.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence

import torch

from triptych.errors import TransferError
from triptych.ids import CopyId, Epoch, InstanceId, RequestId
from triptych.transport.data import layout
from triptych.transport.data.pool import Pool
from triptych.transport.data.protocol import Payload, PoolFigures, Pull
from triptych.transport.host import host_id
from triptych.wire.manifest import Locator, Manifest

PLANE = "local"

_planes: dict[Epoch, LocalPlane] = {}
_planes_lock = threading.Lock()


class LocalPlane:
    """A `DataPlane` whose copies are tensors of this process, counted against ``pool_bytes``."""

    def __init__(self, *, instance: InstanceId, epoch: Epoch, pool_bytes: int) -> None:
        self.planes: tuple[str, ...] = (PLANE,)
        self._instance = instance
        self._epoch = epoch
        self._lock = threading.Lock()
        self._pool = Pool(pool_bytes)
        self.pool_bytes = self._pool.stage_capacity
        self._held: dict[CopyId, tuple[Manifest, tuple[torch.Tensor, ...]]] = {}
        self._numbers = itertools.count()
        with _planes_lock:
            _planes[epoch] = self

    def stage(self, request: RequestId, payload: Payload, *, spare: bool = False) -> Manifest:
        """Keep a copy of the payload. Raises `TooLarge` or `PoolFull`."""
        entries, nbytes = layout.plan(payload.tensors)
        copy = CopyId(f"{self._epoch}.{next(self._numbers)}")
        with self._lock:
            self._pool.stage(copy, nbytes, spare=spare)
            self._forget_gone()
        try:
            tensors = _clone(payload.tensors)
        except BaseException:
            with self._lock:
                self._pool.release(copy)
                self._pool.unpin(copy)
            raise
        manifest = Manifest(
            copy=copy,
            request=request,
            producer=self._instance,
            epoch=self._epoch,
            nbytes=nbytes,
            checksum=0,
            tensors=entries,
            tree=payload.tree,
            locators=(Locator(plane=PLANE, host=host_id(), address=self._epoch, offset=0, pool_bytes=self.pool_bytes),),
        )
        with self._lock:
            self._held[copy] = manifest, tensors
            self._pool.unpin(copy)
            self._forget_gone()
        return manifest

    def pull(self, manifest: Manifest, *, deadline: float, cancelled: Callable[[], bool]) -> Pull:
        """Copy a payload out of the plane of this process that staged it. Raises `TransferError`."""
        started = time.monotonic()
        if not any(locator.plane == PLANE for locator in manifest.locators):
            offered = ", ".join(locator.plane for locator in manifest.locators) or "none"
            raise TransferError(
                f"local: copy {manifest.copy} of {manifest.producer} is offered by other ways: {offered}"
            )
        with _planes_lock:
            owner = _planes.get(manifest.epoch)
        if owner is None:
            raise TransferError(f"local: {manifest.producer} does not live in this process (epoch {manifest.epoch})")
        if cancelled():
            raise TransferError(f"local: the pull of copy {manifest.copy} was cancelled")
        if time.monotonic() >= deadline:
            raise TransferError(f"local: the pull of copy {manifest.copy} passed its deadline")
        payload = owner._read(manifest)
        return Pull(payload=payload, plane=PLANE, nbytes=manifest.nbytes, seconds=time.monotonic() - started)

    def _read(self, manifest: Manifest) -> Payload:
        with self._lock:
            held = self._held.get(manifest.copy)
        if held is None:
            raise TransferError(
                f"local: {self._instance} does not keep copy {manifest.copy} ({manifest.nbytes} bytes) any more"
            )
        # The tuple keeps the tensors alive, so a release meanwhile does no harm.
        return Payload(tree=held[0].tree, tensors=_clone(held[1]))

    def release(self, copies: Sequence[CopyId]) -> None:
        """Free copies; unknown ones are ignored."""
        with self._lock:
            for copy in copies:
                self._pool.release(copy)
            self._forget_gone()

    def copies(self) -> tuple[Manifest, ...]:
        """The copies that are staged now."""
        with self._lock:
            return tuple(manifest for manifest, _ in self._held.values())

    def take_dropped(self) -> tuple[CopyId, ...]:
        """Copies that were dropped under pressure since the last call."""
        with self._lock:
            return self._pool.take_dropped()

    @property
    def figures(self) -> PoolFigures:
        """How full the pool is and was."""
        with self._lock:
            pool = self._pool
            return PoolFigures(used=pool.used_bytes, peak=pool.peak_bytes, refusals=pool.refusals)

    @property
    def used_bytes(self) -> int:
        """Bytes of tensors that are held."""
        with self._lock:
            return self._pool.used_bytes

    def _forget_gone(self) -> None:
        for copy in self._held.keys() - set(self._pool.staged()):
            del self._held[copy]

    def check_integrity(self) -> None:
        """Raise AssertionError when the books do not add up."""
        with self._lock:
            self._pool.check_integrity()
            assert self._held.keys() <= set(self._pool.staged()), "tensors are held that the books do not know"

    def close(self) -> None:
        """Let go of all copies."""
        with _planes_lock:
            _planes.pop(self._epoch, None)
        with self._lock:
            for copy in self._pool.staged():
                self._pool.release(copy)
            self._held.clear()


def _clone(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    clones = tuple(tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors)
    layout.settle(tensors)  # whoever uses them next does so on another thread, and perhaps another stream
    return clones
