"""A modelled transfer pool: copies of one size, of which the oldest give way when it is full."""

from __future__ import annotations

from triptych.ids import CopyId, Epoch, InstanceId, RequestId
from triptych.wire.manifest import Manifest


class SimPool:
    """What one life of an instance keeps. ``pool_bytes`` and ``copy_bytes``: its size and that of each copy."""

    def __init__(self, instance: InstanceId, epoch: Epoch, pool_bytes: int, copy_bytes: int) -> None:
        self._instance = instance
        self._epoch = epoch
        self._pool_bytes = pool_bytes
        self._copy_bytes = copy_bytes
        self._made = 0
        self.copies: dict[CopyId, Manifest] = {}
        self._spare: dict[CopyId, None] = {}
        """Copies that yield to others."""

    def make_room(self, *, spare: bool) -> tuple[bool, list[CopyId]]:
        """Drop what yields, oldest first. Whether one more copy fits then, and what was dropped.

        A copy that is no spare one always goes in, as the real pool's reserve lets it.
        """
        dropped: list[CopyId] = []
        while self.copies and (len(self.copies) + 1) * self._copy_bytes > self._pool_bytes:
            if spare and not self._spare:
                return False, dropped
            dropped.append(next(iter(self._spare or self.copies)))
            self.release(dropped[-1])
        return True, dropped

    def put(self, request: RequestId, tree: bytes, name: str, *, spare: bool) -> Manifest:
        """Enter a copy; ``tree`` says what it is."""
        manifest = Manifest(
            copy=CopyId(f"{self._epoch}:{request}/{name}#{self._made}"),
            request=request,
            producer=self._instance,
            epoch=self._epoch,
            nbytes=self._copy_bytes,
            checksum=0,
            tensors=(),
            tree=tree,
            locators=(),
        )
        self._made += 1
        self.copies[manifest.copy] = manifest
        if spare:
            self._spare[manifest.copy] = None
        return manifest

    def release(self, copy: CopyId) -> None:
        """Free a copy, if it is still here."""
        self.copies.pop(copy, None)
        self._spare.pop(copy, None)
