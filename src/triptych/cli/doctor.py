"""`triptych doctor`: what this machine has and lacks for serving, and how to mend each lack."""

from __future__ import annotations

import argparse
import ctypes.util
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from triptych.cli.finding import Finding, installed
from triptych.config import MIB, ServerConfig
from triptych.errors import ConfigError
from triptych.launch.ports import is_free
from triptych.transport.adapters import active_adapters

GIB = 1 << 30
_IMPORT_SECONDS = 60.0
"""Longest time that importing Mooncake may take."""

MOONCAKE_BUILDS = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
)
SHARED_MEMORY = Path("/dev/shm")


def run(args: argparse.Namespace) -> int:
    """Print every finding; 1 when one of them keeps Triptych from serving."""
    failed = False
    for finding in findings(Path(args.output_dir), args.port, args.scheduler_port):
        mend = f"  -> {finding.mend}" if finding.mend else ""
        print(f"{finding.verdict:<5} {finding.what:<16} {finding.found}{mend}", flush=True)
        failed = failed or finding.verdict == "fail"
    return 1 if failed else 0


def findings(output_dir: Path, port: int, scheduler_port: int) -> Iterator[Finding]:
    """Every check, in the order in which a newcomer would mend them."""
    yield _python()
    yield from _torch()
    yield from _accelerations()
    yield from _mooncake()
    yield from _ports(port, scheduler_port)
    yield from _codecs()
    yield _disk(output_dir)
    yield _shared_memory()


def _python() -> Finding:
    return Finding(verdict="ok", what="python", found=f"{platform.python_version()} ({sys.executable})")


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding(verdict="fail", what="torch", found=str(error), mend="pip install torch")
        return
    yield Finding(verdict="ok", what="torch", found=f"{torch.__version__}, {torch.get_num_threads()} CPU threads")
    if not torch.cuda.is_available():
        build: Any = torch.version.cuda
        found = "torch sees none" if build else "this build of torch is for the CPU"
        mend = "check nvidia-smi and the driver" if build else "on a GPU machine: pip install the CUDA build of torch"
        yield Finding(verdict="warn", what="gpu", found=found, mend=f"{mend}; without GPU pass --device cpu")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found = f"{properties.name}, {properties.total_memory / GIB:.0f} GiB"
        yield Finding(verdict="ok", what=f"gpu {index}", found=found)


def _accelerations() -> Iterator[Finding]:
    try:
        from triptych.cli.accelerations import accelerations
    except (ImportError, OSError):  # of torch, which has a line of its own
        return
    yield from accelerations()


def _mooncake() -> Iterator[Finding]:
    builds = [name for name in MOONCAKE_BUILDS if installed(name)]
    if not builds:
        mend = 'pip install "triptych[cpu]", "triptych[cuda12]" or "triptych[cuda13]"; one host works without it'
        yield Finding(verdict="warn", what="mooncake", found="not installed", mend=mend)
        return
    if len(builds) > 1:
        mend = f"pip uninstall all but one of {', '.join(builds)}"
        yield Finding(verdict="fail", what="mooncake", found="several builds overwrite each other", mend=mend)
        return
    libraries = {"ibverbs": "libibverbs1"}
    if builds[0] == "mooncake-transfer-engine-cuda13":
        libraries["numa"] = "libnuma1"
    for library, package in libraries.items():
        if ctypes.util.find_library(library) is None:
            yield Finding(verdict="fail", what=f"lib{library}", found="not found", mend=f"apt-get install -y {package}")
    # In a process of its own: the engine takes its settings when it is first imported, and may end its process.
    command = [sys.executable, "-c", "import mooncake.engine"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        mend = 'see where `python -X faulthandler -c "import mooncake.engine"` stands'
        yield Finding(verdict="fail", what="mooncake", found=f"not loaded within {_IMPORT_SECONDS:g} s", mend=mend)
        return
    if result.returncode:
        mend = "install the missing system library, or the build that fits this machine's CUDA"
        last = (result.stderr.strip() or f"exit status {result.returncode}").splitlines()[-1]
        yield Finding(verdict="fail", what="mooncake", found=last, mend=mend)
        return
    yield Finding(verdict="ok", what="mooncake", found=f"{builds[0]} {installed(builds[0])}")
    if adapters := ",".join(active_adapters()):
        found = f"{adapters}: between hosts, with --disagg-ib-device {adapters}; without it by TCP"
        yield Finding(verdict="ok", what="rdma", found=found)


def _ports(port: int, scheduler_port: int) -> Iterator[Finding]:
    try:
        ServerConfig(port=port, scheduler_port=scheduler_port)
    except ConfigError as error:
        yield Finding(verdict="fail", what="ports", found=error.message, mend="choose other ports")
        return
    control = range(scheduler_port, scheduler_port + 4)
    busy = [p for p in (port, *control) if not is_free(p)]
    names = f"{port} and {control[0]} to {control[-1]}"
    if busy:
        found = f"in use: {', '.join(map(str, busy))}"
        mend = "stop what listens there (ss -ltnp), or pass --port and --scheduler-port"
        yield Finding(verdict="warn", what="ports", found=found, mend=mend)
    else:
        yield Finding(verdict="ok", what="ports", found=f"{names} are free")


def _codecs() -> Iterator[Finding]:
    try:
        import av
    except (ImportError, OSError) as error:
        yield Finding(verdict="fail", what="pyav", found=str(error), mend="pip install av")
        return
    missing = [name for name in ("libx264", "aac") if name not in av.codecs_available]
    if missing:
        found = f"PyAV {av.__version__} lacks {', '.join(missing)}"
        yield Finding(
            verdict="fail", what="codecs", found=found, mend="pip install --force-reinstall --only-binary av av"
        )
    else:
        yield Finding(verdict="ok", what="codecs", found=f"PyAV {av.__version__} with libx264 and aac")


def _disk(folder: Path) -> Finding:
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    found = f"{free / GIB:.1f} GiB free for {folder}"
    if free < GIB:
        return Finding(verdict="fail", what="disk", found=found, mend="free some room or pass another --output-dir")
    return Finding(verdict="ok", what="disk", found=found)


def _shared_memory() -> Finding:
    if not SHARED_MEMORY.is_dir():
        mend = "mount a tmpfs there, or use --disagg-transfer mooncake"
        return Finding(verdict="warn", what="shared memory", found=f"no {SHARED_MEMORY}", mend=mend)
    usage = shutil.disk_usage(SHARED_MEMORY)
    found = f"{usage.free / MIB:.0f} of {usage.total / MIB:.0f} MiB free in {SHARED_MEMORY}"
    if usage.free < 3 * 256 * MIB:  # one pool of the default size for each role
        mend = "in a container: --shm-size=2g; or a smaller --disagg-transfer-pool-size"
        return Finding(verdict="warn", what="shared memory", found=found, mend=mend)
    return Finding(verdict="ok", what="shared memory", found=found)
