"""Times the search inside a change of membership: seats in, layout with copies out (`elastic.placing.Placer`).

Plays random histories of memberships over profiles estimated from the paper's configurations and writes results.json.
Every membership is planned once, in a process that has prepared for 32 devices beforehand; the time of that preparation
and of a search without it are reported, too.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from varuna_capslog.config.reading import load_config
from varuna_capslog.config.settings import Elastic
from varuna_capslog.membership.generation import MemberLayout
from varuna_capslog.membership.layout_candidates import LayoutCandidates
from varuna_capslog.membership.placing import Placer, state_bytes
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.planners.seconds import Link, step_player
from varuna_capslog.plans.plan import pipelines_of
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape
from varuna_capslog.start.prepare import profile_run

ROOT = Path(__file__).parents[3]
RESULTS = Path(__file__).with_name("results.json")
GIB = 1 << 30
MOST = 32

CONFIGURATIONS = ("rn50_e6", "rn101_e12", "rn101_d_e12")
RUNS = ((8, 1), (8, 8), (32, 8), (32, 32))
"""(microbatches of a step, accumulation blocks)"""
LINKS = {"free": None, "10 Gbit/s": Link(1.25e9, 1e-4)}
FLEETS: dict[str, Callable[[random.Random, int], list[int]]] = {
    "no limit": lambda dice, count: [0] * count,
    "1 GiB each": lambda dice, count: [GIB] * count,
    "16 GiB each": lambda dice, count: [16 * GIB] * count,
    "2 to 24 GiB": lambda dice, count: [dice.choice((2, 4, 8, 16, 24)) * GIB for _ in range(count)],
}


def milliseconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU milliseconds of one call, and its answer."""
    begun = time.process_time()
    answer = work()
    return (time.process_time() - begun) * 1e3, answer


def seats_of(capacities: list[int]) -> list[Seat]:
    """Return members, each on its own host."""
    return [Seat(f"h{number}-0", f"h{number}", size) for number, size in enumerate(capacities)]


def placer_of(profile: Profile, run: tuple[int, int], link: Link | None, planner: str) -> Placer:
    """Return a placer with a run's settings: redundancy 1, sync, copies on the device."""
    sizes = state_bytes(profile)
    assert sizes is not None
    microbatches, blocks = run
    step = RunShape(microbatches, microbatch_size=1, num_blocks=blocks)
    candidates = LayoutCandidates(profile, tuple(sizes[0]), step, planner, beside=sizes[0], link=link or Link())
    return Placer(candidates, Elastic(), sizes[1])


def measure(profile: Profile, run: tuple[int, int], link: Link | None, planner: str, questions: int) -> dict[str, Any]:
    """Time the preparation, then a history of memberships for every kind of fleet, then searches unprepared."""
    row: dict[str, Any] = {"prepare_ms": {}, "fleets": {}}
    for most in (8, MOST):
        step_player.cache_clear()
        placer = placer_of(profile, run, link, planner)
        row["prepare_ms"][most] = round(milliseconds(partial(placer.candidates.prepare, most))[0], 1)
    for name, fleet in FLEETS.items():
        dice = random.Random(name)
        taken, waits, shapes = [], 0, set()
        for _ in range(questions):
            seats = seats_of(fleet(dice, dice.randint(1, MOST)))
            spent, layout = milliseconds(partial(placer, seats))
            taken.append(spent)
            if isinstance(layout, MemberLayout):
                shapes.add(None if layout.plan is None else pipelines_of(layout.plan))
            else:
                waits += 1
        row["fleets"][name] = {
            "questions": questions,
            "median_ms": round(float(np.median(taken)), 2),
            "p99_ms": round(float(np.quantile(taken, 0.99)), 2),
            "most_ms": round(max(taken), 2),
            "waits": waits,
            "layouts": len(shapes),
        }
    unprepared = {}
    for count in (8, 16, MOST - 1):
        step_player.cache_clear()
        fresh = placer_of(profile, run, link, planner)
        unprepared[count] = round(milliseconds(partial(fresh, seats_of([0] * count)))[0], 1)
    row["unprepared_ms"] = unprepared
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=300, help="memberships per run and kind of fleet")
    parser.add_argument("--planner", default="exact")
    parser.add_argument("--only", default=None, help="one of the configurations")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = []
    for name in [args.only] if args.only else CONFIGURATIONS:
        config = load_config(ROOT / "configs" / "paper" / f"{name}.yaml", ["profile.source=estimated"])
        profile = profile_run(config, show=False)
        for run in RUNS:
            for link_name, link in LINKS.items():
                row = {
                    "configuration": name,
                    "layers": profile.num_layers,
                    "microbatches": run[0],
                    "blocks": run[1],
                    "link": link_name,
                    **measure(profile, run, link, args.planner, args.questions),
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    about = {
        "planner": args.planner,
        "most_devices": MOST,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "commit": commit.stdout.strip(),
        "most_ms": max(fleet["most_ms"] for row in rows for fleet in row["fleets"].values()),
    }
    args.output.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(about))


if __name__ == "__main__":
    main()
