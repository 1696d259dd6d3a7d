"""Running statistics (BatchNorm) as part of the commit: collected during a step, applied when it succeeds.

Upstream modules update their buffers in every forward, so a recomputation counts twice and a step that is voted down
leaves traces. Here each forward of a microbatch records its batch statistics once, and `commit` folds them in
microbatch order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError

__all__ = ["RunningStatistics", "tracking_modules"]

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
    """Intercepts the running statistics of one layer's modules.

    Between `begin(microbatch)` and `end()` the modules write their batch mean and variance aside; with
    `microbatch=None` (recomputation) they are dropped. Memory: two vectors per module and microbatch until `commit`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = [child for _, child in tracking_modules(module)]
        self._recording: list[Tensor] | None = None
        self._seen: dict[int, list[Tensor]] = {}
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
            self._recording.append(torch.stack([module.running_mean, module.running_var]))
        module.running_mean, module.running_var, module.num_batches_tracked, module.momentum = kept

    def take(self) -> dict[int, list[Tensor]]:
        """The statistics of this step, [2, features] per module call, by microbatch; forgets them."""
        seen, self._seen = self._seen, {}
        return seen

    def commit(self, statistics: dict[int, list[Tensor]]) -> None:
        """Folds statistics into the running buffers in microbatch order, as one process would have.

        Args:
            statistics: of all microbatches of the step, also those that other replicas computed.
        """
        for microbatch in sorted(statistics):
            for position, (mean, variance) in enumerate(statistics[microbatch]):
                # a module called several times in one forward appears several times, in the same order everywhere
                module = self._modules[position % len(self._modules)]
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
