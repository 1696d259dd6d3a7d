"""A Varuna user's script as in Varuna's documentation; `--fail` breaks rank 1 at a chosen place.

Run by the launch tests; it imports the plugin for a timeout only.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import varuna

from tests.varuna_plugin import models

torch.set_num_threads(1)
parser = argparse.ArgumentParser()
for name in ("rank", "local_rank", "chunk_size", "batch-size"):
    parser.add_argument(f"--{name}", type=int)
parser.add_argument("--stage_to_rank_map")
parser.add_argument("--fail", default="")
parser.add_argument("--store", default="")
parser.add_argument("--cuts", default="", help="the script's own, which the launcher must leave alone")
parser.add_argument("--timeout", type=float, default=0.0)
args = parser.parse_args()
if args.timeout:
    import varuna_capslog.varuna_plugin as plugin

    plugin.configure(timeout_seconds=args.timeout)


def fail(where: str) -> None:
    """Break rank 1 in the second step if `--fail` names this place."""
    if args.fail == where and args.rank == 1 and state["step"] == 1:
        if where == "hang":
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGKILL)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        fail("forward")
        fail("hang")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        fail("backward")
        return gradient


class Model(models.Model):
    def __init__(self) -> None:
        super().__init__(varuna.CutPoint)
        self.head.register_forward_pre_hook(lambda module, inputs: (Failing.apply(inputs[0]),))


state = {"step": 0}
dist.init_process_group("gloo")
torch.manual_seed(0)
trainer = varuna.Varuna(
    Model(),
    args.stage_to_rank_map,
    models.get_batch,
    args.batch_size,
    args.chunk_size,
    device="cpu",
    local_rank=args.local_rank,
)
optimizer = torch.optim.SGD(trainer.parameters(), lr=0.1)
trainer.set_optimizer(optimizer)
for step in range(3):
    state["step"] = step
    loss, _, _ = trainer.step(models.batch(args.batch_size, 8, 8, step))
    fail("optimizer")
    optimizer.step()
    trainer.zero_grad()
    if args.fail == "exception" and args.rank == 1 and step == 1:
        sys.exit(9)
    if args.store:
        if args.fail == "checkpoint" and args.rank == 1 and step == 1:
            from varuna_capslog.varuna_plugin import checkpoint

            checkpoint.write_synced = lambda path, state: os.kill(os.getpid(), signal.SIGKILL)
        trainer.checkpoint(args.store)
if args.rank == 0:
    cuts = trainer.partitioned_model.capslog.partition.cuts
    sys.stderr.write(f"losses end with {loss:.6f}; cuts {cuts}; {args.cuts}\n")
dist.barrier()
