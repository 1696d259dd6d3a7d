"""Search time of `exact` where a stage's bytes depend on its position: synthetic chains, memory models of schedules.

Prints a table of README.md; takes some seconds.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.memory.costs import NEVER
from varuna_capslog.memory.inflight import InflightCosts
from varuna_capslog.planners.exact import exact_cuts
from varuna_capslog.schedules import RunShape

RUNS = {
    "1f1b, 64 microbatches": RunShape(64, "1f1b", False),
    "1f1b, 400 microbatches": RunShape(400, "1f1b", False),
    "gpipe, 64 microbatches": RunShape(64, "gpipe", False),
    "varuna, inputs on the device": RunShape(64, "varuna", True, "device"),
}


def layers(kind: str, size: int) -> tuple[NDArray[np.int64], ...]:
    """Return static, saved, working and input bytes of each layer.

    independent: up to 1 GB each; ties: up to 3 bytes, up to 100 MB of inputs; detr_like: a third uneven layers, then
    twenty large ones, then equal small ones.
    """
    drawn = np.random.default_rng(0)
    static, saved, working = (drawn.integers(1, 4 if kind == "ties" else 10**9, size) for _ in range(3))
    if kind == "detr_like":
        static, saved, working = (np.full(size, megabytes * 10**6) for megabytes in (40, 30, 90))
        third = size // 3
        saved[:third], working[:third] = drawn.integers(5, 60, third) * 10**6, drawn.integers(50, 400, third) * 10**6
        saved[third : third + 20] = 500 * 10**6
    return static, saved, working, drawn.integers(0, 10**8, size + 1)


def costs_of(kind: str, size: int, run: RunShape) -> InflightCosts:
    """Return the costs of these layers by the composition's equation, with the bytes in flight."""
    static, saved, working, inputs = layers(kind, size)
    nowhere = np.tri(size, size + 1, dtype=np.bool_)

    def sums(each: NDArray[np.int64]) -> NDArray[np.int64]:
        running = np.append(0, np.cumsum(each))
        return np.where(nowhere, 0, running - running[:-1, None])

    kept = sums(saved)
    at_work = kept.copy()
    at_work[:, 1:] = np.where(nowhere[:, 1:], 0, kept[:, :-1] + working)
    alone = np.where(nowhere, NEVER, sums(static) + np.maximum.accumulate(at_work, axis=1))
    within = np.where(nowhere, 0, 1)
    return InflightCosts(alone, kept, within * inputs[:size, None], within * inputs, run, one_memory=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=3, help="searches of which the fastest counts")
    times = parser.parse_args().times
    for size, devices in ((48, 24), (1000, 100)):
        print(f"\nL={size:,} G={devices}: milliseconds of processor time, the fastest of {times}\n")
        print(f"| layers | {' | '.join(RUNS)} |")
        print("|---" * (len(RUNS) + 1) + "|")
        for kind in ("independent", "ties", "detr_like"):
            cells = []
            for run in RUNS.values():
                costs = costs_of(kind, size, run)
                seconds = []
                for _ in range(times):
                    begun = time.thread_time()
                    exact_cuts(costs, devices)
                    seconds.append(time.thread_time() - begun)
                cells.append(f"{1e3 * min(seconds):.1f}")
            print(f"| {kind} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
