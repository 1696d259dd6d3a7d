"""The section on a run whose members changed, from events.jsonl: who left, was lost or joined, why, and the cost."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from varuna_capslog.base.failures import losses_in_words
from varuna_capslog.base.units import format_bytes
from varuna_capslog.reports import markup
from varuna_capslog.reports.markup import UNKNOWN, Markup, duration, in_words, moment, plain, plural
from varuna_capslog.reports.memory import COLOURS, MOST_GENERATIONS, GenerationPeaks, plot_generations
from varuna_capslog.reports.run import Event, RunRecord, StepLine

__all__ = [
    "KINDS",
    "Account",
    "account_of",
    "change_kind",
    "change_parts",
    "changes_in_short",
    "event_words",
    "goodput_parts",
]


_MOST_ROWS = 60
_BEGINNINGS = ("start", "resume", "morph")


def change_kind(event: Event) -> str:
    """Return the most serious kind of a change: "lost", "left" or "joined"; "" for any other event."""
    causes = [str(text) for text in _listed(event.details.get("why"))]
    return next((name for name in COLOURS if any(text.endswith(f" {name}") for text in causes)), "")


def changes_in_short(run: RunRecord) -> str | None:
    """Return a line for the summary; None for a run whose members never changed."""
    morphs = [event for event in run.events if event.kind == "morph"]
    if not morphs:
        return None
    kinds = [change_kind(event) for event in morphs]
    parts = [f"{kinds.count(name)} with a device {name}" for name in COLOURS if name in kinds]
    pauses = [pause for event in morphs if (pause := _number(event, "pause_seconds")) is not None]
    moved = sum(int(_number(event, "moved_bytes") or 0) for event in morphs)
    return (
        f"{plural(len(morphs), 'change')} of the devices" + (f" ({', '.join(parts)})" if parts else "") + ", "
        f"{duration(sum(pauses))} of pauses, {format_bytes(moved)} moved"
    )


def change_parts(run: RunRecord) -> list[Markup]:
    """Return picture and table; nothing for a run that no member joined or left."""
    short = changes_in_short(run)
    waits = [event for event in run.events if event.kind == "waiting"]
    if short is None and not waits:
        return []
    parts = [] if short is None else [markup.paragraph(f"{short}. Training went on in the same processes.")]
    changes = _changes(run.events)
    generations = _generations(run, [event for event, _ in changes])
    shown = generations[-MOST_GENERATIONS:]
    if any(generation.stages for generation in shown):
        caption = "Peak memory of each stage by generation, which is what a time between two changes is called."
        if len(shown) < len(generations):
            caption += f" The last {len(shown)} of {len(generations)}."
        if any(generation.measured is None for generation in shown):
            caption += " A generation of a few steps is not measured."
        parts.append(markup.figure(plot_generations(shown), "Bars of the memory of each stage, by generation", caption))
    rows = [_row(event, words) for event, words in changes[-_MOST_ROWS:]]
    headings = ("time (UTC)", "step", "generation", "what happened", "devices", "cuts", "pause", "search", "moved")
    parts.append(markup.table("change-table", headings, rows, left=(3,)))
    if len(rows) < len(changes):
        parts.append(markup.paragraph(f"The last {len(rows)} of {len(changes)} are shown."))
    parts.append(
        markup.paragraph(
            "Step: the first one under the new cuts. Pause: from the end of the last step before to the beginning of "
            "the next one. Moved: state of layers that got another owner from a device, not from a copy it already had."
        )
    )
    if (lost := losses_in_words([{"kind": event.kind, **event.details} for event in run.events])) is not None:
        parts.append(markup.paragraph(f"Workers lost: {lost}."))
    parts += [
        markup.note(f"At {moment(event.time)} UTC it waited: {event.details.get('why')}.")
        for event in {str(event.details.get("why")): event for event in waits}.values()
    ]
    return parts


def event_words(event: Event) -> str:
    """Return an event's details in words: its reason first, then every number with its unit; zeros are left out."""
    reasons = [str(reason) for reason in _listed(event.details.get("why")) or [event.details.get("why")] if reason]
    return "; ".join([*reasons, *in_words({key: entry for key, entry in event.details.items() if key != "why"})])


def _changes(events: Sequence[Event]) -> list[tuple[Event, str]]:
    """Return every new generation, and its causes with notices and losses since the generation before."""
    changes: list[tuple[Event, str]] = []
    reasons: dict[str, str] = {}
    for event in events:
        member = str(event.details.get("member"))
        if event.kind == "lost":
            reasons[member] = str(event.details.get("why", "")).removeprefix(f"worker {member} ")
        elif event.kind == "notice":
            reasons.setdefault(member, _notice(event.details))
        elif event.kind in _BEGINNINGS and "cuts" in event.details:
            sentences = []
            for sentence in map(str, _listed(event.details.get("why"))):
                named = [name for name in reasons if name in sentence.replace(",", " ").split()]
                why = [(f"{name} " if len(named) > 1 else "") + reasons.pop(name) for name in named]
                sentences.append(sentence + (f" ({'; '.join(why)})" if why else ""))
            changes.append((event, "; ".join(sentences)))
    return changes


def _notice(details: Mapping[str, Any]) -> str:
    deadline = details.get("deadline")
    remaining_text = f", {deadline:.0f} s left" if isinstance(deadline, (int, float)) else ""
    return f"notice from {details.get('source')}{remaining_text}"


def _row(event: Event, words: str) -> list[str]:
    members, ways = _listed(event.details.get("members")), _listed(event.details.get("ways"))
    cuts = " + ".join(map(str, ways or [event.details.get("cuts")]))
    moved, step = _number(event, "moved_bytes"), event.step
    begins = event.kind != "morph"
    return [
        moment(event.time),
        plain(None if step is None else step + begins),
        plain(event.generation),
        words,
        str(len(members)) if members else UNKNOWN,
        markup.code(cuts),
        UNKNOWN if begins else duration(_number(event, "pause_seconds")),
        duration(_number(event, "search_seconds")),
        UNKNOWN if begins or moved is None else format_bytes(int(moved)),
    ]


def _generations(run: RunRecord, changes: Sequence[Event]) -> list[GenerationPeaks]:
    """Return every generation that began or made a step, oldest first."""
    began = {event.generation: event for event in changes if event.generation is not None}
    steps: dict[int, list[int]] = {}
    measured: dict[int, Sequence[int]] = {}
    for line in run.steps:
        if line.generation is None:
            continue
        steps.setdefault(line.generation, []).append(line.step)
        if line.peak_bytes:
            measured[line.generation] = line.peak_bytes
    generations = []
    for number in sorted(set(began) | set(steps)):
        event, made, plan = began.get(number), steps.get(number), run.plans.get(number)
        predicted, capacity = (None, None) if plan is None else (plan.stage_bytes, plan.capacities_of(plan.placement()))
        peaks = measured.get(number)
        if predicted is not None and peaks is not None and len(peaks) != len(predicted):
            peaks = None
        change = "" if event is None else change_kind(event)
        why = "" if event is None else "; ".join(map(str, _listed(event.details.get("why"))))
        span = None if made is None else (made[0], made[-1])
        generations.append(GenerationPeaks(number, span, why, change, predicted, peaks, capacity))
    return generations


def _number(event: Event, name: str) -> float | None:
    value = event.details.get(name)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


# -- Accounts for the time of a run, from its files alone: productive steps, and all other time.
#
# Every moment from the first launch to the last line of the run's files belongs to exactly one of the kinds below, so
# that they add up to the wall time.


KINDS: Mapping[str, str] = {
    "productive": "steps that count: the last time that each was made",
    "repeated": "steps that were made again later, and the part of a step that a loss broke off",
    "paused": "changes of the devices, without their waiting, checkpoints and broken-off steps, which have rows here",
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
    """Seconds by kind, in the order of `KINDS`; pauses: the part of these seconds in changes of the devices."""

    seconds: Mapping[str, float]
    pauses: Mapping[str, float]

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
    evaluated = {(evaluation.step, evaluation.generation) for evaluation in run.evaluations}
    return _Ledger(steps, run.events, evaluated).account()


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
        self._pauses: dict[int | None, float] = {}
        for event in self._events:
            if event.kind == "checkpoint":
                self._stalls[event.step, event.generation] += _seconds_of(event, "stall_seconds")
            elif event.kind in ("morph", "resume"):
                self._broken_off.setdefault(event.generation, _seconds_of(event, "lost_step_seconds"))
                if (pause := _number(event, "pause_seconds")) is not None:
                    self._pauses.setdefault(event.generation, pause)
        self._last = {line.step: number for number, line in enumerate(self._steps)}
        self._seconds_by_kind, self._in_pauses = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0.0)

    def account(self) -> Account:
        """Return seconds by kind."""
        first = self._steps[0]
        begin = _begin(first)
        at = min([begin, *(_time(event) for event in self._events if event.kind == "launch")])
        self._before_a_step(at, begin, None, first)
        for number, line in enumerate(self._steps):
            end = max(begin, line.time or 0.0)
            counts = self._last[line.step] == number
            self._seconds_by_kind["productive" if counts else "repeated"] += end - begin
            if number + 1 < len(self._steps):
                following = self._steps[number + 1]
                begin = max(end, _begin(following))
                self._before_a_step(end, begin, line, following)
        self._seconds_by_kind["ending"] += max([end, *self._times[-1:]]) - end
        return Account(self._seconds_by_kind, self._in_pauses)

    def _before_a_step(self, begin: float, end: float, before: StepLine | None, after: StepLine) -> None:
        """Account for the time without a step before a step begins."""
        inside = self._events[bisect_left(self._times, begin) : bisect_right(self._times, end)]
        launches = [_time(event) for event in inside if event.kind == "launch"]
        if launches or before is None:
            # launches that made no step count as part of the start
            launched = launches[0] if launches else begin
            stopped = max([begin, *(at for event in inside if (at := _time(event)) < launched)])
            self._seconds_by_kind["ending"] += stopped - begin
            self._seconds_by_kind["not running"] += launched - stopped
            self._seconds_by_kind["starting"] += end - launched
            return
        changes = before.generation != after.generation
        remaining_seconds = end - begin
        if changes and after.generation in self._pauses:
            # the pause is as long as its event says, so that every table shows the same seconds
            remaining_seconds = min(remaining_seconds, self._pauses[after.generation])
            self._seconds_by_kind["between steps"] += end - begin - remaining_seconds
        for kind, seconds in self._known(end, inside, before, after):
            taken = min(remaining_seconds, max(0.0, seconds))
            self._spend(kind, taken, changes)
            remaining_seconds -= taken
        self._spend("paused" if changes else "between steps", remaining_seconds, changes)

    def _spend(self, kind: str, seconds: float, in_pause: bool) -> None:
        self._seconds_by_kind[kind] += seconds
        if in_pause:
            self._in_pauses[kind] += seconds

    def _known(self, end: float, inside: Sequence[Event], before: StepLine, after: StepLine) -> list[tuple[str, float]]:
        """Return the known kinds of time between two steps, with their longest possible seconds."""
        boundary = before.step, before.generation
        parts = [("checkpointing", self._stalls.get(boundary, 0.0))]
        if before.generation != after.generation:
            parts.append(("repeated", self._broken_off.get(after.generation, 0.0)))
            waits = [_time(event) for event in inside if event.kind == "waiting"]
            if waits:  # until the last device joins; the change after that is a pause
                comes = [at for event in inside if event.kind == "join" and (at := _time(event)) > waits[0]]
                parts.append(("waiting", (comes[-1] if comes else end) - waits[0]))
        elif boundary in self._evaluated:
            parts.append(("evaluating", math.inf))  # the rest
        return parts


def _time(event: Event) -> float:
    return event.time or 0.0


def _begin(line: StepLine) -> float:
    return (line.time or 0.0) - (line.step_seconds or 0.0)


def _seconds_of(event: Event, name: str) -> float:
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
            words = markup.described(kind, meaning)
            rows.append([words, duration(seconds), f"{100 * share:.2f} %", markup.cell_bar(share)])
    rows.append(["all", duration(account.total), "100.00 %", ""])
    parts = [markup.table("goodput-table", ("kind", "time", "share", ""), rows, left=(0, 3))]
    inside = [f"{kind} {duration(seconds)}" for kind, seconds in account.pauses.items() if seconds > 0]
    if inside:
        total = duration(sum(account.pauses.values()))
        parts.append(markup.paragraph(f"The pauses of all changes of the devices, {total}, are: {', '.join(inside)}."))
    return parts
