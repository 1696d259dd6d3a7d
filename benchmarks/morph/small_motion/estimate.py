"""Losing one of eight ranks, by the pure functions: bytes and pause before the next step, with new cuts and with a
small motion, for the paper's configurations on estimated profiles and links of three rates.

Each of the eight ranks is lost once. Layers and copies are placed as a run of planner `budget` places them (redundancy
1, one rank per host). The pause is that of the transfers alone: detecting the loss and forming the generation take the
same time both ways.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from varuna_capslog.base.files import append_jsonl
from varuna_capslog.config.reading import load_config
from varuna_capslog.config.settings import Elastic
from varuna_capslog.membership.generation import MemberLayout
from varuna_capslog.membership.layout_candidates import LayoutCandidates
from varuna_capslog.membership.placing import Placer, state_bytes
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.membership.small_motion import Loss, SmallMotion, Weighed
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape
from varuna_capslog.start.prepare import profile_run

ROOT = Path(__file__).parents[3]
NAMES = ("rn50_e6", "rn101_e12", "rn50_d_e6", "rn101_d_e12")
RATES = {"100 Mbit/s": 12.5e6, "1 Gbit/s": 125e6, "10 Gbit/s": 1.25e9}
DEVICES = 8
MICROBATCHES = 16


def profile_of(name: str) -> Profile:
    """Return the estimated profile of one of the paper's configurations."""
    return profile_run(
        load_config(ROOT / "configs" / "paper" / f"{name}.yaml", ["profile.source=estimated"]), show=False
    )


def tell(row: dict[str, Any], output: Path | None) -> None:
    """Print a row as one line of JSON, and append it to `output` unless that is None."""
    print(json.dumps(row), flush=True)
    if output:
        append_jsonl(output, row)


def placer_of(profile: Profile, planner: str, run: RunShape) -> Placer:
    """Return a run's placer: snapshots beside training, copies on the device, free transfers of activations."""
    sizes = state_bytes(profile)
    assert sizes is not None
    candidates = LayoutCandidates(profile, tuple(sizes[0]), run, planner, beside=sizes[0])
    return Placer(candidates, Elastic(), sizes[1])


def losses_of(placer: Placer, rate: float, setting: str, step_seconds: float) -> list[tuple[Weighed, float]]:
    """Return the decision for the loss of each rank, and the seconds that it took."""
    seats = [Seat(f"m{rank}", f"h{rank}", 0) for rank in range(DEVICES)]
    before = placer(seats, placer.propose(seats))
    assert isinstance(before, MemberLayout)
    motions, weighings = SmallMotion(placer, setting), []
    for out in range(DEVICES):
        stay = [*seats[:out], *seats[out + 1 :]]
        loss = Loss(before, tuple(seat.member for seat in seats), stay, placer.propose(stay), rate, step_seconds)
        motions.weigh(loss)
        begun = time.perf_counter()
        weighed = motions.weigh(loss)
        assert weighed is not None
        weighings.append((weighed, time.perf_counter() - begun))
    return weighings


def row_of(name: str, profile: Profile, planner: str, link: str, step_seconds: float) -> dict[str, Any]:
    """Return medians and ranges over the lost rank."""
    rate = RATES[link]
    placer = placer_of(profile, planner, RunShape(MICROBATCHES, microbatch_size=1))
    always = losses_of(placer, rate, "always", step_seconds)
    auto = losses_of(placer, rate, "auto", step_seconds)

    def of(way: str, key: str) -> list[float]:
        return [weighed.event_fields[way][key] for weighed, _ in always if way in weighed.event_fields]

    def bytes_of(way: str) -> list[float]:
        return [moved + copied for moved, copied in zip(of(way, "moved_bytes"), of(way, "copied_bytes"), strict=True)]

    def told(values: list[float], digits: int) -> list[float]:
        return [round(value, digits) for value in (statistics.median(values), min(values), max(values))]

    return {
        "configuration": name,
        "planner": planner,
        "link": link,
        "state_megabytes": round(sum(placer.layer_bytes) / 1e6),
        **{
            way: {
                "megabytes": told([size / 1e6 for size in bytes_of(way)], 1),
                "pause_seconds": told(of(way, "pause_seconds"), 3),
                "step_seconds": told(of(way, "step_seconds"), 3),
                "lost_seconds": told(of(way, "lost_seconds"), 2),
            }
            for way in ("new_cuts", "small_motion")
        },
        "follow_megabytes": told([weighed.event_fields["follow_bytes"] / 1e6 for weighed, _ in always], 1),
        "auto_small_motions": sum(weighed.plan is not None for weighed, _ in auto),
        "weighing_ms": told([1e3 * seconds for _, seconds in always], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(NAMES))
    parser.add_argument("--planner", default="throughput")
    parser.add_argument(
        "--step", type=float, default=0.0, help="seconds that a step of eight ranks takes; 0: estimated"
    )
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    for name in args.only:
        profile = profile_of(name)
        for link in RATES:
            tell(row_of(name, profile, args.planner, link, args.step), args.output)


if __name__ == "__main__":
    main()
