"""Step time under a memory cap: our time-optimal cuts beside CAPSlog's, Varuna's and the smallest-peak cuts.

`--simulate`: the six configurations of the paper, from estimated profiles (no GPU): 8 devices of 16 GiB, 8
microbatches.
`--sleep`: the same plans as real steps of the engine over gloo, on layers that sleep instead of computing.
`--measure`: real engine runs of one small config on this machine's CPU, the plans in turn, round after round.
README.md explains the numbers.
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

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from common import plan
from sleepers import measured_steps

from varuna_capslog.memory import resolve
from varuna_capslog.memory.costs import Headroom
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
"""Links between two stages. The last: the sender copies its messages itself and cannot compute meanwhile."""


def estimated(config: str, size: tuple[int, int], folder: Path) -> Profile:
    """Return the estimated profile of a configuration at one image size."""
    path = folder / f"{config}-{size[0]}x{size[1]}.json"
    if not path.is_file():
        arguments = ["profile", str(ROOT / "configs" / "paper" / f"{config}.yaml"), "--estimate", "-o", str(path)]
        capslog([*arguments, f"profile.image_size=[{size[0]},{size[1]}]"])
    return read_profile(path)


def capslog(arguments: list[str]) -> None:
    """Run the command of this environment; its output is logged if it fails."""
    done = subprocess.run([sys.executable, "-c", COMMAND, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"capslog {' '.join(arguments)} failed: {done.stderr}")


def timed_as(memory: Profile, times: Profile) -> Profile:
    """Join the bytes of a profile (largest input) with the seconds and transfers of another (usual input)."""
    layers = [
        dataclasses.replace(
            layer,
            forward_seconds=timed.forward_seconds,
            backward_seconds=timed.backward_seconds,
            boundary_bytes=timed.boundary_bytes,
        )
        for layer, timed in zip(memory.layers, times.layers, strict=True)
    ]
    return dataclasses.replace(memory, layers=tuple(layers))


def plans_of(profile: Profile, devices: int, capacity: int | None, microbatches: int, link: Link) -> dict[str, Plan]:
    """Return the compared plans, all judged by the same memory model and capacity."""
    options = {"capacity": capacity, "num_microbatches": microbatches}
    plans = {}
    for name in ("varuna", "capslog", "exact", "throughput"):
        # CAPSlog plans on M_i + sum M_a, as the paper does.
        memory = "additive" if name == "capslog" else "auto"
        cuts = plan(profile, devices, name, memory, **options, link=link).cuts
        plans[name] = dataclasses.replace(plan(profile, devices, **options, cuts=cuts), planner=name)
    return plans


def simulated(folder: Path) -> list[dict[str, Any]]:
    """Return a row for each configuration, image size, link and planner."""
    rows = []
    for config in CONFIGS:
        largest = estimated(config, (1333, 1333), folder)
        sizes = {"1333x1333": largest, "800x1066": timed_as(largest, estimated(config, (800, 1066), folder))}
        for size, profile in sizes.items():
            for name, link in LINKS.items():
                plans = plans_of(profile, DEVICES, CAPACITY, MICROBATCHES, link)
                steps = {
                    key: simulate_plan(profile, candidate, link=link).step_seconds for key, candidate in plans.items()
                }
                bound, proven, search = certificate(profile, link)
                for key, candidate in plans.items():
                    rows.append({
                        "config": config, "size": size, "link": name, "planner": key, "cuts": list(candidate.cuts),
                        "fits": candidate.fits, "peak_bytes": candidate.peak_bytes, "step_seconds": steps[key],
                        "against_varuna": steps["varuna"] / steps[key],
                        "bound_seconds": bound, "proven": proven, "search_seconds": search,
                    })  # fmt: skip
    return rows


def certificate(profile: Profile, link: Link) -> tuple[float, bool, float]:
    """Return the bound of the step time under the cap, whether the plan is proven optimal, and the search time."""
    _, costs = resolve("auto", profile, RunShape(MICROBATCHES))
    usable = [Headroom.of(profile).usable(CAPACITY)] * DEVICES
    begun = time.process_time()
    best = fastest_cuts(costs, LayerSeconds.of_profile(profile, link), RunShape(MICROBATCHES), DEVICES, usable)
    if best is None:
        raise SystemExit(f"{profile.model}: nothing fits {CAPACITY // GIB} GiB")
    return best.bound_seconds, best.proven, time.process_time() - begun


def slept(folder: Path, configs: list[str], ranks: int, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Return a row for each configuration and planner: simulated and measured steps of sleeping layers, free links.

    The total memory is the same for fewer ranks. Times are scaled so that the fastest plan's step takes `seconds`.
    """
    rows = []
    for config in configs:
        profile = estimated(config, (1333, 1333), folder)
        plans = plans_of(profile, ranks, CAPACITY * DEVICES // ranks, MICROBATCHES, Link())
        steps = {name: simulate_plan(profile, candidate, link=Link()).step_seconds for name, candidate in plans.items()}
        real = measured_steps(profile, plans, MICROBATCHES, seconds, rounds, min(steps.values()))
        for name, candidate in plans.items():
            ratio = steps["varuna"] / steps[name]
            rows.append(
                {
                    "config": config,
                    "ranks": ranks,
                    "planner": name,
                    "cuts": list(candidate.cuts),
                    "fits": candidate.fits,
                }
                | {"step_seconds": steps[name], "against_varuna": ratio, **real[name]}
            )
    return rows


def show_slept(rows: list[dict[str, Any]], statistic: str) -> None:
    """Print a table of README.md, and the errors of the simulation; `statistic` is "median" or "least"."""
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
    """Measure step seconds of real runs: plans in turn, `rounds` times; a run's median without its first two steps."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        path = folder / "profile.json"
        common = [f"pipeline.devices={ranks}", "train.epochs=null", f"train.max_steps={steps}", *overrides]
        capslog(["profile", str(config), *common, "-o", str(path)])
        profile = read_profile(path)
        microbatches = resolved_microbatches(config, common)
        plans = plans_of(profile, ranks, None, microbatches, Link())
        # A cap between the smallest peak and that of the fastest cuts, so that it has an effect.
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
        for name, candidate in plans.items():
            rows.append({
                "planner": name, "cuts": list(candidate.cuts), "peak_bytes": candidate.peak_bytes,
                "median_seconds": statistics.median(times[name]), "least_seconds": min(times[name]),
                "simulated_seconds": simulate_plan(profile, candidate, num_microbatches=microbatches).step_seconds,
                "simulated_on_two_cores": simulate_plan(
                    profile, candidate, num_microbatches=microbatches, speeds=[1.0, 1.0]
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
    """Print the tables of README.md."""
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
    args = parser.parse_args()
    result: dict[str, Any] = {}
    if args.simulate:
        args.profiles.mkdir(parents=True, exist_ok=True)
        result["simulated"] = simulated(args.profiles)
        show(result["simulated"])
    if args.sleep is not None:
        args.profiles.mkdir(parents=True, exist_ok=True)
        result["slept"] = slept(args.profiles, args.configs, args.sleep, args.rounds, args.seconds)
        show_slept(result["slept"], args.statistic)
    if args.measure is not None:
        result["measured"] = measured(args.measure, args.ranks, args.rounds, args.steps, args.overrides)
        for row in result["measured"]["rows"]:
            print(row)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
