"""Compares steps of zb-h1 and of 1f1b-star with 1f1b, on stages that sleep, with delayed links.

Engine, schedules and gloo are real; only the layers sleep instead of computing, so that ranks do not compete for cores.
The engines of both schedules exist at once and take turns. Prints the tables of README.md.
"""

from __future__ import annotations

import argparse
import queue
import random
import sys
import threading
import time
from collections.abc import Mapping, Sequence
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
from varuna_capslog.model.chain import Chain, Layer, TensorSpec
from varuna_capslog.planning.cuts import in_flight_of_period
from varuna_capslog.plans.parts import PlanStage
from varuna_capslog.schedules import StageGraph, StageSeconds, schedule_of, simulate

Times = Sequence[tuple[float, float, float]]
"""Seconds of the forward and of both halves of the backward of each stage."""


class _WaitForWeight(torch.autograd.Function):
    """Passes a parameter on, and its gradient after a delay."""

    @staticmethod
    def forward(context: Any, parameter: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        return parameter.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(context.seconds)
        return gradients[0], None


class SleepingHalves(nn.Module):
    """Layer that sleeps instead of computing, in its forward and in each half of its backward."""

    def __init__(self, forward: float, inputs: float, weights: float) -> None:
        super().__init__()
        self.wait, self.weights, self.shift = Sleeping(forward, inputs), weights, nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        shift: Tensor = _WaitForWeight.apply(self.shift, self.weights)
        out: Tensor = self.wait(x + shift)
        return out


class _Late:
    """Receive whose message arrives when it has passed the simulated link."""

    def __init__(self) -> None:
        self._there, self._value = threading.Event(), None

    def arrive(self, value: Any) -> None:
        self._value = value
        self._there.set()

    def wait(self) -> Any:
        self._there.wait()
        return self._value


def slow_links(communicator: Communicator, seconds: Mapping[int, float]) -> None:
    """Delay every received message by its peer's `seconds`; messages of one peer pass one after the other."""
    receive, links = communicator.receive, {}

    def serve(link: queue.Queue[tuple[Any, _Late]], delay: float) -> None:
        while True:
            pending, late = link.get()
            value = pending.wait()
            time.sleep(delay)
            late.arrive(value)

    def late_receive(spec: TensorSpec, peer: int, *more: Any) -> Any:
        if seconds.get(peer, 0.0) <= 0.0:
            return receive(spec, peer, *more)
        if peer not in links:
            links[peer] = queue.Queue()
            threading.Thread(target=serve, args=(links[peer], seconds[peer]), daemon=True).start()
        late = _Late()
        links[peer].put((receive(spec, peer, *more), late))
        return late

    communicator.receive = late_receive  # type: ignore[method-assign]


def measure(
    communicator: Communicator,
    times: Times,
    transfer: Sequence[float],
    schedules: Mapping[str, Sequence[int] | None],
    microbatches: int,
    rounds: int,
) -> dict[str, list[float]]:
    """Return this rank's seconds of every round of each schedule, under its limits."""
    rank, runs = communicator.rank, {}
    between = {rank - 1: transfer[rank], rank + 1: transfer[rank + 1] if rank + 1 < len(times) else 0.0}
    slow_links(communicator, between)
    for name, limits in schedules.items():
        chain = Chain([Layer(f"stage.{n}", SleepingHalves(*waits)) for n, waits in enumerate(times)], name="sleeper")
        stages = tuple(
            PlanStage(((n, n + 1),), (n,), in_flight=None if limits is None else limits[n]) for n in range(len(times))
        )
        options = EngineOptions(microbatches, schedule=name, recompute=False)
        engine = PipelineEngine(chain, mean_loss, Layout(stages), options, communicator, torch.device("cpu"))
        runs[name] = stepping(engine, microbatches, {"x": torch.zeros(1, 64)})
    measured = interleave(runs, rounds, communicator.barrier, warmup=1)
    return {name: [wall for wall, _ in row] for name, row in measured.items()}


def compare(
    case: str,
    name: str,
    times: Times,
    transfer: Sequence[float],
    limits: Sequence[int] | None,
    microbatches: int,
    rounds: int,
) -> dict[str, Any]:
    """Compare a schedule with 1f1b, measured and simulated."""
    graph = StageGraph.line(len(times), microbatches)
    forward, inputs, weights = ([stage_times[part] for stage_times in times] for part in range(3))
    seconds = StageSeconds(
        forward,
        [i + w for i, w in zip(inputs, weights, strict=True)],
        transfer=transfer,
        other={"I": inputs, "W": weights},
    )
    played = {
        key: simulate(schedule_of(key, graph, in_flight=stage_limits or ()), seconds, graph=graph)
        for key, stage_limits in ((name, limits), ("1f1b", None))
    }
    rows = run_ranks(measure, len(times), times, transfer, {name: limits, "1f1b": None}, microbatches, rounds)
    # a step ends when its last rank ends
    steps = {
        key: [max(rank_seconds) for rank_seconds in zip(*(row[key] for row in rows), strict=True)] for key in played
    }
    row = {
        "case": case,
        "stages": len(times),
        "microbatches": microbatches,
        "rounds": rounds,
        **beside_play(steps, {key: play.step_seconds for key, play in played.items()}, name, "1f1b"),
        "in_flight": {key: play.max_in_flight for key, play in played.items()},
    }
    middle, low, high = row["ratio"]
    ours, theirs = (row["measured_seconds"][key] for key in (name, "1f1b"))
    print(
        f"| {case} | {1e3 * ours:.0f} | {1e3 * theirs:.0f} | {middle:.3f} ({low:.3f}-{high:.3f}) | "
        f"{row['played_ratio']:.3f} | {row['in_flight'][name]} | {row['in_flight']['1f1b']} |",
        flush=True,
    )
    return row


def main() -> None:
    """Measure zb-h1 on equal stages, and 1f1b-star on random ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="pairs of steps per case")
    parser.add_argument("--draws", type=int, default=3, help="drawn pipelines for each cost of the links")
    parser.add_argument("--unit", type=float, default=0.008, help="seconds of a forward")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    arguments = parser.parse_args()
    unit, rounds = arguments.unit, arguments.rounds
    print("| case | ms | 1f1b ms | ratio (quartiles) | played ratio | in flight | in flight of 1f1b |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for stages, halves in ((4, (1.0, 1.0)), (4, (1.25, 0.75)), (8, (1.0, 1.0))):
        times = [(unit, unit * halves[0], unit * halves[1])] * stages
        case = f"zb-h1, {stages} equal stages, b = {halves[0]:g} + {halves[1]:g} f"
        rows.append(compare(case, "zb-h1", times, [0.0] * stages, None, 2 * stages, rounds))
    draw = random.Random(0)
    for cost in (0.3, 0.8):
        for number in range(arguments.draws):
            times = [(seconds, seconds, seconds) for seconds in (unit * (1 + 0.2 * draw.random()) for _ in range(8))]
            slowest = 3 * max(stage[0] for stage in times)
            transfer = [0.0, *(0.5 * cost * slowest * draw.random() for _ in range(7))]
            both = [stage[1] + stage[2] for stage in times]
            limits = in_flight_of_period([stage[0] for stage in times], both, transfer)
            case = f"1f1b-star, 8 stages, links up to {cost:g}, draw {number}"
            rows.append(compare(case, "1f1b-star", times, transfer, limits, 32, rounds))
    write_json(arguments.output, {"rows": rows})


if __name__ == "__main__":
    main()
