"""Our numbers for every table and figure of the CAPSlog paper, each row marked with its source.

`paper.py` calls a function per figure and draws its rows; nothing here writes a file. Marks: *estimated* (fake
tensors, exact for the range of layers), *predicted* (M_i + sum of M_a of the estimated profile), *simulated* (estimated
seconds played through the schedule), *measured* (clocked here), *counted*, *extrapolated*, *printed* (by the paper).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common import plan
from published import CONFIGURATIONS, FIGURE_10, FIGURE_12, GPUS, MEMORY_BYTES, OUT_OF_MEMORY, PEAKS

from varuna_capslog.config.reading import load_config
from varuna_capslog.memory import MEMORY_MODELS
from varuna_capslog.model.workload import load_workload
from varuna_capslog.planners import PLANNERS
from varuna_capslog.planners.mcap import count_cut_lists
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.simulation import simulate_plan
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.profiles.runs import capslog_partitionings, mcap_partitionings, stage_runs
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.estimate import Memo, StageEstimator, estimate_config
from varuna_capslog.schedules import RunShape

__all__ = [
    "GB",
    "Model",
    "Rows",
    "bayesian_search",
    "figure_8",
    "figure_9",
    "figure_10",
    "figure_11",
    "figure_12",
    "figure_13",
    "load",
    "table_7",
]

Rows = list[dict[str, Any]]

ROOT = Path(__file__).resolve().parents[2]
GB = 1 << 30
"""The paper's GB, which its own numbers fit best when read as GiB."""

MOST_CUT_LISTS = 100_000_000
"""Brute force is run up to so many cut lists; beyond it is extrapolated from its time for each."""

LINKS = {
    "no transfer time": Link(),
    "0.5 GB/s, sender waits": Link(bandwidth=0.5e9, latency_seconds=1e-4, copy_bandwidth=0.5e9),
}
"""Two ends of what the paper's nodes may have had: it prints no link."""


@dataclass(frozen=True)
class Model:
    """Configuration with its profile, its exact peaks, and the time to build both.

    resident_bytes: bytes that Varuna keeps on every GPU besides the stage: the padded minibatch and its padding mask.
    """

    name: str
    profile: Profile
    estimator: StageEstimator
    estimate_seconds: float
    resident_bytes: int

    def peaks(self, cuts: Sequence[int]) -> list[int]:
        """Return the estimated peak of every stage, each range of layers run separately."""
        ends = [*cuts[1:], self.profile.num_layers]
        return [self.estimator.stage(first, end).peak_bytes for first, end in zip(cuts, ends, strict=True)]

    def plan(self, planner: str, devices: int = GPUS) -> Plan:
        """Return the planner's plan with the paper's memory model."""
        return plan(self.profile, devices, planner=planner, memory="additive")


def load(progress: Callable[[str], None]) -> dict[str, Model]:
    """Return all six configurations, estimated in sequence with a shared cache of equal layers."""
    memo = Memo()
    models = {}
    for name in CONFIGURATIONS:
        progress(f"estimating {name}")
        config = load_config(ROOT / "configs" / "paper" / f"{name.lower().replace('-', '_')}.yaml")
        begun = time.process_time()
        profile = estimate_config(config, memo=memo)
        seconds = time.process_time() - begun
        estimator = StageEstimator(load_workload(config), RunConditions(device="cuda"), memo=memo)
        assert config.profile.image_size is not None
        height, width = config.profile.image_size
        resident = config.train.minibatch_size * height * width * (3 * 4 + 1)
        models[name] = Model(name, profile, estimator, seconds, resident)
    return models


def table_7(models: Mapping[str, Model]) -> Rows:
    """Return Fig. 7, which the text calls Table 7: cut points and parameters."""
    rows = []
    for name, model in models.items():
        cut_points, parameters = CONFIGURATIONS[name]
        counted = sum(layer.parameter_bytes or 0 for layer in model.profile.layers) // 4
        twice = sum(use.bytes * (len(use.layers) - 1) for use in model.profile.shared) // 4
        rows.append(
            {
                "configuration": name,
                "cut points (counted)": model.profile.num_layers - 1,
                "printed": cut_points,
                "parameters (counted)": counted - twice,
                "printed parameters": parameters,
            }
        )
    return rows


def figure_8(models: Mapping[str, Model]) -> Rows:
    """Return the peak of every GPU for RN50-D-E6: Varuna's cuts, CAPSlog's, and CAPSlog's own prediction."""
    model = models["RN50-D-E6"]
    varuna, capslog = model.plan("varuna"), model.plan("capslog")
    columns = {
        "Varuna (estimated)": model.peaks(varuna.cuts),
        "CAPSlog (estimated)": model.peaks(capslog.cuts),
        "CAPSlog (predicted)": list(capslog.stage_bytes or ()),
    }
    return [
        {"GPU": gpu} | {name: (peaks[gpu] + model.resident_bytes) / GB for name, peaks in columns.items()}
        for gpu in range(GPUS)
    ]


def figure_9(models: Mapping[str, Model]) -> Rows:
    """Return the largest peak of any GPU, the cut lists that run out of 16 GB, and the reduction."""
    rows = []
    for name, model in models.items():
        peaks = {
            planner: max(model.peaks(model.plan(planner).cuts)) + model.resident_bytes
            for planner in ("varuna", "capslog", "exact")
        }
        composed = plan(model.profile, GPUS, planner="exact", memory="composition")
        best = max(model.peaks(composed.cuts)) + model.resident_bytes
        rows.append(
            {
                "configuration": name,
                "Varuna (estimated)": peaks["varuna"] / GB,
                "CAPSlog (estimated)": peaks["capslog"] / GB,
                "ours (estimated)": best / GB,
                "Varuna runs out of 16 GB": peaks["varuna"] > MEMORY_BYTES,
                "printed: runs out": name in OUT_OF_MEMORY,
                "CAPSlog trains": peaks["capslog"] <= MEMORY_BYTES,
                "reduction": 1 - peaks["capslog"] / peaks["varuna"],
                "our reduction": 1 - best / peaks["varuna"],
                "printed peaks": PEAKS.get(name),
            }
        )
    return rows


def figure_10(models: Mapping[str, Model]) -> Rows:
    """Return the throughput of CAPSlog's and of our time-optimal cuts over Varuna's, 8 microbatches of 1."""
    rows = []
    for name, model in models.items():
        for link_name, link in LINKS.items():
            seconds = {}
            for planner in ("varuna", "capslog", "throughput"):
                if planner == "throughput":
                    cut_plan = plan(
                        model.profile, GPUS, planner=planner, capacity=MEMORY_BYTES, run=RunShape(8), link=link
                    )
                else:
                    cut_plan = model.plan(planner)
                done = simulate_plan(model.profile, cut_plan, schedule="varuna", num_microbatches=8, link=link)
                seconds[planner] = done.step_seconds
            rows.append(
                {
                    "configuration": name,
                    "link": link_name,
                    "Varuna s (simulated)": seconds["varuna"],
                    "CAPSlog s (simulated)": seconds["capslog"],
                    "ours s (simulated)": seconds["throughput"],
                    "CAPSlog over Varuna": seconds["varuna"] / seconds["capslog"],
                    "ours over Varuna": seconds["varuna"] / seconds["throughput"],
                    "printed range": FIGURE_10,
                }
            )
    return rows


def bayesian_search(models: Mapping[str, Model], devices: Sequence[int]) -> dict[tuple[str, int], tuple[float, float]]:
    """Return seconds and predicted peak (GB) of mcap-bo by configuration and GPUs; it takes half a minute each."""
    searches = {}
    for name, count in [("RN50-D-E6", 8), ("RN101-D-E6", 8), *(("RN101-D-E12", count) for count in devices)]:
        costs = MEMORY_MODELS["additive"].stage_costs(models[name].profile, RunShape())
        begun = time.perf_counter()
        cuts = PLANNERS["mcap-bo"](costs, count, None)
        searches[name, count] = (time.perf_counter() - begun, max(costs.peaks(cuts)) / GB)
    return searches


def figure_11(models: Mapping[str, Model], devices: Sequence[int], bayesian: Mapping[Any, Any]) -> Rows:
    """Return the seconds of each recommender by number of GPUs; brute force beyond `MOST_CUT_LISTS` is extrapolated."""
    rows = []
    for name in ("RN50-D-E6", "RN101-D-E6", "RN101-D-E12"):
        model = models[name]
        costs = MEMORY_MODELS["additive"].stage_costs(model.profile, RunShape())
        each = _seconds_of_one_cut_list(costs)
        for count in devices:
            row: dict[str, Any] = {"configuration": name, "GPUs": count}
            for planner in ("capslog", "capslog-tb", "exact"):
                row[planner] = _fastest(partial(PLANNERS[planner], costs, count, None), 7)
            total = count_cut_lists(model.profile.num_layers, count)
            row["cut lists"] = total
            row["mcap-bf"] = (
                _fastest(partial(PLANNERS["mcap-bf"], costs, count, None), 1)
                if total <= MOST_CUT_LISTS
                else each * total
            )
            row["mcap-bf mark"] = "measured" if total <= MOST_CUT_LISTS else "extrapolated"
            row["mcap-bo"] = bayesian[name, count][0] if (name, count) in bayesian else None
            rows.append(row)
    return rows


def _seconds_of_one_cut_list(costs: Any) -> float:
    """Return the seconds of brute force per cut list, at the largest number of GPUs that it is run for."""
    counts = [n for n in range(2, costs.num_layers) if count_cut_lists(costs.num_layers, n) <= MOST_CUT_LISTS]
    chosen = max(counts, key=lambda n: count_cut_lists(costs.num_layers, n))
    return _fastest(partial(PLANNERS["mcap-bf"], costs, chosen, None), 1) / count_cut_lists(costs.num_layers, chosen)


def _fastest(work: Callable[[], Any], times: int) -> float:
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
    return min(taken)


def figure_12(models: Mapping[str, Model]) -> Rows:
    """Return the profiling launches of each method, the number of mCAP's out of memory, and our estimate's time."""
    rows = []
    for name, model in models.items():
        num_layers = model.profile.num_layers
        mcap, trimmed = mcap_partitionings(num_layers, GPUS), capslog_partitionings(num_layers, GPUS)
        costs = MEMORY_MODELS["composition"].stage_costs(model.profile, RunShape())
        too_big = 0
        for launch in mcap:
            ends = [sum(launch.layers_per_gpu[: gpu + 1]) for gpu in range(len(launch.layers_per_gpu))]
            firsts = [0, *ends[:-1]]
            peaks = [costs.stage_bytes(first, end) for first, end in zip(firsts, ends, strict=True)]
            too_big += max(peaks) + model.resident_bytes > MEMORY_BYTES
        printed = FIGURE_12[name]
        rows.append(
            {
                "configuration": name,
                "mCAP runs (counted)": len(mcap),
                "printed": printed[0],
                "mCAP runs beyond 16 GB (estimated)": too_big,
                "printed mCAP time": printed[1],
                "CAPSlog runs (counted)": len(trimmed),
                "printed ": printed[2],
                "printed CAPSlog time": printed[4],
                "our rounds on 8 workers (counted)": -(-len(stage_runs(num_layers)) // GPUS),
                "our estimate, CPU s (measured)": model.estimate_seconds,
            }
        )
    return rows


def figure_13(models: Mapping[str, Model], devices: Sequence[int], bayesian: Mapping[Any, Any]) -> Rows:
    """Return the predicted peak of each recommender's cut list for RN101-D-E12."""
    model = models["RN101-D-E12"]
    costs = MEMORY_MODELS["additive"].stage_costs(model.profile, RunShape())
    rows = []
    for count in devices:
        row: dict[str, Any] = {"GPUs": count}
        names = ["capslog", "exact"]
        if count_cut_lists(model.profile.num_layers, count) <= MOST_CUT_LISTS:
            names.append("mcap-bf")
        for planner in names:
            row[planner] = max(costs.peaks(PLANNERS[planner](costs, count, None))) / GB
        if ("RN101-D-E12", count) in bayesian:
            row["mcap-bo"] = bayesian["RN101-D-E12", count][1]
        rows.append(row)
    return rows
