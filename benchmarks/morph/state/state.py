"""Measures the pause of a run for a planned change and for a crash, over the size of its state.

One run of three devices per size. Members leave with notice and others join, then members are killed and replaced. The
state is weights and AdamW's two moments, 12 bytes per parameter; every layer has an owner and, on another device, a
copy (`protection: sync`, `redundancy: 1`).
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import live
from live import HERE, Clock, Live, append_result, pauses, quantiles, step_ends

from varuna_capslog.base.errors import CapslogError

SIZES = ((4, 8), (64, 8), (256, 8), (1024, 8), (1024, 64))
"""Megabytes of state, and number of blocks."""
DEVICES = 3
BYTES_PER_PARAMETER = 12


def overrides(megabytes: int, blocks: int) -> list[str]:
    """Return overrides of `small.yaml` that give the model blocks [dim, 2 dim] and `megabytes` of state."""
    dim = round(math.sqrt(megabytes * 2**20 / BYTES_PER_PARAMETER / (4 * blocks)))
    model = [f"model.blocks={blocks}", f"model.dim={dim}", f"model.hidden={2 * dim}"]
    return [*model, "train.checkpoint_every=1000000", "train.epochs=1000000"]


def main_of_member(arguments: Sequence[str]) -> int:
    """Entry point of a member; it also writes its thread's processor time at the ends and beginnings of steps."""
    from varuna_capslog.elastic.member.pipeline_work import PipelineWork

    folder = Path(arguments[0]) / "processor"
    folder.mkdir(exist_ok=True)
    file = os.open(folder / os.environ["CAPSLOG_MEMBER"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    class Accounted(PipelineWork):
        def compute(self, step: int) -> bool:
            os.write(file, f"{self._begun[0]} begins {time.thread_time():.6f}\n".encode())
            return super().compute(step)

        def apply(self, step: int) -> None:
            super().apply(step)
            os.write(file, f"{self._begun[0]} ends {time.thread_time():.6f}\n".encode())

    return live.main(arguments, work=Accounted)


def processor_seconds(folder: Path, generations: Collection[int]) -> list[float]:
    """Return the processor seconds of each member that continued into one of these generations.

    They count for the member's thread, from the end of its last step before to the beginning of its first step in it.
    """
    spans = []
    for path in folder.glob("*"):
        before: tuple[int, float] | None = None
        for line in path.read_text().splitlines():
            number, event, seconds = line.split()
            if event == "ends":
                before = int(number), float(seconds)
            elif before is not None and before[0] < int(number):
                if int(number) in generations:
                    spans.append(float(seconds) - before[1])
                before = None
    return spans


def measure(megabytes: int, blocks: int, changes: int, kills: int, steps: int, seed: int) -> dict[str, Any]:
    """Run once; return its pauses and the bytes transferred in them."""
    dice, clock, ended_early = random.Random(seed), Clock(), None
    leaves: dict[int, float] = {}
    crashes: list[float] = []
    with Live(HERE / "small.yaml", overrides(megabytes, blocks), DEVICES, "state:main_of_member") as run:
        newest = run.wait_steps(DEVICES, 2 * steps, 300)
        try:
            for _ in range(changes):
                began = run.leave(dice.choice(run.members))
                newest = run.wait_steps(DEVICES - 1, steps, 300, after=newest)
                leaves[newest] = began
                run.join()
                newest = run.wait_steps(DEVICES, steps, 300, after=newest)
            for _ in range(kills):
                time.sleep(dice.random() * 0.5)
                killed = run.kill(dice.choice(run.members))
                recovered = run.wait_steps(DEVICES - 1, steps, 300, after=newest)
                crashes.append(min(last for _, last in step_ends(run.marks())[recovered].values()) - killed)
                run.join()
                newest = run.wait_steps(DEVICES, steps, 300, after=recovered)
        except (TimeoutError, RuntimeError, CapslogError) as error:  # the measurements so far are reported
            ended_early = str(error)[:500]
        marks = run.marks()
        # the run's files count the generations that trained from 0
        morphs = {event["generation"] + 1: event for event in run.events() if event["kind"] == "morph"}
        processor = processor_seconds(run.folder / "processor", leaves)
    pause_of = {pause.generation: pause for pause in pauses(marks)}
    ends = step_ends(marks)
    begun = {number: min(last for _, last in rows.values()) for number, rows in ends.items()}
    gaps = [
        b[1] - a[1]
        for rows in ends.values()
        for a, b in zip(list(rows.values())[1:], list(rows.values())[2:], strict=False)
    ]
    planned = [pause_of[number] for number in leaves if number in pause_of]
    return {
        "megabytes": megabytes,
        "blocks": blocks,
        "seconds": clock.seconds,
        "ended_early": ended_early,
        "step_ms": quantiles(gaps),
        "leave_net_ms": quantiles([pause.net for pause in planned]),
        "processor_ms": quantiles(processor),
        "notice_to_first_step_s": quantiles([begun[n] - began for n, began in leaves.items() if n in begun], 1, 2),
        "moved_in_leaves_mb": _megabytes([morphs[number]["moved_bytes"] for number in leaves if number in morphs]),
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
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    for megabytes, blocks in SIZES:
        if not args.only or megabytes in args.only:
            row = measure(megabytes, blocks, args.changes, args.kills, args.steps, args.seed)
            append_result("state", {"seed": args.seed, "devices": DEVICES, **row})


if __name__ == "__main__":
    main()
