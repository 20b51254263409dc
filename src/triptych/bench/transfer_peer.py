"""The sending process of the transfer benchmark: ``python -m triptych.bench.transfer_peer KIND POOL_BYTES``.

With a data plane it stages as many bytes as each line of stdin says and answers with the manifest in hexadecimal. With
``tcp`` it sends as many bytes as it is asked for on a socket of its own, whose port it prints.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from typing import cast

import msgspec
import torch

from triptych.config import TransferConfig, TransferKind
from triptych.ids import Epoch, InstanceId, RequestId
from triptych.transport.data.plane import open_plane
from triptych.transport.data.protocol import Payload


def serve_plane(kind: TransferKind, pool_bytes: int) -> None:
    """Stage what stdin says, until it ends."""
    config = TransferConfig(kind=kind, pool_bytes=pool_bytes)
    plane = open_plane(config, InstanceId("bench-sender"), Epoch(secrets.token_hex(8)), "cpu")
    print("ready", flush=True)
    for line in sys.stdin:
        plane.release([manifest.copy for manifest in plane.copies()])
        payload = Payload(tree=b"", tensors=(torch.ones(int(line), dtype=torch.uint8),))
        print(msgspec.msgpack.encode(plane.stage(RequestId("bench"), payload)).hex(), flush=True)
    plane.close()


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
        serve_plane(cast(TransferKind, sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # threads of the Mooncake engine abort the interpreter's own way out
