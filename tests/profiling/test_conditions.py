"""Input sizes in a profile's conditions: the largest, the median, the histogram."""

from __future__ import annotations

from tests.profiling.workloads import Equal
from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.profiling.conditions import input_sizes


class Uneven(Equal):
    """Rows of 3, 5 or 9 numbers; training draws 9 once."""

    def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
        return {"x": TensorSpec((microbatch_size, 9)), "length": TensorSpec((microbatch_size,))}

    def sampled_inputs(self, microbatch_size: int, count: int, seed: int = 0) -> list[dict[str, TensorSpec]]:
        widths = [5, 9, 3, 5, 3, 5, 5][:count]
        return [
            {"x": TensorSpec((microbatch_size, width)), "length": TensorSpec((microbatch_size,))} for width in widths
        ]


def test_a_workload_without_sizes_has_one():
    sizes = input_sizes(Equal(width=16), 2)
    shapes = {"x": [2, 16]}
    assert sizes.to_json() == {"largest": shapes, "median": shapes, "sampled": 1, "histogram": [[shapes, 1]]}
    assert sizes.quantile(0.9) == sizes.largest


def test_the_histogram_counts_and_rises():
    sizes = input_sizes(Uneven(), 2)
    value = sizes.to_json()
    assert [(row["x"], count) for row, count in value["histogram"]] == [([2, 3], 2), ([2, 5], 4), ([2, 9], 1)]
    assert value["median"] == {"x": [2, 5], "length": [2]}
    assert [sizes.quantile(part)["x"].shape[1] for part in (0, 0.25, 0.3, 0.99, 1)] == [3, 3, 5, 9, 9]
    assert value["sampled"] == 7
