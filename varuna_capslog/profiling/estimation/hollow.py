"""One trimmed stage on fake tensors: the engine's own program of a step, with nothing behind its tensors.

`estimate` calls `run_hollow`. The stage, executor, gradient book and optimizer are those that train, so that whatever
they keep or free is followed as it happens; only the messages and the device are pretended. Nothing is decided here.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.communicator import Communicator, PendingReceive, PendingSend
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.probe import resident_tensors
from varuna_capslog.engine.stage import LossFunction, MicrobatchContext, Stage
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.estimation.allocator import replay
from varuna_capslog.profiling.estimation.lifetimes import Lifetimes
from varuna_capslog.profiling.estimation.quirks import Quirks
from varuna_capslog.profiling.estimation.recipes import Recipes
from varuna_capslog.profiling.estimation.roofline import Speed, Stopwatch
from varuna_capslog.profiling.trim import MEASURED_RANK, TrimmedRun, trimmed_engine

__all__ = ["HollowRun", "run_hollow"]

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class HollowRun:
    """What a step of a stage asked of the allocator.

    Attributes:
        peak_bytes: the most that was live at once, as the device's allocator counts.
        static_bytes: parameters, gradients, moments and buffers when all gradients are there.
        saved_bytes: what a forward leaves for its backward, the stage's inputs included; and what a caching allocator
            gave beyond what was asked for when the peak was there, for one graph.
        forward_seconds, backward_seconds: of one microbatch, by `roofline`.
        attention: "eager" where the layers make matrices of softmax, "fused" where a fused kernel attends.
        limits: what it met of `quirks.LIMITS`, because of which its bytes are too low.
        events: see `allocator.replay`; what is there before the step comes first.
    """

    peak_bytes: int
    static_bytes: int
    saved_bytes: int
    forward_seconds: float
    backward_seconds: float
    attention: frozenset[str]
    limits: frozenset[str]
    events: tuple[tuple[int, int], ...]


def run_hollow(
    mode: FakeTensorMode,
    chain: Chain,
    run: TrimmedRun,
    conditions: RunConditions,
    loss: LossFunction,
    quirks: Quirks,
    speed: Speed,
    recipes: Recipes | None = None,
    microbatches: int | None = None,
) -> HollowRun:
    """One step of a trimmed stage that has trained before: the optimizer's moments are there, gradients are not.

    Args:
        mode: allows inputs that are not fake; best the same one for all runs of a chain.
        chain: from `skeleton`.
        loss: the workload's.
        quirks, speed: of the device that the run is for.
        recipes: see `Lifetimes`.
        microbatches: of the step; None: `enough_microbatches`.

    Raises:
        CapslogError: a layer or the loss cannot run on fake tensors.
    """
    communicator = _Silent(run, quirks.staged)
    count = microbatches or enough_microbatches(conditions, quirks)
    with torch.random.fork_rng(devices=[]), mode, quirks.dispatch():
        with _copied_by_shape():
            engine, minibatch = trimmed_engine(chain, run, conditions, communicator, loss, _CPU, True, count)
        (stage,) = engine.stages.values()
        _prepare(engine, stage, conditions, quirks)
        held = resident_tensors(engine.layers, engine.optimizer)
        own = {tensor.untyped_storage()._cdata for tensor in held}
        followed = Lifetimes(quirks.temporary, held, recipes)
        meter = _Meter(stage, own, followed, speed)
        del held
        with followed:
            meter.attach()
            try:
                engine.train_step(
                    2,
                    minibatch,
                    lambda _: {name: spec.empty() for name, spec in run.specs[0].items()},
                    before_commit=lambda: meter.count_static(engine),
                )
            except CapslogError:
                raise
            except Exception as error:
                raise CapslogError(
                    f"layers {run.first} to {run.end - 1} cannot run on fake tensors "
                    f"({type(error).__name__}: {error}); let them depend on shapes only, or set profile.source=measured"
                ) from error
        if meter.refused:
            raise CapslogError(f"the loss refuses fake values ({meter.refused}); make it finite on any outputs")
        events, lasting = followed.events, quirks.lasting_bytes
        if lasting:
            # taken in an earlier step
            events = [(0, lasting), *events]
        seconds = meter.seconds
        peak_bytes, saved_bytes = followed.peak_bytes, meter.saved_bytes
        if quirks.caching:
            # such an allocator gives somewhat more than it is asked for, and most of it with what is saved
            peaks = replay(events)
            graphs = 1 if conditions.recompute or not run.has_downstream else 2
            peak_bytes = peaks.allocated_bytes
            saved_bytes += peaks.remainder_bytes // graphs
        return HollowRun(
            peak_bytes,
            meter.static_bytes,
            saved_bytes,
            # the last stage forwards in its recomputation only
            max(seconds["forward"], seconds["recompute"]),
            seconds["backward"],
            frozenset(meter.attention),
            frozenset(quirks.limits),
            tuple(events),
        )


def enough_microbatches(conditions: RunConditions, quirks: Quirks) -> int:
    """How many show the peak of any longer step.

    The second is the first to find all gradients. Where inputs or graphs of others wait on the device, it takes a third
    to have one waiting then; and where messages do, a fourth, as in a measured run.
    """
    if not quirks.staged:
        return 4
    return 2 if conditions.recompute and conditions.stage_inputs == "host" else 3


@contextmanager
def _copied_by_shape() -> Iterator[None]:
    """What torch cannot do to modules of fake tensors while an engine is built.

    `Module.to` would swap the parameters for others: they are where they belong. `deepcopy` would copy memory that is
    not there.
    """
    original = nn.Module.to
    nn.Module.to = lambda module, *_, **__: module  # type: ignore[method-assign, assignment]
    FakeTensor.__deepcopy__ = _copy  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.to = original  # type: ignore[method-assign]
        del FakeTensor.__deepcopy__


def _copy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    if id(tensor) not in memo:
        twin = tensor.detach().clone()
        memo[id(tensor)] = nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
    copied: Tensor = memo[id(tensor)]
    return copied


def _prepare(engine: PipelineEngine, stage: Stage, conditions: RunConditions, quirks: Quirks) -> None:
    """Gives the optimizer its moments and the stage the habits of the device."""
    moments = {}
    for address, parameter in engine.optimizer.parameters.items():
        empty = torch.empty_like(parameter)
        moments[address] = {"exp_avg": empty, "exp_avg_sq": empty, "step": torch.empty(())}
    engine.optimizer.load(moments)
    if quirks.foreach and engine.optimizer._adamw is not None:
        for group in engine.optimizer._adamw.param_groups:
            group["foreach"], group["fused"] = True, None
    if quirks.staged and conditions.stage_inputs == "host":
        stage._keep = _OnHost  # type: ignore[method-assign, assignment]


class _OnHost:
    """A stage input that waits in host memory, which is not the device's."""

    def __init__(self, tensor: Tensor) -> None:
        self._spec = TensorSpec.of(tensor)

    def to(self, device: torch.device, non_blocking: bool = False) -> Tensor:
        return self._spec.empty(device)


class _Meter:
    """Counts what the first microbatch saves, how long its work takes, and what is there before the update."""

    def __init__(self, stage: Stage, own: set[int], followed: Lifetimes, speed: Speed) -> None:
        self._stage, self._own, self._followed, self._speed = stage, own, followed, speed
        self.saved_bytes = self.static_bytes = 0
        self.seconds = {"forward": 0.0, "recompute": 0.0, "backward": 0.0}
        self.attention: set[str] = set()
        self.refused = ""

    def attach(self) -> None:
        """Looks at the stage's work from now on."""
        for name in self.seconds:
            call = functools.partial(self._watch, name, getattr(self._stage, name))
            setattr(self._stage, name, call)

    def count_static(self, engine: PipelineEngine) -> None:
        """Between backward and update, when all gradients are there."""
        self.static_bytes = sum(_storages(resident_tensors(engine.layers, engine.optimizer)).values())

    def _watch(self, name: str, call: Callable[..., Any], context: MicrobatchContext, *arguments: Any) -> Any:
        if context.index != 0:
            return call(context, *arguments)
        stopwatch = Stopwatch(self._speed)

        def observe(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
            stopwatch.operator(func, args, kwargs, result)
            name = func.overloadpacket.__name__
            if name in ("_softmax", "_safe_softmax") and args[0].dim() > 2:
                self.attention.add("eager")
            elif name.startswith("_scaled_dot_product"):
                self.attention.add("fused")

        self._followed.observer = observe
        try:
            result = call(context, *arguments) if name == "backward" else self._saving(call, context, *arguments)
        finally:
            self._followed.observer = None
        self.seconds[name] = stopwatch.seconds
        return result

    def _saving(self, call: Callable[..., Any], context: MicrobatchContext, *arguments: Any) -> Any:
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            saved.update(_storages([tensor]))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = call(context, *arguments)
        kept = self._stage.kept(context.index)
        saved.update(_storages([tensor for tensor in kept if isinstance(tensor, Tensor)]))
        self.saved_bytes = max(self.saved_bytes, sum(size for key, size in saved.items() if key not in self._own))
        self.refused = self.refused or self._stage.refusals.get(context.index, "")
        return result


def _storages(tensors: list[Tensor]) -> dict[int, int]:
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage.nbytes()
    return found


# -- messages that nobody sends


class _Silent(Communicator):
    """The measured rank's end of a pipeline whose other rank does not exist: buffers come and go, no message does.

    Args:
        staged: messages wait in host memory, as CUDA tensors' do; they reach the device when they are waited for.
    """

    def __init__(self, run: TrimmedRun, staged: bool) -> None:
        alone = not run.has_upstream and not run.has_downstream
        super().__init__(0 if alone else MEASURED_RANK, 1 if alone else 2, 0, datetime.timedelta(0))
        self._staged = staged

    def send(self, tensor: Tensor, peer: int, tag: int) -> PendingSend:
        kept = torch.empty(0) if self._staged else tensor.detach()
        return PendingSend(self, None, peer, kept)

    def receive(self, spec: TensorSpec, peer: int, tag: int, device: torch.device) -> PendingReceive:
        if self._staged:
            return _Staged(self, spec, peer, device)
        return PendingReceive(self, None, peer, spec.empty(device), device)

    def sum_(self, slots: Tensor) -> Tensor:
        return slots

    def gather(self, value: Any) -> list[Any]:
        # asked once, for the names of the loss parts, which the rank of the loss tells
        return [["loss"] if value is None else value] * self.world_size


class _Staged(PendingReceive):
    """A receive that lands in host memory first."""

    def __init__(self, communicator: Communicator, spec: TensorSpec, peer: int, device: torch.device) -> None:
        super().__init__(communicator, None, peer, torch.empty(0), device)
        self._spec = spec

    def wait(self) -> Tensor:
        return self._spec.empty(self._device)
