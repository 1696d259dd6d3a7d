"""Interface of an engine, and the table in which a run finds an engine by the name in its config.

Two engines exist: `PipelineEngine`, our own, and `varuna_plugin.VarunaEngine`, which has Varuna compute the step. They
share no base class: callers know only this protocol. The start-up passes down an `Engines` object, so nothing here
imports one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from varuna_capslog.base.errors import CapslogError

if TYPE_CHECKING:  # the module that names the engines imports this one, and no torch
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
    """Report of a rank on the data and the work of a step.

    waited_seconds: for inputs or targets. busy_seconds: of forwards, recomputations and backwards; the engine adds
        them.
    failure: why some data could not be read, so that the step must be refused; None where all could.
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
        grad_norm: global, before clipping and without the loss scale; infinite where the step is skipped.
        scale: factor of the update on the gradients: it clips, undoes the loss scale, and corrects unequal counts of
            targets (`workload.COUNTED`); 0: the step is skipped, since its gradients overflowed.
        finite: loss and gradients are finite.
        refusal: why the step must not be applied, or None. Where the loss itself refused outputs, only the ranks of the
            last stage know its message.
        stop: some rank wishes to stop after this step. ballots: by rank (empty: none); () where no rank gave any.
        waited_seconds, busy_seconds: by rank, as in `RankReport`; the latter is () where the engine measures none.
        loss_scale: of the step's losses; None where they are not scaled.
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
        """True where no parameter is updated: a scaled loss was finite, but its gradients were not."""
        return self.scale == 0.0


Load: TypeAlias = "Callable[[int], dict[str, Tensor]]"
"""Global index of a microbatch -> the chain's inputs; called on the ranks whose stages take some."""

Example: TypeAlias = "Callable[[], tuple[Mapping[str, Tensor], Any, Mapping[str, float]]]"
"""Inputs, targets and normalisers of one microbatch, for an engine that traces the model on real tensors."""


class Engine(Protocol):
    """Engine of one rank of a training run. A step is `compute`, `vote`, `apply`; `step.train_step` makes all three.

    layers: of this rank's stages, in layer order, for checkpoints. optimizer: steps their parameters.
    """

    chain: Chain
    layout: Layout
    options: EngineOptions
    communicator: Communicator
    layers: list[EngineLayer]
    optimizer: StageOptimizer

    @property
    def loaded_microbatches(self) -> Sequence[int]:
        """Microbatches of a step whose inputs this rank loads, rising, once per stage that takes them; often empty."""

    @property
    def judged_microbatches(self) -> Sequence[int]:
        """Microbatches of a step whose loss this rank computes, rising; empty for most ranks."""

    @property
    def doing(self) -> str:
        """Action under way, for error messages."""

    def compute(self, step: int, minibatch: Minibatch, load: Load) -> None:
        """Run forwards, backwards and sums, which leave the minibatch's gradients in `.grad` and change nothing else.

        `step` counts from 1; with the run's seed it fixes all random numbers. Raises CapslogError for a minibatch of
        another size than the run's, PeerLost where another rank is gone.
        """

    def vote(
        self, step: int, minibatch: Minibatch, stop: bool = False, ballot: bytes = b"", data: RankReport = ...
    ) -> Verdict:
        """Tell all ranks, after `compute`, whether the step may be applied, and the ballot of each rank.

        Args:
            stop: this rank wishes to stop after the step. ballot: for all ranks, together with the verdict.
            data: this rank's report; by default it waited for no data.

        Raises PeerLost where another rank is gone; the step is then dropped here.
        """

    def apply(self, verdict: Verdict) -> float:
        """Make the step of the vote, or skip its update, as the verdict says; return the learning rate.

        Raises PeerLost where a rank is gone that should send values that it updated for this one (`replicated`); some
        layers here are then updated and some not. Nothing is sent where every rank keeps the moments of its own layers.
        """

    def forget(self) -> None:
        """Drop all traces of a step that was broken off or refused."""

    def evaluate(
        self,
        minibatches: Sequence[Minibatch],
        load: Callable[[int, int], dict[str, Tensor]],
        take: Callable[[int, int, dict[str, Tensor]], None],
    ) -> None:
        """Run minibatches forward, in evaluation mode: number w over `layout.ways[w]`. Every rank calls it alike.

        Args:
            load: (way, microbatch) -> inputs of the chain; called on the ranks whose stages take some.
            take: called with (way, microbatch, outputs) on the ranks of the last layer.
        """


@dataclass(frozen=True)
class EngineParts:
    """Parts of an engine. chain: whole, on the CPU, equal on every rank. timeout_seconds: longest wait for messages."""

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
    check: raises CapslogError where something that it needs is not installed; called before any worker starts.
    """

    build: Callable[[EngineParts], Engine]
    check: Callable[[], object] = lambda: None


class Engines(dict[str, EngineKind]):
    """Existing engines, by the value of `engine` in a config."""

    def __missing__(self, name: str) -> EngineKind:
        raise CapslogError(f"engine={name!r} is unknown here; choose one of {', '.join(sorted(self))}")
