"""Which modules of a model stay in eval mode while it trains: those that its user froze, such as a BatchNorm.

Everything that trains, recomputes or estimates layers puts them into training mode here, never by `train()` alone,
which would wake up what was frozen. A captured layer knows by itself what was frozen when it was captured
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
    """While it is open, the model is in the mode that it trains in; afterwards, in the one that it was in before.

    Where the model itself is in training mode, its parts that are not are frozen; else its own `train` says which are.
    What a `train` of the model's classes leaves in eval mode is frozen in any case.
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
    """Lets the layers of a captured model know what of them is frozen."""
    trained = [part for part in model.modules() if part.training]
    with in_training(model):
        frozen = frozen_parts(model)
    for layer in layers:
        assert isinstance(layer.module, Frozen)
        layer.module.freeze(frozen, trained)


def put_in_training(layers: Iterable[nn.Module], chain: Sequence[nn.Module] | None = None) -> None:
    """Puts layers into training mode, but for what is frozen in them.

    OfTheModel what was frozen when a model was captured, its modules count that are in eval mode now and were not then;
    and of layers that were not captured those that are in eval mode. Unless all of the one or of the other kind are:
    then their user has evaluated the model.

    Args:
        chain: the modules of all layers, where `layers` are only some of them, or copies; None: they are all.
    """
    layers = list(layers)
    trains = {isinstance(one, Frozen) for one in chain or layers if any(part.training for part in _parts(one))}
    for module in layers:
        judged = _parts(module) if isinstance(module, Frozen) in trains else ()
        frozen = [part for part in judged if not part.training]
        module.train()
        for part in frozen:
            part.training = False


def frozen_parts(module: nn.Module) -> list[nn.Module]:
    """The parts of a module in training that are in eval mode."""
    return [part for part in module.modules() if not part.training]


def _parts(module: nn.Module) -> Iterable[nn.Module]:
    return module.trained if isinstance(module, Frozen) else module.modules()
