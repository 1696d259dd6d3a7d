"""Compares all planners with CAPSlog's algorithm on the paper's six configurations: search time and peak.

The profiles are estimated for configs/paper/*.yaml (additive model), so that the numbers can be compared with Fig. 11
and 13. Brute force runs up to 10^8 cut lists; beyond, its time is extrapolated from its largest run here and marked as
such. Prints the tables.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from search import algorithm_1

from varuna_capslog.config.reading import load_config
from varuna_capslog.memory.additive import AdditiveCosts
from varuna_capslog.planners.baselines import varuna_cuts
from varuna_capslog.planners.capslog import capslog_cuts, capslog_tb_cuts
from varuna_capslog.planners.exact import exact_cuts
from varuna_capslog.planners.mcap import LIMIT, count_cut_lists, mcap_bf_cuts, mcap_bo_cuts
from varuna_capslog.start.prepare import profile_run

CONFIGS = Path(__file__).parents[2] / "configs" / "paper"
NAMES = ("rn50_e6", "rn50_d_e6", "rn101_e6", "rn101_d_e6", "rn101_e12", "rn101_d_e12")
DILATED = ("rn50_d_e6", "rn101_d_e6", "rn101_d_e12")
Search = Callable[[AdditiveCosts, int], list[int]]
QUICK: dict[str, Search] = {
    "varuna": varuna_cuts,
    "capslog": capslog_cuts,
    "capslog-tb": capslog_tb_cuts,
    "exact": exact_cuts,
    "algorithm 1": algorithm_1,
}
GIB = 1 << 30


def costs_of(name: str) -> AdditiveCosts:
    """Return M_i and M_a of a configuration."""
    profile = profile_run(load_config(CONFIGS / f"{name}.yaml", ["profile.source=estimated"]), show=False)
    return AdditiveCosts.of_statistics(profile.column("isolated_bytes"), profile.column("added_bytes"))


def timed(search: Search, costs: AdditiveCosts, devices: int, repeats: int) -> tuple[float, list[int]]:
    """Return the median CPU seconds, and the cut list."""
    seconds = []
    for _ in range(repeats):
        begun = time.thread_time()
        cuts = search(costs, devices)
        seconds.append(time.thread_time() - begun)
    return statistics.median(seconds), cuts


def show(seconds: float) -> str:
    """Format a time in a suitable unit."""
    for size, unit in ((31_557_600, "years"), (86_400, "days"), (3600, "h"), (1, "s")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{1e3 * seconds:.3g} ms"


class BruteForce:
    """Times brute force where it may run, and extrapolates from its time per cut list elsewhere."""

    def __init__(self) -> None:
        self.largest = (0, 0.0)

    def cell(self, costs: AdditiveCosts, devices: int) -> tuple[str, list[int] | None]:
        count = count_cut_lists(costs.num_layers, devices)
        if count > LIMIT:
            weighed, seconds = self.largest
            return f"{show(count * seconds / weighed)} (extrapolated, {count:.3g} cut lists)", None
        seconds, cuts = timed(mcap_bf_cuts, costs, devices, 1)
        if count > self.largest[0]:
            self.largest = (count, seconds)
        return f"{show(seconds)} ({count:.3g} cut lists)", cuts


def of_all(costs: dict[str, AdditiveCosts], bayes: list[str], devices: int) -> None:
    """Print a table of all configurations on `devices` GPUs."""
    brute = BruteForce()
    columns = ["varuna", "capslog", "capslog-tb", "exact", "algorithm 1", "mcap-bf", "mcap-bo"]
    print(f"\nAll planners, G = {devices}: CPU time, and the predicted peak in GiB\n")
    print(f"| configuration | L | {' | '.join(columns)} |\n{'|---' * (len(columns) + 2)}|")
    for name, of_layers in costs.items():
        cells = []
        for planner in columns:
            cuts: list[int] | None
            if planner == "mcap-bf":
                text, cuts = brute.cell(of_layers, devices)
                if cuts is not None and cuts != exact_cuts(of_layers, devices):
                    raise SystemExit(f"brute force and exact differ on {name}")
            elif planner == "mcap-bo":
                if name not in bayes:
                    cells.append("-")
                    continue
                seconds, cuts = timed(mcap_bo_cuts, of_layers, devices, 1)
                text = show(seconds)
            else:
                seconds, cuts = timed(QUICK[planner], of_layers, devices, 21)
                text = show(seconds)
            cells.append(text if cuts is None else f"{text}: {max(of_layers.peaks(cuts)) / GIB:.3f}")
        print(f"| {name} | {of_layers.num_layers} | {' | '.join(cells)} |", flush=True)


def over_devices(costs: dict[str, AdditiveCosts]) -> None:
    """Print Fig. 11: search time of the dilated configurations on 2 to 24 GPUs."""
    for name in DILATED:
        brute = BruteForce()
        print(f"\nSearch time of {name} (L = {costs[name].num_layers}), as in Fig. 11\n")
        print("| G | capslog | capslog-tb | exact | algorithm 1 | mcap-bf |\n|---|---|---|---|---|---|")
        for devices in (2, 4, 6, 8, 10, 12, 16, 20, 24):
            quick = [timed(QUICK[planner], costs[name], devices, 21) for planner in ("capslog", "capslog-tb", "exact")]
            plain = timed(algorithm_1, costs[name], devices, 5)[0]
            text, _ = brute.cell(costs[name], devices)
            cells = [*(show(seconds) for seconds, _ in quick), show(plain), text]
            print(f"| {devices} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument(
        "--bayes", default="rn101_d_e12", help="configurations for mcap-bo, by commas; it takes half a minute for each"
    )
    arguments = parser.parse_args()
    costs = {name: costs_of(name) for name in NAMES}
    of_all(costs, arguments.bayes.split(","), arguments.devices)
    over_devices(costs)


if __name__ == "__main__":
    main()
