"""Images per second of RT-DETR: our one-stage run beside transformers' Trainer, on one core in turns.

Each runs like a user's run in its own process, with the same initial weights, order of images, batch, optimizer and
learning rate; both are pinned to the same core, and the parent lets them train blocks of steps in turns. Processor time
counts from the end of one block to the end of the next, so that it includes images that are decoded ahead while a
process waits for its turn. Prints the table of README.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from common import median_ratio, write_json
from contenders import BATCH, keys, make_trainer, settled

from detr_pipeline.rt_detr.task import RtDetrWorkload
from varuna_capslog.engine.communicator import connect
from varuna_capslog.start.prepare import prepare_run
from varuna_capslog.training.run import Run

_CONFIG = "bccd_rt_detr"


class _Turns:
    """Counts the steps of a run, and waits for its turn after every block of steps."""

    def __init__(self, pipe: Any, steps: int, warm_up: int) -> None:
        self._pipe, self._steps = pipe, steps
        self._done, self._began = -warm_up, 0.0

    def over(self) -> bool:
        """Count a step, wait for the next turn at a block's end, and return True when the run shall end."""
        self._done += 1
        if self._done < 0 or self._done % self._steps:
            return False
        self._pipe.send((time.perf_counter() - self._began, time.process_time()))
        goes_on: bool = self._pipe.recv()
        self._began = time.perf_counter()
        return not goes_on


def _ours(turns: _Turns, size: tuple[int, int], folder: Path) -> None:
    config, workload = settled(_CONFIG, keys(_CONFIG, size, 1500, folder))
    plan = prepare_run(config, show=False)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    communicator = connect(0, 1, "127.0.0.1", store.port)
    run = Run(config, plan, workload, communicator, torch.device("cpu"), stop_wished=turns.over)
    run.resume()
    run.train()
    run.loop.close()
    communicator.close()


def _trainer(turns: _Turns, size: tuple[int, int], folder: Path) -> None:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            control.should_training_stop = turns.over()

    config, workload = settled(_CONFIG, keys(_CONFIG, size, 1500, folder))
    assert isinstance(workload, RtDetrWorkload)
    make_trainer(config, workload, folder, Stop()).train()


_RUNS = {"ours": _ours, "trainer": _trainer}


def _serve(name: str, turns: _Turns, core: int, size: tuple[int, int], folder: Path, profile: bool) -> None:
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    if not profile:
        _RUNS[name](turns, size, folder)
        return
    import cProfile
    import pstats

    with cProfile.Profile(time.process_time) as profiler:
        _RUNS[name](turns, size, folder)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def main() -> None:
    """Measure blocks in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=10, help="of a block")
    parser.add_argument(
        "--warm-up",
        type=int,
        default=60,
        help="steps before the first block, in which nearly all numbers of denoising queries come up, whose shapes our "
        "run traces once each",
    )
    parser.add_argument("--size", type=int, nargs=2, default=(160, 224), help="height and width of the pictures")
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--profile", action="store_true", help="print the functions that take the time of each instead")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    context, size = multiprocessing.get_context("spawn"), tuple(arguments.size)
    pipes: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for name in _RUNS:
            pipes[name], theirs = context.Pipe()
            turns = _Turns(theirs, arguments.steps, arguments.warm_up)
            options = (name, turns, arguments.core, size, Path(folder) / name, arguments.profile)
            processes.append(context.Process(target=_serve, args=options, daemon=True))
            processes[-1].start()
            theirs.close()
        worked = {name: pipe.recv()[1] for name, pipe in pipes.items()}
        wall: dict[str, list[float]] = {name: [] for name in _RUNS}
        work: dict[str, list[float]] = {name: [] for name in _RUNS}
        for number in range(arguments.rounds):
            for name in list(_RUNS)[:: 1 if number % 2 == 0 else -1]:
                pipes[name].send(True)
                seconds, until = pipes[name].recv()
                wall[name].append(seconds)
                work[name].append(until - worked[name])
                worked[name] = until
        for pipe in pipes.values():
            pipe.send(False)
        for process in processes:
            process.join()
    print("| | ours | Trainer | ours / Trainer, median (quartiles) |\n|---|---|---|---|")
    pictures = arguments.steps * BATCH
    for title, times in (("processor ms per picture", work), ("wall-clock ms per picture", wall)):
        ratio = "{:.3f} ({:.3f}-{:.3f})".format(*median_ratio(times["ours"], times["trainer"]))
        mine, theirs = (1e3 * statistics.median(times[name]) / pictures for name in _RUNS)
        print(f"| {title} | {mine:.2f} | {theirs:.2f} | {ratio} |")
    write_json(arguments.output, {"wall": wall, "work": work, "pictures": pictures})


if __name__ == "__main__":
    main()
