"""A host of a chaos run: an ordinary supervisor, `Host`, in a process of its own that chaos may kill or stop.

It is forked by a fork server of the rig, so that a machine that comes back need not import anything first. The fork
server of its workers is a fork in turn.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from varuna_capslog.base.errors import CapslogError

__all__ = ["ENTRY", "MODULES", "main"]

ENTRY = "tests.rig.watch:main"
MODULES = (
    "varuna_capslog.start.member_worker",
    "varuna_capslog.elastic.member.runtime",
    "tests.rig.relayed",
    "torch.utils.tensorboard",
    "torch._dynamo",
    "torch._subclasses.fake_tensor",
    "rich.progress",
)


def main(order: Mapping[str, Any]) -> int:
    """Supervises `order["workers"]` workers of the run in `order["run_dir"]` until the host has no more to do."""
    if order.get("namespace"):
        from tests.rig.machines.tun import join

        join(str(order["namespace"]))  # before there is any other thread
    from tests.rig.faults import JumpedClock
    from varuna_capslog.base import clock
    from varuna_capslog.base.fork_server import PRELOADED
    from varuna_capslog.base.supervisor import Interrupted, WorkerFailed
    from varuna_capslog.config.reading import load_config
    from varuna_capslog.elastic.host.host import Host, HostOptions
    from varuna_capslog.elastic.host.workers import member_server
    from varuna_capslog.elastic.store.opening import StoreGone

    clock.use(JumpedClock(Path(order["run_dir"]) / "chaos", str(order["name"])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_dir = Path(order["run_dir"])
    config = load_config(run_dir / "config.yaml")

    def say(line: str) -> None:
        sys.stdout.write(f"{time.time():.3f} {line}\n")

    environment: dict[str, str] = order["environment"]
    modules = (*PRELOADED, *MODULES, config.workload.partition(":")[0])
    server = member_server(ENTRY, modules, environment, prepared=True)  # before there is any other thread
    host = Host(
        HostOptions(
            run_dir,
            ENTRY,
            num_workers=int(order["workers"]),
            name=str(order["name"]),
            store=str(order["store"]),
            environment=environment,
            settings=config.elastic,
            say=say,
            sources=None,
            fork_server=server,
        )
    )
    try:
        end = host.run()
    except Interrupted as error:
        say(str(error))
        return 130
    except (WorkerFailed, StoreGone, CapslogError) as error:
        say(str(error))
        return 1
    say(f"host ends: {end.how}, pid {os.getpid()}")
    return 0
