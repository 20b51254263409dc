"""Many seeds over all cores: what they covered together, or the first one that does not hold."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED as FIRST
from concurrent.futures import Future, ProcessPoolExecutor, wait

from triptych.sim.coverage import Coverage
from triptych.sim.simulation import Simulation

_CHUNK = 50
"""Seeds that a process runs before it reports."""


def sweep(
    first: int, count: int, *, processes: int | None = None, told: Callable[[int], None] | None = None
) -> Coverage:
    """Run the seeds ``first`` to ``first + count - 1``, each a simulation of its own, in so many processes.

    ``processes``: as many as there are cores when None. ``told`` hears, now and then, up to which seed all before it
    hold, so that a run that was stopped can go on from there. Raises `Violation` for a seed that does not hold.
    """
    coverage, held = Coverage(), set[int]()
    upto = first
    chunks = iter(range(first, first + count, _CHUNK))
    context = multiprocessing.get_context("spawn")
    # What is imported lives as long as the process: the collector need not look at it after every simulation.
    with ProcessPoolExecutor(processes or os.cpu_count(), mp_context=context, initializer=gc.freeze) as pool:
        running: dict[Future[Coverage], int] = {}

        def refill() -> None:
            for start in chunks:
                running[pool.submit(run_seeds, start, min(_CHUNK, first + count - start))] = start
                if len(running) >= 4 * (processes or os.cpu_count() or 1):
                    return

        try:
            refill()
            while running:
                for done in wait(running, return_when=FIRST).done:
                    held.add(running.pop(done))
                    coverage.add(done.result())
                upto = _advance(upto, held, first + count)
                if told is not None:
                    told(upto)
                refill()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return coverage


def run_seeds(first: int, count: int) -> Coverage:
    """Run seeds one after the other in this process. Raises `Violation` at the first that does not hold."""
    coverage = Coverage()
    for simulation in _simulations(first, count):
        simulation.run()
        coverage.add(simulation.world.coverage)
    return coverage


def _simulations(first: int, count: int) -> Iterator[Simulation]:
    return (Simulation(seed) for seed in range(first, first + count))


def _advance(upto: int, held: set[int], end: int) -> int:
    while upto in held:
        held.remove(upto)
        upto = min(upto + _CHUNK, end)
    return upto
