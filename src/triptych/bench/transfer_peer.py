"""The sending process of the transfer benchmark: ``python -m triptych.bench.transfer_peer KIND POOL_BYTES DEVICE``.

With a data plane it stages as many bytes of a tensor on the device as each line of stdin says, and answers with the
seconds that it took and the manifest in hexadecimal. With ``tcp`` it sends as many bytes as it is asked for on a socket
of its own, whose port it prints.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from typing import cast

import msgspec
import torch

from triptych.config import TransferConfig, TransferKind
from triptych.ids import Epoch, InstanceId, RequestId
from triptych.transport.data.plane import open_plane
from triptych.transport.data.protocol import Payload


def serve_plane(kind: TransferKind, pool_bytes: int, device: str) -> None:
    """Stage what stdin says, until it ends."""
    on_gpu = pool_bytes if kind in ("cuda-ipc", "gpudirect") else 0
    config = TransferConfig(kind=kind, pool_bytes=pool_bytes, gpu_pool_bytes=on_gpu)
    plane = open_plane(config, InstanceId("bench-sender"), Epoch(secrets.token_hex(8)), device)
    print("ready", flush=True)
    tensor = torch.empty(0, dtype=torch.uint8)
    for line in sys.stdin:
        plane.release([manifest.copy for manifest in plane.copies()])
        if tensor.numel() != int(line):
            tensor = torch.ones(int(line), dtype=torch.uint8, device=device)
            wait_for(device)
        started = time.perf_counter()
        manifest = plane.stage(RequestId("bench"), Payload(tree=b"", tensors=(tensor,)))
        took = time.perf_counter() - started
        print(took, msgspec.msgpack.encode(manifest).hex(), flush=True)
    plane.close()


def wait_for(device: str) -> None:
    """Until the device has done all that it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def serve_tcp() -> None:
    """Send what one client asks for, until it hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = memoryview(b"")
        with connection:
            while len(order := connection.recv(8, socket.MSG_WAITALL)) == 8:
                nbytes = int.from_bytes(order, "little")
                if len(data) != nbytes:
                    data = memoryview(bytes(nbytes))
                connection.sendall(data)


if __name__ == "__main__":
    if sys.argv[1] == "tcp":
        serve_tcp()
    else:
        serve_plane(cast(TransferKind, sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    sys.stdout.flush()
    os._exit(0)  # threads of the Mooncake engine abort the interpreter's own way out
