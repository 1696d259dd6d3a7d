"""Joint plans: search time, and simulated step time beside its bound, for 1,024 devices of two kinds and N <= 16.

Synthetic chains of 48 layers whose seconds and bytes differ by an order of magnitude, drawn with a fixed seed; no GPU.
See README.md for what the numbers mean.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from varuna_capslog.planners.joint import Device, JointPlan, best_fleet
from varuna_capslog.planners.seconds import Link
from varuna_capslog.profiles.record import LayerProfile, Profile

GIB = 1024**3
LARGE, SMALL = Device(24 * GIB, 1.0), Device(16 * GIB, 0.6)
LINK = Link(12e9, 1e-5)


def chain(num_layers: int) -> Profile:
    """Return a chain of layers of 10 to 60 ms and 0.25 to 1.5 GiB, in no order; 10 MB cross each cut."""
    rng = random.Random(3)
    layers = []
    for number in range(num_layers):
        forward = rng.choice([0.01, 0.02, 0.05]) * rng.uniform(0.8, 1.2)
        layers.append(
            LayerProfile(
                f"layer.{number}",
                isolated_bytes=rng.randint(1, 6) * GIB // 4,
                added_bytes=rng.randint(1, 5) * GIB // 4 if number else None,
                parameter_bytes=20 * 10**6,
                boundary_bytes=10**7,
                forward_seconds=forward,
                backward_seconds=2 * forward,
            )
        )
    return Profile(tuple(layers), model="synthetic", conditions={"microbatch_size": 1})


def row(
    profile: Profile, devices: list[Device], minibatch: int, blocks: int, link: Link | None, times: int
) -> dict[str, Any]:
    """Plan several times: the first search fills the cache of schedules, the fastest other is a later change."""
    seconds, plan = [], None
    for _ in range(times):
        begun = time.process_time()
        plan = best_fleet(profile, devices, minibatch, blocks, link=link)
        seconds.append(time.process_time() - begun)
    assert plan is not None
    return {
        "devices": len(devices), "kinds": len(set(devices)), "minibatch": minibatch, "blocks": blocks,
        "link": "12 GB/s" if link else "free", "first_seconds": seconds[0],
        "again_seconds": min(seconds[1:], default=seconds[0]), **summary(plan),
    }  # fmt: skip


def summary(plan: JointPlan) -> dict[str, Any]:
    """Return the plan's columns of the table."""
    lengths = sorted({len(pipeline.devices) for pipeline in plan.pipelines})
    return {
        "pipelines": len(plan.pipelines),
        "stages": lengths,
        "idle": len(plan.idle),
        "step_seconds": plan.step_seconds,
        "bound_seconds": plan.bound_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    large = chain(48)
    for link in (None, LINK):
        rows.append(row(large, [LARGE] * 512 + [SMALL] * 512, 2048, 256, link, args.times))
    small = chain(25)
    for number in (2, 3, 4, 5, 7, 11, 13, 16):
        rows.append(row(small, [LARGE] * number, 32, 16, None, args.times))
    for number in (4, 7, 16):
        rows.append(row(small, [LARGE] * (number - number // 2) + [SMALL] * (number // 2), 32, 16, None, args.times))
    print(
        "| devices | kinds | blocks | link | pipelines x stages | idle | step | bound | ratio | first ms | again ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for case in rows:
        fits = case["step_seconds"] is not None
        times = f"{case['first_seconds'] * 1e3:.0f} | {case['again_seconds'] * 1e3:.0f} |"
        cells = f"| {case['devices']} | {case['kinds']} | {case['blocks']} | {case['link']} | "
        if fits:
            stages = "/".join(map(str, case["stages"]))
            ratio = case["step_seconds"] / case["bound_seconds"]
            cells += f"{case['pipelines']} x {stages} | {case['idle']} | {case['step_seconds']:.2f} s | "
            cells += f"{case['bound_seconds']:.2f} s | {ratio:.3f} | "
        else:
            cells += "does not fit | | | | | "
        print(cells + times)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
