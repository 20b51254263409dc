"""Which pools in shared memory a process holds: no directory names them, but the kernel lists who has them."""

from __future__ import annotations

import re
from pathlib import Path

PREFIX = "triptych-"
"""How the names of our memfds begin; a token follows."""

_LINK = re.compile(rf"/memfd:{PREFIX}(\w+)")


def segments(pid: int) -> set[str]:
    """Tokens of the pools that the process has open or mapped, its own and its peers'.

    Empty for a process that is gone, is waiting to be collected, or belongs to another user.
    """
    process = Path(f"/proc/{pid}")
    found: set[str] = set()
    try:
        links = list((process / "fd").iterdir())
        mappings = (process / "maps").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return found
    for link in links:
        try:
            opened = str(link.readlink())
        except OSError:  # closed meanwhile
            continue
        found.update(_LINK.findall(opened))
    found.update(_LINK.findall(mappings))
    return found
