"""The processes of a profile on Varuna: the measured stage, and the stages before and behind it.

A worker builds the model's skeleton once, and a new Varuna job for every run, since Varuna cuts a model up for good.
Memory and seconds have the meanings of `profiling.trim.observe`, so both engines have the same profile format.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from varuna_capslog.engine.communicator import connect
from varuna_capslog.engine.probe import StageMeter, storage_bytes, storages_of
from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.model.hollow import built_hollow
from varuna_capslog.profiles.record import Observation
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.trim import MICROBATCHES, TrimmedRun, real_parameter
from varuna_capslog.profiling.worker import Role
from varuna_capslog.varuna_plugin.executor import Microbatches
from varuna_capslog.varuna_plugin.install import install, silent, uninstall
from varuna_capslog.varuna_plugin.options import configure, current
from varuna_capslog.varuna_plugin.splitting.stages import kept_names
from varuna_capslog.varuna_plugin.splitting.tracing import Partition, Trace, tie_groups
from varuna_capslog.varuna_plugin.wire import Bundle

__all__ = ["STEPS", "ProfileOptions", "Subject", "observe", "varuna_roles"]

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class ProfileOptions:
    """Options of a profile.

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
    """Subject of a profile, given to every worker: the function that builds the model, and the model's trace.

    batch: inputs of one microbatch, on the CPU, for which the trace holds.
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
    """Measured stage's role on Varuna, and the roles of one neighbour before it and one behind it."""
    subject = source()
    with silent():
        torch.manual_seed(0)
        _, (model,) = built_hollow(subject.build, lambda built: [built])

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
    """Play one rank of a run. Return None on neighbours, and where the run has no stage for this role.

    role: the stage's place, and its device. meeting: port and name under which the ranks of this run find each other.
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
                cuts=cuts,
                stages_of_interest=[interest],
                loss=options.loss,
                timeout_seconds=options.timeout_seconds,
                trace=subject.trace,
            )
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
    """Build this rank's Varuna around a copy of the model in which only the stage's own parameters have memory."""
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
    stage_model = copy.deepcopy(model, memo)
    size = MICROBATCHES * subject.chunk_size
    mapping = "".join(f"{rank};" for rank in range(stages))
    trainer = varuna.Varuna(
        stage_model, mapping, lambda *_, **__: subject.batch, size, subject.chunk_size, device=device
    )
    trainer.set_optimizer(subject.options.optimizer(list(trainer.parameters())))
    return trainer


# -- the measured stage


STEPS = 3
"""Steps of a run: the first creates the optimizer state, the second measures memory, the third measures time."""


def observe(trainer: Any, inputs: Microbatches, layers: tuple[int, int], conditions: RunConditions) -> Observation:
    """Train `STEPS` steps and measure this rank's stage; the other ranks train as many.

    Bytes are those of the device: tensors that Varuna keeps or sends in host memory do not count, even where the device
    is the CPU. For the first stage one microbatch of inputs counts. trainer: a `varuna.Varuna` with its optimizer,
    which does not train again afterwards. layers: (first, end) pieces of the stage.
    """
    stage = trainer.partitioned_model.capslog
    stage.bundle_type = _OffDevice
    measured = _MeasuredStage(trainer)
    meter, resident_storages = measured.meter, storages_of(measured.resident())
    # bytes that every forward saves for its backward
    measured.around_forward = lambda: meter.saving(resident_storages, measured.received)
    measured.step(inputs)
    measured.around_forward = contextlib.nullcontext
    with meter.peak(measured.given if stage.stage == 0 else ()):
        measured.step(inputs)
    # every forward and backward, without the waiting of a backward
    measured.around_forward = lambda: meter.timing("forward")
    stage.watch_backward = measured.time_backward
    measured.step(inputs)
    assert meter.peak_bytes is not None
    before, behind = (() if cut is None else cut.spec.tensors for cut in (stage.entry, stage.exit))
    boundaries = {str(n): spec for n, spec in enumerate(before)}, {str(n): spec for n, spec in enumerate(behind)}
    seconds = statistics.median(meter.seconds["forward"]), statistics.median(meter.seconds["backward"])
    row = conditions.row(layers, boundaries, (meter.peak_bytes, meter.static_bytes, meter.saved_bytes), seconds)
    return row if stage.entry is not None else replace(row, boundary_in_bytes=storage_bytes(measured.given))


class _OffDevice(Bundle):
    """Leaving tensors, copied to memory that torch does not count: on a CPU, host memory is the device's."""

    def to_host(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            return tensor.cpu()
        spec = TensorSpec.of(tensor)
        memory = torch.from_numpy(np.empty(spec.num_bytes, np.uint8)).view(spec.dtype)
        return memory.as_strided(spec.shape, spec.stride).copy_(tensor)


class _MeasuredStage:
    """A rank's Varuna and the meter that measures it.

    given: the tensors of one microbatch's inputs, as the model was called. around_forward: gives a context that is open
    during each of the user's forwards on this stage.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._module = trainer, trainer.partitioned_model.module
        self._stage = trainer.partitioned_model.capslog
        self.meter = StageMeter(trainer.device, self.resident)
        self.given: list[Tensor] = []
        self.around_forward: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self._began = 0.0
        real = self._module.forward

        def forward(*arguments: Any, **inputs: Any) -> Any:
            self.given = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
            with self.around_forward():
                return real(*arguments, **inputs)

        self._module.forward = forward

    def step(self, inputs: Microbatches) -> None:
        """Run a training step as in a Varuna script."""
        self._trainer.step(inputs)
        self.meter.count_static()
        self._trainer.optimizer.step()
        self._trainer.zero_grad()

    def resident(self) -> list[Tensor]:
        """Parameters, gradients, buffers and optimizer state."""
        parameters = list(self._module.parameters())
        state = pytree.tree_leaves([dict(entry) for entry in self._trainer.optimizer.state.values()])
        tensors = [p.detach() for p in parameters] + [p.grad for p in parameters if p.grad is not None]
        tensors += [*self._module.buffers(), *(leaf for leaf in state if isinstance(leaf, Tensor))]
        # AdamW's step counters lie on the host
        return [tensor for tensor in tensors if tensor.device == self._trainer.device]

    def received(self) -> list[Tensor] | None:
        """Inputs that the stage keeps for its backward; None in a forward without a backward."""
        if not torch.is_grad_enabled():
            return None
        if self._stage.entry is None:
            return self.given
        return [tensor for tensor in self._stage.entry.point.recv_fn().tensors if tensor is not None]

    def time_backward(self, moment: str) -> None:
        """Time each backward; a callback for `StageRun.watch_backward`."""
        now = self.meter.now()
        if moment == "ended":
            self.meter.seconds["backward"].append(now - self._began)
        self._began = now
