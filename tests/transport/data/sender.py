"""A process with a data plane of its own: stages what it is told to on stdin, answers with manifests on stdout.

Run as ``python sender.py EPOCH KIND POOL_BYTES [PORT]``; with PORT it starts over until Mooncake listens there.
"""

from __future__ import annotations

import json
import os
import sys
import time

import msgspec
import torch

from triptych.config import TransferConfig
from triptych.ids import Epoch, InstanceId, RequestId
from triptych.transport.data.plane import open_plane
from triptych.transport.data.protocol import DataPlane, Payload


def tensors(seed: int, nbytes: int) -> tuple[torch.Tensor, ...]:
    """Some of every kind, and one of ``nbytes``; the same for the same seed in every process."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(3, 5, generator=generator).bfloat16(),
        torch.randn(7, generator=generator),
        torch.randint(-(2**40), 2**40, (2, 2, 2), generator=generator),
        torch.randint(0, 2, (9,), generator=generator).bool(),
        torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8),
        torch.tensor(seed),
        torch.empty(0, 4),
        torch.randn(4, 6, generator=generator).t(),
    )


def open_sender(epoch: str, kind: str, pool_bytes: int, port: int | None) -> DataPlane:
    """The plane; with ``port``, one whose Mooncake session is there."""
    if kind in ("cuda-ipc", "gpudirect"):
        import gpu_standin

        return gpu_standin.open_gpu_plane("sender", epoch, pool_bytes, pool_bytes // 4, kind)
    config = TransferConfig(kind=kind, pool_bytes=pool_bytes)  # type: ignore[arg-type]
    while True:
        plane = open_plane(config, InstanceId("sender"), Epoch(epoch), "cpu")
        if port is None:
            return plane
        manifest = plane.stage(RequestId("probe"), Payload(tree=b"", tensors=()))
        plane.release([manifest.copy])
        if f":{port}/" in manifest.locators[-1].address:
            return plane
        plane.close()
        time.sleep(0.1)


def main(epoch: str, kind: str, pool_bytes: str, port: str | None = None) -> None:
    """Serve until stdin ends."""
    plane = open_sender(epoch, kind, int(pool_bytes), int(port) if port else None)
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "release" in order:
            plane.release([order["release"]])
            print(plane.used_bytes, flush=True)
            continue
        data = tensors(order["seed"], order["nbytes"]) if order["tensors"] else ()
        if kind in ("cuda-ipc", "gpudirect") and torch.cuda.is_available():
            data = tuple(tensor.cuda() for tensor in data)
        manifest = plane.stage(RequestId("r"), Payload(tree=b"tree", tensors=data))
        print(msgspec.msgpack.encode(manifest).hex(), flush=True)
    plane.close()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
