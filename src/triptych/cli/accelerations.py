"""What the doctor says of speed: which accelerations this machine has for which option, and how to get the others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from torch.cuda import nccl

from triptych.accel import attention
from triptych.accel.compiling import default_folder
from triptych.accel.kernels.probe import trouble
from triptych.cli.finding import Finding, installed
from triptych.transport.adapters import active_adapters, gpu_reach, peer_memory
from triptych.transport.data.gpu_memory import all_export_dma_buf

_HOPPER = (9, 0)
_FP8 = (8, 9)
"""Compute capabilities from which FlashAttention-3 and FP8 products work."""


def accelerations() -> Iterator[Finding]:
    """Of the first GPU; a machine without one runs the stock path."""
    if not torch.cuda.is_available():
        found = "none without a GPU: what a model runs on is Diffusers' stock path"
        yield Finding(verdict="ok", what="acceleration", found=found)
        return
    device = torch.device("cuda", 0)
    capability = torch.cuda.get_device_capability(device)
    yield _attention(attention.present(device), capability)
    yield from _measured(device, default_folder() / attention.KEPT)
    yield _compiling(device)
    yield _fp8(capability)
    if torch.cuda.device_count() > 1:
        yield from _several_gpus()
    if active_adapters():
        yield gpudirect(bindings=installed("cuda-bindings") is not None, dma_buf=all_export_dma_buf())


def _attention(present: tuple[str, ...], capability: tuple[int, int]) -> Finding:
    found = f"{', '.join(present)}; auto takes the exact one that is measured to be fastest when a model is loaded"
    if capability[0] == _HOPPER[0] and "flash3" not in present:
        return Finding(
            verdict="warn", what="attention", found=found,
            mend='pip install "triptych[hopper]" for FlashAttention-3, the fastest one of this GPU',
        )  # fmt: skip
    return Finding(verdict="ok", what="attention", found=found)


def _measured(device: torch.device, file: Path) -> Iterator[Finding]:
    """What earlier starts measured and later ones go by, those with another --cache-dir excepted."""
    for shape, seconds in attention.kept_measurements(device, file).items():
        times = ", ".join(f"{name} {took * 1e3:.2f} ms" for name, took in sorted(seconds.items(), key=lambda s: s[1]))
        yield Finding(verdict="ok", what="measured", found=f"attention of {shape}: {times} (kept in {file})")


def _compiling(device: torch.device) -> Finding:
    """What a server finds that tries to build a kernel."""
    version = installed("triton")
    if version is None:
        found = "no triton: --profile lossless and fast cannot compile"
        return Finding(verdict="warn", what="compiling", found=found, mend="pip install triton")
    # A kernel that an earlier start built would tell nothing.
    with TemporaryDirectory() as empty, patch.dict(os.environ, TRITON_CACHE_DIR=empty):
        try:
            failed = trouble(device)
        except torch.OutOfMemoryError:
            found = f"triton {version}, which could not be tried: the GPU has no memory left"
            return Finding(verdict="ok", what="compiling", found=found)
    if failed:
        mend = "apt-get install gcc python3-dev, and set CC where the compiler has another name"
        return Finding(verdict="warn", what="compiling", found=f"triton {version}: {failed}", mend=mend)
    return Finding(verdict="ok", what="compiling", found=f"triton {version}, for --profile lossless and fast")


def _fp8(capability: tuple[int, int]) -> Finding:
    if capability < _FP8:
        found = f"not on a GPU of compute capability {capability[0]}.{capability[1]}; 8.9 is needed"
        return Finding(verdict="ok", what="fp8", found=found)
    version = installed("torchao")
    if version is None:
        found = "no torchao: --quant and --profile fast cannot quantise"
        return Finding(verdict="warn", what="fp8", found=found, mend='pip install "triptych[quant]"')
    return Finding(verdict="ok", what="fp8", found=f"torchao {version}, for --quant and --profile fast")


def _several_gpus() -> Iterator[Finding]:
    if not torch.distributed.is_nccl_available():
        found = "this build of torch has none: one instance cannot use several GPUs"
        yield Finding(verdict="warn", what="nccl", found=found, mend="pip install the CUDA build of torch")
    else:
        version = ".".join(map(str, nccl.version()))
        yield Finding(verdict="ok", what="nccl", found=f"{version}, for instances of several GPUs (--num-gpus)")
    if installed("cuda-bindings") is None:
        yield Finding(
            verdict="ok", what="gpu to gpu", found="through host memory",
            mend="pip install cuda-bindings for --disagg-transfer-gpu-pool-size",
        )  # fmt: skip
    else:
        yield Finding(verdict="ok", what="gpu to gpu", found="CUDA IPC, with --disagg-transfer-gpu-pool-size")


def gpudirect(*, bindings: bool, dma_buf: bool) -> Finding:
    """Whether RDMA can get at GPU memory, as far as can be seen without trying: with the package cuda-bindings or
    without, and of GPUs that all export their memory as DMA-BUF or not."""
    what, host = "gpudirect", "RDMA through host memory"
    if not bindings:
        mend = "pip install cuda-bindings for --disagg-transfer-gpu-pool-size"
        return Finding(verdict="ok", what=what, found=host, mend=mend)
    reach = gpu_reach(dma_buf=dma_buf)
    if not reach.possible:
        return Finding(verdict="ok", what=what, found=f"{host}: {reach.found}", mend=reach.mend)
    if peer_memory() is None and installed("mooncake-transfer-engine-non-cuda"):
        mend = 'pip install "triptych[cuda12]" or "triptych[cuda13]" in place of the build for the CPU'
        return Finding(verdict="ok", what=what, found=f"{host}: {reach.found}", mend=mend)
    found = f"possible: {reach.found}; with --disagg-ib-device and --disagg-transfer-gpu-pool-size"
    return Finding(verdict="ok", what=what, found=found)
