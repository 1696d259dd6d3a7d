"""Interface of a config's `workload: package.module:function`: a chain, data, a loss, and an evaluation of the result.

The engine calls a workload only through this interface, and a workload never calls the engine.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from varuna_capslog.base.errors import CapslogError, ConfigError, RunFinding
from varuna_capslog.base.functions import call_function
from varuna_capslog.config.defaults import BF16_MASTER, BF16_WEIGHTS
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.splitting.chains import split_chain
from varuna_capslog.variants.registry import apply_variants, drop_unread_work

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config

__all__ = [
    "COUNTED",
    "DataSource",
    "Evaluator",
    "HostTargets",
    "LateTargets",
    "Minibatch",
    "Reading",
    "ReadingSource",
    "Workload",
    "known_targets",
    "load_workload",
]


COUNTED = "counted"
"""Key of a loss part: the number of targets that a microbatch's loss is a mean of, in any unit; see `Workload.loss`."""


@dataclass(frozen=True)
class LateTargets:
    """Targets of one microbatch that are read with its samples, so that a minibatch's description cannot hold them.

    read: returns the targets; called where the loss is computed. Raises StepRefused if they cannot be read.
    """

    read: Callable[[], Any]


class HostTargets(dict[str, Any]):
    """Targets whose tensors stay on the CPU, for a loss that reads them there, as bipartite matching does."""


def known_targets(targets: Any, device: torch.device) -> Any:
    """Return the targets on the device where the loss is computed; `LateTargets` are read now.

    Moves tensors in lists, tuples and dicts of any depth, and objects with a method `to`, such as a batch of
    transformers; `HostTargets` and other objects stay as they are.
    """
    resolved = targets.read() if isinstance(targets, LateTargets) else targets
    if device.type == "cpu":
        return resolved
    return pytree.tree_map(lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf, resolved)


@dataclass
class Minibatch:
    """Description of one minibatch that is available *before* any pixel or token is read.

    It is a pure function of the data set's index, the epoch and the sample indices, so every rank computes it alone: no
    shape and no target ever travels between ranks.

    Attributes:
        inputs: per microbatch (global index), the spec of every chain input.
        targets: per microbatch, the targets of the loss: small, on the CPU, and moved to the loss's device unless they
            are `HostTargets`. `LateTargets`, if they are known only after the samples are read.
        normalisers: of the *whole* minibatch, such as the number of boxes: with these divisors, the losses of the
            microbatches add up to the unsplit minibatch's loss.
        sample_ids: per microbatch, the ids that an error message names (image ids, file names).
        recipes: per microbatch, private data of the data source, which its `load` reads.
    """

    inputs: list[dict[str, TensorSpec]]
    targets: list[Any]
    normalisers: dict[str, float] = field(default_factory=dict)
    sample_ids: list[list[Any]] = field(default_factory=list)
    recipes: list[Any] = field(default_factory=list)


class DataSource(Protocol):
    """Samples by index. Both methods are deterministic and may be called on any rank, in any order, from any thread."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def minibatch(self, groups: Sequence[Sequence[int]], epoch: int) -> Minibatch:
        """Describe the minibatch whose microbatches hold the samples `groups`; decodes nothing."""

    def load(self, minibatch: Minibatch, microbatch: int) -> dict[str, Tensor]:
        """Return a microbatch's input tensors, on the CPU, exactly as `minibatch.inputs[microbatch]` describes."""


class Reading(Protocol):
    """Microbatch that is being read."""

    def result(self) -> tuple[dict[str, Tensor], Any]:
        """Wait for the microbatch; return its inputs and targets. Raises CapslogError if it cannot be read."""


@runtime_checkable
class ReadingSource(Protocol):
    """`DataSource` whose targets are read together with the inputs, and that reads ahead by itself.

    ahead: number of microbatches that should be read before they are needed.
    """

    ahead: int

    def begin(self, minibatch: Minibatch, microbatch: int) -> Reading:
        """Begin to read a microbatch."""


class Evaluator(Protocol):
    """Turns outputs into scores. `collect` runs where the last layer is; `summarize` runs once, on all results."""

    def collect(self, outputs: Mapping[str, Tensor], minibatch: Minibatch, microbatch: int) -> list[Any]:
        """Return plain (picklable, JSON-able) results of one microbatch."""

    def summarize(self, results: list[Any]) -> dict[str, Any]:
        """Return scores of the whole set, as {"AP": 0.42, ...}; the first key decides which is `best` (higher wins)."""


class Workload(ABC):
    """Chain, data, loss and evaluation of a run. The config's function makes it, and must not open the data set."""

    name: str = "model"
    variants: Mapping[str, str] = MappingProxyType({})
    """Pattern of layers' names -> the variant that computes them, as in the config (`load_workload`)."""
    splits: Mapping[str, str] = MappingProxyType({})
    """Pattern of layers' names -> how they are split into parts, as in the config (`load_workload`)."""
    numerics: str = "same"
    """The weakest numerical class that those variants and splits may have."""

    def chosen_chain(self, evaluates: bool = True) -> Chain:
        """Return the chain that a run trains, with its layers split by `splits` and computed by `variants`. A run that
        never evaluates gets the chain of `build_training_chain`, other runs that of `build_chain`.

        Raises:
            CapslogError: a split or variant is unknown, not allowed or matches no layer; or the builder raises it.
        """
        chain = self.build_chain() if evaluates else self.build_training_chain()
        if self.splits:
            chain = split_chain(chain, self.splits, self.numerics)
        if self.variants and chain.factories is not None:
            raise CapslogError(
                f"variants is {dict(self.variants)}, but the layers of {chain.name!r} are built by factories, which no "
                "variant can change; choose the way to compute them in the factories"
            )
        if self.variants:
            apply_variants([(layer.name, layer.module) for layer in chain.layers], self.variants, self.numerics)
            drop_unread_work(
                [layer.module for layer in chain.layers], [layer.writes for layer in chain.layers], chain.readers
            )
        return chain

    @abstractmethod
    def build_chain(self) -> Chain:
        """Make a freshly initialised chain on the CPU; the caller has seeded torch. Equal seeds give equal weights."""

    def build_training_chain(self) -> Chain:
        """Make a chain whose layers run only in training mode, for a profile: no capture in eval mode is needed."""
        return self.build_chain()

    def hold_bfloat16(self) -> None:
        """Make all later chains with weights and floating-point inputs in bfloat16 (`train.precision`).

        Raises:
            CapslogError: the workload makes its chain itself.
        """
        raise CapslogError(
            f"train.precision={BF16_WEIGHTS} casts a model before it is captured, but {type(self).__name__} makes its "
            f"own chain; return layers in bfloat16 with train.precision=float32, or choose {BF16_MASTER}"
        )

    def check(self) -> Iterable[RunFinding]:
        """Return findings on data and weights that the user should know, or that would stop or spoil the run.

        Called once before the workers of a run start. A CapslogError raised here counts as a finding, too.
        """
        return ()

    def read_samples(self) -> Mapping[str, int]:
        """Read at least the first sample of each data source; return each source's number of samples, by its name.
        `capslog check` calls it in a separate process. Raises CapslogError: a source or sample cannot be read.
        """
        sources = {"training": self.train_data(), "validation": self.val_data()}
        read = {name: source for name, source in sources.items() if source is not None and len(source)}
        for source in read.values():
            source.load(source.minibatch([[0]], 0), 0)
        return {name: len(source) for name, source in read.items()}

    def data_facts(self) -> Mapping[str, Any]:
        """Return facts of the training data that must be the same when a run is continued, as {name: plain value};
        default: none. `number of samples`, if present, is reported before the workers start.
        """
        return {}

    def hand_over(self) -> None:  # noqa: B027 (most workloads have nothing to hand over)
        """Write into the run's folder results that workers would otherwise compute again, such as a captured model.

        Called once before the workers of a run start. Default: does nothing.
        """

    @abstractmethod
    def loss(self, outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
        """Return scalar parts of one microbatch's share of the minibatch loss. `"loss"` is differentiated; all are
        summed over microbatches and logged. Outputs and targets (see `known_targets`) lie on one device.

        If targets are known only after they are read, no normaliser can count them. Then the entry `COUNTED` is this
        microbatch's weight, and the step is divided by the mean of these weights over the microbatches.
        """

    @abstractmethod
    def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
        """Return specs of the largest inputs of a run, or of `profile.image_size`, for profiles and plans."""

    def sampled_inputs(self, microbatch_size: int, count: int, seed: int = 0) -> list[dict[str, TensorSpec]]:
        """Return specs of one microbatch from each of `count` random training minibatches: usual sizes, whereas
        `profile_inputs` has the largest. Decodes nothing. Default: one entry, for data of one size.
        """
        return [self.profile_inputs(microbatch_size)]

    def profile_targets(self, microbatch_size: int) -> tuple[Any, dict[str, float]]:
        """Return targets and normalisers that go with `profile_inputs`, for the loss on the last layer."""
        return None, {}

    def loss_key(self) -> object:
        """Return a key by which models share the estimate of their loss: it is equal for two workloads if, on equal
        outputs and with the profile targets, both losses run the same operators on the same shapes. Default: unique.
        """
        return id(self)

    def train_data(self) -> DataSource:
        """Open the training data."""
        raise NotImplementedError(f"workload {self.name!r} has no training data")

    def val_data(self) -> DataSource | None:
        """Open the validation data, or return None."""
        return None

    def evaluator(self) -> Evaluator | None:
        """Return the evaluator of `val_data`, or None."""
        return None

    def sample_files(self, count: int) -> list[Path]:
        """Return a few validation files that `predict` can draw on, for the report; [] where there are none."""
        return []

    def sample_text(self, trained: Callable[[], Chain]) -> str | None:
        """Return text that the trained chain generates, for the report; None if it generates no text."""
        return None

    def costs_depend_on(self) -> Sequence[str]:
        """Return further functions, as `package.module:function`, on which the costs of the model depend."""
        return ()

    def own_names(self, chain: Chain) -> Mapping[str, str]:
        """Map each weight's address to its name in other programs; default: the address itself."""
        return {address: address for address in chain.named_tensors()}

    def build_model(self) -> nn.Module | None:
        """Return the module from which the chain is made, with fresh weights; None if there is no such module."""
        return None

    def import_weights(self, path: Path) -> tuple[dict[str, Tensor], list[str]]:
        """Return a foreign checkpoint's weights as {address `<layer>.<name>`: tensor}, and the skipped entries."""
        raise NotImplementedError(f"workload {self.name!r} cannot read foreign weights from {path}")

    def predict(self, chain: Chain, images: Sequence[Path], out: Path) -> list[Path]:
        """Run a whole trained chain on files and draw its predictions; return the pictures written into `out`."""
        raise CapslogError(
            f"workload {self.name!r} draws no predictions on images; `capslog export RUN_DIR --weights FILE` writes "
            "the weights for a program of your own"
        )


def load_workload(config: Config) -> Workload:
    """Import `config.workload` and call it with the config, or return the workload object that the config holds.

    Raises ConfigError: as `call_function`, or the function returned no Workload.
    """
    if config.given_workload is not None:
        return _with_choices(config.given_workload, config)
    name = f"workload={config.workload!r}"
    try:
        workload = call_function(config.workload, name, config)
        if not isinstance(workload, Workload):
            raise ConfigError(
                f"{name} returned {type(workload).__name__}; it must return a varuna_capslog.model.workload.Workload"
            )
    except ConfigError as error:
        raise ConfigError(f"{config.source}: {error}" if config.source else str(error)) from error
    return _with_choices(workload, config)


def _with_choices(workload: Workload, config: Config) -> Workload:
    if config.train.precision == BF16_WEIGHTS:
        workload.hold_bfloat16()
    if not (config.variants or config.splits):
        return workload
    workload = copy.copy(workload)
    workload.variants, workload.splits, workload.numerics = config.variants, config.splits, config.numerics
    return workload
