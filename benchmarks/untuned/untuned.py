"""Compares predicted peaks with the CPU's allocator for models drawn by seed from a fixed list. Prints the tables.

Each model is captured as `capslog plan --model` captures it. It trains two steps as one stage and two as a plan of two
or three stages, one process per rank; the peak of the second step is compared with the earlier prediction.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import queue
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from architectures import TORCHVISION, TRANSFORMERS, inputs_of
from common import plan, write_json
from torch import Tensor

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.communicator import connect
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.probe import PeakProbe, resident_tensors
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.model_workload import ModelSection, ModelWorkload, parse_input
from varuna_capslog.model.workload import Minibatch
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.estimate import StageEstimator, estimate_workload
from varuna_capslog.profiling.rehearsal import rehearse
from varuna_capslog.schedules import RunShape

MIB = 1 << 20
CPU = torch.device("cpu")
MICROBATCHES = 4
SCHEDULES = [("varuna", True), ("1f1b", False)]


@dataclass(frozen=True)
class Trial:
    """Bytes of a rank of a plan; modelled: by the memory model that chose the cuts."""

    model: str
    what: str
    measured: int
    predicted: int
    modelled: int | None

    def row(self) -> str:
        """Return a line of the table; errors are above 0 where more was predicted than measured."""
        model = "- | -" if self.modelled is None else _beside(self.modelled, self.measured)
        return (
            f"| {self.model} | {self.what} | {self.measured / MIB:.2f} | {_beside(self.predicted, self.measured)} | "
            f"{model} |"
        )


def _beside(guess: int, real: int) -> str:
    return f"{guess / MIB:.2f} | {guess / real - 1:+.2%}"


def workload_of(name: str) -> ModelWorkload:
    """Return the workload that `capslog plan --model` makes of an entry of the list."""
    inputs = inputs_of(name)
    settings = ModelSection(factory="architectures:architecture", arguments={"name": name}, inputs=inputs)
    return ModelWorkload(settings, parse_input(inputs[0]).shape[0])


# -- measured


def apart(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run each task in its own forked process and return their results: autograd must have no threads before a fork."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()

    def run(place: int) -> None:
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        results.put((place, tasks[place]()))

    processes = [context.Process(target=run, args=(place,), daemon=True) for place in range(len(tasks))]
    for process in processes:
        process.start()
    returned: dict[int, Any] = {}
    while len(returned) < len(tasks):
        try:
            place, outcome = results.get(timeout=1.0)
            returned[place] = outcome
        except queue.Empty:
            if any(process.exitcode for process in processes):
                raise SystemExit("a process failed; its traceback stands above") from None
    for process in processes:
        process.join()
    return [returned[place] for place in range(len(tasks))]


def measured(workload: ModelWorkload, chain: Chain, cuts: Sequence[int], schedule: str, recompute: bool) -> list[int]:
    """Return the allocator's peak of every rank in the second step."""
    specs, size = workload.profile_inputs, workload._size
    inputs = dict(specs(size))
    minibatch = Minibatch([inputs] * MICROBATCHES, [None] * MICROBATCHES, {"microbatches": float(MICROBATCHES)})
    options = EngineOptions(MICROBATCHES, schedule=schedule, recompute=recompute, clip_norm=1.0)

    parsed = [parse_input(text) for text in inputs_of(workload._settings.arguments["name"])]

    def load(microbatch: int) -> dict[str, Tensor]:
        return {spec.name: spec.make(spec.shape, microbatch) for spec in parsed}

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def trained(rank: int) -> int:
        communicator = connect(rank, len(cuts), "127.0.0.1", store.port, timeout_seconds=300.0)
        layout = Layout.pipelines(cuts, len(chain))
        engine = PipelineEngine(chain, workload.loss, layout, options, communicator, CPU)
        train_step(engine, 1, minibatch, load)
        with PeakProbe(CPU, resident_tensors(engine.layers, engine.optimizer)) as probe:
            train_step(engine, 2, minibatch, load)
        communicator.barrier()
        communicator.close()
        return probe.peak_bytes

    return apart([functools.partial(trained, rank) for rank in range(len(cuts))])


# -- predicted


def planned(
    name: str, conditions: RunConditions, run: RunShape, devices: int
) -> tuple[Sequence[int], Sequence[int | None], list[int]]:
    """Return the cuts, and per stage the bytes by the memory model that chose them and by the rehearsal."""
    estimator, cuts, modelled = StageEstimator(workload_of(name), conditions), (0,), (None,)
    if devices > 1:
        best = plan(estimate_workload(workload_of(name), conditions), devices, run=run)
        cuts, modelled = best.cut_list, best.stage_bytes or (None,) * devices
    return cuts, modelled, rehearse(estimator, cuts, run.schedule, MICROBATCHES)


def trials_of(name: str, draw: random.Random) -> list[Trial]:
    """Measure a plan of one stage and a plan of two or three, under two random schedules."""
    workload = workload_of(name)
    chain = workload.build_training_chain()
    orders = draw.sample(SCHEDULES, 2)
    trials = []
    for (schedule, recompute), drawn in zip(orders, (1, draw.choice((2, 3))), strict=True):
        devices = min(drawn, len(chain))
        conditions = RunConditions(microbatch_size=workload._size, recompute=recompute)
        run = RunShape(MICROBATCHES, schedule, recompute, microbatch_size=workload._size)
        ((cuts, modelled, predicted),) = apart([functools.partial(planned, name, conditions, run, devices)])
        peaks = measured(workload, chain, cuts, schedule, recompute)
        ends = [*cuts[1:], len(chain)]
        how = f"{schedule}{', recomputation' if recompute else ''}"
        for stage, (real, guess, model) in enumerate(zip(peaks, predicted, modelled, strict=True)):
            label = f"{len(cuts)} stages, layers {cuts[stage]}-{ends[stage] - 1}" if devices > 1 else "all"
            trials.append(Trial(name, f"{how}: {label}", real, guess, model))
            out(trials[-1].row())
    return trials


def summary(label: str, errors: Sequence[float]) -> str:
    """Return a sentence of the median and largest absolute errors, and the lowest error."""
    sizes = sorted(map(abs, errors))
    return (
        f"{label}: {len(errors)} ranks, median error {statistics.median(sizes):.3%}, worst {sizes[-1]:.2%}, "
        f"lowest {min(errors):+.2%}"
    )


def out(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=12, help="models that are measured")
    parser.add_argument("--seed", type=int, default=16)
    parser.add_argument("--only", nargs="+", help="these entries of the list instead of drawn ones")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = sorted([*TORCHVISION, *TRANSFORMERS])
    draw = random.Random(arguments.seed)
    order = arguments.only or draw.sample(names, len(names))
    trials: list[Trial] = []
    refused: dict[str, str] = {}
    out("| model | what | measured MiB | predicted MiB | error | memory model MiB | error |")
    out("|---|---|---|---|---|---|---|")
    done = 0
    for name in order:
        if done == (len(order) if arguments.only else arguments.models):
            break
        try:
            trials += trials_of(name, random.Random(f"{arguments.seed} {name}"))
            done += 1
        except CapslogError as error:
            refused[name] = str(error)
            out(f"| {name} | refused: {error} | | | | | |")
    out("")
    out(summary("predicted", [trial.predicted / trial.measured - 1 for trial in trials]))
    modelled = [trial.modelled / trial.measured - 1 for trial in trials if trial.modelled is not None]
    if modelled:
        out(summary("memory model", modelled))
    write_json(
        arguments.json, {"seed": arguments.seed, "trials": [asdict(trial) for trial in trials], "refused": refused}
    )


if __name__ == "__main__":
    main()
