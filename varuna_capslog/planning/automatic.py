"""Planner `auto`: asks all planners that answer in time, plays their plans, and takes the fastest that fits.

Each is asked as `capslog compare` asks it, and `joint` as well; `mcap-bo`, which searches for up to a minute, is not.
The answer is therefore never slower than theirs, as far as the play and the planners' own verdicts are right.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners import BUDGET, EVERY_PLANNER, JOINT, MADPIPE, with_microbatches
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.comparison import BY_NAME_ONLY
from varuna_capslog.planning.layerwise import budget_plan, check_memory, judged_whole
from varuna_capslog.planning.placed.graphs import asked_for_stages
from varuna_capslog.planning.playing import SAME, even_share_seconds, with_step_seconds
from varuna_capslog.planning.ranks import folded
from varuna_capslog.planning.search import plan as search
from varuna_capslog.planning.search import plan_of_equals
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

__all__ = ["ASKED", "automatic_plan"]

_LAST = (BUDGET, "pipedream", "dawnpiper", "vpipe", MADPIPE, "graphpipe", JOINT, "mcap-bf", "piper")
"""Those that search longer, in the order in which they are asked."""

ASKED = (*(name for name in EVERY_PLANNER if name not in (*BY_NAME_ONLY, *_LAST)), *_LAST)
"""Every planner that `auto` asks, in this order."""


def automatic_plan(
    profile: Profile,
    devices: int,
    memory: str,
    capacity: int | Sequence[int] | None,
    run: RunShape,
    link: Link | None = None,
    limit_seconds: float | None = None,
) -> Plan:
    """The plan with the shortest played step of those that fit, judged; its `planner` is who found it.

    Where none fits, the one that lacks least. `bound_seconds` holds for all plans of so many devices: their work shared
    out evenly. One note says how far behind the second is, and who had no answer.

    Args:
        memory, capacity, run, link: as in `search.plan`. With one accumulation block in `run`, planners that share
            blocks out choose how many there are.
        limit_seconds: no further planner is asked after so long, and `budget` ends its search; at least one answers.

    Raises CapslogError where the profile has no seconds, or no planner has an answer: what `exact` says.
    """
    begun = time.perf_counter()
    shape, found = with_microbatches(run, devices), _Answers(capacity is None)
    bound = even_share_seconds(profile, shape.microbatches, devices)
    weighed = {"pipedream", asked_for_stages(profile, devices)}  # by `budget` itself, if it has an answer
    for name in ASKED:
        left = None if limit_seconds is None else limit_seconds - (time.perf_counter() - begun)
        if found.fastest is not None and left is not None and left <= 0:
            found.late.append(name)
            continue
        if BUDGET in found.plans and name in weighed:
            continue
        try:
            answer = _answer(name, profile, devices, memory, capacity, shape, link, left)
        except CapslogError as error:
            found.refused[name] = str(error)
            continue
        found.add(name, with_step_seconds(profile, answer, shape.settled(), link))
    best = found.fastest
    if best is None:
        raise CapslogError(found.refused["exact"])
    notes = [*best.notes, found.sentence()]
    if run.num_microbatches is None:
        notes.append(f"the microbatches of a step are not known: {shape.num_microbatches} are planned for")
    step = best.step_seconds
    fits = step is not None and best.fits is not False
    return dataclasses.replace(
        best,
        bound_seconds=min(bound, step) if fits and step is not None else None,
        proven=step <= bound * (1 + SAME) if fits and step is not None else None,
        search_space=f"any stages on {devices} devices" if fits else None,
        search_seconds=time.perf_counter() - begun,
        notes=tuple(notes),
    )


def _answer(
    name: str,
    profile: Profile,
    devices: int,
    memory: str,
    capacity: int | Sequence[int] | None,
    run: RunShape,
    link: Link | None,
    left: float | None,
) -> Plan:
    """The plan of one planner; left: seconds that its search may still take."""
    if name == BUDGET:
        limit = None if left is None else max(left, 1e-3)
        check_memory(name, memory)
        # the plan decides how many blocks a step has, whatever the exchange of gradients costs
        return judged_whole(
            profile, budget_plan(profile, devices, capacity, run, link, None, limit, "any"), devices, run
        )
    if name != JOINT:
        return folded(profile, search(profile, devices, name, memory, capacity, run, link), memory, run.settled())
    return plan_of_equals(profile, devices, memory, capacity, run, link)


@dataclass
class _Answers:
    """What was answered, and by whom not.

    free: there is no capacity, so that every plan fits.
    """

    free: bool
    plans: dict[str, Plan] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    late: list[str] = field(default_factory=list)

    def add(self, name: str, plan: Plan) -> None:
        if plan.step_seconds is None and plan.fits is not False:
            self.refused[name] = "its step cannot be played"
        else:
            self.plans[name] = plan

    def _rank(self, plan: Plan) -> tuple[int, float]:
        if plan.fits or self.free:
            return 0, plan.step_seconds or 0.0
        lack = float("inf") if plan.shortfall is None else float(plan.shortfall.bytes)
        return (1, plan.step_seconds or 0.0) if plan.fits is None else (2, lack)

    @property
    def fastest(self) -> Plan | None:
        """The first of the best plans; None before one is known."""
        return min(self.plans.values(), key=self._rank, default=None)

    def sentence(self) -> str:
        """Who was asked, who is next, and who had nothing to say."""
        order = sorted(self.plans, key=lambda name: self._rank(self.plans[name]))
        parts = [f"planner auto has taken the plan of {order[0]}, of {len(order)} that answered"]
        steps = [self.plans[name].step_seconds for name in order if self._rank(self.plans[name])[0] == 0]
        if len(steps) > 1 and steps[0] and steps[1]:
            behind = (steps[1] / steps[0] - 1) * 100
            how = f"{behind:.2g} % slower" if behind > 0.01 else "as fast"
            parts.append(f"the next, of {order[1]}, is {how}")
        if self.refused:
            parts.append(f"no answer from {', '.join(self.refused)}")
        if self.late:
            parts.append(f"not asked in time: {', '.join(self.late)}")
        return "; ".join(parts)
