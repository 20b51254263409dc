"""The RDMA adapters of this machine, as the system lists them."""

from __future__ import annotations

from pathlib import Path

LISTED = Path("/sys/class/infiniband")


def active_adapters() -> tuple[str, ...]:
    """Names of the adapters (``mlx5_0``) that have a port in use, sorted."""
    try:
        active = {state.parts[-4] for state in LISTED.glob("*/ports/*/state") if "ACTIVE" in state.read_text()}
    except OSError:  # one that went meanwhile, or a system that shows none to this user
        return ()
    return tuple(sorted(active))
