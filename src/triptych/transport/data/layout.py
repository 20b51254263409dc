"""How tensors lie in a copy: packed one after the other, 64-byte aligned, with zeroed gaps; and back again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triptych.errors import TransferError
from triptych.transport.data.pool import align
from triptych.wire.manifest import Manifest, TensorEntry

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex64,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.bool,
    )
}
"""Every dtype that can cross, by its name on the wire."""


def plan(tensors: Sequence[torch.Tensor]) -> tuple[tuple[TensorEntry, ...], int]:
    """Where each tensor goes, and the bytes of the whole copy. Raises `TransferError` for a dtype or layout that
    cannot cross."""
    entries: list[TensorEntry] = []
    offset = 0
    for index, tensor in enumerate(tensors):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES or tensor.layout != torch.strided:
            raise TransferError(f"tensor {index} is {tensor.dtype}, {tensor.layout}: it cannot be handed over")
        nbytes = tensor.numel() * tensor.element_size()
        entries.append(TensorEntry(dtype=dtype, shape=tuple(tensor.shape), offset=offset, nbytes=nbytes))
        offset += align(nbytes)
    return tuple(entries), offset


def write(tensors: Sequence[torch.Tensor], entries: Sequence[TensorEntry], out: torch.Tensor) -> None:
    """Copy the tensors to their places in ``out``, uint8 [copy bytes]. `settle` waits for copies from and on a GPU."""
    for tensor, entry in zip(tensors, entries, strict=True):
        end = entry.offset + entry.nbytes
        if entry.nbytes:
            place = out[entry.offset : end].view(tensor.dtype).view(entry.shape)
            place.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        out[end : align(end)].zero_()  # nothing of an earlier request leaks through the gaps


def settle(tensors: Sequence[torch.Tensor]) -> None:
    """Wait until the current streams of the tensors' GPUs are done with them."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def check(manifest: Manifest) -> None:
    """Raise `TransferError` unless every tensor lies inside the copy and has the bytes that its shape needs.

    A manifest comes from another process; nothing in it is believed.
    """
    if manifest.nbytes < 0:
        raise TransferError(f"copy {manifest.copy} from {manifest.producer} is impossible: {manifest.nbytes} bytes")
    for index, entry in enumerate(manifest.tensors):
        dtype = DTYPES.get(entry.dtype)
        count = 1
        for extent in entry.shape:
            count *= extent
        if (
            dtype is None
            or any(extent < 0 for extent in entry.shape)
            or entry.nbytes != count * dtype.itemsize
            or entry.offset < 0
            or entry.offset != align(entry.offset)
            or entry.offset + entry.nbytes > manifest.nbytes
        ):
            raise TransferError(
                f"tensor {index} of copy {manifest.copy} from {manifest.producer} is impossible: {entry.dtype} "
                f"{list(entry.shape)}, {entry.nbytes} bytes at {entry.offset} of {manifest.nbytes}"
            )


def read(entries: Sequence[TensorEntry], data: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in ``data``, uint8 [copy bytes], as views of it. The entries have passed `check`."""
    return tuple(
        data[entry.offset : entry.offset + entry.nbytes].view(DTYPES[entry.dtype]).view(entry.shape)
        for entry in entries
    )
