"""The goodput of a recorded trace of preemptions (Bamboo's p3) with new cuts after every loss, with small motions
always, and with the one expected to lose less. Uses the pure functions that a run calls; nothing is trained.

Every removed node is a crash without notice; a join is prepared beside the training. Both ways take the same time to
detect a loss and to form the next generation. If more is lost at once than copies cover, training goes back to its last
checkpoint; so does a run with new cuts whose next loss comes before its copies are complete.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from estimate import RATES, placer_of, profile_of, tell

from varuna_capslog.membership.generation import MemberLayout
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.membership.small_motion import (
    BESIDE,
    FOLLOW_STEPS,
    SECOND_PAUSE,
    USUAL_GAP,
    Loss,
    SmallMotion,
    traffic_of,
)
from varuna_capslog.planning.trace_replay import TraceEvent, read_trace
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

FOUNDING = 0.2
"""Seconds to detect a loss and form the next generation (`../crash`)."""
RESTART = 45.0
"""Seconds to restart from a checkpoint."""
MICROBATCHES, BLOCKS = 32, 8


@dataclass
class Told:
    """Totals of a replay: uses of the time, in seconds, and counts."""

    samples: float = 0.0
    ideal: float = 0.0
    paused: float = 0.0
    slowed: float = 0.0
    went_back: int = 0
    losses: int = 0
    small: int = 0
    first_bytes: list[int] = field(default_factory=list)


class Course:
    """Replay of one trace.

    Args:
        rate: bytes per second between members.
        checkpoint_seconds: seconds between checkpoints.
    """

    def __init__(self, profile: Profile, setting: str, rate: float, checkpoint_seconds: float) -> None:
        run = RunShape(MICROBATCHES, microbatch_size=1, num_blocks=BLOCKS)
        self.placer = placer_of(profile, "throughput", run)
        self.motions, self.rate, self.every = SmallMotion(self.placer, setting), rate, checkpoint_seconds
        self.told = Told()
        self.seats: list[Seat] = []
        self.layout: MemberLayout | None = None
        self.step = 0.0  # seconds of a step of the layout with new cuts
        self.pause_until = self.slow_until = 0.0
        self.ratio = 1.0
        self.alone = frozenset[str]()  # members whose loss no copy covers before `slow_until`

    def played(self, layout: MemberLayout) -> float:
        seconds = self.motions.step_seconds(layout)
        assert seconds is not None
        return seconds

    def train(self, now: float, until: float) -> None:
        """Add up the training from one event to the next."""
        if self.layout is None or until <= now:
            return
        told, length = self.told, until - now
        paused = min(length, max(0.0, self.pause_until - now))
        slow = min(length - paused, max(0.0, self.slow_until - max(now, self.pause_until)))
        told.paused += paused
        told.slowed += (1 - self.ratio) * slow
        told.ideal += length * MICROBATCHES / self.step
        told.samples += (length - paused - (1 - self.ratio) * slow) * MICROBATCHES / self.step

    def settle(self, now: float) -> None:
        """Adopt the new cuts whose transfer has ended by `now`."""
        if self.layout is not None and now >= self.slow_until and self.ratio < 1.0:
            new = self.placer(self.seats)
            assert isinstance(new, MemberLayout)
            self.layout, self.ratio = new, 1.0
            self.alone = frozenset()

    def change(self, now: float, joined: list[str], gone: set[str], changes: int) -> None:
        before, members = self.layout, tuple(seat.member for seat in self.seats)
        stay = [seat for seat in self.seats if seat.member not in gone]
        self.seats = stay + [Seat(name, name, 0) for name in joined]
        layout = self.placer(self.seats) if self.seats else "nobody"
        if not isinstance(layout, MemberLayout):
            self.layout = None
            return
        told, names = self.told, [seat.member for seat in stay]
        lost = [member for member in members if member in gone]
        begun = max(now, self.pause_until)
        self.layout = layout
        if before is None:
            self.pause_until = begun + (RESTART if told.samples else 0.0)
        elif not lost:
            self.pause_until = begun + SECOND_PAUSE
        elif not before.covers(names) or (now < self.slow_until and self.alone & gone):
            told.losses += 1
            told.went_back += 1
            self.pause_until = begun + RESTART
            told.samples -= self.every / 2 * MICROBATCHES / self.step
        else:
            told.losses += 1
            self.after_loss(now, begun, before, members, stay, joined, changes)
            return
        self.step, self.ratio, self.slow_until = self.played(layout), 1.0, self.pause_until

    def after_loss(
        self,
        now: float,
        begun: float,
        before: MemberLayout,
        members: tuple[str, ...],
        stay: list[Seat],
        joined: list[str],
        changes: int,
    ) -> None:
        """Continue from copies, which cover the loss."""
        told, names = self.told, [seat.member for seat in stay]
        new = self.layout
        assert new is not None
        gap = (USUAL_GAP + now) / (1 + changes)
        weighed = None
        if not joined:
            loss = Loss(before, members, stay, None, self.rate, 0.0, gap, self.every / 2)
            weighed = self.motions.weigh(loss)
        self.step, sizes = self.played(new), self.placer.layer_bytes
        cuts = traffic_of(before, new, names, sizes)
        if weighed is None or weighed.plan is None or weighed.copies is None:
            self.pause_until = begun + FOUNDING + cuts.seconds(self.rate)
            self.slow_until, self.ratio = self.pause_until, 1.0
            told.first_bytes.append(cuts.bytes)
            small = new
        else:
            small = MemberLayout.of_plan(weighed.plan, names, weighed.copies)
            first, follow = traffic_of(before, small, names, sizes), traffic_of(small, new, names, sizes)
            step = self.played(small)
            self.pause_until = begun + FOUNDING + first.seconds(self.rate)
            self.slow_until = self.pause_until + BESIDE * follow.seconds(self.rate) + FOLLOW_STEPS * step + SECOND_PAUSE
            # the second pause counts as a part of the slow time, without training
            length = self.slow_until - self.pause_until
            self.ratio = (length - SECOND_PAUSE) / length * min(1.0, self.step / step)
            told.small += 1
            told.first_bytes.append(first.bytes)
            self.layout = small
        held = {member: {*before.holds(member), *small.owned.get(member, ())} for member in names}
        self.alone = frozenset(
            next(member for member in names if layer in held[member])
            for layer in range(small.num_layers)
            if sum(layer in held[member] for member in names) == 1
        )


def replayed(
    profile: Profile, events: list[TraceEvent], setting: str, rate: float, checkpoint_seconds: float
) -> dict[str, Any]:
    """Replay the trace and return its row of results."""
    course, now = Course(profile, setting, rate, checkpoint_seconds), 0.0
    moments = sorted({event.seconds for event in events})
    for changes, moment in enumerate(moments):
        # after new cuts that come in between, the steps have full speed
        until = min(max(now, course.slow_until), moment)
        course.train(now, until)
        course.settle(until)
        course.train(until, moment)
        now = moment
        events_now = [event for event in events if event.seconds == moment]
        gone = {event.node for event in events_now if event.kind == "remove"}
        course.change(now, sorted(event.node for event in events_now if event.kind == "add"), gone, changes)
    told = course.told
    sizes = sorted(told.first_bytes)
    return {
        "setting": setting,
        "samples_per_second": round(told.samples / now, 4),
        "share_of_ideal": round(told.samples / told.ideal, 5),
        "paused_seconds": round(told.paused, 1),
        "lost_by_longer_steps_seconds": round(told.slowed, 1),
        "losses": told.losses,
        "small_motions": told.small,
        "went_back": told.went_back,
        "p50_megabytes_before_next_step": round(sizes[len(sizes) // 2] / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="p3-trace.csv of github.com/uclasystem/bamboo")
    parser.add_argument("--name", default="rn101_e12")
    parser.add_argument("--every", type=float, default=900.0, help="seconds between two checkpoints")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    profile = profile_of(args.name)
    events = read_trace(args.trace)
    for link, rate in RATES.items():
        for setting in ("never", "auto", "always"):
            row = {"configuration": args.name, "link": link, **replayed(profile, events, setting, rate, args.every)}
            tell(row, args.output)


if __name__ == "__main__":
    main()
