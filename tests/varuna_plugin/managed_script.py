"""A Varuna user's script for morphing, as Varuna's documentation asks for: it goes on from the newest checkpoint, and
saves and ends after SIGUSR1. Rank 0 asks for a morph itself, as a poller of machines would.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
from pathlib import Path

import torch
import torch.distributed as dist
import varuna

import varuna_capslog.varuna_plugin as plugin
from tests.varuna_plugin import models

torch.set_num_threads(1)
parser = argparse.ArgumentParser()
for name in ("rank", "local_rank", "chunk_size", "batch-size", "steps", "morph-after"):
    parser.add_argument(f"--{name}", type=int)
parser.add_argument("--stage_to_rank_map")
parser.add_argument("--store", type=Path)
args = parser.parse_args()
asked = []
signal.signal(signal.SIGUSR1, lambda number, frame: asked.append(number))

replicas = [row.split(",") for row in args.stage_to_rank_map.strip(";").split(";")]
batch_size = args.batch_size * len(replicas[0])

plugin.install()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = models.Model(varuna.CutPoint, norm=False)
trainer = varuna.Varuna(
    model, args.stage_to_rank_map, models.get_batch, batch_size, args.chunk_size, local_rank=args.local_rank
)
optimizer = torch.optim.SGD(trainer.parameters(), lr=0.1)
trainer.set_optimizer(optimizer)
begin = max((int(folder.name.rpartition("_")[2]) for folder in args.store.glob("varuna_ckpt_*")), default=0)
if begin:
    trainer.load_checkpoint(str(args.store), begin)
replica = next(row.index(str(args.rank)) for row in replicas if str(args.rank) in row)
for step in range(begin + 1, args.steps + 1):
    whole = models.batch(batch_size, 8, 8, step)
    share = slice(replica * args.batch_size, (replica + 1) * args.batch_size)
    loss, _, _ = trainer.step({name: values[share] for name, values in whole.items()})
    optimizer.step()
    trainer.zero_grad()
    if args.rank == 0:
        with open(args.store / "losses.txt", "a") as file:
            file.write(f"{step} {dist.get_world_size()} {loss:.9f}\n")
        if begin == 0 and step == args.morph_after:
            os.replace("machines.next", "machines")
            with socket.create_connection(("127.0.0.1", int(os.environ["VARUNA_MORPH_PORT"]))) as manager:
                manager.sendall(b"morph")
                manager.shutdown(socket.SHUT_WR)
                manager.recv(1)
            while not asked:
                signal.pause()
    stops = torch.tensor(float(bool(asked)))
    dist.all_reduce(stops, op=dist.ReduceOp.MAX)
    if stops:
        trainer.checkpoint(str(args.store), step)
        break
dist.barrier()
