"""One forward of a range of layers on fake tensors, without graphs and with nothing behind its tensors.

`inference` calls `run_forward`. What runs is `Chain.run_stage` under `no_grad`, with the layers in eval mode;
lifetimes, kernels and the allocator are those of the estimates for training (`hollow`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.failures import shortage
from varuna_capslog.engine.probe import storage_bytes
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.profiling.estimation.allocator import replay
from varuna_capslog.profiling.estimation.headroom import StepTrace
from varuna_capslog.profiling.estimation.lifetimes import Lifetimes, Recipes
from varuna_capslog.profiling.estimation.operators import Work
from varuna_capslog.profiling.estimation.quirks import Quirks
from varuna_capslog.profiling.estimation.rates import Speed
from varuna_capslog.profiling.skeleton import with_real_layers

__all__ = ["ForwardRun", "run_forward"]


@dataclass(frozen=True)
class ForwardRun(StepTrace):
    """Allocations of one forward of some layers; the peak is as the device's allocator counts.

    Attributes:
        weight_bytes: parameters and buffers, in the peak too.
        seconds: by `rates`.
        attends: True where the layers attend to other tokens.
        limits: names of `quirks.LIMITS` that it met, because of which its bytes are too low.
    """

    weight_bytes: int
    seconds: float
    attends: bool
    limits: frozenset[str]


def run_forward(
    mode: FakeTensorMode,
    chain: Chain,
    layers: tuple[int, int],
    inputs: Mapping[str, TensorSpec],
    quirks: Quirks,
    speed: Speed,
    recipes: Recipes,
) -> ForwardRun:
    """Run one forward of layers [first, end) of one microbatch.

    Args:
        mode: allows inputs that are not fake; best the same one for all runs of a chain.
        chain: from `skeleton`.
        inputs: specs of the tensors across the cut before the first of them.
        quirks, speed: of the device that the run is for.
        recipes: see `Lifetimes`.

    Raises:
        CapslogError: a layer cannot run on fake tensors.
    """
    first, end = layers
    watch = _Watch(speed)
    with torch.random.fork_rng(devices=[]), mode, quirks.dispatch(), torch.no_grad():
        part = with_real_layers(chain, range(first, end))
        modules = [layer.module.eval() for layer in part.layers[first:end]]
        held = [tensor.detach() for module in modules for tensor in (*module.parameters(), *module.buffers())]
        followed = Lifetimes(quirks.temporary, held, recipes, on_host=not quirks.has("host staging"))
        weight_bytes = storage_bytes(held)
        followed.observer = watch
        with followed:
            try:
                part.run_stage(first, end, {name: spec.empty() for name, spec in inputs.items()})
            except CapslogError:
                raise
            except Exception as error:
                raise shortage(error) or CapslogError(
                    f"layers {first} to {end - 1} cannot run on fake tensors ({type(error).__name__}: {error}); let "
                    "them depend on shapes only"
                ) from error
        events = [*quirks.taken_before(), *followed.events]
        peak_bytes = replay(events).allocated_bytes if quirks.has("caching allocator") else followed.peak_bytes
        return ForwardRun(
            peak_bytes, tuple(events), weight_bytes, speed.seconds(watch.work), watch.attends, frozenset(quirks.limits)
        )


class _Watch:
    """Observer of operators: adds up their work, and detects attention."""

    def __init__(self, speed: Speed) -> None:
        self._speed = speed
        self.work: Work = {}
        self.attends = False

    def __call__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        self._speed.count(self.work, func, args, kwargs, result)
        name = func.overloadpacket.__name__
        if name.startswith("_scaled_dot_product") or (
            name in ("_softmax", "_safe_softmax") and isinstance(args[0], Tensor) and args[0].dim() > 2
        ):
            self.attends = True
