"""The section on a run whose members changed: which members left, were lost or joined, why, and at which cost.

`page` calls it. It reads the events.jsonl that the members and the hosts wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from varuna_capslog.base.units import format_bytes
from varuna_capslog.elastic.losses import losses_in_words
from varuna_capslog.reports import markup
from varuna_capslog.reports.markup import Markup
from varuna_capslog.reports.memory import COLOURS, MOST_GENERATIONS, GenerationPeaks, draw_generations
from varuna_capslog.reports.run import Event, RunRecord
from varuna_capslog.reports.wording import UNKNOWN, duration, moment, plain, plural

__all__ = ["change_kind", "change_parts", "changes_in_short"]

_PICTURE = "generations.png"
_MOST_ROWS = 60
_BEGINNINGS = ("start", "resume", "morph")


def change_kind(event: Event) -> str:
    """Return the kind of a change: "lost", "left" or "joined", the gravest first; "" for any other event."""
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


def change_parts(run: RunRecord, folder: Path) -> list[Markup]:
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
        draw_generations(folder / _PICTURE, shown)
        caption = "Peak memory of each stage by generation, which is what a time between two changes is called."
        if len(shown) < len(generations):
            caption += f" The last {len(shown)} of {len(generations)}."
        if any(generation.measured is None for generation in shown):
            caption += " A generation of a few steps is not measured."
        parts.append(markup.figure(_PICTURE, "Bars of the memory of each stage, by generation", caption))
    rows = [_row(event, words) for event, words in changes[-_MOST_ROWS:]]
    headings = ("time (UTC)", "step", "generation", "what happened", "devices", "cuts", "pause", "search", "moved")
    parts.append(markup.table("change-table", headings, rows, left=(0, 3, 5)))
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


def _changes(events: Sequence[Event]) -> list[tuple[Event, str]]:
    """Return every generation that began, and its causes with the notices and losses since the generation before."""
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
