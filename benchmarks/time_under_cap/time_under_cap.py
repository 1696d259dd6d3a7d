"""Step time under a memory cap: our time-optimal cuts beside CAPSlog's, Varuna's and the smallest-peak cuts.

`--simulate`: the six configurations of the paper, from estimated profiles (no GPU): 8 devices of 16 GiB, 8
microbatches.
`--sleep`: the same plans as real steps of the engine over gloo, on layers that sleep instead of computing.
`--measure`: real engine runs of one small config on this machine's CPU, the plans in turn, round after round.
See README.md for what the numbers mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import plan
from sleepers import measured_steps

from varuna_capslog.memory import resolve
from varuna_capslog.memory.headroom import Headroom
from varuna_capslog.planners.seconds import LayerSeconds, Link
from varuna_capslog.planners.throughput import fastest_cuts
from varuna_capslog.planning.simulation import simulate_plan
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile, read_profile
from varuna_capslog.schedules import RunShape

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ("rn50_e6", "rn50_d_e6", "rn101_e6", "rn101_d_e6", "rn101_e12", "rn101_d_e12")
GIB = 1024**3
CAPACITY, DEVICES, MICROBATCHES = 16 * GIB, 8, 8

COMMAND = "from varuna_capslog.cli import program; program()"

LINKS = {
    "free": Link(),
    "12 GB/s": Link(12e9, 1e-5),
    "0.5 GB/s": Link(0.5e9, 1e-4),
    "0.5 GB/s, blocking": Link(0.5e9, 1e-4, copy_bandwidth=0.5e9),
}
"""Between two stages. The last: the sender copies what it sends itself and cannot compute meanwhile."""


def estimated(config: str, size: tuple[int, int], folder: Path) -> Profile:
    """The estimated profile of a configuration at one image size."""
    path = folder / f"{config}-{size[0]}x{size[1]}.json"
    if not path.is_file():
        arguments = ["profile", str(ROOT / "configs" / "paper" / f"{config}.yaml"), "--estimate", "-o", str(path)]
        capslog([*arguments, f"profile.image_size=[{size[0]},{size[1]}]"])
    return read_profile(path)


def capslog(arguments: list[str]) -> None:
    """Runs the command of this environment; what it says goes to the log when it fails."""
    done = subprocess.run([sys.executable, "-c", COMMAND, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"capslog {' '.join(arguments)} failed: {done.stderr}")


def timed_as(memory: Profile, times: Profile) -> Profile:
    """Bytes of one profile, seconds and transfers of another: memory for the largest input, time for the usual."""
    layers = [
        dataclasses.replace(
            layer,
            forward_seconds=other.forward_seconds,
            backward_seconds=other.backward_seconds,
            boundary_bytes=other.boundary_bytes,
        )
        for layer, other in zip(memory.layers, times.layers, strict=True)
    ]
    return dataclasses.replace(memory, layers=tuple(layers))


def plans_of(profile: Profile, devices: int, capacity: int | None, microbatches: int, link: Link) -> dict[str, Plan]:
    """The cut lists that are compared, all judged by the same memory model and capacity."""
    given = {"capacity": capacity, "num_microbatches": microbatches}
    found = {}
    for name in ("varuna", "capslog", "exact", "throughput"):
        # CAPSlog plans on M_i + sum M_a, as the paper does.
        memory = "additive" if name == "capslog" else "auto"
        cuts = plan(profile, devices, name, memory, **given, link=link).cuts
        found[name] = dataclasses.replace(plan(profile, devices, **given, cuts=cuts), planner=name)
    return found


def simulated(folder: Path) -> list[dict[str, Any]]:
    """One row per configuration, image size, link and planner."""
    rows = []
    for config in CONFIGS:
        largest = estimated(config, (1333, 1333), folder)
        sizes = {"1333x1333": largest, "800x1066": timed_as(largest, estimated(config, (800, 1066), folder))}
        for size, profile in sizes.items():
            for name, link in LINKS.items():
                plans = plans_of(profile, DEVICES, CAPACITY, MICROBATCHES, link)
                steps = {key: simulate_plan(profile, one, link=link).step_seconds for key, one in plans.items()}
                bound, proven, search = certificate(profile, link)
                for key, one in plans.items():
                    rows.append({
                        "config": config, "size": size, "link": name, "planner": key, "cuts": list(one.cuts),
                        "fits": one.fits, "peak_bytes": one.peak_bytes, "step_seconds": steps[key],
                        "against_varuna": steps["varuna"] / steps[key],
                        "bound_seconds": bound, "proven": proven, "search_seconds": search,
                    })  # fmt: skip
    return rows


def certificate(profile: Profile, link: Link) -> tuple[float, bool, float]:
    """Bound of the step time under the cap, whether the answer is proven to be the best, and the search time."""
    _, costs = resolve("auto", profile, RunShape(MICROBATCHES))
    usable = [Headroom.of(profile).usable(CAPACITY)] * DEVICES
    begun = time.process_time()
    best = fastest_cuts(costs, LayerSeconds.of_profile(profile, link), RunShape(MICROBATCHES), DEVICES, usable)
    if best is None:
        raise SystemExit(f"{profile.model}: nothing fits {CAPACITY // GIB} GiB")
    return best.bound_seconds, best.proven, time.process_time() - begun


def slept(folder: Path, configs: list[str], ranks: int, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """One row per configuration and planner: simulated and measured steps of layers that sleep, with free links.

    Fewer ranks get as much memory in all. Times are scaled so that the fastest plan's step takes `seconds`.
    """
    rows = []
    for config in configs:
        profile = estimated(config, (1333, 1333), folder)
        plans = plans_of(profile, ranks, CAPACITY * DEVICES // ranks, MICROBATCHES, Link())
        steps = {name: simulate_plan(profile, one, link=Link()).step_seconds for name, one in plans.items()}
        found = measured_steps(profile, plans, MICROBATCHES, seconds, rounds, min(steps.values()))
        for name, one in plans.items():
            ratio = steps["varuna"] / steps[name]
            rows.append(
                {"config": config, "ranks": ranks, "planner": name, "cuts": list(one.cuts), "fits": one.fits}
                | {"step_seconds": steps[name], "against_varuna": ratio, **found[name]}
            )
    return rows


def show_slept(rows: list[dict[str, Any]], statistic: str) -> None:
    """A table of README.md, and how far the two are from each other; `statistic` is "median" or "least"."""
    print(f"\n{rows[0]['ranks']} ranks: times Varuna's, simulated / measured (step longer than simulated)\n")
    print("| configuration | varuna | capslog | exact | throughput |")
    print("|---|---|---|---|---|")
    for config in dict.fromkeys(row["config"] for row in rows):
        cells = []
        for row in (row for row in rows if row["config"] == config):
            long = row[f"{statistic}_seconds"] / row["step_seconds"] - 1
            ratios = f"{row['against_varuna']:.2f} / {row[f'{statistic}_against_varuna']:.2f}"
            cells.append(f"{ratios} ({long:+.1%})" + ("" if row["fits"] else " **does not fit**"))
        print(f"| {config} | {' | '.join(cells)} |")
    off = [abs(row[f"{statistic}_against_varuna"] / row["against_varuna"] - 1) for row in rows]
    print(f"ratios apart by {statistics.median(off):.1%} in the median, {max(off):.1%} at most")


def measured(config: Path, ranks: int, rounds: int, steps: int, overrides: list[str]) -> dict[str, Any]:
    """Step seconds of real runs: the plans in turn, `rounds` times; a run's median over its steps but the first two."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        path = folder / "profile.json"
        common = [f"pipeline.devices={ranks}", "train.epochs=null", f"train.max_steps={steps}", *overrides]
        capslog(["profile", str(config), *common, "-o", str(path)])
        profile = read_profile(path)
        microbatches = resolved_microbatches(config, common)
        plans = plans_of(profile, ranks, None, microbatches, Link())
        # A cap between the smallest peak and that of the fastest cuts, so that memory is felt.
        cap = (plans["exact"].peak_bytes + plans["throughput"].peak_bytes) // 2
        plans["throughput, capped"] = plan(profile, ranks, "throughput", capacity=cap, run=RunShape(microbatches))
        times: dict[str, list[float]] = {name: [] for name in plans}
        for number in range(rounds):
            for name in list(plans) if number % 2 == 0 else list(plans)[::-1]:
                run = folder / f"run-{number}-{name.replace(', ', '-')}"
                cuts = ",".join(map(str, plans[name].cuts))
                capslog(["train", str(config), *common, f"pipeline.cuts=[{cuts}]", f"run_dir={run}"])
                lines = (run / "metrics.jsonl").read_text().splitlines()
                times[name].append(statistics.median([json.loads(line)["step_seconds"] for line in lines][2:]))
        rows = []
        for name, one in plans.items():
            rows.append({
                "planner": name, "cuts": list(one.cuts), "peak_bytes": one.peak_bytes,
                "median_seconds": statistics.median(times[name]), "least_seconds": min(times[name]),
                "simulated_seconds": simulate_plan(profile, one, num_microbatches=microbatches).step_seconds,
                "simulated_on_two_cores": simulate_plan(
                    profile, one, num_microbatches=microbatches, speeds=[1.0, 1.0]
                ).step_seconds,
                "against_varuna": statistics.median(
                    [a / b for a, b in zip(times["varuna"], times[name], strict=True)]
                ),
            })  # fmt: skip
        return {"config": config.name, "ranks": ranks, "microbatches": microbatches, "capacity": cap, "rows": rows}


def resolved_microbatches(config: Path, overrides: list[str]) -> int:
    from varuna_capslog.config.reading import load_config

    return load_config(config, overrides).num_microbatches


def show(rows: list[dict[str, Any]]) -> None:
    """The tables of README.md."""
    for size in ("1333x1333", "800x1066"):
        for link in LINKS:
            print(f"\nTime at {size}, link {link}: step in ms (times Varuna's), GiB of the largest stage\n")
            print("| configuration | varuna | capslog | exact | throughput | proven |")
            print("|---|---|---|---|---|---|")
            for config in CONFIGS:
                mine = {r["planner"]: r for r in rows if (r["config"], r["size"], r["link"]) == (config, size, link)}
                cells = [
                    f"{r['step_seconds'] * 1e3:.0f} ({r['against_varuna']:.2f}x), {r['peak_bytes'] / GIB:.2f}"
                    + ("" if r["fits"] else " **does not fit**")
                    for r in mine.values()
                ]
                best = mine["throughput"]
                proof = "yes" if best["proven"] else f"{best['step_seconds'] / best['bound_seconds'] - 1:.1%}"
                print(f"| {config} | {' | '.join(cells)} | {proof} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--measure", type=Path, metavar="CONFIG")
    parser.add_argument("--sleep", type=int, nargs="?", const=DEVICES, metavar="RANKS", help="default 8")
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS), help="for --sleep")
    parser.add_argument(
        "--statistic",
        choices=("median", "least"),
        default="median",
        help="least where others use the cores, for --sleep",
    )
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="of the fastest step of a configuration, for --sleep"
    )
    parser.add_argument("--profiles", type=Path, default=Path("profiles"), help="folder that keeps estimated profiles")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", help="config keys for --measure")
    given = parser.parse_args()
    result: dict[str, Any] = {}
    if given.simulate:
        given.profiles.mkdir(parents=True, exist_ok=True)
        result["simulated"] = simulated(given.profiles)
        show(result["simulated"])
    if given.sleep is not None:
        given.profiles.mkdir(parents=True, exist_ok=True)
        result["slept"] = slept(given.profiles, given.configs, given.sleep, given.rounds, given.seconds)
        show_slept(result["slept"], given.statistic)
    if given.measure is not None:
        result["measured"] = measured(given.measure, given.ranks, given.rounds, given.steps, given.overrides)
        for row in result["measured"]["rows"]:
            print(row)
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
