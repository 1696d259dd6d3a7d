"""Reads the inputs of an ordinary model as text (`--input` and `model.inputs`), and makes up tensors for them."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from varuna_capslog.base.errors import CapslogError

__all__ = ["INPUT_GRAMMAR", "SEED", "InputSpec", "parse_input"]

INPUT_GRAMMAR = (
    "NAME=DTYPE[SIZE,...] (LOW..HIGH, or 192/224/256, for a SIZE that changes) with an optional :HIGH (whole numbers "
    "below HIGH) or :=VALUE, as in input_ids=int64[1,128]:50257"
)
_PATTERN = re.compile(
    r"^(?P<name>[A-Za-z_][\w.]*)=(?P<dtype>\w+)\[(?P<sizes>[\d,\s./]*)\](?::(?P<fixed>=)?(?P<number>-?[\d.]+))?$"
)
SEED = 20210323


@dataclass(frozen=True)
class InputSpec:
    """Input of a model, as text `NAME=DTYPE[SIZE,...]`, `...:HIGH` or `...:=VALUE`.

    Made-up values are normally distributed for floating types, whole numbers from 0 below `high` for integers (default
    2, valid for any vocabulary), true or false for bool; `value` fills the tensor with one number instead. A size
    LOW..HIGH changes from microbatch to microbatch: `shape` has its greatest value and `least` the smallest, by
    dimension. So does a size A/B/C, which has only these values (`choices`, rising): the first ones of all sizes of a
    model go together, and so on.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    high: int = 2
    value: float | None = None
    least: Mapping[int, int] = field(default_factory=dict)
    choices: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def sized(self, part: float) -> tuple[int, ...]:
        """Return the shape with each changing size at this part of its range or values: 0 its least, 1 its greatest."""
        sizes = list(self.shape)
        for dimension, low in self.least.items():
            sizes[dimension] = low + round(part * (self.shape[dimension] - low))
        for dimension, values in self.choices.items():
            sizes[dimension] = values[round(part * (len(values) - 1))]
        return tuple(sizes)

    def make(self, shape: Sequence[int], seed: int) -> Tensor:
        """Make a tensor of that shape; equal seeds give equal values."""
        if self.value is not None:
            return torch.full(shape, self.value, dtype=self.dtype)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{SEED} {self.name} {seed}".encode()))
        if self.dtype.is_floating_point:
            return torch.randn(shape, generator=generator).to(self.dtype)
        high = 2 if self.dtype == torch.bool else self.high
        return torch.randint(0, high, shape, generator=generator).to(self.dtype)


def parse_input(text: str) -> InputSpec:
    """Read one `--input`.

    Raises:
        CapslogError: not of the form; an unknown dtype; a size of 0; a number that does not go with the dtype.
    """
    match = _PATTERN.match(text.strip().replace(" ", ""))
    if match is None:
        raise CapslogError(f"the input {text!r} is not of the form {INPUT_GRAMMAR}")
    dtype = getattr(torch, match["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise CapslogError(
            f"the input {text!r} has the unknown dtype {match['dtype']!r}; write float32, int64, bool, ..."
        )
    try:
        texts = match["sizes"].split(",")
        choices = {at: tuple(map(int, size.split("/"))) for at, size in enumerate(texts) if "/" in size}
        ranges = [choices.get(at) or tuple(map(int, size.split(".."))) for at, size in enumerate(texts)]
        shape = tuple(high for *_, high in ranges)
        least = {at: size[0] for at, size in enumerate(ranges) if len(size) == 2 and at not in choices}
        if any(len(size) > 2 and at not in choices for at, size in enumerate(ranges)):
            raise ValueError
    except ValueError:
        raise CapslogError(f"the input {text!r} needs at least one size, the batch; write {INPUT_GRAMMAR}") from None
    if any(not 1 < low < shape[at] for at, low in least.items()):
        raise CapslogError(f"the input {text!r} has a range that does not rise from at least 2; write LOW..HIGH")
    if any(list(values) != sorted(set(values)) for values in choices.values()):
        raise CapslogError(f"the input {text!r} has sizes that do not rise; write them from the least to the greatest")
    if min(shape) < 1 or any(values[0] < 1 for values in choices.values()):
        raise CapslogError(f"the input {text!r} has a size of 0; every size must be at least 1")
    made = InputSpec(match["name"], dtype, shape, least=least, choices=choices)
    if match["number"] is None:
        return made
    number = float(match["number"])
    if match["fixed"]:
        return replace(made, value=number)
    if dtype.is_floating_point or dtype == torch.bool or number != int(number) or number < 1:
        raise CapslogError(f"the input {text!r}: HIGH must be a whole number above 0 and goes with integer dtypes only")
    return replace(made, high=int(number))
