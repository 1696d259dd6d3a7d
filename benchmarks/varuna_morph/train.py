"""User's script that `measure.py` disturbs: eight pieces, 0.6 million parameters, AdamW, dropout, clipping.

PYTHONPATH=/path/to/varuna python benchmarks/varuna_morph/train.py RUN_DIR STEPS WORKERS
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import varuna
from torch import Tensor, nn
from torch.nn import functional as F

import varuna_capslog.varuna_plugin as plugin
from varuna_capslog.base import files

DIM = 192
RUN_DIR, STEPS, WORKERS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.GELU(), nn.Dropout(0.1), nn.Linear(DIM, DIM))
            for _ in range(8)
        )
        self.cuts = nn.ModuleList(varuna.CutPoint() for _ in range(7))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = x + self.blocks[0](x)
        for cut, block in zip(self.cuts, list(self.blocks)[1:], strict=True):
            x = cut(x)
            x = x + block(x)
        return F.mse_loss(x, target)


def batch(step: int) -> dict[str, Tensor]:
    time.sleep(0.05)  # stands for loading, without a core: 400 steps last until a worker has joined
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(8, 16, DIM, generator=generator) for name in ("x", "target")}


def note(step: int, loss: float, norm: float) -> None:
    files.append_jsonl(RUN_DIR / "times.jsonl", {"step": step, "time": time.time(), "pid": os.getpid()})


plugin.run_elastic(
    Model,
    lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    batch,
    steps=STEPS,
    batch_size=8,
    chunk_size=1,
    run_dir=RUN_DIR,
    workers=WORKERS,
    clip_grad_max_norm=0.5,
    on_step=note,
)
