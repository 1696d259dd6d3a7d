"""Compares the memory models with directly estimated stages, and measures the effect of their errors on plans.

A model without stage positions is compared, too. Prints the tables of README.md. The ranges take some ten CPU minutes;
`--ranges FOLDER` stores them there and reads them again.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import statistics
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from ranges import PAPER, estimator_of, exact_ranges, profile_of, requested_bytes

from varuna_capslog.memory import MEMORY_MODELS
from varuna_capslog.memory.costs import RangeCosts
from varuna_capslog.planners.baselines import varuna_cuts
from varuna_capslog.planners.capslog import capslog_cuts
from varuna_capslog.planners.exact import exact_cuts
from varuna_capslog.profiles.record import Profile, read_profile, write_profile
from varuna_capslog.profiling.estimate import Memo
from varuna_capslog.profiling.estimation.allocator import replay
from varuna_capslog.schedules import RunShape

GIB, MIB = 1 << 30, 1 << 20
MODELS = ("additive", "composition")


def truth(name: str, folder: Path | None, memo: Memo) -> tuple[Profile, NDArray[np.int64]]:
    """Return the profile and the exact ranges of a configuration, from the folder if stored there."""
    if folder is None:
        return profile_of(name, memo), exact_ranges(name, memo)
    kept, table = folder / f"{name}.json", folder / f"{name}.npy"
    if not table.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_profile(kept, profile_of(name, memo))
        np.save(table, exact_ranges(name, memo))
    return read_profile(kept), np.load(table)


def errors(name: str, profile: Profile, exact: NDArray[np.int64]) -> None:
    """Print the errors of each model over all ranges."""
    real = ~np.tri(*exact.shape, dtype=np.bool_)
    for model in MODELS:
        predicted = MEMORY_MODELS[model].stage_costs(profile, RunShape()).matrix()[real]
        off = 100 * (predicted / exact[real] - 1)
        bytes_off = np.abs(predicted - exact[real]) / MIB
        print(
            f"| {name} | {model} | {np.abs(off).mean():.3f} % | {np.percentile(np.abs(off), 95):.2f} % | "
            f"{off.max():+.2f} % | {off.min():+.2f} % | {bytes_off.mean():.1f} / {bytes_off.max():.1f} |"
        )


def requested(name: str, memo: Memo, count: int = 30) -> None:
    """Print the errors of the composition of requested bytes, over `count` ranges: the model without the allocator."""
    profile, estimator = profile_of(name, memo), estimator_of(name, memo)
    rows = []
    for row in profile.observations:
        stage = estimator.stage(*row.layers)
        saved = stage.saved_bytes - replay(stage.events).remainder_bytes
        rows.append(dataclasses.replace(row, peak_bytes=requested_bytes(stage), saved_bytes=saved))
    composition = MEMORY_MODELS["composition"].stage_costs(
        dataclasses.replace(profile, observations=tuple(rows)), RunShape()
    )
    rng = random.Random(0)
    off = []
    for _ in range(count):
        first, end = sorted(rng.sample(range(profile.num_layers + 1), 2))
        off.append(100 * (composition.stage_bytes(first, end) / requested_bytes(estimator.stage(first, end)) - 1))
    print(f"| {name} | {np.abs(off).mean():.4f} % | {max(off):+.3f} % | {min(off):+.3f} % |", flush=True)


def recommendations(name: str, profile: Profile, exact: NDArray[np.int64]) -> None:
    """Print the peaks by exact ranges of the plan of each search with each model."""
    true = RangeCosts(exact)
    additive, composed = (MEMORY_MODELS[model].stage_costs(profile, RunShape()) for model in MODELS)
    for devices in range(2, 17):
        best = max(true.peaks(exact_cuts(true, devices)))
        cells = []
        for costs, search in ((additive, capslog_cuts), (additive, exact_cuts), (composed, exact_cuts)):
            peak = max(true.peaks(search(costs, devices)))
            cells.append(f"{peak / GIB:.3f} (+{100 * (peak / best - 1):.1f} %)")
        print(f"| {name} | {devices} | {' | '.join(cells)} | {best / GIB:.3f} |")


def one_f_one_b(name: str, profile: Profile) -> None:
    """Print four cut lists under the model of 1F1B: eight devices, eight microbatches, no recomputation."""
    costs = MEMORY_MODELS["1f1b"].stage_costs(profile, RunShape(8, "1f1b", False))
    blind = MEMORY_MODELS["additive"].stage_costs(profile, RunShape())
    best = max(costs.peaks(exact_cuts(costs, 8)))
    cells = []
    for cuts in (varuna_cuts(costs, 8), exact_cuts(blind, 8), capslog_cuts(costs, 8)):
        peak = max(costs.peaks(cuts))
        cells.append(f"{peak / GIB:.2f} ({peak / best:.2f}x)")
    print(f"| {name} | {' | '.join(cells)} | {best / GIB:.2f} |", flush=True)


def search_times(name: str, profile: Profile) -> None:
    """Print the milliseconds of processor time of the exact search with its tie-break, for each model in turn."""
    for devices in (8, 24):
        cells = []
        for model, run in (
            ("additive", RunShape()),
            ("composition", RunShape()),
            ("1f1b", RunShape(64, "1f1b", False)),
            ("gpipe", RunShape(64, "gpipe", False)),
        ):
            costs = MEMORY_MODELS[model].stage_costs(profile, run)
            times = []
            for _ in range(50):
                begun = time.thread_time()
                exact_cuts(costs, devices)
                times.append(1e3 * (time.thread_time() - begun))
            cells.append(f"{statistics.median(times):.2f} ({min(times):.2f})")
        print(f"| {name} | {profile.num_layers} | {devices} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranges", type=Path, help="folder that keeps the directly estimated ranges")
    folder = parser.parse_args().ranges
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    memo = Memo()
    truths = {name: truth(name, folder, memo) for name in PAPER[:2]}
    print("| configuration | model | mean error | 95 % below | most above | most below | MiB mean / most |")
    print("|---" * 7 + "|")
    for name, (profile, exact) in truths.items():
        errors(name, profile, exact)
    print("\nThe composition of requested bytes, 30 ranges each\n")
    print("| configuration | mean error | most above | most below |")
    print("|---" * 4 + "|")
    for name in truths:
        requested(name, memo)
    print("\nGiB by exact ranges (above the optimum)\n")
    print("| configuration | G | capslog on additive | exact on additive | exact on composition | optimum |")
    print("|---" * 6 + "|")
    for name, (profile, exact) in truths.items():
        recommendations(name, profile, exact)
    print("\nGiB under 1F1B without recomputation, 8 devices, 8 microbatches (times the optimum)\n")
    print("| configuration | uniform | position-blind exact | fill-first with the right costs | exact |")
    print("|---" * 5 + "|")
    profiles = {name: truths[name][0] if name in truths else profile_of(name, memo) for name in PAPER}
    for name, profile in profiles.items():
        one_f_one_b(name, profile)
    print("\nMilliseconds of the exact search with its tie-break, median (smallest) of 50\n")
    print("| configuration | L | G | additive | composition | 1f1b | gpipe |")
    print("|---" * 7 + "|")
    for name in (PAPER[0], PAPER[-1]):
        search_times(name, profiles[name])


if __name__ == "__main__":
    main()
