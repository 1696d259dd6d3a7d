"""Peak and processor seconds of a last stage with many classes: its loss whole, in chunks, and with logits in chunks.

The stage is a linear layer of [B, S, 256] to V classes and the mean cross entropy. Peaks are those of the profiler's
real run (CPU allocator, AdamW) and of the estimate; processor seconds are of a forward and a backward on one thread.
Every round runs all ways once, the order reversed from one round to the next. Prints the table of README.md.

python -m benchmarks.variants.loss --shape 8 512 32000 --rounds 3
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.workload import Workload
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.estimate import estimate_workload
from varuna_capslog.profiling.measure import profile_workload
from varuna_capslog.variants.chunked_loss import chunked_cross_entropy

WIDTH = 256
WAYS = {
    "plain": "`cross_entropy`",
    "loss": "`data.loss=chunked_cross_entropy`",
    "plain, inside": "inside the model",
    "logits": "inside the model, variant `chunked-loss`",
}


class Model(nn.Module):
    """x [B, S, 256], classes [B, S] -> logits, or logits and their loss."""

    def __init__(self, classes: int, with_loss: bool) -> None:
        super().__init__()
        self.body, self.head, self.with_loss = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, classes, bias=False), with_loss

    def forward(self, x: Tensor, classes: Tensor) -> Any:
        """See the class."""
        logits = self.head(self.body(x))
        if not self.with_loss:
            return logits, classes
        return {"loss": F.cross_entropy(logits.flatten(0, 1), classes.flatten()), "logits": logits}


class LastStage(Workload):
    """Workload of two layers; the last one and the loss are measured."""

    name = "last stage"

    def __init__(self, way: str, batch: int, length: int, classes: int) -> None:
        self._way, self._shape, self._classes = way, (batch, length), classes
        if way == "logits":
            self.variants, self.numerics = {"head": "chunked-loss"}, "close"

    def build_chain(self) -> Chain:
        """Return the model as a captured chain whose only output is its loss or its logits."""
        example = {"x": torch.zeros(*self._shape, WIDTH), "classes": torch.ones(self._shape, dtype=torch.int64)}
        inside = self._way in ("logits", "plain, inside")
        chain = Chain.from_module(Model(self._classes, inside), ["head"], example, evaluates=False)
        return Chain(chain.layers, chain.inputs, ("loss",) if inside else chain.outputs, chain.name)

    def loss(self, outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
        """Return the model's own loss, or compute it from the logits."""
        if "loss" in outputs:
            return {"loss": outputs["loss"]}
        logits, classes = outputs.values()
        cross_entropy = chunked_cross_entropy if self._way == "loss" else F.cross_entropy
        return {"loss": cross_entropy(logits.flatten(0, 1), classes.flatten())}

    def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
        """Return the specs of x and classes, all of one size."""
        x = TensorSpec((*self._shape, WIDTH), torch.float32)
        return {"x": x, "classes": TensorSpec(self._shape, torch.int64)}


def seconds(workload: LastStage, chain: Chain, shape: tuple[int, int], classes: int) -> float:
    """Return the processor seconds of the last layer and its loss, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    values = {
        "classes": torch.randint(0, classes, shape, generator=generator),
        "x": torch.randn(*shape, WIDTH, generator=generator),
    }
    layer = chain.layers[-1]
    reads = {name: values["classes" if name == "classes" else "x"].clone() for name in layer.reads}
    for tensor in reads.values():
        tensor.requires_grad_(tensor.is_floating_point())
    layer.module.zero_grad()
    begun = time.process_time()
    written = layer.run(reads)
    outputs = {name: written.get(name, reads.get(name)) for name in chain.outputs}
    workload.loss({name: tensor for name, tensor in outputs.items() if tensor is not None}, None, {})["loss"].backward()
    return time.process_time() - begun


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", type=int, nargs=3, default=[8, 512, 32000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="plain ways before their others")
    args = parser.parse_args()
    batch, length, classes = args.shape
    torch.set_num_threads(1)
    from benchmarks.variants.loss import LastStage  # as worker processes import it

    workloads = {way: LastStage(way, batch, length, classes) for way in args.ways}
    chains = {way: workload.chosen_chain(evaluates=False) for way, workload in workloads.items()}
    spent: dict[str, list[float]] = {way: [] for way in args.ways}
    for number in range(args.rounds + 1):
        for way in args.ways if number % 2 == 0 else reversed(args.ways):
            took = seconds(workloads[way], chains[way], (batch, length), classes)
            if number:  # the first round warms up
                spent[way].append(took)
    print("| logits | way | peak, MiB | estimated, MiB | of plain | processor s | of plain |")
    print("|---|---|---|---|---|---|---|")
    conditions, first = RunConditions(recompute=False), 0
    for way in args.ways:
        rows = [
            next(row for row in profile.observations if row.layers == (1, 2))
            for profile in (profile_workload(workloads[way], conditions), estimate_workload(workloads[way], conditions))
        ]
        measured, estimated = (row.peak_bytes for row in rows)
        plain = "plain" if way in ("plain", "loss") else "plain, inside"
        first = measured if way == plain else first
        ratios = [took / base for took, base in zip(spent[way], spent[plain], strict=True)]
        print(
            f"| {args.shape} | {WAYS[way]} | {measured / 2**20:.0f} | {estimated / 2**20:.0f} | "
            f"{measured / first:.3f} | {statistics.median(spent[way]):.2f} | "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f}) |",
            flush=True,
        )


if __name__ == "__main__":
    main()
