"""Compares the step of a layer whose parts run on several ranks with the same parts on one rank.

Engine, schedule and gloo are real; the layers sleep instead of computing, so that ranks do not compete for cores. The
steps of both plans are interleaved. Prints the table of README.md.

python -m benchmarks.variants.beside --rounds 10
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from benchmarks.common import Sleeping, beside_play, interleave, mean_loss, run_ranks, stepping
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.model.chain import Chain, Layer
from varuna_capslog.model.splitting.chains import split_chain
from varuna_capslog.model.splitting.splitter import Splitter
from varuna_capslog.model.splitting.torch_layers import PartsSum
from varuna_capslog.planning.simulation import simulate_plan
from varuna_capslog.plans.parts import PlanStage, Units
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import LayerProfile, Profile, TensorRecord

SHAPE = (1, 64)
SCHEDULE = "1f1b"
AROUND = 0.1
"""Seconds of the layer before and of the one behind, as a part of those of the layer that is split."""


class _Wide(nn.Module):
    """A layer that sleeps; its parts share the seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.sleep = seconds, Sleeping(seconds, 2 * seconds)

    def forward(self, x: Tensor) -> Tensor:
        slept: Tensor = self.sleep(x)
        return slept

    def split(self, into: Splitter) -> None:
        """Split into parts that share the weight and sleep their share of the seconds."""
        names = [into.value(str(part)) for part in range(into.degree)]
        for part, name in enumerate(names):
            share = into.sharing(self.sleep)
            share.seconds = (self.seconds / into.degree, 2 * self.seconds / into.degree)
            into.add(str(part), share, into.reads, [name])
        into.add("sum", PartsSum(None), names, into.writes)


def built(seconds: float, parts: int) -> Chain:
    """Return a chain of a short layer, a long one in parts, and a short one."""
    short = AROUND * seconds
    layers = [
        Layer("before", Sleeping(short, 2 * short)),
        Layer("wide", _Wide(seconds)),
        Layer("after", Sleeping(short, 2 * short)),
    ]
    return split_chain(Chain(layers), {"wide": f"tensor-{parts}"}, "close")


def plans(parts: int) -> dict[str, tuple[PlanStage, ...]]:
    """Return two plans: each part on its own rank, and all on the first; the first rank also has the other layers.

    The first part is a separate stage: in one stage with the preceding layer, the other parts would wait for it.
    """
    ranges = [(0, 1), *((part, part + 1) for part in range(1, parts + 1)), (parts + 1, parts + 3)]
    ranks = [0, *range(parts), 0]
    beside = tuple(PlanStage((piece,), (rank,)) for piece, rank in zip(ranges, ranks, strict=True))
    return {"side by side": beside, "one rank": (PlanStage(((0, parts + 3),), (0,)),)}


def play(seconds: float, parts: int, microbatches: int) -> dict[str, float]:
    """Return the step seconds of both plans as `capslog simulate` computes them, with free links."""
    chain = built(seconds, parts)
    layer_seconds = [AROUND * seconds, *[seconds / parts] * parts, 0.0, AROUND * seconds]
    rows = [
        LayerProfile(
            layer.name, 0, 0 if n else None, forward_seconds=layer_seconds[n], backward_seconds=2 * layer_seconds[n]
        )
        for n, layer in enumerate(chain.layers)
    ]
    size = 4 * SHAPE[0] * SHAPE[1]
    tensors = [
        TensorRecord(value.name, size, value.writer >= 0, value.writer if value.writer >= 0 else None, readers)
        for value, readers in chain.readers.items()
    ]
    profile, units = Profile(tuple(rows), tensors=tuple(tensors)), Units(microbatches, 1, 1)
    return {
        name: simulate_plan(
            profile, Plan(len(chain), stages, units, SCHEDULE, routes="direct"), recompute=False
        ).step_seconds
        for name, stages in plans(parts).items()
    }


def measure(
    communicator: Communicator, seconds: float, parts: int, microbatches: int, rounds: int
) -> dict[str, list[float]]:
    """Return this rank's seconds of every round of each plan; a rank without a stage is idle."""
    runs = {}
    for name, stages in plans(parts).items():
        options = EngineOptions(microbatches, schedule=SCHEDULE, recompute=False)
        engine = PipelineEngine(
            built(seconds, parts), mean_loss, Layout(stages, direct=True), options, communicator, torch.device("cpu")
        )
        runs[name] = stepping(engine, microbatches, {"x": torch.zeros(*SHAPE)})
    times = interleave(runs, rounds, communicator.barrier, warmup=1)
    return {name: [wall for wall, _ in row] for name, row in times.items()}


def compare(seconds: float, parts: int, microbatches: int, rounds: int) -> None:
    """Print measured and simulated ratios of the plan side by side to the plan on one rank."""
    played = play(seconds, parts, microbatches)
    rows = run_ranks(measure, parts, seconds, parts, microbatches, rounds)
    # a step ends when its last rank ends
    steps = {name: [max(ends) for ends in zip(*(row[name] for row in rows), strict=True)] for name in played}
    comparison = beside_play(steps, played, "side by side", "one rank")
    middle, low, high = comparison["ratio"]
    measured = comparison["measured_seconds"]
    print(
        f"| {parts} | {microbatches} | {1e3 * measured['one rank']:.0f} | {1e3 * measured['side by side']:.0f} | "
        f"{middle:.3f} ({low:.3f}-{high:.3f}) | {comparison['played_ratio']:.3f} | "
        f"{(2 * AROUND + 1 / parts) / (2 * AROUND + 1):.3f} |",
        flush=True,
    )


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.04, help="that the forward of the split layer takes whole")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    print("| parts and ranks | microbatches | one rank, ms | side by side, ms | ratio (quartiles) | played | least |")
    print("|---|---|---|---|---|---|---|")
    for parts in (2, 4):
        for microbatches in (1, 8):
            compare(args.seconds, parts, microbatches, args.rounds)


if __name__ == "__main__":
    main()
