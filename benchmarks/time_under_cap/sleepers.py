"""Measured steps of the paper's six configurations on chains of layers that sleep as long as a GPU would compute.

Used by `time_under_cap.py --sleep`. The engine, its schedule and gloo are real; only the layers sleep instead of
computing, so that ranks do not compete for cores. Layer times are an estimated profile's, scaled; its bytes are used
for planning but not allocated.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import Sleeping, interleave, mean_loss, run_ranks, stepping

from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.model.chain import Chain, Layer
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile

__all__ = ["measured_steps"]

_WIDTH = 1024

Times = Sequence[tuple[float, float]]
"""Forward and backward seconds of each layer."""


def measured_steps(
    profile: Profile, plans: Mapping[str, Plan], microbatches: int, seconds: float, rounds: int, simulated: float
) -> dict[str, dict[str, float]]:
    """Measure steps of each plan in turn, in the profile's seconds, under Varuna's schedule.

    Args:
        seconds: length to which the layers' times scale a step of the unscaled length `simulated`.

    Returns:
        For each plan its median and least step, and the ratio of Varuna's step to it: median over rounds, and of least.
    """
    scale = seconds / simulated
    times = [
        (scale * forward, scale * backward)
        for forward, backward in zip(profile.column("forward_seconds"), profile.column("backward_seconds"), strict=True)
    ]
    # planners may choose the same cuts, which are measured once
    names: dict[tuple[int, ...], list[str]] = {}
    for name, plan in plans.items():
        names.setdefault(tuple(plan.cuts), []).append(name)
    (ranks,) = {len(cuts) for cuts in names}
    rows = run_ranks(_steps, ranks, times, list(names), microbatches, rounds)
    # a step ends when its last rank ends
    steps = {
        cuts: [max(rank_seconds) for rank_seconds in zip(*(row[n] for row in rows), strict=True)]
        for n, cuts in enumerate(names)
    }
    base = steps[tuple(plans["varuna"].cuts)]
    return {
        name: {
            "median_seconds": statistics.median(steps[cuts]) / scale,
            "least_seconds": min(steps[cuts]) / scale,
            "median_against_varuna": statistics.median(a / b for a, b in zip(base, steps[cuts], strict=True)),
            "least_against_varuna": min(base) / min(steps[cuts]),
        }
        for cuts, several in names.items()
        for name in several
    }


def _steps(
    communicator: Communicator, times: Times, cut_lists: Sequence[tuple[int, ...]], microbatches: int, rounds: int
) -> list[list[float]]:
    """Return this rank's seconds of every round of each cut list; all engines exist at once and take turns."""
    runs = {str(number): _engine(communicator, times, cuts, microbatches) for number, cuts in enumerate(cut_lists)}
    measured = interleave(runs, rounds, communicator.barrier, warmup=1)
    return [[wall for wall, _ in measured[name]] for name in runs]


def _engine(communicator: Communicator, times: Times, cuts: tuple[int, ...], microbatches: int) -> Callable[[], object]:
    """Return a function that trains one step of sleeping layers."""
    chain = Chain([Layer(f"layer.{n}", Sleeping(*waits)) for n, waits in enumerate(times)], name="sleeper")
    layout = Layout.pipelines(cuts, len(chain))
    options = EngineOptions(microbatches)
    engine = PipelineEngine(chain, mean_loss, layout, options, communicator, torch.device("cpu"))
    return stepping(engine, microbatches, {"x": torch.zeros(1, _WIDTH)})
