"""Shape tables of one process that share what they traced: a trace of the tiny chain takes longer than ten steps."""

from __future__ import annotations

from typing import Any, ClassVar

from tests.engine.workload import TinyData
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.trace import ShapeTable


class SharedShapes(ShapeTable):
    """Table that traces a layer only where no table of this process, or of the one it was forked from, has traced an
    equal layer on equal inputs.
    """

    _traced_before: ClassVar[dict[tuple[str, ...], Any]] = {}

    def __init__(
        self, chain: Chain, device_type: str = "cpu", precision: str = "float32", weights: str = "float32"
    ) -> None:
        super().__init__(chain, device_type, precision, weights)
        self._traced = self._traced_before.setdefault((self._device, precision, weights), self._traced)


def trace_tiny(chain: Chain, *sizes: int) -> None:
    """Trace the tiny chain on microbatches of each number of samples in `sizes`, of every image size of `TinyData`."""
    table = SharedShapes(chain)
    for size in sizes:
        for sample in range(6):  # the image's size follows from the index of a microbatch's first sample
            table.boundaries(TinyData(6).minibatch([[sample] * size], 0).inputs[0])
