"""One machine of an elastic run of this library: a `Host` with one worker, started like `capslog host` starts it.

python our_machine.py FOLDER --slot 0 --port 29401 --devices 1 --replicas 4 --seconds 0.0005 --steps 300
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from varuna_capslog.config.settings import Config  # noqa: E402


def settings(folder: Path, devices: int, replicas: int, seconds: float, steps: int) -> Config:
    """Return `rivals.yaml` with the settings of this run."""
    from varuna_capslog.config.reading import load_config

    overrides = {
        "run_dir": folder / "run",
        "model.seconds": seconds,
        "train.max_steps": steps,
        "pipeline.devices": devices,
        "pipeline.replicas": replicas,
    }
    return load_config(HERE / "rivals.yaml", [f"{key}={value}" for key, value in overrides.items()])


def main() -> None:
    """Run one machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--slot", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    from varuna_capslog.elastic.host.host import Host, HostOptions
    from varuna_capslog.elastic.host.workers import member_server
    from varuna_capslog.start.elastic_host import member_modules, starting_point, wait_for_store

    config = settings(args.folder, args.devices, args.replicas, args.seconds, args.steps)
    address = f"127.0.0.1:{args.port}"
    path = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    common: dict[str, Any] = {
        "entry": "ours:work",
        "name": f"machine{args.slot}",
        "environment": {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        "settings": config.elastic,
        "say": lambda line: print(line, flush=True),
        "sources": (),
        "modules": member_modules(config),
        "hosts": args.devices * args.replicas,
    }
    # as in `capslog host`: the workers' modules are imported while this machine plans, or waits for the planning one
    server = member_server(common["entry"], common["modules"], common["environment"])
    common["fork_server"] = server
    if args.slot == 0:
        server.call("varuna_capslog.start.local_run:prepared_run", config, False)
        keys, stamp = starting_point(config)
        Host(HostOptions(config.run_dir, serve_at=address, keys=keys, first=stamp, **common)).run()
    else:
        wait_for_store(config.run_dir, address, 280, common["say"])
        Host(HostOptions(config.run_dir, store=address, **common)).run()


if __name__ == "__main__":
    main()
