"""How long a run pauses for a planned change and for a crash, against the size of its state.

One run of three devices per size. Members leave with notice and others join, then members are killed and replaced. The
state is weights and AdamW's two moments, 12 bytes per parameter; every layer has an owner and, on another device, a
copy (`protection: sync`, `redundancy: 1`).
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from live import HERE, Clock, Live, append_result, pauses, quantiles, step_ends

from varuna_capslog.base.errors import CapslogError

SIZES = ((4, 8), (64, 8), (256, 8), (1024, 8), (1024, 64))
"""Megabytes of state, and in how many blocks."""
DEVICES = 3
BYTES_PER_PARAMETER = 12


def overrides(megabytes: int, blocks: int) -> list[str]:
    """The model of `small.yaml` with blocks [dim, 2 dim] of that size."""
    dim = round(math.sqrt(megabytes * 2**20 / BYTES_PER_PARAMETER / (4 * blocks)))
    model = [f"model.blocks={blocks}", f"model.dim={dim}", f"model.hidden={2 * dim}"]
    return [*model, "train.checkpoint_every=1000000", "train.epochs=1000000"]


def measure(megabytes: int, blocks: int, changes: int, kills: int, steps: int, seed: int) -> dict[str, Any]:
    """One run: its pauses, and what travelled in them."""
    dice, clock, ended_early = random.Random(seed), Clock(), None
    left: dict[int, float] = {}
    crashes: list[float] = []
    with Live(HERE / "small.yaml", overrides(megabytes, blocks), DEVICES) as live:
        newest = live.wait_steps(DEVICES, 2 * steps, 300)
        try:
            for _ in range(changes):
                began = live.leave(dice.choice(live.members))
                newest = live.wait_steps(DEVICES - 1, steps, 300, after=newest)
                left[newest] = began
                live.join()
                newest = live.wait_steps(DEVICES, steps, 300, after=newest)
            for _ in range(kills):
                time.sleep(dice.random() * 0.5)
                killed = live.kill(dice.choice(live.members))
                found = live.wait_steps(DEVICES - 1, steps, 300, after=newest)
                crashes.append(min(last for _, last in step_ends(live.marks())[found].values()) - killed)
                live.join()
                newest = live.wait_steps(DEVICES, steps, 300, after=found)
        except (TimeoutError, RuntimeError, CapslogError) as error:  # what was measured up to here is told
            ended_early = str(error)[:500]
        marks = live.marks()
        # the run's files count the generations that trained from 0
        morphs = {event["generation"] + 1: event for event in live.events() if event["kind"] == "morph"}
    found_pauses = {pause.generation: pause for pause in pauses(marks)}
    ends = step_ends(marks)
    begun = {number: min(last for _, last in rows.values()) for number, rows in ends.items()}
    gaps = [
        b[1] - a[1]
        for rows in ends.values()
        for a, b in zip(list(rows.values())[1:], list(rows.values())[2:], strict=False)
    ]
    planned = [found_pauses[number] for number in left if number in found_pauses]
    return {
        "megabytes": megabytes,
        "blocks": blocks,
        "seconds": clock.seconds,
        "ended_early": ended_early,
        "step_ms": quantiles(gaps),
        "leave_net_ms": quantiles([pause.net for pause in planned]),
        "notice_to_first_step_s": quantiles([begun[n] - began for n, began in left.items() if n in begun], 1, 2),
        "moved_in_leaves_mb": _megabytes([morphs[number]["moved_bytes"] for number in left if number in morphs]),
        "kill_to_step_ms": quantiles(crashes),
        "moved_in_crashes_mb": _megabytes(
            [event["moved_bytes"] for event in morphs.values() if any("lost" in why for why in event["why"])]
        ),
        "transfer_ms": quantiles([event["transfer_seconds"] for event in morphs.values()]),
    }


def _megabytes(sizes: list[int]) -> float | None:
    return round(statistics.median(sizes) / 2**20, 1) if sizes else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=8, help="leaves, and as many joins, of each size")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="of every generation, before the next change")
    parser.add_argument("--only", type=int, nargs="*", help="megabytes")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for megabytes, blocks in SIZES:
        if not given.only or megabytes in given.only:
            found = measure(megabytes, blocks, given.changes, given.kills, given.steps, given.seed)
            append_result("state", {"seed": given.seed, "devices": DEVICES, **found})


if __name__ == "__main__":
    main()
