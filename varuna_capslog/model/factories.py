"""Factories of a chain's layers, so that a process builds only the layers that it needs.

A layer that is not built has a hollow module of the same code, with its names, shapes and buffers. Weights depend on
the seed and the layer's index alone, not on which layers are built or in which order; torch's generator is restored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.seeds import mix
from varuna_capslog.model.hollow import Stripped, built_hollow, replace_parameters
from varuna_capslog.model.layer import Layer

__all__ = ["Factories", "LayerFactory"]


@dataclass(frozen=True)
class LayerFactory:
    """Layer that is built where it is needed.

    name, reads, writes: as in `Layer`.
    make: makes a new module at every call, on the CPU, with random numbers of torch only.
    """

    name: str
    make: Callable[[], nn.Module]
    reads: tuple[str, ...] = ("x",)
    writes: tuple[str, ...] = ("x",)


class Factories:
    """Factories of a chain's layers, in order; layer k is made with (seed, k).

    Attributes:
        values: by address `<layer>.<name>`, values of parameters and buffers that replace those of the factory.
    """

    def __init__(self, layers: Iterable[LayerFactory], seed: int) -> None:
        self._layers, self._seed = tuple(layers), seed
        self.values: dict[str, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> Factories:
        return self  # a copied chain uses the same factories

    def build(self, index: int) -> nn.Module:
        """Build the module of one layer with its initial values; its tied parameters are not shared yet."""
        module = self._made(index)
        with torch.no_grad():
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                value = self.values.get(f"{self._layers[index].name}.{name}")
                if value is not None:
                    tensor.copy_(value)
        return module

    def hollow_layers(self, tied: Sequence[Sequence[str]]) -> list[Layer]:
        """Return the layers with parameters that have shapes only; see `Chain.from_factories` for `tied`."""
        stripped: Stripped = {}
        layers: list[Layer] = []
        users: dict[nn.Parameter, str] = {}
        for index, layer in enumerate(self._layers):
            _, (module,) = built_hollow(functools.partial(self._made, index), lambda made: [made], stripped)
            for name, parameter in module.named_parameters():
                if users.setdefault(parameter, layer.name) != layer.name:
                    raise CapslogError(
                        f"the factories of {users[parameter]!r} and {layer.name!r} give out one parameter, {name!r} in "
                        "the latter; let each make its own, and name both in tied"
                    )
            layers.append(Layer(layer.name, module, layer.reads, layer.writes))
        for group in tied:
            _tie(layers, group)
        return layers

    def _made(self, index: int) -> nn.Module:
        layer = self._layers[index]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(mix(self._seed, index))
            module = layer.make()
        if not isinstance(module, nn.Module):
            raise CapslogError(
                f"the factory of layer {layer.name!r} returned {type(module).__name__}; it must return an nn.Module"
            )
        return module


def _tie(layers: Sequence[Layer], group: Sequence[str]) -> None:
    """Make all parameters of one name under these addresses the same parameter."""
    modules = [_parameters_under(layers, address) for address in group]
    shapes = [
        {
            name: (tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
            for name, parameter in parameters.items()
        }
        for parameters in modules
    ]
    for address, parameters, shape in zip(group[1:], modules[1:], shapes[1:], strict=True):
        if shape != shapes[0]:
            raise CapslogError(f"tied: {group[0]!r} has {shapes[0]}, but {address!r} has {shape}; tie what is alike")
        replace_parameters(
            (layer.module for layer in layers), {parameters[name]: parameter for name, parameter in modules[0].items()}
        )


def _parameters_under(layers: Sequence[Layer], address: str) -> Mapping[str, nn.Parameter]:
    """Return the parameter at an address, or all parameters of the module there, by their names inside the module."""
    for layer in sorted(layers, key=lambda layer: -len(layer.name)):
        if f"{address}.".startswith(f"{layer.name}."):
            inner = address[len(layer.name) + 1 :]
            named = layer.module.named_parameters(remove_duplicate=False)
            parameters = {
                name: parameter for name, parameter in named if not inner or f"{name}.".startswith(f"{inner}.")
            }
            if parameters:
                return {name[len(inner) :]: parameter for name, parameter in parameters.items()}
    raise CapslogError(
        f"tied: no layer has a parameter, or a module with some, at {address!r}; give <layer>.<name inside the layer>"
    )
