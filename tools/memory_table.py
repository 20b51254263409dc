"""Prints the resident memory of each role's process against one process that holds the whole model.

    python tools/memory_table.py [MODEL]

The figures are those of the operating system, after one request, as the instances report them to the server. On a small
model they are mostly Python and torch, which every process has; the last column shows what is beyond the smallest.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from triptych.launch.args import ServerArgs
from triptych.launch.group import Group
from triptych.launch.plan import Gpus, plan_pool
from triptych.launch.pool import Pool
from triptych.launch.ports import free_ports

MIB = 1 << 20
HEARTBEATS = 2.0
"""Seconds after which the figures in the server are fresh."""


def measure(model: str, device: str, **gpus: Gpus) -> dict[str, int]:
    """Roles of each instance to its resident bytes after one request."""
    scheduler, *_, port = free_ports(5)
    with tempfile.TemporaryDirectory() as outputs:
        args = ServerArgs.from_kwargs(
            model_path=model, device=device, port=port, scheduler_port=scheduler, output_dir=Path(outputs)
        )
        plan = plan_pool(args, **gpus)
        group = Group(plan.processes)
        group.start()
        with Pool(plan, group) as pool, httpx.Client(base_url=pool.wait_ready().url, trust_env=False) as http:
            job: dict[str, Any] = http.post("/v1/videos", json={"prompt": "a ball", "num_inference_steps": 2}).json()
            while job["status"] not in ("completed", "failed"):
                time.sleep(0.2)
                job = http.get(f"/v1/videos/{job['id']}").json()
            assert job["status"] == "completed", job["error"]
            time.sleep(HEARTBEATS)
            info: dict[str, Any] = http.get("/server_info").json()
    return {" + ".join(i["roles"]): i["resident_bytes"] for i in info["instances"]}


def main() -> None:
    """Measure one deployment in roles and one whole, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    whole = measure(options.model, options.device, replica_gpus=[[0]])
    parts = measure(options.model, options.device, encoder_gpus=[[0]], denoiser_gpus=[[0]], decoder_gpus=[[0]])
    (whole_bytes,) = whole.values()
    least = min(parts.values())
    print(f"{'process':<32} {'resident MiB':>12} {'of the whole':>12} {'over least MiB':>15}")
    for roles, resident in [*sorted(parts.items(), key=lambda item: item[1]), *whole.items()]:
        share, over = resident / whole_bytes, (resident - least) / MIB
        print(f"{roles:<32} {resident / MIB:>12.1f} {share:>12.0%} {over:>15.1f}")


if __name__ == "__main__":
    main()
