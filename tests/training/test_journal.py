"""What the record of a step says of a measured peak."""

from __future__ import annotations

import torch

from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.training.journal import peak_record


def test_a_peak_is_recorded_with_the_shapes_of_the_largest_microbatch() -> None:
    """A peak holds for the sizes it was measured at; without them it was compared with one of the largest input."""
    sizes = [(2, 3, 40, 60), (2, 3, 64, 48), (2, 3, 50, 50)]
    microbatches = [
        {"images": TensorSpec(size), "sizes": TensorSpec((2, 2), torch.int64, requires_grad=False)} for size in sizes
    ]
    assert peak_record((7, 5), "a meter", microbatches) == {
        "peak_bytes": [7, 5],
        "peak_source": "a meter",
        "peak_input": {"images": [2, 3, 64, 48], "sizes": [2, 2]},
    }
    assert peak_record((7,), None, []) == {"peak_bytes": [7], "peak_source": None}
