"""Finds the largest batch of GPipe's, vPipe's, DawnPiper's and our planner: DawnPiper's Tables 1 and 2, estimated.

BERT 340 M, GPT-2 770 M, T5 780 M and AmoebaNet-D 28 M on 4 and 8 devices of 40 GB, as many microbatches as stages. Each
model is estimated for microbatches of 1, 2, 4 ... samples; profiles in between are interpolated field by field. All
methods are judged by the same memory simulation. Prints README.md's table. `--asynchronous` gives Table 2: pipelines
that never drain, like PipeDream's, whose stages keep the weights of every microbatch in flight; this library does not
train so.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "plan_any_model"))
sys.path.insert(0, str(Path(__file__).parents[2]))

import models
import torch
from amoebanet import AmoebaNetD, Imaged
from common import judged_layerwise_plan, write_json
from torch import nn

import varuna_capslog as capslog
from varuna_capslog.base.gpus import GPUS
from varuna_capslog.planners.dawnpiper import dawnpiper_stages
from varuna_capslog.planners.layerwise import Intervals, Layerwise
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planners.vpipe import vpipe_stages
from varuna_capslog.planning.largest import largest_by_bytes
from varuna_capslog.planning.problem import Problem
from varuna_capslog.plans.parts import MemoryInterval
from varuna_capslog.profiles.record import Profile, read_profile, write_profile
from varuna_capslog.schedules import RunShape

KIND = "a100-40gb"
CAPACITY = GPUS[KIND].memory_bytes
LINK = Link(bandwidth=2e10, host_bandwidth=2e10)
"""PCIe 4 x16, which reaches about 20 GB/s."""


def gpt2_large() -> nn.Module:
    """Return GPT-2 large with 774 million parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=1280, n_layer=36, n_head=20, use_cache=False))


def amoebanet() -> nn.Module:
    """Return AmoebaNet-D with 27.9 million parameters."""
    return Imaged(AmoebaNetD(18, 120))


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str], int]] = {
    "BERT": (models.bert_large, ["input_ids=int64[{},512]:30522", "labels=int64[{},512]:30522"], 256),
    "GPT-2": (gpt2_large, ["input_ids=int64[{},1024]:50257", "labels=int64[{},1024]:50257"], 64),
    "T5": (models.t5_large, ["input_ids=int64[{},512]:32128", "labels=int64[{},128]:32128"], 512),
    "AmoebaNet": (amoebanet, ["images=float32[{},3,224,224]", "labels=int64[{}]:1000"], 2048),
}
"""Model, its inputs for a number of samples, and the largest microbatch that is estimated. The paper does not state the
length of its sequences."""


def profiles_of(name: str, folder: Path) -> dict[int, Profile]:
    """Return a profile for each power of two up to the largest microbatch; profiles are kept in `folder`."""
    build, inputs, most = MODELS[name]
    profiles, size = {}, 1
    while size <= most:
        path = folder / f"{name}-{size}.json"
        if not path.exists():
            begun = time.perf_counter()
            with torch.device("meta"):
                model = build()
            sample = [text.format(size) for text in inputs]
            write_profile(path, capslog.estimate(model, sample, device=f"cuda:{KIND}"))
            sys.stderr.write(f"{path.name}: {time.perf_counter() - begun:.0f} s\n")
        profiles[size] = read_profile(path)
        size *= 2
    return profiles


def between(low: Any, high: Any, part: float) -> Any:
    """Interpolate every number of a JSON value: `part` of the way from `low` to `high`."""
    if isinstance(low, dict):
        return {name: between(value, high[name], part) for name, value in low.items() if name in high}
    if isinstance(low, list):
        assert len(low) == len(high)
        return [between(below, above, part) for below, above in zip(low, high, strict=True)]
    if isinstance(low, bool) or not isinstance(low, int | float) or low == high:
        return low
    moved = low + part * (high - low)
    return round(moved) if isinstance(low, int) else moved


def profile_at(profiles: dict[int, Profile], size: int) -> Profile:
    """Return the profile of microbatches of `size` samples."""
    if size in profiles:
        return profiles[size]
    low = max(power for power in profiles if power < size)
    values = profiles[low].to_json(), profiles[2 * low].to_json()
    return Profile.from_json(between(*values, (size - low) / low))


def even_bounds(chain: Layerwise, stages: int) -> list[int]:
    """Return the bounds of stages that minimize the slowest stage's seconds, like torchgpipe's balance by time."""
    size = chain.num_layers

    @cache
    def best(first: int, remaining: int) -> tuple[float, tuple[int, ...]]:
        if remaining == 1:
            return chain.seconds(first, size), (size,)
        candidates = (
            (max(chain.seconds(first, end), (tail := best(end, remaining - 1))[0]), (end, *tail[1]))
            for end in range(first + 1, size - remaining + 2)
        )
        return min(candidates, key=lambda candidate: candidate[0])

    return [0, *best(0, stages)[1]]


class Methods:
    """Checks of which methods fit microbatches of a given size on a number of devices."""

    def __init__(self, profiles: dict[int, Profile], stages: int, asynchronous: bool) -> None:
        self.profiles, self.stages, self.asynchronous = profiles, stages, asynchronous

    def chain(self, size: int, schedule: str, limited: bool = True) -> Layerwise:
        """Return the chain problem of a profile; not `limited`: without memory limits."""
        profile = profile_at(self.profiles, size)
        run = RunShape(self.stages, schedule, True, microbatch_size=size, num_blocks=1)
        usable = Problem.of(profile, self.stages, CAPACITY).usable if limited else None
        chain = Layerwise.of_profile(profile, run, self.stages, usable, LINK)
        if not self.asynchronous:
            return chain
        weights = profile.column("parameter_bytes")

        def peak(stage: int, first: int, end: int, intervals: Intervals) -> int:
            versions = self.stages - 1 - stage  # besides the newest version
            return chain.peak(stage, first, end, intervals) + versions * sum(weights[first:end])

        return dataclasses.replace(chain, peak=cache(peak))

    def holds(self, size: int, schedule: str, bounds: Sequence[int], recompute: bool) -> bool:
        """Check that stages fit that keep all activations, or with `recompute` only their inputs."""
        chain = self.chain(size, schedule)
        for stage in range(self.stages):
            first, end = bounds[stage : stage + 2]
            again = (MemoryInterval(first, end, "recompute"),) if recompute else ()
            if chain.peak(stage, first, end, again) > chain.usable[stage]:
                return False
        return True

    def gpipe(self, size: int) -> bool:
        """GPipe: balanced seconds, no recomputation, GPipe's schedule."""
        return self.holds(size, "gpipe", even_bounds(self.chain(size, "gpipe"), self.stages), False)

    def pipedream(self, size: int) -> bool:
        """PipeDream: balanced seconds, no recomputation, 1F1B that never drains."""
        return self.holds(size, "1f1b", even_bounds(self.chain(size, "1f1b"), self.stages), False)

    def gpipe_r(self, size: int) -> bool:
        """GPipe with recomputation of all activations."""
        return self.holds(size, "gpipe", even_bounds(self.chain(size, "gpipe"), self.stages), True)

    def vpipe(self, size: int) -> bool:
        """vPipe's cuts without memory limits, which balance seconds; no recomputation."""
        stages = vpipe_stages(self.chain(size, "1f1b", limited=False))
        return self.holds(size, "1f1b", [0, *(stage.end for stage in stages)], False)

    def dawnpiper(self, size: int) -> bool:
        """DawnPiper without swaps and recomputation."""
        chain, none = self.chain(size, "1f1b"), [0] * len(self.chain(size, "1f1b").forward)
        return not any(stage.lack for stage in dawnpiper_stages(dataclasses.replace(chain, freed=none, moved=none)))

    def vpipe_sr(self, size: int) -> bool:
        """vPipe with swaps and recomputation."""
        return not any(stage.lack for stage in vpipe_stages(self.chain(size, "1f1b")))

    def dawnpiper_sr(self, size: int) -> bool:
        """DawnPiper with swaps and recomputation."""
        return not any(stage.lack for stage in dawnpiper_stages(self.chain(size, "1f1b")))

    def budget(self, size: int) -> bool:
        """Planner `budget`, under 1F1B, with all kinds of intervals."""
        run = RunShape(self.stages, "1f1b", True, microbatch_size=size, num_blocks=1)
        profile = profile_at(self.profiles, size)
        return bool(judged_layerwise_plan(profile, self.stages, "budget", "auto", CAPACITY, run, LINK, 10).fits)


ROWS = (
    ("nothing", ("gpipe", "vpipe", "dawnpiper")),
    ("recomputed, or both", ("gpipe_r", "vpipe_sr", "dawnpiper_sr", "budget")),
)
ASYNCHRONOUS_ROWS = (
    ("nothing", ("pipedream", "vpipe", "dawnpiper")),
    ("recomputed, or both", ("vpipe_sr", "dawnpiper_sr")),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--devices", default="4,8")
    parser.add_argument("--asynchronous", action="store_true", help="Table 2: pipelines that never drain")
    parser.add_argument("--profiles", type=Path, help="a folder that keeps the estimates; default: none is kept")
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    wanted = ASYNCHRONOUS_ROWS if args.asynchronous else ROWS
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.profiles or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in args.models.split(","):
            profiles = profiles_of(name, folder)
            for stages in map(int, args.devices.split(",")):
                methods = Methods(profiles, stages, args.asynchronous)
                for treated, rows in wanted:
                    for method in rows:
                        begun = time.perf_counter()
                        fits = getattr(methods, method)
                        lack = lambda size, fits=fits: -1 if fits(size) else 1  # noqa: E731
                        size = max(largest_by_bytes(range(max(profiles) + 1), lack, {0: -1}))
                        seconds = time.perf_counter() - begun
                        results.append(
                            {"model": name, "devices": stages, "treated": treated, "method": method}
                            | {"batch": size * (1 if args.asynchronous else stages), "most": size == max(profiles)}
                            | {"seconds": seconds}
                        )
                        sys.stderr.write(f"{results[-1]}\n")
    batch_of = {(row["devices"], row["method"], row["model"]): row["batch"] for row in results}
    print(f"| devices | treated | method | {' | '.join(args.models.split(','))} |\n|{'---|' * (3 + len(MODELS))}")
    for stages in map(int, args.devices.split(",")):
        for treated, rows in wanted:
            for method in rows:
                batches = (str(batch_of[stages, method, name]) for name in args.models.split(","))
                print(f"| {stages} | {treated} | {method.partition('_')[0]} | {' | '.join(batches)} |")
    write_json(args.json, {"rows": results})


if __name__ == "__main__":
    main()
