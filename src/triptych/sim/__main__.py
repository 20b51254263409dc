"""Command line of the simulator: ``python -m triptych.sim --seed N [--count M] [--trace]``."""

from __future__ import annotations

import argparse
import sys

from triptych.sim.coverage import Coverage
from triptych.sim.simulation import Simulation
from triptych.sim.sweep import sweep
from triptych.sim.world import Violation


def main(arguments: list[str] | None = None) -> int:
    """Run seeds; 1 when an invariant is violated."""
    parser = argparse.ArgumentParser(prog="python -m triptych.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="first seed (default 0)")
    parser.add_argument("--count", type=int, default=1, help="how many seeds to run (default 1)")
    parser.add_argument("--processes", type=int, help="how many seeds run at once (default: one a core)")
    parser.add_argument("--trace", action="store_true", help="print the last events of the first seed; run only that")
    options = parser.parse_args(arguments)
    try:
        if options.trace or options.count == 1:
            coverage, count = _one(options.seed, trace=options.trace), 1
        else:
            coverage, count = _many(options.seed, options.count, options.processes), options.count
    except Violation as violation:
        print(violation, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"{count:,} seeds hold")
    print("requests:", ", ".join(f"{number:,} {state}" for state, number in sorted(coverage.ends.items())))
    print("faults:", ", ".join(f"{number:,} {fault}" for fault, number in sorted(coverage.faults.items())))
    print("counted:", ", ".join(f"{number:,} {name}" for name, number in sorted(coverage.counted.items())))
    print("never seen:", ", ".join(coverage.missing()) or "nothing")
    return 0


def _one(seed: int, *, trace: bool) -> Coverage:
    simulation = Simulation(seed)
    try:
        simulation.run()
    finally:
        if trace:
            for when, who, what in simulation.world.trace:
                print(f"{when:9.4f} {who:12} {what}")
    return simulation.world.coverage


def _many(first: int, count: int, processes: int | None) -> Coverage:
    told = first

    def tell(upto: int) -> None:
        nonlocal told
        if upto - told >= 1000:
            told = upto
            left = first + count - upto
            onward = f"; go on from here with --seed {upto} --count {left}" if left else ""
            print(f"seeds {first:,} to {upto - 1:,} hold{onward}", file=sys.stderr, flush=True)

    return sweep(first, count, processes=processes, told=tell)


if __name__ == "__main__":
    sys.exit(main())
