"""Reduces a model to one stage: frees foreign parameters, skips foreign modules, activates its two CutPoints.

Replaces `PartitionedModel.initialize` and all that it calls. The trace is taken on one rank and sent to the others, so
nothing is written into the current folder and every rank has the same partition.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.varuna_plugin.options import current
from varuna_capslog.varuna_plugin.profiling import trimming
from varuna_capslog.varuna_plugin.splitting.stage_run import EntryCut, ExitCut, StageRun
from varuna_capslog.varuna_plugin.splitting.tracing import (
    Partition,
    Phantom,
    Trace,
    make_phantoms,
    tie_groups,
    trace_model,
)

__all__ = ["ANCHOR", "initialize", "reduce_to_stage"]

_log = logging.getLogger(__name__)

ANCHOR = "capslog_anchor"
"""Name of the empty parameter of a stage that has none of its own: optimizers refuse empty lists."""

_TRACED_SAMPLES = 2
"""One sample would fail in batch normalisation over features."""


def initialize(self: Any, get_batch_fn: Callable[..., Any], from_cache: bool = False) -> None:
    """Replace `PartitionedModel.initialize`; `from_cache` has no meaning here, since nothing is cached in files.

    Raises CapslogError on every rank: the trace failed, the ranks have different models or cut lists, or the cuts do
    not fit the model.
    """
    from varuna.partitioned_model import CutPoint

    options = current()
    trace = options.trace or _shared_trace(self.module, get_batch_fn, CutPoint)
    partition = _agreed_partition(trace, self.module, self.num_stages)
    if trace.moving and self.num_stages > 1:
        raise CapslogError(
            f"a forward changes the buffers {', '.join(trace.moving[:3])}, which are no running statistics; Varuna "
            "runs most forwards twice and would change them twice: keep such state out of the model"
        )
    run = StageRun(partition, self.stage, tie_groups(partition, self.shared_weights or ()))
    _reduce(self.module, run, torch.device(self.device))
    norms = [module for module in self.module.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    run.norms = [module for module in norms if module._buffers.get("running_mean") is not None]
    self.capslog = run
    points = {name: module for name, module in self.module.named_modules() if isinstance(module, CutPoint)}
    self.pre_cp, run.entry = _wake(self, points, partition.entry(self.stage), self.stage, EntryCut)
    self.post_cp, run.exit = _wake(self, points, partition.exit(self.stage), self.stage + 1, ExitCut)
    # attributes that the rest of Varuna reads
    self.num_cutpoints = len(trace.cuts)
    self.cuts_per_stage = len(partition.pieces(self.stage))
    self.ordered_modules = {name: points[name] for name in (cut.name for cut in trace.cuts)}
    self.param_name_to_pstage = self.parameter_names_to_cuts()
    self.shared_weight_stages = None
    _log.info("stage %d of %d holds pieces %s", self.stage, self.num_stages, list(partition.pieces(self.stage)))


def _reduce(model: nn.Module, run: StageRun, device: torch.device) -> None:
    """Reduce the model to the stage's part; a stage that is not of interest passes on dummy tensors instead."""
    options = current()
    interest = options.stages_of_interest
    if interest is not None:
        if max(interest) >= run.partition.num_stages:
            raise CapslogError(
                f"stages_of_interest={list(interest)}, but the stages are 0 to {run.partition.num_stages - 1}"
            )
        # no real stage is left in the other ties
        run.ties = tuple(tie for tie in run.ties if set(tie.stages) & set(interest))
    if interest is None or run.stage in interest:
        reduce_to_stage(model, run)
        return
    cuts = run.partition.trace.cuts
    shapes = None if options.trace is not None else trimming.CutShapes(model, tuple(cut.name for cut in cuts))
    reduce_to_stage(model, run, trimming.kept_names(run.partition, run.ties, run.stage))
    trimming.play_stage(model, run, shapes, device)


def _agreed_partition(trace: Trace, model: nn.Module, num_stages: int) -> Partition:
    """Partition that every rank has configured; a rank that fails tells all, so that none waits for it."""
    partition = problem = None
    try:
        partition = Partition(trace, current().cuts_for(trace.num_pieces, num_stages))
        if list(trace.parameters) != [name for name, _ in model.named_parameters()]:
            raise CapslogError("its model has other parameters than rank 0's; build the same model on every rank")
    except CapslogError as error:
        problem = str(error)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (partition and partition.cuts, problem))
    for rank, (cuts, problem) in enumerate(everyone):
        if problem is not None:
            raise CapslogError(f"rank {rank}: {problem}")
        if cuts != everyone[0][0]:
            raise CapslogError(
                f"rank {rank} is configured with cuts={list(cuts)}, rank 0 with {list(everyone[0][0])}; configure the "
                "same on every rank"
            )
    assert partition is not None
    return partition


def _shared_trace(model: nn.Module, get_batch: Callable[..., Any], cut_type: type[nn.Module]) -> Trace:
    """Trace on rank 0 and send the trace to all; a failure there is an error on every rank, so that none waits."""
    message: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            message = [trace_model(model, get_batch(_TRACED_SAMPLES, device="cpu"), cut_type)]
        except Exception as error:
            cause = str(error) if isinstance(error, CapslogError) else f"{type(error).__name__}: {error}"
            message = [f"the model cannot be traced on get_batch_fn({_TRACED_SAMPLES}, device='cpu'): {cause}"]
            _log.debug("tracing failed", exc_info=True)
    dist.broadcast_object_list(message, src=0)
    if isinstance(message[0], str):
        raise CapslogError(message[0])
    trace: Trace = message[0]
    return trace


def _wake(
    partitioned: Any, points: dict[str, Any], spec: Any, index: int, kind: type[EntryCut] | type[ExitCut]
) -> tuple[Any, Any]:
    """Stage's CutPoint with the attributes that Varuna sets, and its function; (None, None) without one."""
    if spec is None:
        return None, None
    point = points[spec.name]
    point.cp_index, point.stage, point.num_stages = index, partitioned.stage, partitioned.num_stages
    point.set_ret_val_func, point.device, point.fp16 = partitioned.set_ret_val, partitioned.device, False
    point.cp_func = kind(point, spec, partitioned.capslog)
    return point, point.cp_func


def reduce_to_stage(model: nn.Module, run: StageRun, kept: set[str] | None = None) -> None:
    """Free every parameter and buffer that the stage does not use, and skip modules before its first cut.

    The names of the remaining tensors do not change, so that checkpoints are the same for any cut list. kept: names
    that stay instead of those that the stage uses.
    """
    foreign = {
        name
        for name, stages in run.partition.stages_of.items()
        if (run.stage not in stages if kept is None else name not in kept)
    }
    named = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    for path, module in model.named_modules():
        for store in (module._parameters, module._buffers):
            for key, tensor in list(store.items()):
                if tensor is not None and named[id(tensor)] in foreign:
                    del store[key]
                    module.__dict__[key] = Phantom(f"{path}.{key}" if path else key, dims=tensor.dim())
                    # other references (an LSTM's list of its weights) must not keep the memory
                    tensor.data = tensor.data.new_empty(0)
    for name, structure in _skipped_modules(run.partition, run.stage).items():
        _guard(model.get_submodule(name), name, structure, run)
    if next(model.parameters(), None) is None:
        model.register_parameter(ANCHOR, nn.Parameter(torch.zeros(0)))


def _skipped_modules(partition: Partition, stage: int) -> dict[str, Any]:
    """Outermost modules with a call wholly before the stage's first cut, and their results' structure."""
    first = partition.cuts[stage]
    calls = partition.trace.calls
    skipped: dict[str, Any] = {}
    for call in calls:
        parent = None if call.parent is None else calls[call.parent]
        if call.last < first and (parent is None or parent.last >= first):
            if call.module in skipped and skipped[call.module] != call.structure:
                skipped[call.module] = ("value",)
            skipped.setdefault(call.module, call.structure)
    return skipped


def _guard(module: nn.Module, name: str, structure: Any, run: StageRun) -> None:
    """Make the module return phantoms as long as the forward has not reached the stage's own code."""
    real = module.forward

    def forward(*arguments: Any, **keywords: Any) -> Any:
        if run.active:
            return real(*arguments, **keywords)
        return make_phantoms(structure, f"the result of {name!r}")

    module.forward = forward
