"""The chain of `tests.profiling.workloads.Megabytes` as a module with CutPoints, for profiles by both engines."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.profiling.workloads import Megabytes


def build() -> nn.Module:
    from varuna import CutPoint

    from varuna_capslog.varuna_plugin.engine import ChainModule

    workload = Megabytes()
    return ChainModule(workload.build_chain(), CutPoint, workload.loss)


def get_batch(size: int, device: Any = None) -> dict[str, Any]:
    """Return the inputs that our own profiler makes up."""
    workload = Megabytes()
    inputs = {name: spec.empty().fill_(1) for name, spec in workload.profile_inputs(size).items()}
    targets, normalisers = workload.profile_targets(size)
    return {"inputs": inputs, "targets": targets, "normalisers": normalisers}


def whole_job(communicator: Any, cuts: list[int], chunk_size: int) -> Any:
    """Run an untrimmed job; return the middle stage's row."""
    # equal tokens make a saturated loss, whose gradients are subnormal numbers and a hundred times as slow
    torch.set_flush_denormal(True)
    try:
        return _whole_job(cuts, chunk_size)
    finally:
        torch.set_flush_denormal(False)


def _whole_job(cuts: list[int], chunk_size: int) -> Any:
    from tests.varuna_plugin import cases
    from varuna_capslog.profiling.conditions import RunConditions
    from varuna_capslog.varuna_plugin import Microbatches, profiling

    with cases.patched(cuts, loss="sum") as varuna:
        torch.manual_seed(0)
        mapping = cases.stage_map(len(cuts), 1)
        trainer = varuna.Varuna(
            build(), mapping, lambda size, device: get_batch(chunk_size), 4 * chunk_size, chunk_size, device="cpu"
        )
        optimizer = torch.optim.AdamW(trainer.parameters())
        trainer.set_optimizer(optimizer)
        inputs = Microbatches([get_batch(chunk_size)] * 4)
        if trainer.stage == 1:
            return profiling.observe(trainer, inputs, (cuts[1], cuts[2]), RunConditions("cpu", chunk_size, {}))
        for _ in range(profiling.STEPS):
            trainer.step(inputs)
            optimizer.step()
            trainer.zero_grad()
    return None


class Picky(nn.Module):
    """Model whose second piece fails on dummy tensors."""

    def __init__(self) -> None:
        super().__init__()
        from varuna import CutPoint

        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.cuts = nn.ModuleList(CutPoint() for _ in range(2))
        self.first.requires_grad_(True)

    def forward(self, x: Any) -> Any:
        x = self.cuts[0](self.first(x) - 100.0)
        if not getattr(x, "_source", None) and float(x.detach().max()) > 0:
            raise ValueError("values above 0 are none of mine")
        return self.last(self.cuts[1](self.second(x))).square().mean()


def picky_batch(size: int, device: Any = None) -> dict[str, Any]:
    return {"x": torch.zeros(size, 4)}
