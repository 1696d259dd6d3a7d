"""`plugin.profile`: measures each piece of a CutPoint model on Varuna, by trimming, and returns a `Profile`.

Every run is a Varuna job of up to three stages of which only the middle one computes: one piece, or two neighbours
(CAPSlog, Sec. III-A). `profiling.launches` starts the workers; `worker` has the stages.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from varuna_capslog import accelerator
from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.probe import peak_source
from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.profiles.record import Observation, Profile, SharedParameter, layers_of_runs
from varuna_capslog.profiles.runs import StageRun, stage_runs
from varuna_capslog.profiling import launches
from varuna_capslog.profiling.conditions import Progress, RunConditions
from varuna_capslog.profiling.launches import LaunchTimes, devices_of, failures_named, in_one_launch
from varuna_capslog.profiling.trim import TrimmedRun
from varuna_capslog.profiling.worker import ReadyValue, Workers
from varuna_capslog.varuna_plugin.install import install, installed_patches, silent, uninstall
from varuna_capslog.varuna_plugin.profiling.worker import ProfileOptions, Subject, varuna_roles
from varuna_capslog.varuna_plugin.splitting.tracing import Trace, trace_model

__all__ = ["profile"]


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
    process makes more than two neighbouring pieces real. Rows have the same meaning as those of `capslog profile`;
    bytes are the device's, so tensors that Varuna keeps in host memory do not count.

    Args:
        model: the model, or a function that builds it; a function defined at the top level of a module is cheapest.
        get_batch_fn: as for Varuna; its batches should be as large as the run's largest.
        chunk_size: samples of a microbatch.
        options: fields of `ProfileOptions`, by name.

    Raises:
        DoesNotFit: a run may need more memory than there is; nothing was tried.
        CapslogError: no fitting Varuna, a model without CutPoints, no such device, or a run failed: which, and why.
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
    """Varuna's commit, the subject and a whole model; Varuna is left as it was found."""
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
    """Measure a row for each piece and each two neighbours."""
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
    source: Any = ReadyValue(subject)  # where our own engine's workers get a workload
    described = Workers(source, devices, options.threads, modules, conditions, launches.free_bytes, names, varuna_roles)
    with failures_named(names), described.group(len(devices)) as group:
        rows = in_one_launch(tasks, group, described, clock, progress or (lambda *_: None))
    return [rows[(*run, None)] for run in runs]


def _cut_specs(subject: Subject) -> list[dict[str, TensorSpec]]:
    """Specs of the tensors that cross the cuts 0 .. K + 1, by position; nothing behind the loss."""
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
    """Most bytes that a run takes: results of its operations, gradients of the same size, the parameters as in
    `admission`, and copies of the tensors that cross its cuts in three processes.
    """
    pieces = set(range(*run))
    held = [sizes[name] for name, used in trace.parameters.items() if pieces & set(used)]
    crossing = sum(spec.num_bytes for cut in (specs[run[0]], specs[run[1]]) for spec in cut.values())
    made = sum(trace.made_bytes[piece] for piece in pieces)
    copies = 4 if device == "cpu" else 5
    return copies * sum(held) + 3 * max(held, default=0) + 2 * made + 12 * crossing


def _names(trace: Trace) -> list[str]:
    """Names of the pieces, each after the first module that runs wholly inside it."""
    names: list[str] = []
    for piece in range(trace.num_pieces):
        inside = next((call.module for call in trace.calls if call.first == call.last == piece), None)
        # a CutPoint's own call ends in the next piece
        name = f"piece {piece}" if inside is None else inside
        names.append(f"{name} ({piece})" if name in names else name)
    return names


def _described(value: Any, name: str = "") -> dict[str, list[int]]:
    """Shapes of the tensors among the inputs, by dotted names."""
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
