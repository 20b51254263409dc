"""Prints the resident memory of each role's process against one process that holds the whole model.

    python tools/memory_table.py [MODEL]

The figures are those of the operating system, as the instances report them to the server. On a small model they are
mostly Python and torch, which every process has.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import TypeAlias

from triptych.client import Client
from triptych.launch.args import ServerArgs
from triptych.launch.group import Group
from triptych.launch.plan import Gpus, plan_pool
from triptych.launch.pool import Pool
from triptych.launch.ports import free_ports

MIB = 1 << 20
HEARTBEATS = 2.0
"""Seconds after which the figures in the server are fresh."""


Figures: TypeAlias = tuple[int, int]
"""Resident bytes of a process with its model loaded, and after one request at the model's own size."""


def measure(model: str, device: str, **gpus: Gpus) -> dict[str, Figures]:
    """Roles of each instance to its figures."""
    scheduler, *_, port = free_ports(5)
    with tempfile.TemporaryDirectory() as outputs:
        args = ServerArgs.from_kwargs(
            model_path=model, device=device, port=port, scheduler_port=scheduler, output_dir=Path(outputs)
        )
        plan = plan_pool(args, **gpus)
        group = Group(plan.processes, output=lambda _name, _line: None)
        group.start()
        with Pool(plan, group) as pool, Client(pool.wait_ready().url) as client:
            loaded = resident(client)
            client.generate("a ball", num_inference_steps=2)
            used = resident(client)
    return {roles: (loaded[roles], used[roles]) for roles in loaded}


def resident(client: Client) -> dict[str, int]:
    """Roles of each instance to its resident bytes, once its next heartbeats have told them."""
    time.sleep(HEARTBEATS)
    return {" + ".join(i["roles"]): i["resident_bytes"] for i in client.server_info()["instances"]}


def main() -> None:
    """Measure one deployment in roles and one whole, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    whole = measure(options.model, options.device, replica_gpus=[[0]])
    parts = measure(options.model, options.device, encoder_gpus=[[0]], denoiser_gpus=[[0]], decoder_gpus=[[0]])
    ((whole_loaded, _),) = whole.values()
    print(f"{'process':<32} {'loaded MiB':>11} {'of the whole':>13} {'after a request MiB':>20}")
    for roles, (loaded, used) in [*sorted(parts.items(), key=lambda item: item[1]), *whole.items()]:
        print(f"{roles:<32} {loaded / MIB:>11.1f} {loaded / whole_loaded:>13.0%} {used / MIB:>20.1f}")


if __name__ == "__main__":
    main()
