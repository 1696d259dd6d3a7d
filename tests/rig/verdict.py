"""Compares a chaos run with an uninterrupted run of the same config in one process, by the plain engine."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.rig.judge import Segment, Truth, judge
from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.supervisor import Forks
from varuna_capslog.config.settings import Config
from varuna_capslog.model.workload import load_workload
from varuna_capslog.start.elastic_host import training_modules
from varuna_capslog.start.prepare import prepare_run
from varuna_capslog.training.checkpoint import open_checkpoint
from varuna_capslog.training.layer_state import digest
from varuna_capslog.training.run_setup import build_chain, last_step
from varuna_capslog.training.stored_layers import from_checkpoint

__all__ = ["breaches_of", "truth_of", "weights_of_run"]


def breaches_of(config: Config, segments: Sequence[Segment], last: int, reached: int) -> list[str]:
    """Sentences about all that is wrong with a run in the config's folder; empty for a run that passed.

    Args:
        last, reached: see `truth_of`.

    Raises:
        CapslogError: the uninterrupted run failed, or a checkpoint cannot be read.
    """
    truth = truth_of(config, last, reached)
    weights = weights_of_run(config, Path(config.run_dir), last)
    within = 1 if config.elastic.protection == "sync" else 2
    limited = config.pipeline.capacity is not None  # copies may find no room
    redundancy = None if limited else config.elastic.redundancy
    return judge(segments, truth, weights, last, within, redundancy)


def truth_of(config: Config, last: int, reached: int) -> Truth:
    """Train the same config with the plain engine in one process, without faults, and return its numbers and weights.

    Args:
        last: the step whose weights are compared.
        reached: the newest step that any member made; more than `last` where a run ended while it repeated lost steps.

    Raises:
        CapslogError: the uninterrupted run failed.
    """
    folder = Path(config.run_dir) / "chaos" / "truth"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    data = {key: value for key, value in config.data.items() if key != "pause_seconds"}
    model = {key: value for key, value in config.model.items() if key != "block_seconds"}
    plain = config.model_copy(
        update={
            "run_dir": folder,
            "data": data,
            "model": model,
            "elastic": config.elastic.model_copy(update={"enabled": False}),
            "pipeline": config.pipeline.model_copy(
                update={"devices": 1, "replicas": 1, "cuts": None, "plan": None, "capacity": None, "verify_every": 0}
            ),
            "train": config.train.model_copy(
                update={
                    "max_steps": max(1, last, reached),
                    "checkpoint_every": last if reached > last > 0 else None,
                    "checkpoint_keep": max(1, reached),  # also that of `last`, however far the run had come
                    "max_seconds": None,
                    "lr_decay_steps": _decay_steps(config),
                }
            ),
        }
    )
    prepare_run(plain, show=False)
    _train(plain, folder)
    rows = files.read_jsonl(folder / "metrics.jsonl")
    numbers = {row["step"]: (row["loss"], row["grad_norm"]) for row in rows}
    return Truth(numbers, weights_of_run(plain, folder, last))


def _train(config: Config, folder: Path) -> None:
    """The run of a prepared folder in a process of its own, whose output goes to a file there."""
    modules, log = training_modules(config), folder / "worker.log"
    with Forks("varuna_capslog.start.worker:forked", [str(folder)], modules, {"OMP_NUM_THREADS": "1"}) as start:
        status = start(1, {}, log).wait()  # the output of a rank 0 would go to this process's own
    if status:
        raise CapslogError(f"the uninterrupted run failed with {status}: {log.read_text().strip()[-500:]}")


def _decay_steps(config: Config) -> int | None:
    """Step at which the run's learning rate reaches its end; a run of another length would end it at another step."""
    train = config.train
    if train.lr_schedule == "constant" or train.lr_decay_steps is not None:
        return train.lr_decay_steps
    return last_step(train, len(load_workload(config).train_data()))


def weights_of_run(config: Config, run_dir: Path, step: int) -> dict[str, str]:
    """A digest of the state of every layer in the checkpoint of a step. Raises CapslogError where there is none."""
    chain, _ = build_chain(config, load_workload(config))
    checkpoint = open_checkpoint(run_dir / "checkpoints" / f"step-{step:08d}")
    return {
        layer.name: digest(from_checkpoint(checkpoint, chain, index)).hex() for index, layer in enumerate(chain.layers)
    }
