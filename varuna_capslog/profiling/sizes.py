"""How large the inputs of a run are: the largest, which memory is planned for, and what is usual, which time is.

Both come from the workload's description of its data; nothing is decoded. `estimate` and `capslog profile` show them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.model.workload import Workload

__all__ = ["SAMPLES", "InputSizes", "input_sizes", "shapes_of"]

SAMPLES = 256
"""Minibatches that are sampled."""

Inputs = Mapping[str, TensorSpec]


@dataclass(frozen=True)
class InputSizes:
    """Inputs of one microbatch.

    Attributes:
        largest: of those that the run can meet.
        sampled: of random minibatches, the smallest first; one entry where all are alike.
    """

    largest: Inputs
    sampled: tuple[Inputs, ...]

    def quantile(self, part: float) -> Inputs:
        """The sampled inputs that this part of all is smaller than; 0.5 is the median."""
        return self.sampled[min(int(part * len(self.sampled)), len(self.sampled) - 1)]

    def to_json(self) -> dict[str, Any]:
        """Shapes: the largest, the median, and the histogram as [shapes, number of minibatches] by rising bytes."""
        counts = Counter(_text(inputs) for inputs in self.sampled)
        shapes = {_text(inputs): shapes_of(inputs) for inputs in self.sampled}
        return {
            "largest": shapes_of(self.largest),
            "median": shapes_of(self.quantile(0.5)),
            "sampled": len(self.sampled),
            "histogram": [[shapes[text], counts[text]] for text in shapes],
        }


def input_sizes(workload: Workload, microbatch_size: int, count: int = SAMPLES, seed: int = 0) -> InputSizes:
    """The sizes that training of this workload meets; equal seeds give equal samples."""
    sampled = workload.sampled_inputs(microbatch_size, count, seed)
    return InputSizes(workload.profile_inputs(microbatch_size), tuple(sorted(sampled, key=_num_bytes)))


def _num_bytes(inputs: Inputs) -> int:
    return sum(spec.num_bytes for spec in inputs.values())


def shapes_of(inputs: Inputs) -> dict[str, list[int]]:
    """The shape of every input, as a profile writes it."""
    return {name: list(spec.shape) for name, spec in inputs.items()}


def _text(inputs: Inputs) -> str:
    """The shape of the input with most bytes, which the others go along with."""
    name, spec = max(inputs.items(), key=lambda item: item[1].num_bytes)
    return f"{name} {'x'.join(map(str, spec.shape))}"
