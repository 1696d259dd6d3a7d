"""Compares simulated and measured step times: a transformer, a small DETR, a sleeper; many cut lists, three schedules.

All inputs of the simulation are measured here first: a profile (`varuna_capslog.profiles`), the costs of a message and
an update, and the slowdown of two ranks that compute at the same time. The sleeper's layers wait a known time instead
of computing, so that its ranks need no separate cores. Prints the tables of README.md.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import (
    Sleeping,
    TransformerSize,
    interleave,
    machine,
    plan,
    run_ranks,
    token_loss,
    transformer_chain,
    write_json,
)

from varuna_capslog.config.reading import load_config
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.chain import Chain, Layer, TensorSpec
from varuna_capslog.model.workload import Minibatch, Workload, load_workload
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.simulation import simulate_plan
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.conditions import UPDATE_RATE
from varuna_capslog.profiles.record import LayerProfile, Profile
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.measure import profile_workload
from varuna_capslog.schedules import RunShape

SIZE = TransformerSize(blocks=8, dim=128, sequence=64, microbatch_size=4)
DETR = (
    "model.encoder_layers=3",
    "model.decoder_layers=3",
    "model.hidden_dim=128",
    "model.feedforward=256",
    "model.queries=20",
    "profile.image_size=[128, 128]",
)
SCHEDULES = (("gpipe", False), ("1f1b", False), ("varuna", True))
ROOT = Path(__file__).parents[2]


class Tokens(Workload):
    """Transformer of the other benchmarks as a workload."""

    name = "transformer"

    def build_chain(self) -> Chain:
        return transformer_chain(SIZE)

    def loss(self, outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
        return token_loss(outputs, targets, normalisers)

    def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
        return {"x": TensorSpec((microbatch_size, SIZE.sequence), torch.int64)}

    def profile_targets(self, microbatch_size: int) -> tuple[Tensor, dict[str, float]]:
        shape = (microbatch_size, SIZE.sequence)
        return torch.zeros(shape, dtype=torch.int64), {"tokens": float(shape[0] * shape[1])}


class Sleeper(Workload):
    """Sixteen layers that wait 4 to 16 ms; the slow ones come first, as in a convolutional backbone."""

    name = "sleeper"
    seconds = (0.016, 0.012, 0.012, 0.008, 0.008, 0.008, *[0.004] * 9, 0.008)

    def build_chain(self) -> Chain:
        return Chain(
            [Layer(f"layer.{n}", Sleeping(wait, 2 * wait)) for n, wait in enumerate(self.seconds)], name=self.name
        )

    def loss(self, outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
        return {"loss": outputs["x"].mean()}

    def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
        return {"x": TensorSpec((microbatch_size, 4096))}

    def profile(self) -> Profile:
        """Return the layers' sleeping times as a profile; the bytes only make the planners' cuts differ."""
        layers = [
            LayerProfile(
                f"layer.{n}",
                isolated_bytes=round(wait * 1e6) + 1000 * (n % 5),
                added_bytes=round(wait * 5e5) if n else None,
                boundary_bytes=4 * 4096,
                forward_seconds=wait,
                backward_seconds=2 * wait,
            )
            for n, wait in enumerate(self.seconds)
        ]
        return Profile(tuple(layers), model=self.name)


def make_workload(name: str) -> Workload:
    """Return workload `transformer`, `detr` (ResNet-18 with three encoder and three decoder layers) or `sleeper`."""
    if name == "sleeper":
        return Sleeper()
    return Tokens() if name == "transformer" else load_workload(load_config(ROOT / "configs/tiny.yaml", DETR))


Statistic = Callable[[Sequence[float]], float]
STATISTICS: dict[str, Statistic] = {"median": statistics.median, "fastest": min}
MICROBATCH = {"transformer": SIZE.microbatch_size, "detr": 2, "sleeper": 1}


@dataclass(frozen=True)
class Case:
    """Engine under test: a cut list of `planner` under a schedule."""

    planner: str
    cuts: tuple[int, ...]
    schedule: str
    recompute: bool
    microbatches: int

    @property
    def group(self) -> tuple[str, int]:
        """Schedule and microbatches; cases of a group differ only in their cuts."""
        return self.schedule, self.microbatches


# -- on the ranks


def measure(communicator: Communicator, name: str, cases: Sequence[Case], rounds: int) -> list[dict[str, Any]]:
    """Return for each case this rank's seconds of every round, and the times of messages, norm and optimizer."""
    workload = make_workload(name)
    results: list[dict[str, Any]] = []
    for _, group in itertools.groupby(cases, key=lambda case: case.group):
        several = list(group)
        engines = [_engine(workload, case, communicator, MICROBATCH[name]) for case in several]
        runs = {str(number): step for number, (step, _) in enumerate(engines)}
        times = interleave(runs, rounds, communicator.barrier, warmup=1 if name == "sleeper" else 2)
        for number, (_, costs) in enumerate(engines):
            results.append({"seconds": [wall for wall, _ in times[str(number)]], **costs})
    return results


def _engine(
    workload: Workload, case: Case, communicator: Communicator, size: int
) -> tuple[Callable[[], object], dict[str, Any]]:
    """Return a function that trains one step, and a dictionary that collects the costs of its update."""
    torch.manual_seed(0)
    chain = workload.build_chain()
    options = EngineOptions(case.microbatches, schedule=case.schedule, recompute=case.recompute, clip_norm=0.1)
    layout = Layout.pipelines(case.cuts, len(chain))
    engine = PipelineEngine(chain, workload.loss, layout, options, communicator, torch.device("cpu"))
    specs = workload.profile_inputs(size)
    targets, normalisers = workload.profile_targets(size)
    minibatch = Minibatch(
        [specs] * case.microbatches,
        [targets] * case.microbatches,
        {key: value * case.microbatches for key, value in normalisers.items()},
    )
    values = {key: _values(spec) for key, spec in specs.items()}
    owned = sum(p.numel() * p.itemsize for layer in engine.layers for p in layer.parameters.values())
    costs: dict[str, Any] = {"parameter_bytes": owned, "update_seconds": []}
    book = engine._gradients
    norms, apply = book.squared_norms, engine.optimizer.step

    def timed_norms(layers: Sequence[int]) -> dict[int, Tensor]:
        began = time.perf_counter()
        result = norms(layers)
        costs["update_seconds"].append(time.perf_counter() - began)
        return result

    def timed_apply(*arguments: Any) -> float:
        began = time.perf_counter()
        result = apply(*arguments)
        costs["update_seconds"][-1] += time.perf_counter() - began
        return result

    book.squared_norms = timed_norms  # type: ignore[method-assign]
    engine.optimizer.step = timed_apply  # type: ignore[method-assign]
    steps = itertools.count(1)
    return lambda: train_step(engine, next(steps), minibatch, lambda _: values), costs


def _values(spec: TensorSpec) -> Tensor:
    tensor = spec.empty()
    if spec.dtype.is_floating_point:
        return tensor.uniform_()
    return tensor.fill_(128 if tensor.shape[-1] == 2 else 1)  # image sizes, or a token


def measure_link(communicator: Communicator, rounds: int = 15) -> dict[str, float]:
    """Measure a ping-pong of 4 KiB and 1 MiB between two ranks: seconds in `send`, and until the arrival."""
    seconds: dict[str, float] = {}
    peer, device = 1 - communicator.rank, torch.device("cpu")
    for name, count in (("small", 1 << 10), ("large", 1 << 18)):
        spec, tensor = TensorSpec((count,)), torch.zeros(count)
        sends, trips = [], []
        for number in range(rounds):
            arriving = communicator.receive(spec, peer, 7 + communicator.rank, device)
            communicator.barrier()
            if communicator.rank == 1:
                arriving.wait()
            began = time.perf_counter()
            sending = communicator.send(tensor, peer, 7 + peer)
            sent = time.perf_counter()
            if communicator.rank == 0:
                arriving.wait()
            ended = time.perf_counter()
            sending.wait()
            if number >= 3:
                sends.append(sent - began)
                trips.append((ended - began) / 2)
        seconds[f"{name}_send"], seconds[f"{name}_trip"] = statistics.median(sends), statistics.median(trips)
    return seconds


def measure_contention(communicator: Communicator, name: str, rounds: int = 9) -> list[tuple[float, float]]:
    """Time a forward and backward of the whole model: (seconds alone, seconds while the other rank does the same)."""
    workload = make_workload(name)
    case = Case("whole", (0,), "gpipe", False, 1)
    alone = Communicator(0, 1, 0, communicator._timeout)
    step, _ = _engine(workload, case, alone, MICROBATCH[name])
    rows = []
    for number in range(rounds + 2):
        seconds = []
        for ranks in ((0,), (1,), (0, 1)):
            communicator.barrier()
            began = time.perf_counter()
            if communicator.rank in ranks:
                step()
                seconds.append(time.perf_counter() - began)
        if number >= 2:
            rows.append((seconds[0], seconds[1]))
    return rows


# -- inputs of the simulation


def profiles_of(name: str, repeats: int) -> list[Profile]:
    """Measure `repeats` profiles, one after the other."""
    workload = make_workload(name)
    return [
        profile_workload(workload, RunConditions(microbatch_size=MICROBATCH[name], recompute=False), workers=1)
        for _ in range(repeats)
    ]


def combine(profiles: Sequence[Profile], update_rate: float, statistic: Statistic) -> Profile:
    """Combine profiles: the statistic of every layer's seconds, and the rate of updates."""

    def layer(rows: Sequence[LayerProfile]) -> LayerProfile:
        forward, backward = (
            statistic([getattr(row, part) for row in rows]) for part in ("forward_seconds", "backward_seconds")
        )
        return replace(rows[0], forward_seconds=forward, backward_seconds=backward)

    first = profiles[0]
    rows = tuple(layer(rows) for rows in zip(*(profile.layers for profile in profiles), strict=True))
    return replace(first, layers=rows, observations=(), conditions={**first.conditions, UPDATE_RATE: update_rate})


def cut_lists(profile: Profile, ranks: int) -> dict[str, tuple[int, ...]]:
    """Return the planners' cut lists, and two that are unbalanced on purpose."""
    by_planner = {
        name: plan(profile, ranks, planner=name, memory="additive").cuts for name in ("varuna", "capslog", "exact")
    }
    by_planner["throughput"] = plan(
        profile, ranks, planner="throughput", memory="additive", run=RunShape(None, "1f1b", False)
    ).cuts
    last = profile.num_layers
    by_planner["early"] = (0, *range(last // (2 * ranks), last // (2 * ranks) + ranks - 1))
    by_planner["late"] = (0, *range(last - last // (2 * ranks) - ranks + 2, last - last // (2 * ranks) + 1))
    different: dict[str, tuple[int, ...]] = {}
    for name, cuts in by_planner.items():
        if cuts not in different.values():
            different[name] = cuts
    return different


def make_cases(profile: Profile, ranks: int, microbatches: Sequence[int]) -> list[Case]:
    """Return every cut list under every schedule; cases of a group are adjacent."""
    cuts = cut_lists(profile, ranks)
    return [
        Case(name, tuple(cut_list), schedule, recompute, count)
        for (schedule, recompute), count in itertools.product(SCHEDULES, microbatches)
        for name, cut_list in cuts.items()
    ]


def predict(profile: Profile, case: Case, link: Link, speeds: Sequence[float] | None) -> float:
    """Return the simulated step in seconds."""
    played = Plan.of_cuts(profile.num_layers, case.cuts, schedule=case.schedule, num_microbatches=case.microbatches)
    return simulate_plan(profile, played, recompute=case.recompute, link=link, speeds=speeds).step_seconds


# -- the result


def compare(
    name: str, ranks: int, cases: Sequence[Case], simulated: Sequence[float], rows: Any, statistic: Statistic
) -> list[dict[str, Any]]:
    """Return a row for each case: simulated and measured step; a step ends when its last rank ends."""
    result = []
    for number, case in enumerate(cases):
        rounds = [max(times) for times in zip(*(row[number]["seconds"] for row in rows), strict=True)]
        measured = statistic(rounds)
        result.append(
            {
                "model": name,
                "ranks": ranks,
                "planner": case.planner,
                "cuts": list(case.cuts),
                "schedule": case.schedule,
                "microbatches": case.microbatches,
                "simulated_seconds": simulated[number],
                "measured_seconds": measured,
                "error": simulated[number] / measured - 1.0,
                "rounds": rounds,
            }
        )
    return result


def pairs(rows: Sequence[Mapping[str, Any]]) -> tuple[int, int, int]:
    """Count pairs of cut lists of a group: (correctly ordered by the simulation, distinguishable, all).

    The steps of one round follow each other directly. A pair is distinguishable if all rounds but at most one in six
    agree on the faster one and the median ratio is 2 % or more from 1.
    """
    right = told = total = 0
    for a, b in itertools.combinations(rows, 2):
        if any(a[key] != b[key] for key in ("model", "ranks", "schedule", "microbatches")):
            continue
        total += 1
        ratios = [a_seconds / b_seconds for a_seconds, b_seconds in zip(a["rounds"], b["rounds"], strict=True)]
        middle = statistics.median(ratios)
        agreeing = sum((ratio > 1) == (middle > 1) for ratio in ratios)
        if agreeing < len(ratios) - len(ratios) // 6 or abs(middle - 1) < 0.02:
            continue
        told += 1
        right += (a["simulated_seconds"] > b["simulated_seconds"]) == (middle > 1)
    return right, told, total


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarize errors and order over rows."""
    errors = sorted(abs(row["error"]) for row in rows)
    right, told, total = pairs(rows)
    return {
        "cases": len(rows),
        "median_error": statistics.median(errors),
        "worst_error": errors[-1],
        "mean_signed_error": statistics.fmean(row["error"] for row in rows),
        "pairs_right": right,
        "pairs_told_apart": told,
        "pairs": total,
    }


def run_model(
    name: str, ranks: Sequence[int], rounds: int, repeats: int, cores: int, statistic: Statistic
) -> tuple[list[Any], dict[str, Any]]:
    """Run all cases of a model: profile, train, profile again, then simulate with the measurements."""
    if name == "sleeper":
        return _run_sleeper(ranks, rounds, statistic)
    profiles = profiles_of(name, repeats)
    wires = run_ranks(measure_link, 2)[0]
    paces = [pair for row in run_ranks(measure_contention, 2, name) for pair in row]
    pace = min(1.0, statistic([alone for alone, _ in paces]) / statistic([together for _, together in paces]))
    rough = combine(profiles, 0.0, statistic)
    of_ranks = {count: make_cases(rough, count, (4, 8) if count == 2 else (8,)) for count in ranks}
    measured = {count: run_ranks(measure, count, name, cases, rounds) for count, cases in of_ranks.items()}
    profiles += profiles_of(name, repeats)
    latency = wires["small_send"]
    size = 1 << 20
    link = Link(
        size / max(1e-9, wires["large_trip"] - wires["small_trip"]),
        latency,
        size / max(1e-9, wires["large_send"] - wires["small_send"]),
    )
    updates = [
        statistics.median(case["update_seconds"]) / case["parameter_bytes"]
        for rows in measured.values()
        for row in rows
        for case in row
    ]
    profile = combine(profiles, statistics.median(updates), statistic)
    speeds = [1.0, *[pace] * (cores - 1)]
    results = []
    for count, cases in of_ranks.items():
        simulated = [predict(profile, case, link, speeds) for case in cases]
        results += compare(name, count, cases, simulated, measured[count], statistic)
    inputs = {
        "layers": profile.num_layers,
        "forward_ms": 1e3 * sum(profile.column("forward_seconds")),
        "backward_ms": 1e3 * sum(profile.column("backward_seconds")),
        "update_rate": profile.conditions[UPDATE_RATE],
        "speed_of_two": pace,
        "latency_ms": 1e3 * link.latency_seconds,
        "bandwidth": link.bandwidth,
        "copy_bandwidth": link.copy_bandwidth,
    }
    return results, inputs


def _run_sleeper(ranks: Sequence[int], rounds: int, statistic: Statistic) -> tuple[list[Any], dict[str, Any]]:
    """Run the sleeper: its layers' times are known, messages and updates are free, so only steps are measured."""
    profile = Sleeper().profile()
    results = []
    for count in ranks:
        cases = make_cases(profile, count, (4,))
        measured = run_ranks(measure, count, "sleeper", cases, min(rounds, 3))
        simulated = [predict(profile, case, Link(), None) for case in cases]
        results += compare("sleeper", count, cases, simulated, measured, statistic)
    return results, {"layers": profile.num_layers, "forward_ms": 1e3 * sum(Sleeper.seconds)}


def main() -> None:
    """Measure and print one row per model and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MICROBATCH), choices=list(MICROBATCH))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5, help="steps of each case that count; the sleeper takes 3")
    parser.add_argument("--repeats", type=int, default=1, help="profiles taken before the runs, and after them")
    parser.add_argument(
        "--statistic",
        default="median",
        choices=list(STATISTICS),
        help="of the rounds and of the profiles; `fastest` where other programs take the cores",
    )
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cores = machine()["cores"] or 1
    began = time.perf_counter()
    rows: list[Any] = []
    inputs: dict[str, Any] = {}
    print("| model | ranks | cases | median error | worst | mean, signed | order right, of pairs told apart | of all |")
    print("|---|---|---|---|---|---|---|---|")
    for name in arguments.models:
        model_rows, inputs[name] = run_model(
            name, arguments.ranks, arguments.rounds, arguments.repeats, cores, STATISTICS[arguments.statistic]
        )
        rows += model_rows
        for count in arguments.ranks:
            print_row(name, str(count), [row for row in model_rows if row["ranks"] == count])
        result = {"statistic": arguments.statistic, "inputs": inputs, "rows": rows, "summary": summary(rows)}
        write_json(arguments.output, result)
    for count in arguments.ranks:
        print_row("all", str(count), [row for row in rows if row["ranks"] == count])
    print_row("all", "all", rows)
    for name, measured in inputs.items():
        print(f"{name}: {', '.join(f'{key} {value:.4g}' for key, value in measured.items())}")
    print(f"took {time.perf_counter() - began:.0f} s")


def print_row(name: str, ranks: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a line of README.md's table."""
    totals = summary(rows)
    share = 100 * totals["pairs_right"] / max(1, totals["pairs_told_apart"])
    cells = [
        name,
        ranks,
        str(totals["cases"]),
        *(f"{100 * totals[key]:.1f} %" for key in ("median_error", "worst_error", "mean_signed_error")),
        f"{totals['pairs_right']} / {totals['pairs_told_apart']} ({share:.1f} %)",
        str(totals["pairs"]),
    ]
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
