"""Interface of an engine, and the table in which a run finds an engine by the name in its config.

Two engines exist: `PipelineEngine`, our own, and `varuna_plugin.VarunaEngine`, in which Varuna computes the step. They
share no base class; their callers use only this protocol. The room `start` makes the `Engines` object and passes it
down, so that this module imports neither engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from varuna_capslog.base.errors import CapslogError

if TYPE_CHECKING:  # `start`, which names the engines, imports this module without torch
    import torch
    from torch import Tensor

    from varuna_capslog.engine.communicator import Communicator
    from varuna_capslog.engine.layers import EngineLayer
    from varuna_capslog.engine.layout import Layout
    from varuna_capslog.engine.optimizer import StageOptimizer
    from varuna_capslog.engine.recipe import EngineOptions
    from varuna_capslog.engine.stage import LossFunction
    from varuna_capslog.model.chain import Chain
    from varuna_capslog.model.workload import Minibatch

__all__ = ["NO_REPORT", "Engine", "EngineKind", "EngineParts", "Engines", "Load", "RankReport", "Verdict"]


@dataclass(frozen=True)
class RankReport:
    """Report of a rank on the data and the computation of a step.

    waited_seconds: waits for inputs or targets. busy_seconds: forwards, recomputations, backwards; the engine sets it.
    failure: reason why some data could not be read, for which the step is refused; None where all data was read.
    """

    waited_seconds: float = 0.0
    failure: str | None = None
    busy_seconds: float = 0.0


NO_REPORT = RankReport()
"""The report of a rank that waited for nothing."""


@dataclass(frozen=True)
class Verdict:
    """Result of a step's vote, the same on all ranks.

    Attributes:
        parts: the loss and its parts, of the whole minibatch.
        grad_norm: global gradient norm, before clipping and without the loss scale; infinite for a skipped step.
        scale: factor by which the update multiplies the gradients: it clips, undoes the loss scale, and corrects
            unequal counts of targets (`workload.COUNTED`); 0: the step is skipped, since its gradients overflowed.
        finite: True where loss and gradients are finite.
        refusal: why the step must not be applied, or None. Where the loss itself refused outputs, only the ranks of the
            last stage have the loss's message.
        stop: True where some rank requests to stop after this step.
        ballots: by rank; b"" from a rank without a ballot, () where no rank has one.
        waited_seconds, busy_seconds: by rank, as in `RankReport`; busy_seconds is () where the engine measures none.
        loss_scale: factor on the step's losses; None where they are not scaled.
    """

    step: int
    parts: dict[str, float]
    grad_norm: float
    scale: float
    finite: bool
    refusal: str | None
    stop: bool
    ballots: tuple[bytes, ...] = ()
    waited_seconds: tuple[float, ...] = ()
    busy_seconds: tuple[float, ...] = ()
    loss_scale: float | None = None

    @property
    def skipped(self) -> bool:
        """True where no parameter is updated: the scaled loss was finite, but its gradients were not."""
        return self.scale == 0.0


Load: TypeAlias = "Callable[[int], dict[str, Tensor]]"
"""Maps the global index of a microbatch to the chain's inputs; called on ranks whose stages read inputs."""

Example: TypeAlias = "Callable[[], tuple[Mapping[str, Tensor], Any, Mapping[str, float]]]"
"""Returns inputs, targets and normalisers of one microbatch, for an engine that traces the model on real tensors."""


class Engine(Protocol):
    """Engine of one rank of a training run. A step is `compute`, `vote`, `apply`; `step.train_step` calls all three.

    layers: all layers of this rank's stages, in layer order. optimizer: steps their parameters.
    """

    chain: Chain
    layout: Layout
    options: EngineOptions
    communicator: Communicator
    layers: list[EngineLayer]
    optimizer: StageOptimizer

    @property
    def loaded_microbatches(self) -> Sequence[int]:
        """Microbatches of a step whose inputs this rank loads, rising, once per stage that reads them; often empty."""

    @property
    def judged_microbatches(self) -> Sequence[int]:
        """Microbatches of a step whose loss this rank computes, rising; empty for most ranks."""

    @property
    def doing(self) -> str:
        """Current action, for error messages."""

    def compute(self, step: int, minibatch: Minibatch, load: Load) -> None:
        """Run forwards and backwards, and leave the minibatch's summed gradients in `.grad`; change nothing else.

        `step` counts from 1; with the run's seed it fixes all random numbers. Raises CapslogError unless the minibatch
        has the run's size, PeerLost where another rank is gone.
        """

    def vote(
        self, step: int, minibatch: Minibatch, stop: bool = False, ballot: bytes = b"", data: RankReport = ...
    ) -> Verdict:
        """Decide with all ranks, after `compute`, if the step may be applied, and exchange the ranks' ballots.

        Args:
            stop: this rank requests to stop after the step. ballot: message to all ranks, part of the verdict.
            data: this rank's report; by default the rank waited for no data.

        Raises PeerLost where another rank is gone, after dropping the step.
        """

    def apply(self, verdict: Verdict) -> float:
        """Update the parameters, or skip the update, as the verdict says; return the learning rate.

        Messages are sent only for layers whose moments another rank keeps (`replicated`). Raises PeerLost where such a
        rank is gone; then some layers of this rank are updated and some are not.
        """

    def forget(self) -> None:
        """Drop all traces of an interrupted or refused step."""

    def evaluate(
        self,
        minibatches: Sequence[Minibatch],
        load: Callable[[int, int], dict[str, Tensor]],
        take: Callable[[int, int, dict[str, Tensor]], None],
    ) -> None:
        """Run minibatches in evaluation mode, the w-th on the stages `layout.ways[w]`; all ranks pass the same ones.

        Args:
            load: maps (way, microbatch) to inputs of the chain; called on ranks whose stages read inputs.
            take: called with (way, microbatch, outputs) on the ranks of the last layer.
        """


@dataclass(frozen=True)
class EngineParts:
    """Arguments of `EngineKind.build`. chain: whole, on the CPU, alike on all ranks. timeout_seconds: per message."""

    chain: Chain
    loss: LossFunction
    layout: Layout
    options: EngineOptions
    communicator: Communicator
    device: torch.device
    example: Example
    timeout_seconds: float


@dataclass(frozen=True)
class EngineKind:
    """Engine that a config may name.

    build: makes a rank's engine; raises CapslogError for parts that it cannot run.
    check: called before any worker starts; raises CapslogError where a package that the engine needs is missing.
    """

    build: Callable[[EngineParts], Engine]
    check: Callable[[], object] = lambda: None


class Engines(dict[str, EngineKind]):
    """All engines, by the value of `engine` in a config."""

    def __missing__(self, name: str) -> EngineKind:
        raise CapslogError(f"engine={name!r} is unknown here; choose one of {', '.join(sorted(self))}")
