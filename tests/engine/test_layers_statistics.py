"""Running statistics belong to the module that saw the batch, in any order of the modules."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.layers import EngineLayer
from varuna_capslog.model.chain import Layer


class ShortcutFirst(nn.Module):
    """Module like the blocks of RT-DETR's backbone: the submodule that is made first runs last."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.shortcut, self.inner = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        y = 3 * x + 1
        for _ in range(self.times):
            y = self.inner(y)
        return self.shortcut(x) + y


def buffers_after_two_microbatches(module: nn.Module) -> dict[str, Tensor]:
    """The engine's, each microbatch with a recomputation."""
    layer = EngineLayer(0, Layer("block", module), torch.device("cpu"), "float32", {})
    for microbatch in range(2):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(microbatch))
        layer.forward({"x": x}, microbatch, 0, graph=True, record=True)
        layer.forward({"x": x}, microbatch, 0, graph=True, record=False)
    layer.statistics.commit(layer.statistics.take())
    return dict(module.named_buffers())


def assert_as_plain(module: nn.Module) -> None:
    plain = copy.deepcopy(module)
    for microbatch in range(2):
        plain(torch.randn(5, 4, generator=torch.Generator().manual_seed(microbatch)))
    buffers = buffers_after_two_microbatches(module)
    for name, value in plain.named_buffers():
        torch.testing.assert_close(buffers[name], value, msg=name)


def test_modules_that_run_in_another_order_than_they_were_made() -> None:
    """Their statistics were exchanged: training was right, and evaluation found nothing."""
    assert_as_plain(ShortcutFirst())


def test_modules_that_run_unequally_often() -> None:
    """Such modules were once refused, as was a frozen module beside a trained one."""
    assert_as_plain(ShortcutFirst(2))
    module = ShortcutFirst()
    module.inner.eval()
    assert_as_plain(module)
    assert module.inner.num_batches_tracked == 0


def test_other_modules_for_another_microbatch_are_refused() -> None:
    module = ShortcutFirst()
    layer = EngineLayer(0, Layer("block", module), torch.device("cpu"), "float32", {})
    layer.forward({"x": torch.ones(5, 4)}, 0, 0, graph=True, record=True)
    module.times = 2
    with pytest.raises(CapslogError, match=r"ran \[1, 1\] times in one forward and \[1, 2\] times in another"):
        layer.forward({"x": torch.ones(5, 4)}, 1, 0, graph=True, record=True)
