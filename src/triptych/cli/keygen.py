"""`triptych keygen`: keys for the control plane of one deployment."""

from __future__ import annotations

import argparse
from pathlib import Path

from triptych.transport.control.keys import make_keys


def run(args: argparse.Namespace) -> int:
    """Make the keys and say which machine needs which; returns the exit status."""
    folder = Path(args.folder)
    for path in make_keys(folder):
        print(path)
    print(f"start every process with --disagg-key-dir {folder}")
    print("the server's machine needs server.secret and instance.public, every other instance.secret and server.public")
    return 0
