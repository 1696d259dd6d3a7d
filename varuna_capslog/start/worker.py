"""Process of one rank: forked for the supervisor, or started as `python -m varuna_capslog.start.worker RUN_DIR`.

It ends in one of three ways: done (0), asked to stop at a step boundary (130), or failed, with one sentence in
`workers/<rank>.error.json` and on stderr.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.failures import StopWish, leave, report_failure
from varuna_capslog.base.tables import lasting_output, log_to

if TYPE_CHECKING:
    from varuna_capslog.training.run import Run

__all__ = ["forked", "main", "run_worker"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the worker of the RUN_DIR on the command line; return the exit status."""
    parser = argparse.ArgumentParser("python -m varuna_capslog.start.worker", description="One rank of a prepared run.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--evaluate", action="store_true", help="score the best checkpoint instead of training")
    options = parser.parse_args(arguments)
    return run_worker(options.run_dir, evaluate=options.evaluate)


def forked(arguments: Sequence[str]) -> NoReturn:
    """Run the worker in a forked process (`start/local_run.worker_starter`)."""
    leave(main(arguments))


def run_worker(run_dir: Path, evaluate: bool = False, prepare: Callable[[], object] | None = None) -> int:
    """Run one rank of the run in `run_dir`; rank, world size and rendezvous come from torchrun's variables. Returns 0,
    or 130 when the run was asked to stop; a failure ends the process with its own status.

    Args:
        evaluate: score the best checkpoint and write evaluation.json instead of training.
        prepare: called on rank 0, once all ranks are connected, to put config and plan into `run_dir`; None when the
            launcher has done so.
    """
    rank = int(os.environ.get("RANK", "0"))
    wish = StopWish()
    if evaluate:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # an evaluation saves nothing: Ctrl-C ends it at once
    state: dict[str, Any] = {"name": f"rank {rank}", "stage": None}

    def fail(error: Exception) -> NoReturn:
        run: Run | None = state.get("run")
        where = {"rank": rank, "stage": state["stage"], "step": run.begun_step if run else None}
        where["microbatch"] = _microbatch(run.failed_at if run else None)
        leave(report_failure(run_dir, str(rank), state["name"], error, where))

    try:
        return _work(run_dir, rank, wish, state, evaluate, prepare, fail)
    except Exception as error:
        fail(error)


def _microbatch(doing: str | None) -> int | None:
    numbers = re.findall(r"\d+", doing or "")
    return int(numbers[-1]) if len(numbers) == 2 else None


def _work(
    run_dir: Path,
    rank: int,
    wish: StopWish,
    state: dict[str, Any],
    evaluate: bool,
    prepare: Callable[[], object] | None,
    fail: Callable[[Exception], NoReturn],
) -> int:
    import torch

    from varuna_capslog.config.reading import load_config
    from varuna_capslog.elastic.network import check_gloo_interfaces
    from varuna_capslog.engine.communicator import connected
    from varuna_capslog.engine.layout import layout_of
    from varuna_capslog.model.workload import load_workload
    from varuna_capslog.plans.plan import latest_plan
    from varuna_capslog.start import ENGINES
    from varuna_capslog.training.run import Run
    from varuna_capslog.training.run_setup import check_devices, check_room, choose_device

    if rank == 0 and not evaluate:  # the output of an evaluation may be JSON
        # so that the user sees warnings, such as repairs of annotation files
        log_to(sys.stdout)
    check_gloo_interfaces(os.environ)
    if prepare is not None:
        # a separate store and process group, since the run's timeout is not known yet
        with connected("prepare", 60.0) as communicator:
            communicator.together(lambda: prepare() if rank == 0 else None)
    config = load_config(run_dir / "config.yaml")
    torch.set_num_threads(config.train.threads)
    planned = latest_plan(run_dir)
    if planned is None:
        raise CapslogError(f"{run_dir} holds no plan-<generation>.json; start the run with `capslog train`")
    generation, plan = planned
    layout = layout_of(plan, config)
    state["stage"] = stages[0] if len(stages := layout.stages_of(rank)) == 1 else stages
    state["name"] = layout.describe(rank)
    place = {"rank": rank, "pid": os.getpid(), "host": socket.gethostname(), "stage": state["stage"]}
    files.write_json(run_dir / "workers" / f"{rank}.json", place)
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    device = choose_device(config.device, local_rank)
    check_devices(config.pipeline.transport, device, local_rank)
    check_room(device, plan.ranks[rank].bytes if rank < len(plan.ranks) else None, f"rank {rank}")
    with connected(f"run-{generation}", config.pipeline.timeout_seconds) as communicator:
        run = Run(config, plan, load_workload(config), communicator, device, generation, wish, ENGINES)
        state["run"], run.loop.watch.late = run, fail
        try:
            if evaluate:
                return _evaluate(run, run_dir)
            run.resume()
            return 130 if run.train().stopped else 0
        finally:
            run.loop.close()


def _evaluate(run: Run, run_dir: Path) -> int:
    from varuna_capslog.training.checkpoint import best_checkpoint

    run.take_weights(best_checkpoint(run.setup.checkpoints))
    scores = run.loop.boundaries.evaluate(run.engine)
    if scores is None:
        raise CapslogError(f"the workload {run.config.workload!r} has no validation data or no evaluator")
    if run.communicator.rank == 0:
        files.write_json(run_dir / "evaluation.json", scores)
    return 0


if __name__ == "__main__":
    with lasting_output():
        leave(main())
