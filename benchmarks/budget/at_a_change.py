"""Seconds of planner `budget` when the members of an elastic run change, for the paper's six models.

Eight members with one device each lose one. The proposing member has planned for eight before; its search for seven is
timed without preparation, and after a search made ahead of the change. Prints README.md's table.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from common import write_json
from paper_models import paper_profiles

from varuna_capslog.base.units import parse_bytes, parse_rate
from varuna_capslog.config.settings import Elastic
from varuna_capslog.membership.layout_candidates import Budgeted, LayoutCandidates
from varuna_capslog.membership.placing import Placer
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.verdict import HostMemory
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

MEMBERS = 8


def placer_of(profile: Profile, link: Link, blocks: int) -> Placer:
    """Return the placer of a run whose layers' states are weights and two moments."""
    sizes = [3 * (layer.parameter_bytes or 0) for layer in profile.layers]
    run = RunShape(32, "auto", True, num_blocks=blocks)
    candidates = LayoutCandidates(profile, sizes, run.settled(), "budget", beside=sizes)
    budgeted = Budgeted.of(candidates, run, HostMemory(), link)
    placer = Placer(candidates, Elastic.model_validate({"redundancy": 0}), budgeted=budgeted)
    placer.prepare(MEMBERS, 0)
    return placer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacity", default="16GiB")
    parser.add_argument("--bandwidth", default="12GB/s", help="of links between stages and to the host, or none")
    parser.add_argument("--blocks", type=int, default=4, help="accumulation blocks, which as many pipelines may share")
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    rate = None if args.bandwidth == "none" else parse_rate(args.bandwidth)
    link, capacity, rows = Link(host_bandwidth=rate), parse_bytes(args.capacity), []
    print("| model | plans for 8 members, s | for 7, not prepared, s | searches | for 7, prepared, ms | step, s |")
    print("|---|---|---|---|---|---|")
    for model, profile in paper_profiles():
        seats = [Seat(f"m{number}", f"h{number}", capacity) for number in range(MEMBERS)]
        placer, seconds = placer_of(profile, link, args.blocks), []
        assert placer.budgeted is not None
        for present in (seats, seats[:-1]):
            placer.budgeted.taken()
            begun = time.process_time()
            plan = placer.propose(present)
            seconds.append(time.process_time() - begun)
        searched = placer.budgeted.taken()
        member = placer_of(profile, link, args.blocks)
        member.learn(searched)
        begun = time.process_time()
        again = member.propose(seats[:-1])
        prepared = 1e3 * (time.process_time() - begun)
        assert again == plan
        step = None if plan is None else plan.step_seconds
        rows.append({"model": model, "seconds": seconds, "searches": len(searched), "ms": prepared, "step": step})
        cells = model, f"{seconds[0]:.2f}", f"{seconds[1]:.2f}", len(searched), f"{prepared:.0f}"
        print(f"| {' | '.join(map(str, cells))} | {'-' if step is None else f'{step:.3f}'} |", flush=True)
    write_json(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
