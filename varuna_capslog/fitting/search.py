"""Memory intervals for one device: chooses those that fit a budget, and runs a captured module with them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from varuna_capslog import accelerator
from varuna_capslog.base.errors import CapslogError, DoesNotFit
from varuna_capslog.base.units import format_bytes
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.model.capture import runs_python
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.python_state import PythonState, RandomStates, crafted_draws
from varuna_capslog.model.trace import autocast_context
from varuna_capslog.model.workload import Workload
from varuna_capslog.planners.intervals import Handling, IntervalSearch, stage_bytes
from varuna_capslog.planners.seconds import LayerSeconds
from varuna_capslog.plans.parts import INTERVAL_KINDS, MemoryInterval, pieces_of, ranges_of
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.estimate import StageEstimator, estimated_profile
from varuna_capslog.profiling.estimation.allocator import replay
from varuna_capslog.profiling.estimation.lifetimes import Lifetimes
from varuna_capslog.profiling.estimation.quirks import Quirks
from varuna_capslog.profiling.trim import with_real_layers

__all__ = ["Fit", "Loop", "SegmentedChain", "StepSearch"]


# -- Runs a captured chain in one autograd graph, in which memory intervals recompute or offload ranges of layers.
#
# `torch.utils.checkpoint` (not reentrant) recomputes a range with the same random numbers of torch; hooks offload the
# tensors that autograd saves. Values, gradients and the order in which gradients are added are those of the chain
# without intervals. Side effects that a recomputation must not repeat are undone here: updates of batch norms' running
# statistics, draws from Python's and numpy's generators, and changes of attributes.


_Form = tuple[torch.dtype, torch.Size, tuple[int, ...], int]
"""Dtype, size, stride and offset by which a tensor views its storage."""


@dataclass(frozen=True)
class _Span:
    """Layers of a memory interval, or between intervals. reads, writes: names of tensors that enter and that leave."""

    piece: MemoryInterval
    reads: tuple[str, ...]
    writes: tuple[str, ...]


class SegmentedChain:
    """Layers of a chain before `end`, with rising memory intervals; other layers keep what autograd saves."""

    def __init__(self, chain: Chain, intervals: Sequence[MemoryInterval], end: int) -> None:
        self._chain, self.end, self._python = chain, end, runs_python(chain.layers)
        self._parts = [self._part(piece) for piece in pieces_of(0, end, intervals)]

    def _part(self, piece: MemoryInterval) -> _Span:
        written: set[str] = set()
        reads: dict[str, None] = {}
        for layer in self._chain.layers[piece.first : piece.end]:
            reads |= dict.fromkeys(name for name in layer.reads if name not in written)
            written |= set(layer.writes)
        return _Span(piece, tuple(reads), tuple(name for name in self._chain.crossing(piece.end) if name in written))

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that cross the cut at `end`, by name."""
        values = dict(inputs)
        for part in self._parts:
            outputs = self._run_part(part, [values[name] for name in part.reads])
            alive = self._chain.crossing(part.piece.end)
            values = {name: tensor for name, tensor in values.items() if name in alive and name not in part.writes}
            values |= zip(part.writes, outputs, strict=True)
            del outputs
        return values

    def _run_part(self, part: _Span, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        modules = [layer.module for layer in self._chain.layers[part.piece.first : part.piece.end]]
        offload: AbstractContextManager[Any] = contextlib.nullcontext()
        if part.piece.offloads:
            offload = _to_host([tensor for module in modules for tensor in (*module.parameters(), *module.buffers())])

        def layers(*entering: Tensor) -> tuple[Tensor, ...]:
            values = dict(zip(part.reads, entering, strict=True))
            del entering
            for index in range(part.piece.first, part.piece.end):
                values |= self._chain.layers[index](values)
                alive = self._chain.crossing(index + 1)
                values = {name: tensor for name, tensor in values.items() if name in alive}
            return tuple(values[name] for name in part.writes)

        with offload:
            if not part.piece.recomputes:
                return layers(*_taken(tensors))
            recomputation = _RecomputationState(modules) if self._python else None
            contexts = lambda: (contextlib.nullcontext(), _uncounted(modules, recomputation))  # noqa: E731
            outputs: tuple[Tensor, ...] = checkpoint(layers, *_taken(tensors), use_reentrant=False, context_fn=contexts)
            return outputs


def _taken(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors and remove them from the list, so that the list keeps no tensor alive."""
    taken = tensors[:]
    tensors.clear()
    while taken:
        yield taken.pop(0)


class _RecomputationState:
    """State of random generators before the first run of the modules' Python code, for its recomputation."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._parts = {
            f"{at}.{name}": part for at, module in enumerate(modules) for name, part in module.named_modules()
        }
        self._generators = PythonState(self._parts, files=True).generators
        self._before = RandomStates(self._generators)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Restore the generators for a recomputation; undo its draws and its changes of attributes at the end."""
        now, state = RandomStates(self._generators), PythonState(self._parts, files=True)
        self._before.put_back()
        try:
            yield
        finally:
            state.put_back()
            now.put_back()


@contextlib.contextmanager
def _uncounted(modules: Sequence[nn.Module], recomputation: _RecomputationState | None) -> Iterator[None]:
    """Context in which batch norms update copies of their running statistics, which are dropped at the end."""
    norms = [
        part
        for module in modules
        for part in module.modules()
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats
    ]
    kept = [dict(part._buffers) for part in norms]
    for part in norms:
        part._buffers.update(
            {name: None if buffer is None else buffer.clone() for name, buffer in part._buffers.items()}
        )
    try:
        with recomputation.open() if recomputation is not None else contextlib.nullcontext():
            yield
    finally:
        for part, buffers in zip(norms, kept, strict=True):
            part._buffers.update(buffers)


class _OffloadedStorage:
    """Offloaded storage."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._device = storage.device
        flat = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        self._host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=accelerator.pins_memory(self._device.type))
        self._host.copy_(flat, non_blocking=True)
        self._back: weakref.ref[torch.UntypedStorage] | None = None

    def get(self, form: _Form) -> Tensor:
        """Return a tensor of this storage on the device; tensors that are alive together share one copy."""
        dtype, size, stride, offset = form
        back = None if self._back is None else self._back()
        if back is None:
            flat = torch.empty(self._host.shape, dtype=torch.uint8, device=self._device)
            back = flat.copy_(self._host, non_blocking=True).untyped_storage()
            self._back = weakref.ref(back)
        tensor: Tensor = torch.empty(0, dtype=dtype, device=self._device)
        return tensor.set_(back, offset, size, stride)


def _to_host(apart_from: Collection[Tensor]) -> AbstractContextManager[Any]:
    """Context in which saved tensors are offloaded to the host, except those on the storages of `apart_from`.

    Copies run on the device's current stream, to and from host memory that is pinned where possible.
    """
    stays = {tensor.untyped_storage()._cdata for tensor in apart_from}
    stored: dict[tuple[int, int], tuple[weakref.ref[torch.UntypedStorage], _OffloadedStorage]] = {}

    def pack(tensor: Tensor) -> Tensor | tuple[_OffloadedStorage, _Form]:
        storage = tensor.untyped_storage()
        if storage._cdata in stays or not storage.nbytes():
            return tensor
        key = storage._cdata, tensor._version
        held = stored.get(key)
        if held is None or held[0]() is None:  # a new storage may have a freed one's address, and a tensor new contents
            held = stored[key] = weakref.ref(storage), _OffloadedStorage(storage)
        return held[1], (tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(packed: Tensor | tuple[_OffloadedStorage, _Form]) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed[0].get(packed[1])

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


# -- Search for the choice of memory intervals that fits a budget.
#
# `planners/intervals`, with one call in flight, proposes the fastest choice by an estimated profile; a step with this
# choice is then rehearsed on fake tensors, as in `profiling/rehearsal`. The search is repeated with a budget corrected
# by the difference between estimate and rehearsal. Nothing runs on the device.


_ROUNDS = 8
"""Largest number of choices that are rehearsed for one budget."""

Loss = Callable[[Mapping[str, Tensor]], Tensor]
"""Maps the tensors that leave the chain, by name, to the scalar that is differentiated."""


@dataclass(frozen=True)
class Loop:
    """Settings of the loop in which the module trains.

    precision: "float32", or "bfloat16" or "float16" for a loop under autocast. moments: number of tensors of a trained
    parameter's size that the optimizer keeps. host_bandwidth: bytes per second; None: nothing is offloaded.
    """

    precision: str = "float32"
    moments: int = 2
    host_bandwidth: float | None = None


_MOST_NAMED = 4
"""Largest number of ranges of layers that a summary names."""


@dataclass(frozen=True)
class Fit:
    """Memory intervals chosen for training a module within a budget.

    names: of the layers; those in no interval keep what autograd saves. peak_bytes: of one step, rehearsed (see `fit`);
    static_bytes: the part of it that is the same for any choice. step_seconds: estimated, of a forward and a backward
    with everything kept; again_seconds: estimated, of the recomputed forwards.
    """

    names: tuple[str, ...]
    intervals: tuple[MemoryInterval, ...]
    budget_bytes: int
    peak_bytes: int
    static_bytes: int
    step_seconds: float
    again_seconds: float

    @property
    def summary(self) -> str:
        """Text of two lines: predicted peak and budget; recomputed and offloaded layers."""
        treated = [
            f"{what} of {sum(end - first for first, end in ranges)} of {len(self.names)} layers ({self._named(ranges)})"
            for what, ranges in (
                ("activation checkpointing", self._ranges([part for part in self.intervals if part.recomputes])),
                ("CPU offload", self._ranges([part for part in self.intervals if part.offloads])),
            )
            if ranges
        ]
        if treated and self.step_seconds > 0:
            treated.append(f"step estimated {100 * self.again_seconds / self.step_seconds:.0f} % longer")
        peak = f"predicted peak {format_bytes(self.peak_bytes)} of a budget of {format_bytes(self.budget_bytes)}"
        return f"{peak}\n{', '.join(treated) or 'nothing is recomputed or offloaded'}"

    def _ranges(self, parts: Sequence[MemoryInterval]) -> list[tuple[int, int]]:
        layers = [layer for part in parts for layer in range(part.first, part.end)]
        return list(ranges_of(layers)) if layers else []

    def _named(self, ranges: Sequence[tuple[int, int]]) -> str:
        """Text with the first and last layer of each range, up to `_MOST_NAMED` ranges."""
        ends = [dict.fromkeys((self.names[first], self.names[end - 1])) for first, end in ranges]
        shown = [" to ".join(names) for names in ends]
        return ", ".join(shown if len(shown) <= _MOST_NAMED else [*shown[:_MOST_NAMED], "..."])


class StepSearch:
    """Search for the memory intervals of a module's step on one device. The last layer of `chain` returns the outputs
    of the captured layers, which `loss` maps to the scalar that is differentiated.
    """

    def __init__(
        self, chain: Chain, specs: Mapping[str, TensorSpec], loss: Loss, device: torch.device, loop: Loop
    ) -> None:
        self.loop, self._loss, self._end = loop, loss, len(chain) - 1
        conditions = RunConditions(device.type, precision=loop.precision, stage_inputs="device")
        self._estimator = StageEstimator(_CapturedModule(chain, specs, loss), conditions)
        self._profile = estimated_profile(self._estimator)
        self._ranges = RangeBytes.of_ranks(self._profile, True)
        seconds = LayerSeconds.of_profile(self._profile, None)
        handling = Handling(host_bandwidth=loop.host_bandwidth, copies_beside=False)
        offloads = loop.host_bandwidth is not None and device.type != "cpu"
        kinds = [kind for kind in INTERVAL_KINDS if offloads or kind == "recompute"]
        # no interval includes the last layer: its outputs go to the user and are kept in any case
        self._fronts_by = partial(
            IntervalSearch, self._ranges, handling=handling, firsts=[0], kinds=kinds, borders=range(self._end + 1)
        )
        self._fronts = self._fronts_by(seconds)
        self._keeping_seconds = float(seconds.forward[self._end] + seconds.backward[self._end])
        self._peaks: dict[tuple[MemoryInterval, ...], int] = {}
        parameters = self._estimator.chain.named_parameters().values()
        self._trained_bytes = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
        held = [*parameters, *(buffer for layer in chain.layers for buffer in {*layer.module.buffers()})]
        self.static_bytes = sum(tensor.nbytes for tensor in held) + (1 + loop.moments) * self._trained_bytes

    def fit(self, budget: int) -> Fit:
        """Return the fastest choice within the budget. Raises DoesNotFit, with static bytes and smallest budget."""
        if self.peak_bytes(()) <= budget:
            return self._fit((), budget, 0.0)
        best = self._fastest(budget)
        if best is not None:
            return best
        least, intervals = self._least()
        if least <= budget:
            return self._fit(intervals, budget, self._recompute_seconds(intervals))
        raise DoesNotFit(
            f"a budget of {format_bytes(budget)} is too small to train {self._profile.model}: parameters, gradients, "
            f"{self.loop.moments} moments and buffers alone take {format_bytes(self.static_bytes)}, and the smallest "
            f"budget that does is {least} bytes ({format_bytes(least)}); give that much, or a smaller batch"
        )

    def _fastest(self, budget: int) -> Fit | None:
        """Return the fastest rehearsed choice that fits, or None. Each choice is searched with the budget corrected by
        the estimate's error for the last choice, between the bounds that earlier rehearsals showed.
        """
        low, high = 0.0, float(stage_bytes(self._ranges, 0, self._end, (), 1))
        usable, best = float(budget + self._excess(())), None
        rehearsed: set[tuple[MemoryInterval, ...]] = set()
        for _ in range(4 * _ROUNDS):
            if not low < usable < high:
                usable = (low + high) / 2
            choice = self._fronts.cheapest(0, self._end, 1, usable)
            if choice is None:
                low = usable
                continue
            recompute_seconds = choice.seconds - self._keeping_seconds
            fits = self.peak_bytes(choice.intervals) <= budget
            if fits and (best is None or recompute_seconds < best.again_seconds):
                best = self._fit(choice.intervals, budget, recompute_seconds)
            low, high = (usable, high) if fits else (low, min(usable, choice.bytes))
            usable = budget + self._excess(choice.intervals)
            rehearsed.add(choice.intervals)
            if len(rehearsed) == _ROUNDS or high - low < 1e-3 * high:
                break
        return best

    def _least(self) -> tuple[int, tuple[MemoryInterval, ...]]:
        """Return the fewest rehearsed bytes of some choices near the smallest estimate, and that choice. All layers
        count as equally slow: measured rates vary, and a budget that was reported once must be enough again.
        """
        steps = np.arange(self._profile.num_layers + 1, dtype=float)
        fronts = self._fronts_by(LayerSeconds(steps, 2 * steps, 0 * steps, 0 * steps, 0 * steps))
        smallest, candidates = fronts.least_bytes(0, self._end, 1)[0], []
        for part in (1.0, 1.02, 1.05, 1.1):  # the smallest by estimate need not be the smallest by rehearsal
            choice = fronts.cheapest(0, self._end, 1, part * smallest)
            if choice is not None:
                candidates.append((self.peak_bytes(choice.intervals), choice.intervals))
        return min([*candidates, (self.peak_bytes(()), ())], key=lambda candidate: candidate[0])

    def _recompute_seconds(self, intervals: Sequence[MemoryInterval]) -> float:
        forward = self._profile.column("forward_seconds")
        return sum(sum(forward[interval.first : interval.end]) for interval in intervals if interval.recomputes)

    def _excess(self, intervals: tuple[MemoryInterval, ...]) -> int:
        """Return the bytes by which the estimate of a choice exceeds its rehearsal."""
        return stage_bytes(self._ranges, 0, self._end, intervals, 1) - self.peak_bytes(intervals)

    def _fit(self, intervals: tuple[MemoryInterval, ...], budget: int, recompute_seconds: float) -> Fit:
        names = tuple(layer.name for layer in self._profile.layers[: self._end])
        peak = self.peak_bytes(intervals)
        return Fit(names, intervals, budget, peak, self.static_bytes, self._keeping_seconds, recompute_seconds)

    def peak_bytes(self, intervals: tuple[MemoryInterval, ...]) -> int:
        """Return the rehearsed peak of a step with these intervals, as the device's allocator would count it, without
        gradients at its beginning. Raises CapslogError where a layer or the loss cannot run on fake tensors.
        """
        if intervals not in self._peaks:
            self._peaks[intervals] = self._rehearsed(intervals)
        return self._peaks[intervals]

    def _rehearsed(self, intervals: tuple[MemoryInterval, ...]) -> int:
        conditions = self._estimator.conditions
        quirks, mode = Quirks(conditions.device, conditions.gpu), FakeTensorMode(allow_non_fake_inputs=True)
        with torch.random.fork_rng(devices=[]), crafted_draws(high=True), mode, quirks.dispatch():
            chain = with_real_layers(self._estimator.chain, range(self._end + 1))
            parameters = list(chain.named_parameters().values())
            moments = [
                torch.empty_like(parameter)
                for parameter in parameters
                if parameter.requires_grad
                for _ in range(self.loop.moments)
            ]
            inputs = {name: spec.empty() for name, spec in self._estimator.specs[0].items()}
            held = [*parameters, *moments, *inputs.values()]
            held += [buffer for layer in chain.layers for buffer in layer.module.buffers()]
            followed = Lifetimes(
                quirks.temporary, held, self._estimator.recipes, on_host=not quirks.has("host staging")
            )
            run = SegmentedChain(chain, intervals, self._end)
            with followed:
                try:
                    with autocast_context("cpu", conditions.precision):
                        with followed.with_actual_tensors():
                            outputs = run.run(inputs)
                        loss = self._loss(outputs)
                    loss.backward()
                except CapslogError:
                    raise
                except Exception as error:
                    raise CapslogError(
                        f"a step of {self._profile.model} cannot run on fake tensors "
                        f"({type(error).__name__}: {error}); let the module and the loss depend on shapes only"
                    ) from error
            if quirks.has("caching allocator"):
                return replay([*quirks.taken_before(), *followed.events]).allocated_bytes
            return followed.peak_bytes


class _CapturedModule(Workload):
    """Workload of an existing chain, its inputs and its loss, for the estimator."""

    def __init__(self, chain: Chain, specs: Mapping[str, TensorSpec], loss: Loss) -> None:
        self.name, self._chain, self._specs, self._loss = chain.name, chain, specs, loss

    def build_chain(self) -> Chain:
        return self._chain

    def loss(self, outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
        return {"loss": self._loss(outputs)}

    def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
        return {name: replace(spec, requires_grad=False) for name, spec in self._specs.items()}
