"""The RDMA adapters of this machine, as the system lists them, and whether they can get at its GPUs' memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LISTED = Path("/sys/class/infiniband")
MODULES = Path("/sys/module")
_PEER_MEMORY = ("nvidia_peermem", "nv_peer_mem")
"""Kernel modules, now and formerly, that tell an adapter's driver where the memory of a GPU is."""


def active_adapters() -> tuple[str, ...]:
    """Names of the adapters (``mlx5_0``) that have a port in use, sorted."""
    try:
        active = {state.parts[-4] for state in LISTED.glob("*/ports/*/state") if "ACTIVE" in state.read_text()}
    except OSError:  # one that went meanwhile, or a system that shows none to this user
        return ()
    return tuple(sorted(active))


def peer_memory() -> str | None:
    """The kernel module, if one is loaded, by which adapters reach GPU memory."""
    return next((name for name in _PEER_MEMORY if (MODULES / name).exists()), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReach:
    """By what adapters may reach GPU memory. Whether they do is seen when it is registered."""

    possible: bool
    found: str
    mend: str = ""


def gpu_reach(*, dma_buf: bool) -> GpuReach:
    """Of this machine, whose GPUs all export their memory as DMA-BUF or not."""
    if (module := peer_memory()) is not None:
        return GpuReach(possible=True, found=f"the kernel module {module} is loaded")
    if dma_buf:
        return GpuReach(
            possible=True, found="the driver exports GPU memory as DMA-BUF, which CUDA builds of Mooncake take"
        )
    return GpuReach(
        possible=False,
        found="the kernel module nvidia_peermem is not loaded and the driver exports no DMA-BUF",
        mend="modprobe nvidia_peermem on the host, or NVIDIA's open kernel modules on Linux 5.12 or later",
    )
