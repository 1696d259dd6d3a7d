"""Times planner `budget` at a change of 8 devices, L = 48: without preparation, and searched ahead (`look_ahead`)."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from varuna_capslog.config.reading import load_config
from varuna_capslog.config.settings import Config
from varuna_capslog.membership.placing import Placer, state_bytes
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.profiles.record import Profile
from varuna_capslog.start.prepare import profile_run

ROOT = Path(__file__).parents[3]
GIB = 1 << 30


def seats_of(count: int, capacity: int) -> list[Seat]:
    """Return equal devices, each on its own host."""
    return [Seat(f"m{number}", f"h{number}", capacity) for number in range(count)]


def placer_of(config: Config, profile: Profile) -> Placer:
    """Return the placer of a member whose run has no configured plan."""
    sizes = state_bytes(profile)
    assert sizes is not None
    return Placer.of_config(config, profile, *sizes, edges=profile.known_edges or ())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "paper" / "rn101_e12.yaml")
    parser.add_argument("--gib", type=int, nargs="+", default=[16, 8, 6])
    parser.add_argument("--devices", type=int, default=8)
    args = parser.parse_args()
    devices = args.devices
    overrides = [
        f"pipeline.devices={devices}",
        "pipeline.planner=budget",
        "pipeline.schedule=auto",
        "profile.source=estimated",
        "elastic.enabled=true",
    ]
    for size in args.gib:
        config = load_config(args.config, [*overrides, f"pipeline.capacity={size}GiB"])
        profile = profile_run(config, show=False)
        ahead = placer_of(config, profile)
        begun = time.perf_counter()
        searches = list(ahead.look_ahead(seats_of(devices, size * GIB)))
        prepared = time.perf_counter() - begun
        informed = placer_of(config, profile)
        for search in searches:
            informed.learn(json.loads(json.dumps(search)))
        informed.prepare(devices + 2)
        for count in (devices - 1, devices + 1, devices // 2, 1):
            seats = seats_of(count, size * GIB)
            begun = time.perf_counter()
            plan = informed.propose(seats)
            warm = time.perf_counter() - begun
            fresh = placer_of(config, profile)
            begun = time.perf_counter()
            fresh.propose(seats)
            cold = time.perf_counter() - begun
            row = {
                "layers": profile.num_layers,
                "capacity_gib": size,
                "devices": count,
                "planner": None if plan is None else plan.planner or "equal pipelines",
                "step_seconds": None if plan is None else plan.step_seconds,
                "prepared_ms": round(1e3 * warm, 2),
                "cold_ms": round(1e3 * cold),
                "look_ahead_seconds": round(prepared, 1),
            }
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
