"""Data-parallel training for `torchrun`: restarts go back to the newest checkpoint.

It has the form of the example in the documentation of torch's elastic launch: load a checkpoint, train, save one at
regular steps by the first rank. Every worker takes its part of the step's minibatch, for any number of workers.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from task import MINIBATCH, Digits, StepLog, network, optimizer, order, save
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--every", type=int, required=True, help="steps between checkpoints")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    steps, data, module = order(args.folder), Digits(), network(args.seconds)
    adam, path, step = optimizer(module), args.folder / "checkpoint.pt", 0
    if path.exists():
        saved = torch.load(path)
        module.load_state_dict(saved["model"])
        adam.load_state_dict(saved["optimizer"])
        step = saved["step"]
    model = DistributedDataParallel(module)
    told = [os.environ["TORCHELASTIC_RESTART_COUNT"] + "-" + str(os.getpid())]
    dist.broadcast_object_list(told)
    log = StepLog(args.folder, os.environ["SLOT"])
    while step < len(steps):
        mine = steps[step][rank::world]
        log.tried(step + 1, told[0], mine)
        adam.zero_grad()
        # DDP averages gradients, so each worker's loss is scaled by the number of workers and weighted by its samples
        (data.loss(model, mine, MINIBATCH) * world).backward()
        adam.step()
        step += 1
        log.kept(step, told[0])
        if rank == 0 and (step % args.every == 0 or step == len(steps)):
            save({"model": module.state_dict(), "optimizer": adam.state_dict(), "step": step}, path)
    if rank == 0:
        save(module.state_dict(), args.folder / "final.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
