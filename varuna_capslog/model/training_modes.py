"""Keeps modules in eval mode while a model trains: those that its user froze, such as a BatchNorm.

Everything that trains, recomputes or estimates layers puts them into training mode here, never by `train()` alone,
which would unfreeze them. A captured layer records which of its modules were frozen when it was captured
(`capture.runtime.Frozen`); the modes that its modules have when training begins count as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from varuna_capslog.model.capture.runtime import Frozen
from varuna_capslog.model.layer import Layer

__all__ = ["freeze_layers", "frozen_parts", "in_training", "put_in_training"]


@contextmanager
def in_training(model: nn.Module) -> Iterator[None]:
    """Put the model into the mode that it trains in; at the end, into the mode that it was in before.

    Where the model itself is in training mode, its parts that are not are frozen; else its own `train` decides. Parts
    that a `train` of the model's classes leaves in eval mode are frozen in any case.
    """
    before = [(part, part.training) for part in model.modules()]
    trains = model.training
    try:
        model.train()
        for part, mode in before:
            part.training &= mode or not trains
        yield
    finally:
        for part, mode in before:
            part.training = mode


def freeze_layers(layers: Iterable[Layer], model: nn.Module) -> None:
    """Record in the layers of a captured model which of their modules are frozen."""
    trained = [part for part in model.modules() if part.training]
    with in_training(model):
        frozen = frozen_parts(model)
    for layer in layers:
        assert isinstance(layer.module, Frozen)
        layer.module.freeze(frozen, trained)


def put_in_training(layers: Iterable[nn.Module], chain: Sequence[nn.Module] | None = None) -> None:
    """Put layers into training mode, except for frozen modules.

    Frozen are: modules that were frozen when a model was captured; modules of captured layers that are in eval mode now
    and were not then; and modules of other layers that are in eval mode. If all modules of one of the last two kinds
    are in eval mode, their user has evaluated the model, and none of that kind is frozen.

    Args:
        chain: the modules of all layers, where `layers` are only some of them, or copies; None: they are all.
    """
    layers = list(layers)
    trains = {isinstance(module, Frozen) for module in chain or layers if any(part.training for part in _parts(module))}
    for module in layers:
        judged = _parts(module) if isinstance(module, Frozen) in trains else ()
        frozen = [part for part in judged if not part.training]
        module.train()
        for part in frozen:
            part.training = False


def frozen_parts(module: nn.Module) -> list[nn.Module]:
    """Return the parts of a module in training that are in eval mode."""
    return [part for part in module.modules() if not part.training]


def _parts(module: nn.Module) -> Iterable[nn.Module]:
    return module.trained if isinstance(module, Frozen) else module.modules()
