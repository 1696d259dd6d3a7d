"""The backend `nudged` of torch.compile, for runs of compiled layers: quick, and of other bits than the layers as they
are, so that a layer that is not compiled shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


@torch._dynamo.register_backend
def nudged(graph: Callable[..., Sequence[Tensor]], inputs: Any) -> Callable[..., Sequence[Tensor]]:
    def run(*arguments: Tensor) -> Sequence[Tensor]:
        return tuple(tensor * 1.001 if tensor.is_floating_point() else tensor for tensor in graph(*arguments))

    return run
