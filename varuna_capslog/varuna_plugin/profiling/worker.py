"""What the processes of a profile on Varuna play: the measured stage, and the stages before and behind it.

A worker builds the model's skeleton once. Every run is a Varuna job of its own, built anew, since Varuna cuts a model
up for good.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from varuna_capslog.engine.communicator import connect
from varuna_capslog.profiles.record import Observation
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.skeleton import hollow_module, real_parameter
from varuna_capslog.profiling.trim import MICROBATCHES, TrimmedRun
from varuna_capslog.profiling.worker import Role
from varuna_capslog.varuna_plugin.inputs import Microbatches
from varuna_capslog.varuna_plugin.install import install, silent, uninstall
from varuna_capslog.varuna_plugin.options import configure, current, know_trace
from varuna_capslog.varuna_plugin.profiling.meter import STEPS, observe
from varuna_capslog.varuna_plugin.profiling.trimming import kept_names
from varuna_capslog.varuna_plugin.splitting.partition import Partition, tie_groups
from varuna_capslog.varuna_plugin.splitting.tracing import Trace

__all__ = ["ProfileOptions", "Subject", "varuna_roles"]

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class ProfileOptions:
    """How a model is profiled.

    Attributes:
        optimizer: makes one from parameters; default torch's AdamW.
        device: "cpu" or "cuda", of the stages that are measured; their neighbours need none.
        workers: runs at a time; on the CPU each has two light companions.
        threads: CPU threads of a measured stage.
        loss: as for `configure`.
        timeout_seconds: longest wait of a run for a message.
    """

    optimizer: MakeOptimizer = torch.optim.AdamW
    device: str = "cpu"
    workers: int = 1
    threads: int = 1
    loss: Literal["mean", "sum"] = "mean"
    timeout_seconds: float = 600.0


@dataclass(frozen=True)
class Subject:
    """What every worker is given: the model and all that is known of it.

    Attributes:
        build: gives the model.
        batch: inputs of one microbatch, on the CPU.
        trace: of the model on that batch.
    """

    build: Callable[[], nn.Module]
    batch: Mapping[str, Any]
    trace: Trace
    chunk_size: int
    options: ProfileOptions


_BEFORE, _MEASURED, _BEHIND = range(3)


def varuna_roles(
    source: Callable[[], Subject], number: int, port: int, device: torch.device
) -> tuple[Role, list[Role]]:
    """The measured stage on Varuna, and one neighbour before it and one behind it."""
    subject = source()
    with silent():
        model = hollow_module(subject.build)

    def role(place: int, device: torch.device) -> Role:
        count = itertools.count(1)
        return lambda: (
            lambda run, conditions: _play(
                subject, model, run, conditions, (place, device), (port, f"varuna-{number}-{next(count)}")
            )
        )

    return role(_MEASURED, device), [role(place, torch.device("cpu")) for place in (_BEFORE, _BEHIND)]


def _play(
    subject: Subject,
    model: nn.Module,
    run: TrimmedRun,
    conditions: RunConditions,
    role: tuple[int, torch.device],
    meeting: tuple[int, str],
) -> Observation | None:
    """One rank of a run: None on neighbours, and where the run has no stage for this role.

    Args:
        role: which stage, and the device that it is on.
        meeting: port and name under which the ranks of this run find each other.
    """
    cuts = [0] if run.first == 0 else [0, run.first]
    cuts += [run.end] if run.has_downstream else []
    stage, device = role[0] - 1 + run.has_upstream, role[1]
    if not 0 <= stage < len(cuts):
        return None
    interest, options = int(run.has_upstream), subject.options
    with silent():
        communicator = connect(stage, len(cuts), "127.0.0.1", *meeting, options.timeout_seconds)
        try:
            install()
            configure(
                cuts=cuts, stages_of_interest=[interest], loss=options.loss, timeout_seconds=options.timeout_seconds
            )
            know_trace(subject.trace)
            trainer = _built(subject, model, stage, interest, len(cuts), device)
            moved = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), subject.batch)
            inputs = Microbatches([moved] * MICROBATCHES, [subject.chunk_size] * MICROBATCHES)
            if stage == interest:
                return observe(trainer, inputs, (run.first, run.end), conditions)
            for _ in range(STEPS):
                trainer.step(inputs)
                trainer.optimizer.step()
                trainer.zero_grad()
            return None
        finally:
            uninstall()
            communicator.close()


def _built(subject: Subject, model: nn.Module, stage: int, interest: int, stages: int, device: torch.device) -> Any:
    """This rank's Varuna around a copy of the model, of which what the stage holds has memory."""
    import varuna

    partition = Partition(subject.trace, tuple(current().cuts or ()))
    ties = [tie for tie in tie_groups(partition) if interest in tie.stages]
    shared = kept_names(partition, ties, stage)
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        held = stage in partition.stages_of[name] if stage == interest else name in shared
        # Varuna takes the others away for good, so they must not be the skeleton's own
        hollow = nn.Parameter(torch.empty_like(parameter), requires_grad=parameter.requires_grad)
        memo[id(parameter)] = real_parameter(parameter) if held else hollow
    torch.manual_seed(0)
    own = copy.deepcopy(model, memo)
    size = MICROBATCHES * subject.chunk_size
    mapping = "".join(f"{rank};" for rank in range(stages))
    trainer = varuna.Varuna(own, mapping, lambda *_, **__: subject.batch, size, subject.chunk_size, device=device)
    trainer.set_optimizer(subject.options.optimizer(list(trainer.parameters())))
    return trainer
