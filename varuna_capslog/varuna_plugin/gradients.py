"""Completes gradients after a step: adds up ties, averages replicas, computes the norm over all ranks, and clips.

Replaces `Varuna.init_distributed` and `sync_across_workers`, which need apex even in fp32 and without fp16 reduce a
copy that nothing reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from varuna_capslog.varuna_plugin.options import current
from varuna_capslog.varuna_plugin.tracing import TieGroup
from varuna_capslog.varuna_plugin.wire import peer_errors

__all__ = ["init_distributed", "step_alone", "sync_across_workers"]


def init_distributed(self: Any) -> None:
    """Make the groups of replicas, pipelines and ties, with the configured timeout, on every rank in the same order.
    Then give ties the values of their first stage, and all replicas those of replica 0.
    """
    import varuna.pipeline

    timeout = current().timeout
    self.capslog_world = dist.new_group(timeout=timeout)
    varuna.pipeline.dist.world = self.capslog_world
    self.dp_group = self.pipeline_group = None
    backend = "nccl" if self.device.type == "cuda" and dist.is_nccl_available() else "gloo"
    for stage, ranks in sorted(self.stage_to_rank_map.items()):
        if len(ranks) > 1:
            group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
            if stage == self.stage:
                self.dp_group = group
    self.capslog_tie_groups = {}
    stage_sets = sorted({tie.stages for tie in self.model.capslog.ties if len(tie.stages) > 1})
    for replica in range(self.data_depth):
        ranks = [self.stage_to_rank_map[stage][replica] for stage in range(self.partitions)]
        mine = self.rank in ranks
        if len(ranks) > 1:
            group = dist.new_group(ranks, timeout=timeout)
            self.pipeline_group = group if mine else self.pipeline_group
        for stages in stage_sets:
            group = dist.new_group([ranks[stage] for stage in stages], timeout=timeout)
            if mine and self.stage in stages:
                self.capslog_tie_groups[stages] = group
    _make_equal(self)


def _make_equal(self: Any) -> None:
    ranks = [self.stage_to_rank_map[stage][self.rank_within_stage] for stage in range(self.partitions)]
    with torch.no_grad():
        for tie, held in _ties(self):
            if tie.stages in self.capslog_tie_groups:
                _broadcast(held[0], ranks[tie.stages[0]], self.capslog_tie_groups[tie.stages])
                for copy in held[1:]:
                    copy.copy_(held[0])
        if self.dp_group is not None:
            for tensor in [*self.model.module.parameters(), *self.model.module.buffers()]:
                _broadcast(tensor, self.stage_to_rank_map[self.stage][0], self.dp_group)


def _ties(self: Any) -> list[tuple[TieGroup, list[nn.Parameter]]]:
    """Return all ties, each with those of its parameters that this stage holds."""
    named = dict(self.model.module.named_parameters())
    return [(tie, [named[name] for name in tie.names if name in named]) for tie in self.model.capslog.ties]


def _broadcast(tensor: Tensor, source: int, group: Any) -> None:
    dense = tensor.detach().contiguous()
    dist.broadcast(dense, src=source, group=group)
    tensor.copy_(dense)


def step_alone(original: Callable[..., Any], self: Any, inputs: Any, clip_grad_max_norm: float | None = None) -> Any:
    """Wrap `Varuna.step`: add up ties, compute the norm and clip on a single rank, too, where Varuna does not."""
    loss, overflow, norm = original(self, inputs, clip_grad_max_norm)
    if self.partitions == 1 and self.data_depth == 1:
        _add_ties(self)
        norm = _clipped(self, _squared_norm(self), clip_grad_max_norm)
    return loss, overflow, norm


def sync_across_workers(self: Any, max_norm: float | None) -> tuple[bool, float]:
    """Replace Varuna's: return (no overflow, norm of all gradients after clipping), set the loss of all replicas."""
    with peer_errors("adding up gradients", None, current().timeout):
        _add_ties(self)
        share = 1.0 if current().loss == "sum" else 1.0 / self.data_depth
        if self.dp_group is not None:
            _reduce([p for p in _trained(self) if p.requires_grad], self.dp_group, share)
            _share_statistics(self)
        # replicas have equal gradients now; only replica 0's norm counts, so that all ranks clip by one number
        squared = _squared_norm(self) if self.rank_within_stage == 0 else 0.0
        sums = torch.tensor([squared, self.average_loss * share], dtype=torch.float64)
        dist.all_reduce(sums, group=self.capslog_world)
        self.average_loss = float(sums[1])
        return False, _clipped(self, float(sums[0]), max_norm)


def _share_statistics(self: Any) -> None:
    """Copy replica 0's running statistics to every replica, as DistributedDataParallel does: all evaluate one model."""
    statistics = [
        buffer
        for module in self.model.capslog.norms
        for name, buffer in module._buffers.items()
        if name in ("running_mean", "running_var") and buffer is not None
    ]
    if statistics:
        flat = torch.cat([buffer.reshape(-1) for buffer in statistics])
        dist.broadcast(flat, src=self.stage_to_rank_map[self.stage][0], group=self.dp_group)
        for buffer, values in zip(statistics, flat.split([buffer.numel() for buffer in statistics]), strict=True):
            buffer.copy_(values.view_as(buffer))


def _trained(self: Any) -> list[nn.Parameter]:
    return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]


def _add_ties(self: Any) -> None:
    """Give every copy of a tied parameter the sum of all gradients; ties of the same stages share messages."""
    by_stages: dict[tuple[int, ...], list[list[nn.Parameter]]] = {}
    for tie, held in _ties(self):
        if self.model.capslog.stage in tie.stages:
            by_stages.setdefault(tie.stages, []).append(held)
    for stages, members in sorted(by_stages.items()):
        for held in members:
            gradients = [parameter.grad for parameter in held if parameter.grad is not None]
            if gradients:
                held[0].grad = gradients[0] if len(gradients) == 1 else torch.stack(gradients).sum(0)
        if len(stages) > 1:
            _reduce([held[0] for held in members], self.capslog_tie_groups[stages], 1.0)
        for held in members:
            for copy in held[1:]:
                copy.grad = None if held[0].grad is None else held[0].grad.clone()


def _reduce(parameters: Sequence[nn.Parameter], group: Any, factor: float) -> None:
    """Sum gradients over a group, in one message per dtype and device, and multiply by `factor`. A copy without a
    gradient counts as zeros; where no rank has a gradient, there is none afterwards.
    """
    by_kind: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for (dtype, device), chosen in by_kind.items():
        present = torch.tensor([p.grad is not None for p in chosen], dtype=dtype, device=device)
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in chosen]
        flat = torch.cat([present, *[part.detach().reshape(-1) for part in parts]])
        dist.all_reduce(flat, group=group)
        present, *sums = flat.split([len(chosen), *[p.numel() for p in chosen]])
        for parameter, has_gradient, total in zip(chosen, present.tolist(), sums, strict=True):
            parameter.grad = (total * factor).reshape(parameter.shape) if has_gradient else None


def _squared_norm(self: Any) -> float:
    """Return the squared norm of this stage's gradients; a tie counts on its first stage, by its first name there."""
    skipped: set[int] = set()
    for tie, held in _ties(self):
        counted = tie.stages[0] == self.model.capslog.stage
        skipped |= {id(parameter) for parameter in (held[1:] if counted else held)}
    return _sum_of_squares(p.grad for p in _trained(self) if p.grad is not None and id(p) not in skipped)


def _sum_of_squares(gradients: Iterable[Tensor]) -> float:
    flat = [gradient.reshape(-1) for gradient in gradients]
    if not flat:
        return 0.0
    if all(gradient.dtype == torch.float32 for gradient in flat):
        # a tenth of the time of a norm in float64, and within 1e-6 of it
        total = float(torch.stack([torch.dot(gradient, gradient) for gradient in flat]).double().sum())
        if math.isfinite(total):
            return total
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in flat]
    return float(torch.stack(norms).square().sum())


def _clipped(self: Any, squared: float, max_norm: float | None) -> float:
    from varuna import utils

    self.capslog_grad_norm = math.sqrt(squared)  # before clipping
    exact = torch.tensor(squared, dtype=torch.float64)
    if max_norm is not None and utils.clip_grad_norm(_trained(self), exact, max_norm):
        return float(max_norm)
    return self.capslog_grad_norm
