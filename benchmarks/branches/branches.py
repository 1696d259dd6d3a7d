"""Compares direct routes with relay for two towers on four ranks whose stages sleep, measured and simulated.

Engine, schedule and gloo are real; the layers sleep instead of computing, so that ranks do not compete for cores. The
steps of both plans are interleaved. Prints the table of README.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import Sleeping, beside_play, interleave, mean_loss, run_ranks, stepping, write_json

from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.model.chain import Chain, Layer
from varuna_capslog.planning.simulation import Simulation, simulate_plan
from varuna_capslog.plans.parts import PlanStage, Units
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import LayerProfile, Profile, TensorRecord

SHAPE = (1, 64)
SCHEDULE = "1f1b"
ROUTES = ("direct", "relay")


class Join(nn.Module):
    """Adds the outputs of both towers."""

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        return image + text


def towers(seconds: float) -> Chain:
    """Return a chain: layers 0 and 1 are the image tower, 2 and 3 the text tower, and layer 4 joins them. A backward
    takes twice as long as a forward; the join takes no time.
    """

    def layer(name: str, reads: str, writes: str) -> Layer:
        return Layer(name, Sleeping(seconds, 2 * seconds), (reads,), (writes,))

    layers = [
        layer("image.0", "pixels", "image"),
        layer("image.1", "image", "image"),
        layer("text.0", "tokens", "text"),
        layer("text.1", "text", "text"),
        Layer("join", Join(), ("image", "text"), ("x",)),
    ]
    return Chain(layers, inputs=("pixels", "tokens"), name="two-towers")


STAGES = tuple(PlanStage((piece,), (rank,)) for rank, piece in enumerate([(0, 1), (1, 2), (2, 3), (3, 5)]))
"""The image tower on ranks 0 and 1, the text tower and the join on ranks 2 and 3; all graphs are kept."""


def profile_of(chain: Chain, seconds: float) -> Profile:
    """Return the profile of the sleeping layers, with the readers of each tensor."""
    layer_seconds = [seconds] * (len(chain) - 1) + [0.0]
    size = 4 * SHAPE[0] * SHAPE[1]
    rows = [
        LayerProfile(
            layer.name, 0, 0 if n else None, forward_seconds=layer_seconds[n], backward_seconds=2 * layer_seconds[n]
        )
        for n, layer in enumerate(chain.layers)
    ]
    tensors = [
        TensorRecord(value.name, size, value.writer >= 0, value.writer if value.writer >= 0 else None, readers)
        for value, readers in chain.readers.items()
    ]
    return Profile(tuple(rows), tensors=tuple(tensors))


def play(seconds: float, microbatches: int) -> dict[str, Simulation]:
    """Simulate both plans as `capslog simulate` does."""
    chain = towers(seconds)
    profile = profile_of(chain, seconds)
    return {
        routes: simulate_plan(
            profile, Plan(len(chain), STAGES, Units(microbatches, 1, 1), SCHEDULE, routes=routes), recompute=False
        )
        for routes in ROUTES
    }


def measure(communicator: Communicator, seconds: float, microbatches: int, rounds: int) -> dict[str, list[float]]:
    """Return this rank's seconds of every round of each plan."""
    runs = {}
    for routes in ROUTES:
        options = EngineOptions(microbatches, schedule=SCHEDULE, recompute=False)
        layout = Layout(STAGES, direct=routes == "direct")
        engine = PipelineEngine(towers(seconds), mean_loss, layout, options, communicator, torch.device("cpu"))
        runs[routes] = stepping(engine, microbatches, {name: torch.zeros(*SHAPE) for name in ("pixels", "tokens")})
    times = interleave(runs, rounds, communicator.barrier, warmup=1)
    return {name: [wall for wall, _ in row] for name, row in times.items()}


def compare(seconds: float, microbatches: int, rounds: int) -> dict[str, Any]:
    """Print and return the ratio of direct routes to relay, measured and simulated."""
    played = play(seconds, microbatches)
    rows = run_ranks(measure, len(STAGES), seconds, microbatches, rounds)
    # a step ends when its last rank ends
    steps = {name: [max(ends) for ends in zip(*(row[name] for row in rows), strict=True)] for name in ROUTES}
    row = {
        "microbatches": microbatches,
        "rounds": rounds,
        **beside_play(steps, {name: simulation.step_seconds for name, simulation in played.items()}, "direct", "relay"),
        "in_flight": {name: simulation.pipelines[0].timeline.max_in_flight for name, simulation in played.items()},
    }
    middle, low, high = row["ratio"]
    measured, in_flight = row["measured_seconds"], row["in_flight"]
    print(
        f"| {microbatches} | {1e3 * measured['direct']:.0f} | {1e3 * measured['relay']:.0f} | "
        f"{middle:.3f} ({low:.3f}-{high:.3f}) | {row['played_ratio']:.3f} | "
        f"{100 * (middle / row['played_ratio'] - 1):+.1f} % | {in_flight['direct']} | {in_flight['relay']} |",
        flush=True,
    )
    return row


def main() -> None:
    """Measure steps of 4, 8 and 16 microbatches."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="pairs of steps per case")
    parser.add_argument("--unit", type=float, default=0.1, help="seconds of a forward")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    arguments = parser.parse_args()
    print("| microbatches | direct ms | relay ms | ratio (quartiles) | played ratio | off by | in flight | of relay |")
    print("|---|---|---|---|---|---|---|---|")
    rows = [compare(arguments.unit, microbatches, arguments.rounds) for microbatches in (4, 8, 16)]
    write_json(arguments.output, {"rows": rows})


if __name__ == "__main__":
    main()
