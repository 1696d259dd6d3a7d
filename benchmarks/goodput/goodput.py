"""Compares the productive time that a disturbed run accounts for with the wall time that this script measures.

Four members on one host, the small model of `../morph` with blocks that sleep, so that a step takes about 200 ms. Every
`--every` seconds a member is killed and a new one is started at once. At the end the account of `capslog report` is
read from the run's files, and its sum is compared with the time from just before the launch to the end of the run.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "morph"))

from live import HERE, SLEEPING, Live, append_result

from varuna_capslog.base import files
from varuna_capslog.base.failures import losses_by_cause
from varuna_capslog.reports.changes import account_of
from varuna_capslog.reports.run import read_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between faults")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    overrides = ["train.checkpoint_every=500", f"train.max_steps={args.steps}"]
    draw, began, killed = random.Random(args.seed), time.time(), 0
    with Live(HERE / "small.yaml", [*SLEEPING, *overrides], 4) as live:
        live.wait_steps(4, 5, 120)
        until = time.monotonic() + args.every
        while live.ended is None:
            time.sleep(0.05)
            if time.monotonic() < until or max(mark.step for mark in live.marks()) > args.steps - 25:
                continue
            live.kill(draw.choice(live.members))
            live.join()
            killed, until = killed + 1, until + args.every
        live.finish(60)
        wall = time.time() - began
        account = account_of(read_run(live.folder))
        causes = losses_by_cause(files.read_jsonl(live.folder / "events.jsonl"))
    assert account is not None
    append_result(
        "../goodput",
        {
            "steps": args.steps,
            "every_seconds": args.every,
            "killed": killed,
            "wall_seconds": round(wall, 2),
            "account_seconds": round(account.total, 2),
            "difference_percent": round(100 * (account.total / wall - 1), 3),
            "productive_percent_of_wall": round(100 * account.seconds["productive"] / wall, 2),
            "account": {kind: round(seconds, 2) for kind, seconds in account.seconds.items()},
            "causes": Counter(causes.values()),
        },
    )


if __name__ == "__main__":
    main()
