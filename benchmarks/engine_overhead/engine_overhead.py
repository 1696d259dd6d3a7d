"""Compares the engine's step time with torch.distributed.pipelining's schedules, and with the bubble bound.

Both run the same transformer, cuts, ranks, optimizer and data, interleaved in one process per rank. Prints the table of
README.md.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import (
    TransformerSize,
    captured_chain,
    interleave,
    machine,
    median_ratio,
    run_ranks,
    token_loss,
    token_minibatch,
    transformer_chain,
    write_json,
)

from varuna_capslog.engine import functions
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.recipe import EngineOptions, LearningRate, Recipe
from varuna_capslog.engine.step import train_step

SIZES = {
    "small": TransformerSize(blocks=6, dim=64, sequence=32, microbatch_size=2),
    "medium": TransformerSize(blocks=8, dim=256, sequence=64, microbatch_size=4),
}
RATE, DECAY = 1e-3, 1e-4
TORCHS = {"interleaved": ScheduleInterleaved1F1B, "zero-bubble": ScheduleInterleavedZeroBubble}


def even_cuts(num_layers: int, stages: int) -> tuple[int, ...]:
    """Return cuts into stages of (nearly) equal numbers of layers."""
    return tuple(round(stage * num_layers / stages) for stage in range(stages))


def measure(
    communicator: Communicator, size: TransformerSize, rounds: int, schedule_name: str, captured: bool
) -> dict[str, Any]:
    """Return this rank's times of both engines, and on rank 0 of the unsplit model while the other ranks sleep.

    captured: our engine runs the captured model, with functions from the second call of a layer on.
    """
    rank, ranks, device = communicator.rank, communicator.world_size, torch.device("cpu")
    chain = transformer_chain(size)
    functions.CALLS = 1
    minibatch, tokens, targets = token_minibatch(size)
    stages = ranks if schedule_name == "1f1b" else 2 * ranks
    cuts, placement = even_cuts(len(chain), stages), [stage % ranks for stage in range(stages)]
    rank_stages = range(rank, stages, ranks)
    # copies, since both engines train their own weights
    stage_modules = nn.ModuleList(
        nn.Sequential(*[copy.deepcopy(layer.module) for layer in chain.layers[cuts[n] : (*cuts, len(chain))[n + 1]]])
        for n in rank_stages
    )
    unsplit = nn.Sequential(*[copy.deepcopy(layer.module) for layer in chain.layers])

    def share(output: Tensor, target: Tensor) -> Tensor:
        return token_loss({"x": output}, target, minibatch.normalisers)["loss"]

    parts = [PipelineStage(module, n, stages, device) for module, n in zip(stage_modules, rank_stages, strict=True)]
    if schedule_name == "1f1b":
        schedule = Schedule1F1B(parts[0], size.num_microbatches, loss_fn=share, scale_grads=False)
    else:
        schedule = TORCHS[schedule_name](parts, size.num_microbatches, loss_fn=share, scale_grads=False)
    # torch's own order of split backwards, so that both do the same
    order = schedule.pipeline_order if schedule_name == "zero-bubble" else None
    layout = Layout.pipelines(cuts, len(chain), placement)
    options = EngineOptions(
        size.num_microbatches,
        schedule="1f1b" if order else schedule_name,
        recompute=False,
        actions=order and tuple(tuple(str(action) for action in order[n] if action is not None) for n in range(ranks)),
        recipe=Recipe(LearningRate(RATE), weight_decay=DECAY),
    )
    engine = PipelineEngine(
        captured_chain(size) if captured else chain, token_loss, layout, options, communicator, device
    )
    ours: list[float] = []

    def step_ours() -> None:
        outcome = train_step(engine, len(ours) + 1, minibatch, lambda index: {"x": tokens[index]})
        ours.append(outcome.parts["loss"])

    optimizer = torch.optim.AdamW(stage_modules.parameters(), lr=RATE, weight_decay=DECAY, fused=True)
    theirs: list[float] = []

    def step_theirs() -> None:
        losses: list[Tensor] = []
        inputs = {"arg_mbs": [(part,) for part in tokens]} if rank == 0 else {}
        wanted = {"target_mbs": targets, "losses": losses} if rank == ranks - 1 else {}
        schedule.step(**inputs, **wanted, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        theirs.append(sum(loss.item() for loss in losses))

    whole_optimizer = torch.optim.AdamW(unsplit.parameters(), lr=RATE, weight_decay=DECAY, fused=True)

    def step_unsplit() -> None:
        if rank == 0:
            for part, target in zip(tokens, targets, strict=True):
                share(unsplit(part), target).backward()
            whole_optimizer.step()
            whole_optimizer.zero_grad()

    runs = {"ours": step_ours, "torch": step_theirs, "unsplit": step_unsplit}
    return {"times": interleave(runs, rounds, communicator.barrier), "losses": {"ours": ours, "torch": theirs}}


def report(size: TransformerSize, name: str, ranks: int, rounds: int, schedule: str, captured: bool) -> dict[str, Any]:
    """Run one case and print its row."""
    results = run_ranks(measure, ranks, size, rounds, schedule, captured)
    ours, theirs = results[0]["losses"]["ours"], results[-1]["losses"]["torch"]
    apart = max(abs(a - b) / b for a, b in zip(ours[:3], theirs[:3], strict=True))
    if apart > 1e-5:
        raise SystemExit(f"the two engines do not train the same model: losses {ours[:3]} and {theirs[:3]}")
    # a step ends when its last rank ends; the work is that of all ranks
    seconds, work = (
        {
            run: [combine(row) for row in zip(*([t[kind] for t in r["times"][run]] for r in results), strict=True)]
            for run in ("ours", "torch", "unsplit")
        }
        for kind, combine in ((0, max), (1, sum))
    )
    busy = statistics.median(seconds["unsplit"])
    bubble = (size.num_microbatches + ranks - 1) / size.num_microbatches
    row = {
        "model": name,
        "schedule": schedule,
        "ranks": ranks,
        "rounds": rounds,
        **{f"{run}_seconds": statistics.median(values) for run, values in seconds.items()},
        **{f"{run}_cpu_seconds": statistics.median(values) for run, values in work.items()},
        "ratio": median_ratio(seconds["ours"], seconds["torch"]),
        "cpu_ratio": median_ratio(work["ours"], work["torch"]),
        "bubble_bound_seconds": busy / ranks * bubble,
        "cores_bound_seconds": max(busy / ranks * bubble, busy / min(ranks, machine()["cores"])),
    }
    times = [row[f"{run}_seconds"] for run in ("ours", "torch")]
    bounds = [row[key] for key in ("unsplit_seconds", "bubble_bound_seconds", "cores_bound_seconds")]
    cells = [
        name,
        schedule,
        str(ranks),
        *(f"{1e3 * value:.1f}" for value in times),
        *(f"{middle:.3f} ({low:.3f}-{high:.3f})" for middle, low, high in (row["ratio"], row["cpu_ratio"])),
        *(f"{1e3 * value:.1f}" for value in bounds),
    ]
    print(f"| {' | '.join(cells)} |", flush=True)
    return row


def main() -> None:
    """Measure the requested cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--schedules", nargs="+", default=["1f1b", *TORCHS], choices=["1f1b", *TORCHS])
    parser.add_argument("--rounds", type=int, default=40, help="pairs of steps per case")
    parser.add_argument("--captured", action="store_true", help="our engine runs the captured model, with functions")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    arguments = parser.parse_args()
    for name in arguments.models:
        print(f"{name}: {SIZES[name]}")
    print(
        "| model | schedule | ranks | ours ms | torch ms | ours / torch (quartiles) | processor time ours / torch | "
        "unsplit ms | bubble bound ms | bound with these cores ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    rows = [
        report(SIZES[name], name, ranks, arguments.rounds, schedule, arguments.captured)
        for name in arguments.models
        for schedule in arguments.schedules
        for ranks in arguments.ranks
    ]
    write_json(arguments.output, {"rows": rows})


if __name__ == "__main__":
    main()
