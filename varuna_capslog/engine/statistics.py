"""Running statistics (BatchNorm) as part of the commit: collected during a step, applied when it succeeds.

Upstream modules update their buffers in every forward, so a recomputation counts twice and a step that is voted down
leaves traces. Here each forward of a microbatch records its batch statistics once, and `commit` folds them in
microbatch order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.model.chain import TensorSpec

if TYPE_CHECKING:
    from varuna_capslog.engine.layers import EngineLayer

__all__ = ["BatchStatistics", "RunningStatistics", "StatisticsBook", "tracking_modules"]

_TAG = 3 << 28


class BatchStatistics(NamedTuple):
    """Batch statistics of one call of a module.

    module: its number among the layer's. values: mean and variance, [2, features].
    """

    module: int
    values: Tensor


_Norm = nn.modules.batchnorm._NormBase


def tracking_modules(module: nn.Module) -> Iterator[tuple[str, _Norm]]:
    """The normalisation modules inside `module` that keep running statistics, with their names."""
    for name, child in module.named_modules():
        if isinstance(child, nn.SyncBatchNorm):
            raise CapslogError(
                f"module {name!r} is a SyncBatchNorm, which talks between ranks; use BatchNorm or GroupNorm"
            )
        if isinstance(child, _Norm) and child.track_running_stats and child.running_mean is not None:
            yield name, child


class RunningStatistics:
    """Intercepts the running statistics of one layer's modules; those that are frozen (in eval mode) have none.

    Between `begin(microbatch)` and `end()` the modules write their batch mean and variance aside; with
    `microbatch=None` (recomputation) they are dropped. Memory: two vectors per module and microbatch until `commit`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = [child for _, child in tracking_modules(module)]
        self._recording: list[BatchStatistics] | None = None
        self._seen: dict[int, list[BatchStatistics]] = {}
        self._calls: tuple[int, ...] | None = None
        """The modules that a forward calls, as `arrange` orders them; None before the first one."""
        for child in self._modules:
            child.register_forward_pre_hook(self._divert)
            child.register_forward_hook(self._record, always_call=True)
        self._kept: dict[int, tuple[Tensor | None, Tensor | None, Tensor | None, float | None]] = {}
        self._active = False

    def __bool__(self) -> bool:
        return bool(self._modules)

    def begin(self, microbatch: int | None) -> None:
        """From now on forwards belong to `microbatch` (None: a recomputation, whose statistics are dropped)."""
        self._active = True
        self._recording = None if microbatch is None else self._seen.setdefault(microbatch, [])

    def end(self) -> None:
        """Forwards are no longer part of a step."""
        self._active = False
        self._recording = None

    def _divert(self, module: nn.Module, _: object) -> None:
        if not self._active or not module.training:
            return
        assert isinstance(module, _Norm)
        assert module.running_mean is not None
        assert module.running_var is not None
        self._kept[id(module)] = (module.running_mean, module.running_var, module.num_batches_tracked, module.momentum)
        # with momentum 1 the kernel writes exactly this batch's statistics
        module.running_mean = torch.zeros_like(module.running_mean)
        module.running_var = torch.ones_like(module.running_var)
        module.num_batches_tracked = None
        module.momentum = 1.0

    def _record(self, module: nn.Module, _: object, __: object) -> None:
        kept = self._kept.pop(id(module), None)
        if kept is None:
            return
        assert isinstance(module, _Norm)
        assert module.running_mean is not None
        assert module.running_var is not None
        if self._recording is not None:
            number = next(number for number, child in enumerate(self._modules) if child is module)
            self._recording.append(BatchStatistics(number, torch.stack([module.running_mean, module.running_var])))
        module.running_mean, module.running_var, module.num_batches_tracked, module.momentum = kept

    def arrange(self, microbatch: int) -> None:
        """Sorts the statistics of a microbatch after its forward: by module, repeated calls behind all first ones, so
        that all holders of the layer have the same order.

        Raises:
            CapslogError: the layer calls other modules than it did for an earlier microbatch.
        """
        seen = self._seen[microbatch]
        again = [[earlier.module for earlier in seen[:call]].count(batch.module) for call, batch in enumerate(seen)]
        seen[:] = [seen[call] for call in sorted(range(len(seen)), key=lambda call: (again[call], seen[call].module))]
        calls = tuple(batch.module for batch in seen)
        if self._calls is None:
            self._calls = calls
        if calls != self._calls:
            counts = [[row.count(number) for number in range(len(self._modules))] for row in (self._calls, calls)]
            raise CapslogError(
                f"the normalisations of one layer ran {counts[0]} times in one forward and {counts[1]} times in "
                "another; running statistics need equal calls for every microbatch: use GroupNorm"
            )

    def of(self, microbatch: int) -> Sequence[Tensor]:
        """Statistics of one microbatch of this step so far, in the order of `arrange`."""
        return [batch.values for batch in self._seen.get(microbatch, ())]

    def take(self) -> dict[int, list[BatchStatistics]]:
        """The statistics of this step by microbatch; forgets them."""
        seen, self._seen = self._seen, {}
        return seen

    def commit(self, statistics: Mapping[int, Sequence[BatchStatistics]]) -> None:
        """Folds statistics into the running buffers in microbatch order, as one process would have.

        Args:
            statistics: of all microbatches of the step, also those that other replicas computed.
        """
        for microbatch in sorted(statistics):
            for number, (mean, variance) in statistics[microbatch]:
                module = self._modules[number]
                assert module.running_mean is not None
                assert module.running_var is not None
                if module.num_batches_tracked is not None:
                    module.num_batches_tracked.add_(1)
                if module.momentum is None:
                    assert module.num_batches_tracked is not None
                    factor = 1.0 / float(module.num_batches_tracked)
                else:
                    factor = module.momentum
                module.running_mean.mul_(1 - factor).add_(mean, alpha=factor)
                module.running_var.mul_(1 - factor).add_(variance, alpha=factor)


class StatisticsBook:
    """The running statistics of one rank's layers during a step, those of the layers' other holders included."""

    def __init__(
        self, layers: Sequence[EngineLayer], communicator: Communicator, layout: Layout, num_microbatches: int
    ) -> None:
        self._communicator = communicator
        self._layers = {layer.index: layer for layer in layers if layer.statistics}
        # layer -> the other ranks that hold it -> the microbatches whose statistics they have
        self._others = {
            index: {
                rank: layout.microbatches_of(rank, index, num_microbatches)
                for rank in layout.holders(index)
                if rank != communicator.rank
            }
            for index in self._layers
        }
        self._found: dict[int, dict[int, list[BatchStatistics]]] = {}

    def collect(self) -> None:
        """Takes the statistics of all microbatches of the step from the layers and from their other holders."""
        for index, layer in self._layers.items():
            statistics, others = layer.statistics.take(), self._others[index]
            self._found[index] = statistics | self._ask(index, statistics, others) if others else statistics

    def of(self, index: int) -> Mapping[int, list[BatchStatistics]]:
        """After `collect`: a layer's statistics by microbatch; empty without any."""
        return self._found.get(index, {})

    def commit(self) -> None:
        """Folds them into the layers' buffers."""
        for index, statistics in self._found.items():
            self._layers[index].statistics.commit(statistics)
        self._found = {}

    def forget(self) -> None:
        """Drops the statistics of a broken-off step."""
        self._found = {}

    def _ask(
        self, index: int, mine: Mapping[int, list[BatchStatistics]], others: Mapping[int, Sequence[int]]
    ) -> dict[int, list[BatchStatistics]]:
        """The statistics that the other holders of a layer have, by microbatch."""
        order = sorted(mine)
        calls = mine[order[0]]
        sizes = [batch.values.numel() for batch in calls]
        flat = torch.cat([batch.values.reshape(-1) for microbatch in order for batch in mine[microbatch]])
        wanted = {peer: TensorSpec((sum(sizes) * len(theirs),), flat.dtype) for peer, theirs in others.items()}
        statistics = {}
        for peer, values in self._communicator.exchange(
            dict.fromkeys(others, flat), wanted, _TAG + index, flat.device
        ).items():
            pieces = iter(values.split(sizes * len(others[peer])))
            for microbatch in others[peer]:
                statistics[microbatch] = [
                    BatchStatistics(batch.module, next(pieces).reshape(batch.values.shape)) for batch in calls
                ]
        return statistics
