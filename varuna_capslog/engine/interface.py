"""The interface of an engine, and the table in which a run finds one by the name in its config.

An engine makes the training steps of one rank. Two exist: `PipelineEngine`, our own, and `varuna_plugin.VarunaEngine`,
which has Varuna compute the step. They share no base class: training loop, journal and evaluation know this protocol
only. The start-up names the existing engines in one `Engines` object and hands it down, so that nothing here imports
an engine.
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
    """A rank's report on a step: whether it could read the data, how long it waited for them, how long it worked.

    Attributes:
        waited_seconds: how long it computed nothing because inputs or targets were not read yet.
        failure: why some of them could not be read, so that the step must be refused; None where all could.
        busy_seconds: of its forwards, recomputations and backwards; the engine adds them.
    """

    waited_seconds: float = 0.0
    failure: str | None = None
    busy_seconds: float = 0.0


NO_REPORT = RankReport()
"""The report of a rank that waited for nothing."""


@dataclass(frozen=True)
class Verdict:
    """The result of a step's vote, the same on all ranks.

    Attributes:
        parts: the loss and its parts, of the whole minibatch.
        grad_norm: global norm of the gradients, before clipping and without the loss scale; infinite where the step is
            skipped.
        scale: what the update multiplies the gradients with, for clipping, against the loss scale, and where
            `workload.COUNTED` targets are unequal; 0: the step is skipped, since its gradients overflowed.
        finite: whether loss and gradients are finite.
        refusal: why the step must not be applied; None for one that may. Where the loss itself refused outputs, its
            words are known on the ranks of the last stage only.
        stop: some rank wishes to stop after this step.
        ballots: by rank, what each gave (empty: nothing); () where no rank gave any.
        waited_seconds: by rank, how long each waited for data.
        busy_seconds: by rank, how long each worked on forwards, recomputations and backwards; () where the engine does
            not measure it.
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
        """True where the step updates no parameter: its gradients were not finite, but its loss was, in a run whose
        loss is scaled.
        """
        return self.scale == 0.0


Load: TypeAlias = "Callable[[int], dict[str, Tensor]]"
"""Global index of a microbatch -> the chain's inputs; called on the ranks whose stages take some."""

Example: TypeAlias = "Callable[[], tuple[Mapping[str, Tensor], Any, Mapping[str, float]]]"
"""Inputs, targets and normalisers of one microbatch, for an engine that traces the model on real tensors."""


class Engine(Protocol):
    """Engine of one rank of a training run. A step is `compute`, `vote`, `apply`; `step.train_step` makes all three.

    Attributes:
        layers: those of this rank's stages, in layer order; what a checkpoint writes and loads.
        optimizer: steps the parameters of `layers`.
    """

    chain: Chain
    layout: Layout
    options: EngineOptions
    communicator: Communicator
    layers: list[EngineLayer]
    optimizer: StageOptimizer

    @property
    def loaded_microbatches(self) -> Sequence[int]:
        """The microbatches of a step whose inputs this rank loads, rising; one that several of its stages take stands
        there as often. None for most ranks.
        """

    @property
    def judged_microbatches(self) -> Sequence[int]:
        """The microbatches of a step whose loss this rank computes, rising. None for most ranks."""

    @property
    def doing(self) -> str:
        """The action under way, for error messages."""

    def compute(self, step: int, minibatch: Minibatch, load: Load) -> None:
        """Forwards, backwards and sums: afterwards the minibatch's gradients lie in `.grad`, and nothing has changed.

        Args:
            step: counted from 1; with the run's seed it fixes all random numbers.

        Raises:
            CapslogError: a minibatch of another size than the run's.
            PeerLost: another rank is gone.
        """

    def vote(
        self, step: int, minibatch: Minibatch, stop: bool = False, ballot: bytes = b"", data: RankReport = ...
    ) -> Verdict:
        """After `compute`: all ranks learn whether the step may be applied, and the ballot of each of them.

        Args:
            stop: this rank wishes to stop after the step.
            ballot: handed to all ranks together with the verdict.
            data: how this rank came by the step's data; by default it waited for none.

        Raises:
            PeerLost: another rank is gone; the step is forgotten here.
        """

    def apply(self, verdict: Verdict) -> float:
        """Makes the step that was voted for, or skips its update as the verdict says. Returns the learning rate.

        Raises:
            PeerLost: another rank is gone that was to hand on what it updated for this one (`replicated`), and the
                layers here are of no boundary. Nothing is sent where every rank keeps the moments of its own layers.
        """

    def forget(self) -> None:
        """Drops all traces of a step that was broken off or refused."""

    def evaluate(
        self,
        minibatches: Sequence[Minibatch],
        load: Callable[[int, int], dict[str, Tensor]],
        take: Callable[[int, int, dict[str, Tensor]], None],
    ) -> None:
        """Runs minibatches forward, in evaluation mode: number w over `layout.ways[w]`. Every rank calls it alike.

        Args:
            load: (way, microbatch) -> the chain's inputs; called on the ranks whose stages take some.
            take: called with (way, microbatch, outputs) on the ranks that hold the last layer.
        """


@dataclass(frozen=True)
class EngineParts:
    """Everything from which an engine is built.

    Attributes:
        chain: whole, on the CPU, initialised alike on every rank.
        example: a microbatch of the run.
        timeout_seconds: longest wait for a message.
    """

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
    """An engine that a config may name.

    Attributes:
        build: makes a rank's engine; raises CapslogError for parts that it cannot run.
        check: raises CapslogError where what the engine needs is not installed; called before any worker starts.
    """

    build: Callable[[EngineParts], Engine]
    check: Callable[[], object] = lambda: None


class Engines(dict[str, EngineKind]):
    """The existing engines, by the name that `engine` has in a config."""

    def __missing__(self, name: str) -> EngineKind:
        raise CapslogError(f"engine={name!r} is unknown here; choose one of {', '.join(sorted(self))}")
