"""Stages with several microbatches in one call (`grain`): which layers they may have, and how tensors join and split.

A message between two stages carries the microbatches of the smaller call. The rank of the larger call joins arriving
tensors along the sample dimension, and splits the tensors that it sends. A value without a sample dimension passes
unchanged, and its gradients are added.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.layout import GradientKey, Layout, ports_of, value_of
from varuna_capslog.model.chain import Chain, TensorSpec, Value
from varuna_capslog.model.trace import ShapeTable
from varuna_capslog.plans.parts import with_loss

__all__ = [
    "Joining",
    "check_grains",
    "check_joined",
    "joined_inputs",
    "layers_of_one_microbatch",
    "sample_dimensions",
    "specs_of_values",
    "stage_dimensions",
]


def check_grains(chain: Chain, layout: Layout) -> None:
    """Raise CapslogError where a stage of several microbatches per call has a layer that mixes samples (batch norm)."""
    for number, stage in enumerate(layout.stages):
        for layer in stage.numbers if stage.grain > 1 else ():
            if (norm := _batch_norm(chain, layer)) is not None:
                raise CapslogError(
                    f"stages[{number}].grain is {stage.grain}, but layer {chain.layers[layer].name!r} has a "
                    f"{type(norm).__name__}, whose statistics are those of one microbatch; choose grain 1 for "
                    "the stage of this layer, or another normalisation"
                )


def _batch_norm(chain: Chain, layer: int) -> nn.Module | None:
    modules = chain.layers[layer].module.modules()
    return next((module for module in modules if isinstance(module, nn.modules.batchnorm._BatchNorm)), None)


def layers_of_one_microbatch(
    chain: Chain, specs: tuple[Mapping[Value, TensorSpec], Mapping[Value, TensorSpec]], count: int
) -> list[int]:
    """Return the layers that no stage of `count` microbatches per call may have. specs: of all values, for one
    microbatch and for `count`.
    """

    def takes_one_microbatch(layer: int) -> bool:
        if _batch_norm(chain, layer) is not None:
            return True
        layers, passing = with_loss([layer], len(chain)), chain.values_at(layer)  # as with routes "relay"
        try:
            sample_dimensions(chain, layers, passing, specs, count)
        except CapslogError:
            return True
        return False

    return [layer for layer in range(len(chain)) if takes_one_microbatch(layer)]


def check_joined(chain: Chain, layout: Layout, inputs: Mapping[str, TensorSpec]) -> None:
    """Raise CapslogError where the layers, on fake tensors, fail for several microbatches in one call, or compute other
    values than for each microbatch alone (`sample_dimensions`). inputs: of one microbatch.
    """
    grain = max(stage.grain for stage in layout.stages)
    if grain == 1:
        return
    number = next(number for number, stage in enumerate(layout.stages) if stage.grain == grain)
    joined, table = joined_inputs([inputs] * grain, range(grain)), ShapeTable(chain)
    try:
        small, large = (specs_of_values(chain, table.boundaries(sizes)) for sizes in (inputs, joined))
    except CapslogError as error:
        reason = str(error).partition(";")[0]
        raise CapslogError(
            f"stages[{number}].grain is {grain}, but {reason}; choose grain 1 for every stage, or let the model's code "
            "take as many samples"
        ) from error
    stage_dimensions(chain, layout, (small, large), grain)


def specs_of_values(chain: Chain, cuts: Sequence[Mapping[str, TensorSpec]]) -> dict[Value, TensorSpec]:
    """Return the specs of all values. cuts: specs at every cut (`ShapeTable.boundaries`)."""
    return {value: specs[value.name] for cut, specs in enumerate(cuts) for value in chain.values_at(cut)}


def joined_inputs(rows: Sequence[Mapping[str, TensorSpec]], microbatches: Sequence[int]) -> dict[str, TensorSpec]:
    """Specs of several microbatches' inputs, concatenated in dimension 0. Raises CapslogError for unequal specs."""
    first, count = dict(rows[0]), len(rows)
    for row, microbatch in zip(rows, microbatches, strict=True):
        if dict(row) != first:
            name = next(name for name in first if row.get(name) != first[name])
            shape = "none" if row.get(name) is None else list(row[name].shape)
            raise CapslogError(
                f"microbatches {microbatches[0]} and {microbatch} are to be taken in one call, but their input "
                f"{name!r} is {list(first[name].shape)} and {shape}; choose grain 1, or data of one size"
            )
    return first if count == 1 else {name: _times(name, spec, count) for name, spec in first.items()}


def _times(name: str, spec: TensorSpec, count: int) -> TensorSpec:
    if not spec.shape:
        raise CapslogError(f"the input {name!r} has no dimension of samples; choose grain 1")
    stride = spec.stride if spec.stride[0] == max(spec.stride) else ()
    return TensorSpec((count * spec.shape[0], *spec.shape[1:]), spec.dtype, stride, spec.requires_grad)


def stage_dimensions(
    chain: Chain, layout: Layout, specs: tuple[Mapping[Value, TensorSpec], Mapping[Value, TensorSpec]], count: int
) -> dict[Value, int | None]:
    """Return the `sample_dimensions`, which defines `specs`, `count` and errors, for the stages of larger calls."""
    stages = [stage for stage in layout.stages if stage.grain > 1]
    layers = with_loss((layer for stage in stages for layer in stage.numbers), len(chain))
    passing = {value for stage in stages for value in ports_of(chain, stage.numbers, layout.direct).enters}
    return sample_dimensions(chain, layers, passing, specs, count)


def sample_dimensions(
    chain: Chain,
    layers: Collection[int],
    passing: Collection[Value],
    specs: tuple[Mapping[Value, TensorSpec], Mapping[Value, TensorSpec]],
    count: int,
) -> dict[Value, int | None]:
    """Dimension of each value that grows with the number of microbatches in a call; None: none does.

    Args:
        layers: layers that get several microbatches per call; layer L is the loss. Values that they neither read nor
            write are left out, except those in `passing`, which only pass through their stages.
        specs: for one microbatch, and for `count` microbatches.

    Raises CapslogError for a value that grows in several dimensions, or that depends on all samples but has no
    dimension of samples: such layers compute other values for several microbatches than for each alone.
    """
    dimensions: dict[Value, int | None] = {}
    for value in sorted(chain.readers, key=lambda value: value.writer):
        if value not in passing and value.writer not in layers and not set(chain.readers[value]) & set(layers):
            continue
        small, large = specs[0][value].shape, specs[1][value].shape
        grown = [place for place, (a, b) in enumerate(zip(small, large, strict=True)) if a != b]
        if len(grown) > 1 or any(large[place] != count * small[place] for place in grown):
            raise CapslogError(
                f"{_named(chain, value)} is {list(small)} for one microbatch and {list(large)} for {count}: it has not "
                "one dimension of samples; choose grain 1 for the stages that write or read it"
            )
        dimensions[value] = grown[0] if grown else None
        reads = chain.reads[value.writer] if value.writer in layers else ()
        mixed = specs[0][value].requires_grad and any(dimensions[read] is not None for read in reads)
        if not grown and (mixed or len(chain) in {*layers} & {*chain.readers[value]}):
            raise CapslogError(
                f"{_named(chain, value)} has no dimension of samples, so that it is another one for {count} "
                "microbatches together than for each; choose grain 1 for the stages that write or read it"
            )
    return dimensions


def _named(chain: Chain, value: Value) -> str:
    where = "an input" if value.writer < 0 else f"written by layer {chain.layers[value.writer].name!r}"
    return f"{value.name!r} ({where})"


class Joining:
    """Functions that join and split tensors between two stages, by the `sample_dimensions` of the values."""

    def __init__(self, dimensions: Mapping[Value, int | None]) -> None:
        self._dimensions = dimensions

    def part(self, key: Value | GradientKey, tensor: Tensor, place: int, spec: TensorSpec) -> Tensor:
        """Part `place` of a larger call's tensor. A gradient without samples goes to part 0; other parts are zeros."""
        value = value_of(key)
        dimension = self._dimensions[value]
        if dimension is None:
            return torch.zeros_like(tensor) if key is not value and place else tensor
        size = spec.shape[dimension]
        with torch.no_grad():  # the tensor may be a leaf of a stage on this rank
            return spec.empty(tensor.device).copy_(tensor.narrow(dimension, place * size, size))

    def join(self, key: Value | GradientKey, tensors: Sequence[Tensor], spec: TensorSpec) -> Tensor:
        """Tensor of a larger call, in the layout of `spec`. Gradients without samples are added in call order."""
        value = value_of(key)
        dimension = self._dimensions[value]
        if dimension is not None:
            with torch.no_grad():
                return torch.cat(list(tensors), dimension, out=spec.empty(tensors[0].device))
        return tensors[0] if key is value else functools.reduce(torch.add, tensors)
