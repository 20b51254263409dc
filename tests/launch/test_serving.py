"""What a server asks of its operating system."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import resource, sys
from triptych.config import ServerConfig
from triptych.launch import serving
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 2048))
async def served(config, on_started):
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
    return 0
serving._serve = served
sys.exit(serving.run_server(ServerConfig()))
"""


def test_a_server_takes_as_many_descriptors_as_its_user_may_have() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout == "2048 2048\n"
