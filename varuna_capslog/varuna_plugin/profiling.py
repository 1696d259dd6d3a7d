"""`plugin.profile`: measures each piece of a CutPoint model on Varuna, by trimming, and returns a `Profile`.

Every run is a Varuna job of up to three stages. Only the middle stage computes: one piece, or two neighbouring pieces
(CAPSlog, Sec. III-A). `profiling.launches` starts the workers.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from varuna_capslog import accelerator
from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.communicator import connect
from varuna_capslog.engine.probe import StageMeter, peak_source, storage_bytes, storages_of
from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.model.hollow import built_hollow
from varuna_capslog.profiles.record import Observation, Profile, SharedParameter, layers_of_runs
from varuna_capslog.profiles.runs import StageRun, stage_runs
from varuna_capslog.profiling import launches
from varuna_capslog.profiling.conditions import Progress, RunConditions
from varuna_capslog.profiling.launches import LaunchTimes, devices_of, failures_named, in_one_launch
from varuna_capslog.profiling.trim import MICROBATCHES, TrimmedRun, real_parameter
from varuna_capslog.profiling.worker import ReadyValue, Role, Workers
from varuna_capslog.varuna_plugin.executor import Microbatches
from varuna_capslog.varuna_plugin.install import install, installed_patches, silent, uninstall
from varuna_capslog.varuna_plugin.options import configure, current
from varuna_capslog.varuna_plugin.stages import kept_names
from varuna_capslog.varuna_plugin.tracing import Partition, Trace, tie_groups, trace_model
from varuna_capslog.varuna_plugin.wire import Bundle, host_tensor

__all__ = ["STEPS", "observe", "profile"]


# -- The processes of a profile: the measured stage, and the stages before and behind it.
#
# A worker builds the model's skeleton once, and a new Varuna for every run, since Varuna reduces a model for good.
# Memory and seconds have the meanings of `profiling.trim.observe`, so both engines have the same profile format.


MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class ProfileOptions:
    """Options of a profile.

    Attributes:
        optimizer: makes an optimizer from parameters; default torch's AdamW.
        device: device of the measured stages, "cpu" or "cuda"; their neighbours need no GPU.
        workers: runs at a time; each has two light companion processes on the CPU.
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
    """Return the role of the measured stage on Varuna, and the roles of its neighbours before and behind."""
    subject = source()
    with silent():
        torch.manual_seed(0)
        _, (model,) = built_hollow(subject.build, lambda built: [built])

    def role(place: int, device: torch.device) -> Role:
        count = itertools.count(1)
        return lambda: (
            lambda run, conditions: _run_role(
                subject, model, run, conditions, (place, device), (port, f"varuna-{number}-{next(count)}")
            )
        )

    return role(_MEASURED, device), [role(place, torch.device("cpu")) for place in (_BEFORE, _BEHIND)]


def _run_role(
    subject: Subject,
    model: nn.Module,
    run: TrimmedRun,
    conditions: RunConditions,
    role: tuple[int, torch.device],
    meeting: tuple[int, str],
) -> Observation | None:
    """Carry out one rank's role in a run. Return None on neighbours, and where the run has no stage for this role.

    role: the stage's place, and its device. meeting: port and name of the rendezvous of this run's ranks.
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
        # Varuna frees the other parameters for good, so they must not be the skeleton's own
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
    with meter.peak(measured.input_tensors if stage.stage == 0 else ()):
        measured.step(inputs)
    # time every forward and backward, without a backward's wait for gradients
    measured.around_forward = lambda: meter.timing("forward")
    stage.watch_backward = measured.time_backward
    measured.step(inputs)
    assert meter.peak_bytes is not None
    before, behind = (() if cut is None else cut.spec.tensors for cut in (stage.entry, stage.exit))
    boundaries = {str(n): spec for n, spec in enumerate(before)}, {str(n): spec for n, spec in enumerate(behind)}
    seconds = statistics.median(meter.seconds["forward"]), statistics.median(meter.seconds["backward"])
    row = conditions.row(layers, boundaries, (meter.peak_bytes, meter.static_bytes, meter.saved_bytes), seconds)
    return row if stage.entry is not None else replace(row, boundary_in_bytes=storage_bytes(measured.input_tensors))


class _OffDevice(Bundle):
    """Bundle that copies leaving tensors to memory that torch does not count: on a CPU, host memory is the device's."""

    def to_host(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            return tensor.cpu()
        spec = TensorSpec.of(tensor)
        return host_tensor(spec.dtype, spec.shape, spec.stride).copy_(tensor)


class _MeasuredStage:
    """A rank's Varuna and the meter that measures it.

    input_tensors: of the last forward. around_forward: returns a context that is open during each forward of the model
    on this stage.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._module = trainer, trainer.partitioned_model.module
        self._stage = trainer.partitioned_model.capslog
        self.meter = StageMeter(trainer.device, self.resident)
        self.input_tensors: list[Tensor] = []
        self.around_forward: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self._began = 0.0
        real = self._module.forward

        def forward(*arguments: Any, **inputs: Any) -> Any:
            self.input_tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
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
            return self.input_tensors
        return [tensor for tensor in self._stage.entry.point.recv_fn().tensors if tensor is not None]

    def time_backward(self, moment: str) -> None:
        """Time each backward; a callback for `StageRun.watch_backward`."""
        now = self.meter.now()
        if moment == "ended":
            self.meter.seconds["backward"].append(now - self._began)
        self._began = now


# -- the profile


def profile(
    model: nn.Module | Callable[[], nn.Module],
    get_batch_fn: Callable[..., Mapping[str, Any]],
    chunk_size: int,
    *,
    progress: Progress | None = None,
    **options: Any,
) -> Profile:
    """Profile a model with CutPoints on the installed Varuna; not inside a job, as it starts its own processes.

    The model runs once, whole, in this process (as when a Varuna is built) for the shapes at its cuts. After that no
    process holds the parameters of more than two neighbouring pieces. Rows have the same meaning as those of `capslog
    profile`; bytes are the device's, so tensors that Varuna keeps in host memory do not count.

    Args:
        model: the model, or a function that builds it; a function defined at the top level of a module is cheapest.
        get_batch_fn: as for Varuna; its batches should be as large as the run's largest.
        chunk_size: samples of a microbatch.
        options: fields of `ProfileOptions`, by name.

    Raises:
        DoesNotFit: a run may need more memory than there is; nothing was tried.
        CapslogError: no fitting Varuna, a model without CutPoints, no such device, or a failed run, with its cause.
    """
    fields.refuse_unknown(options, [field.name for field in dataclasses.fields(ProfileOptions)], "option")
    chosen = ProfileOptions(**options)
    device, workers = chosen.device, chosen.workers
    reason = accelerator.why_unusable(device)
    if reason is not None:
        raise CapslogError(
            f"torch can use no device {device!r} here ({reason}); profile with device='cpu', or where there is one"
        )
    if workers < 1 or chunk_size < 1:
        raise CapslogError(f"workers={workers}, chunk_size={chunk_size}: both must be at least 1")
    build: Callable[[], nn.Module] = ReadyValue(model) if isinstance(model, nn.Module) else model
    commit, subject, whole_model = _traced(build, get_batch_fn, chunk_size, chosen)
    trace = subject.trace
    names, sizes = _names(trace), {name: tensor.nbytes for name, tensor in whole_model.named_parameters()}
    conditions = RunConditions(device, chunk_size, _described(subject.batch))
    clock = LaunchTimes()
    rows = _measured(subject, conditions, names, (whole_model, sizes), clock, progress)
    del whole_model
    by_piece = [
        sum(sizes[name] for name, pieces in trace.parameters.items() if i in pieces) for i in range(trace.num_pieces)
    ]
    return Profile(
        layers=layers_of_runs(names, rows, by_piece),
        model=getattr(model, "__name__", None) or type(model).__name__,
        source="measured",
        conditions={
            "engine": "varuna",
            "varuna": commit,
            "device": device,
            "device_name": platform.machine() if device == "cpu" else accelerator.device_name(device),
            "dtype": "float32",
            "microbatch_size": chunk_size,
            "input": conditions.input,
            "optimizer": type(chosen.optimizer([nn.Parameter(torch.zeros(1))])).__name__.lower(),
            "schedule": "varuna",
            "recompute": True,
            "stage_inputs": "host",
            "threads": chosen.threads,
            "order": "packed",
            "peak_source": peak_source(device),
            "torch": torch.__version__,
            "profiling": clock.report("packed", workers),
        },
        shared=tuple(
            SharedParameter(name, sizes[name], pieces) for name, pieces in trace.parameters.items() if len(pieces) > 1
        ),
        observations=tuple(rows),
    )


def _traced(
    build: Callable[[], nn.Module],
    get_batch_fn: Callable[..., Mapping[str, Any]],
    chunk_size: int,
    chosen: ProfileOptions,
) -> tuple[str, Subject, nn.Module]:
    """Return Varuna's commit, the subject and a whole model; afterwards Varuna is patched only if it was before."""
    installed = bool(installed_patches())
    with silent():
        varuna_found = install()
        try:
            from varuna import CutPoint

            batch = get_batch_fn(chunk_size, device="cpu")
            model = build()
            trace = trace_model(model, batch, CutPoint)
        finally:
            if not installed:
                uninstall()
    if not trace.cuts:
        raise CapslogError("the model's forward passes no CutPoint; place some between its layers")
    return varuna_found.commit, Subject(build, batch, trace, chunk_size, chosen), model


def _measured(
    subject: Subject,
    conditions: RunConditions,
    names: Sequence[str],
    model: tuple[nn.Module, Mapping[str, int]],
    clock: LaunchTimes,
    progress: Progress | None,
) -> list[Observation]:
    """Return a measured row for each piece and each two neighbouring pieces."""
    options = subject.options
    runs = stage_runs(subject.trace.num_pieces)
    specs = _cut_specs(subject)
    tasks = []
    for first, end in runs:
        run = TrimmedRun(first, end, subject.trace.num_pieces, tuple(specs[first : end + 1]))
        tasks.append((run, _bound_bytes(subject.trace, model[1], specs, (first, end), conditions.device)))
    tasks.sort(key=lambda task: -task[1])
    devices = devices_of(options.device, min(options.workers, len(tasks)))
    modules = sorted({type(module).__module__ for module in model[0].modules()})
    source: Any = ReadyValue(subject)  # our own engine's workers get a workload here
    described = Workers(source, devices, options.threads, modules, conditions, launches.free_bytes, names, varuna_roles)
    with failures_named(names), described.group(len(devices)) as group:
        rows = in_one_launch(tasks, group, described, clock, progress or (lambda *_: None))
    return [rows[(*run, None)] for run in runs]


def _cut_specs(subject: Subject) -> list[dict[str, TensorSpec]]:
    """Return the specs, by position, of the inputs and of the tensors at each CutPoint, and {} behind the loss."""
    input_specs = {
        str(index): TensorSpec.of(leaf)
        for index, leaf in enumerate(pytree.tree_leaves(dict(subject.batch)))
        if isinstance(leaf, Tensor)
    }
    cuts = [{str(index): spec for index, spec in enumerate(cut.tensors)} for cut in subject.trace.cuts]
    return [input_specs, *cuts, {}]


def _bound_bytes(
    trace: Trace, sizes: Mapping[str, int], specs: Sequence[Mapping[str, TensorSpec]], run: StageRun, device: str
) -> int:
    """Return an upper bound of a run's bytes: results of its operations, gradients of equal size, parameters with their
    copies, as in `launches.BoundTable`, and copies of the tensors at its cuts in three processes.
    """
    pieces = set(range(*run))
    held = [sizes[name] for name, used in trace.parameters.items() if pieces & set(used)]
    crossing = sum(spec.num_bytes for cut in (specs[run[0]], specs[run[1]]) for spec in cut.values())
    made = sum(trace.made_bytes[piece] for piece in pieces)
    copies = 4 if device == "cpu" else 5
    return copies * sum(held) + 3 * max(held, default=0) + 2 * made + 12 * crossing


def _names(trace: Trace) -> list[str]:
    """Return the names of the pieces, each after the first module that runs wholly inside the piece."""
    names: list[str] = []
    for piece in range(trace.num_pieces):
        inside = next((call.module for call in trace.calls if call.first == call.last == piece), None)
        # a CutPoint's own call ends in the next piece
        name = f"piece {piece}" if inside is None else inside
        names.append(f"{name} ({piece})" if name in names else name)
    return names


def _described(value: Any, name: str = "") -> dict[str, list[int]]:
    """Return the shapes of the tensors among the inputs, by dotted names."""
    if isinstance(value, Tensor):
        return {name: list(value.shape)}
    if isinstance(value, Mapping):
        entries = list(value.items())
    else:
        entries = list(enumerate(value)) if isinstance(value, (list, tuple)) else []
    shapes: dict[str, list[int]] = {}
    for key, item in entries:
        shapes |= _described(item, f"{name}.{key}" if name else str(key))
    return shapes
