"""Command line of the simulator: ``python -m triptych.sim --seed N [--count M] [--trace]``."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from triptych.sim.simulation import Simulation
from triptych.sim.world import Violation


def main(arguments: list[str] | None = None) -> int:
    """Run seeds; 1 when an invariant is violated."""
    parser = argparse.ArgumentParser(prog="python -m triptych.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="first seed (default 0)")
    parser.add_argument("--count", type=int, default=1, help="how many seeds to run (default 1)")
    parser.add_argument("--trace", action="store_true", help="print the last events of each run")
    options = parser.parse_args(arguments)
    states: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.count):
        simulation = Simulation(seed)
        try:
            ended = simulation.run()
        except Violation as violation:
            print(f"seed {seed}: {violation}", file=sys.stderr)
            return 1
        finally:
            if options.trace:
                for when, who, what in simulation.world.trace:
                    print(f"{when:9.4f} {who:12} {what}")
        states.update(view.state for view in ended.values())
        counts.update(simulation.server.counts)
    print(f"{options.count} seeds hold")
    print("requests:", ", ".join(f"{count} {state}" for state, count in sorted(states.items())))
    print("counted:", ", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
