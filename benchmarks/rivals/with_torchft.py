"""Data-parallel training with torchft: each worker is a replica group, and a returning worker takes a peer's weights.

`--shards documented` has the form of torchft's own example: its sampler gives each group a fixed part of the samples,
and the group keeps the position of its loader on its disk. `--shards participants` is the most exact form that its
interface allows: the quorum is awaited before the step, and the step's minibatch is divided among the participants.
"""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta
from pathlib import Path

from task import MINIBATCH, Digits, StepLog, network, optimizer, order, save
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

WORKERS = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--shards", choices=("documented", "participants"), required=True)
    args = parser.parse_args()
    slot, documented = int(os.environ["SLOT"]), args.shards == "documented"
    steps, data, module = order(args.folder), Digits(), network(args.seconds)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def state() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": adam.state_dict()}

    def load(saved: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(saved["model"])
        adam.load_state_dict(saved["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        use_async_quorum=documented,
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"slot_{slot}",
        hostname="127.0.0.1",
        init_sync=False,  # as its documentation advises if all begin with the same weights
    )
    model = DistributedDataParallel(manager, module)
    adam = Optimizer(manager, optimizer(module))
    flat = [sample for samples in steps for sample in samples]
    sampler = DistributedSampler(
        flat, replica_rank=slot, num_replica_groups=WORKERS, group_rank=0, num_replicas=1, shuffle=False
    )
    shard, per_step = [flat[position] for position in sampler], MINIBATCH // WORKERS
    position = args.folder / f"loader-{slot}"
    at = int(position.read_text()) if position.exists() else 0
    log = StepLog(args.folder, str(slot))
    (args.folder / f"ready-{slot}").touch()
    while not all((args.folder / f"ready-{peer}").exists() for peer in range(WORKERS)):
        time.sleep(0.02)
    while manager.current_step() < len(steps):
        adam.zero_grad()
        if documented:
            mine, total = shard[at : at + per_step], None
            at += per_step
            position.write_text(str(at))
            if not mine:
                raise SystemExit("this group's samples are used up")
            factor = 1.0
        else:
            mine = steps[manager.current_step()][manager.participating_rank() :: manager.num_participants()]
            total, factor = MINIBATCH, float(manager.num_participants())
        loss = data.loss(model, mine, total) * factor
        manager.wait_quorum()
        step, attempt = manager.current_step() + 1, str(manager._quorum_id)
        log.tried(step, attempt, mine if manager.is_participating() else [])
        loss.backward()
        adam.step()
        if manager.current_step() == step:
            log.kept(step, attempt)
    save(module.state_dict(), args.folder / f"final-{slot}.pt")
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
