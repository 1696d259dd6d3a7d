"""Accounts for the time of a run, from its files alone: productive steps, and all other time.

Every moment from the first launch to the last line of the run's files belongs to exactly one of the kinds below, so
that they add up to the wall time.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from varuna_capslog.reports import markup
from varuna_capslog.reports.markup import Markup
from varuna_capslog.reports.run import Event, RunRecord, StepLine
from varuna_capslog.reports.wording import duration

__all__ = ["KINDS", "Account", "account_of", "goodput_parts"]

KINDS: Mapping[str, str] = {
    "productive": "steps that count: the last time that each was made",
    "repeated": "steps that were made again later, and the part of a step that a loss broke off",
    "paused": "between the last step before a change of the devices and the first one after it, but for what follows",
    "waiting": "waiting for devices",
    "checkpointing": "standing still for a checkpoint",
    "evaluating": "evaluations, with what else happens between the two steps",
    "starting": "from a launch to its first step: profile, plan, processes, model",
    "between steps": "all other time between two steps",
    "ending": "from the last step to the end: the last checkpoint and evaluation",
    "not running": "from the end of one launch to the next one",
}
"""Kinds of time, in the order in which they are shown, with the meaning of each."""


@dataclass(frozen=True)
class Account:
    """Seconds by kind, in the order of `KINDS`."""

    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        """Seconds from the first launch to the last line."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Share of the productive steps in all the time, 0 .. 1."""
        return self.seconds["productive"] / self.total if self.total > 0 else 0.0

    def sentence(self) -> str:
        """Describe the goodput and the unproductive parts, the largest first; parts below 0.05 % are left out."""
        percent = {kind: 100 * seconds / self.total for kind, seconds in self.seconds.items() if self.total > 0}
        unproductive = [(share, kind) for kind, share in percent.items() if kind != "productive" and share >= 0.05]
        named = ", ".join(f"{kind} {share:.1f} %" for share, kind in sorted(unproductive, reverse=True))
        return f"{100 * self.goodput:.1f} % of {duration(self.total)}" + (f" ({named})" if named else "")


def account_of(run: RunRecord) -> Account | None:
    """Return the account of a run; None where its lines have no times, as in older versions."""
    steps = [line for line in run.every_step if line.time is not None and line.step_seconds is not None]
    if not steps or len(steps) < len(run.every_step):
        return None
    return Account(
        _Ledger(
            steps, run.events, {(evaluation.step, evaluation.generation) for evaluation in run.evaluations}
        ).account()
    )


class _Ledger:
    """Splits a run's time, from its beginning to its end, into kinds."""

    def __init__(
        self, steps: Sequence[StepLine], events: Sequence[Event], evaluated: Collection[tuple[int, int | None]]
    ) -> None:
        self._steps = sorted(steps, key=lambda line: line.time or 0.0)
        self._events = sorted((event for event in events if event.time is not None), key=_time)
        self._times = [_time(event) for event in self._events]
        self._evaluated = evaluated
        self._stalls: dict[tuple[int | None, int | None], float] = defaultdict(float)
        self._broken_off: dict[int | None, float] = {}
        for event in self._events:
            if event.kind == "checkpoint":
                self._stalls[event.step, event.generation] += _number(event, "stall_seconds")
            elif event.kind in ("morph", "resume"):
                self._broken_off.setdefault(event.generation, _number(event, "lost_step_seconds"))
        self._last = {line.step: number for number, line in enumerate(self._steps)}
        self._found = dict.fromkeys(KINDS, 0.0)

    def account(self) -> dict[str, float]:
        """Return seconds by kind."""
        first = self._steps[0]
        begin = _begin(first)
        at = min([begin, *(_time(event) for event in self._events if event.kind == "launch")])
        self._before_a_step(at, begin, None, first)
        for number, line in enumerate(self._steps):
            end = max(begin, line.time or 0.0)
            counts = self._last[line.step] == number
            self._found["productive" if counts else "repeated"] += end - begin
            if number + 1 < len(self._steps):
                following = self._steps[number + 1]
                begin = max(end, _begin(following))
                self._before_a_step(end, begin, line, following)
        self._found["ending"] += max([end, *self._times[-1:]]) - end
        return self._found

    def _before_a_step(self, begin: float, end: float, before: StepLine | None, after: StepLine) -> None:
        """Account for time without a step, up to the begin of a step."""
        inside = self._events[bisect_left(self._times, begin) : bisect_right(self._times, end)]
        launches = [_time(event) for event in inside if event.kind == "launch"]
        if launches or before is None:
            # the time of a launch that came to no step counts as its start
            launched = launches[0] if launches else begin
            stopped = max([begin, *(at for event in inside if (at := _time(event)) < launched)])
            self._found["ending"] += stopped - begin
            self._found["not running"] += launched - stopped
            self._found["starting"] += end - launched
            return
        remaining_seconds = end - begin
        for kind, seconds in self._known(end, inside, before, after):
            taken = min(remaining_seconds, max(0.0, seconds))
            self._found[kind] += taken
            remaining_seconds -= taken
        self._found["between steps" if before.generation == after.generation else "paused"] += remaining_seconds

    def _known(self, end: float, inside: Sequence[Event], before: StepLine, after: StepLine) -> list[tuple[str, float]]:
        """Return the known events between two steps, as kinds with their longest possible seconds."""
        boundary = before.step, before.generation
        parts = [("checkpointing", self._stalls.get(boundary, 0.0))]
        if before.generation != after.generation:
            parts.append(("repeated", self._broken_off.get(after.generation, 0.0)))
            waits = [_time(event) for event in inside if event.kind == "waiting"]
            if waits:  # until a device comes that ends it; the change itself is a pause
                comes = [at for event in inside if event.kind == "join" and (at := _time(event)) > waits[0]]
                parts.append(("waiting", (comes[-1] if comes else end) - waits[0]))
        elif boundary in self._evaluated:
            parts.append(("evaluating", math.inf))  # the rest
        return parts


def _time(event: Event) -> float:
    return event.time or 0.0


def _begin(line: StepLine) -> float:
    return (line.time or 0.0) - (line.step_seconds or 0.0)


def _number(event: Event, name: str) -> float:
    value = event.details.get(name)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0.0


def goodput_parts(run: RunRecord) -> list[Markup]:
    """Return a table of the kinds with their shares; nothing where the times are not known."""
    account = account_of(run)
    if account is None:
        return []
    rows = []
    for kind, meaning in KINDS.items():
        if (seconds := account.seconds[kind]) > 0:
            share = seconds / account.total
            rows.append([kind, duration(seconds), f"{100 * share:.2f} %", markup.cell_bar(share), meaning])
    rows.append(["all", duration(account.total), "100.00 %", "", ""])
    return [markup.table("goodput-table", ("kind", "time", "share", "", "what it is"), rows, left=(0, 3, 4))]
