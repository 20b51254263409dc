"""A peer that sends more than is read and vanishes costs what it has sent, and not the process that it sent it to."""

from __future__ import annotations

import subprocess
import sys

RECEIVER = """
import subprocess, sys, time
import zmq
from triptych.transport.control.sockets import open_socket

context = zmq.Context()
sock = open_socket(context, zmq.PULL, max_bytes=1 << 20, hwm=2)
port = sock.bind_to_random_port("tcp://127.0.0.1")
sender = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(port)], stdout=subprocess.PIPE)
assert sender.stdout.readline() == b"sent\\n"
time.sleep(0.5)  # until the queue is full
sender.kill()
sender.wait()
time.sleep(2.5)  # as long as a loop may be kept from reading
read = 0
while sock.poll(500):
    sock.recv()
    read += 1
print("read", read)
"""
SENDER = """
import sys, time
import zmq

sock = zmq.Context().socket(zmq.PUSH)
sock.setsockopt(zmq.SNDHWM, 0)
sock.connect(f"tcp://127.0.0.1:{sys.argv[1]}")
for _ in range(2000):
    sock.send(b"x" * 10000)
print("sent", flush=True)
time.sleep(60)
"""


def test_a_flood_from_a_peer_that_dies_does_not_end_the_receiver() -> None:
    """Symptom: `Assertion failed: !_io_error`, and the server was gone."""
    words = [sys.executable, "-c", RECEIVER, SENDER]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) >= 2
