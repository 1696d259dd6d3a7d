"""The picture of one step: a row per rank, a box per action, its microbatch's number inside.

`page` calls it with a simulated timeline (`varuna_capslog.schedules.simulate`). It draws; it simulates nothing.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.patches import Patch

from varuna_capslog.reports.style import AMBER, BLUE, GREY, INK, PALE, SKY, WIDTH, picture, second_unit
from varuna_capslog.schedules import KINDS, TimedAction, Timeline

__all__ = ["draw_schedule"]

_COLOURS = {"F": SKY, "R": AMBER, "B": BLUE, "I": BLUE, "W": "#5b87ad", "O": "#c9b7d6", "L": "#c9b7d6", "U": GREY}
_WHITE_TEXT = frozenset("BIW")
_SMALLEST, _LARGEST = 4.0, 8.5
"""Points of the numbers in the boxes; where not even the smallest fits, boxes stay empty."""


def draw_schedule(path: Path, timeline: Timeline, in_seconds: bool) -> bool:
    """Draws the timeline and returns whether every box has its number.

    Where a rank runs several stages, boxes read `stage.microbatch`.

    Args:
        in_seconds: False where the times are units of one forward pass, not seconds.
    """
    ranks = len(timeline.actions)
    end = timeline.step_seconds or 1.0
    unit, unit_name = second_unit(end) if in_seconds else (1.0, "forward passes")
    owned = [sorted({one.action.stage for one in row}) for row in timeline.actions]
    several = any(len(stages) > 1 for stages in owned)
    points = 72 * (WIDTH - 1.6) / end  # of axis per second
    numbered = True
    height = max(0.22, min(0.42, 6.0 / ranks))
    with picture(path, height=1.15 + height * ranks) as figure:
        axes = figure.add_subplot()
        for rank, row in enumerate(timeline.actions):
            axes.broken_barh([(0, end / unit)], (rank - 0.41, 0.82), facecolors=PALE, linewidth=0)
            for kind in dict.fromkeys(one.action.kind for one in row):
                boxes = [one for one in row if one.action.kind == kind and one.end_seconds > one.start_seconds]
                spans = [(one.start_seconds / unit, (one.end_seconds - one.start_seconds) / unit) for one in boxes]
                axes.broken_barh(
                    spans, (rank - 0.41, 0.82), facecolors=_COLOURS[kind], edgecolors="white", linewidth=0.6
                )
                texts = [_label(one, several) for one in boxes]
                # one size for a row's boxes of a kind, and all of them or none: gaps would look like a meaning
                room = [points * span[1] * unit / len(text) for span, text in zip(spans, texts, strict=True)]
                size = min([_LARGEST, 72 * height * 0.8, *(1.45 * width for width in room)])
                if size < _SMALLEST:
                    numbered = False
                    continue
                for one, text in zip(boxes, texts, strict=True):
                    middle = (one.start_seconds + one.end_seconds) / 2 / unit
                    colour = "white" if kind in _WHITE_TEXT else INK
                    axes.text(middle, rank, text, ha="center", va="center_baseline", fontsize=size, color=colour)
        labels = [f"rank {rank}" if len(owned[rank]) != 1 else f"stage {owned[rank][0]}" for rank in range(ranks)]
        axes.set_yticks(range(ranks), labels)
        axes.set_ylim(ranks - 0.5, -0.5)
        axes.set_xlim(0, end / unit)
        axes.set_xlabel(f"time since the begin of the step [{unit_name}]")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        kinds = [kind for kind in _COLOURS if any(one.action.kind == kind for row in timeline.actions for one in row)]
        handles = [Patch(facecolor=_COLOURS[kind], label=KINDS[kind]) for kind in kinds]
        handles.append(Patch(facecolor=PALE, label="idle"))
        figure.legend(handles=handles, loc="outside upper left", ncols=len(handles))
    return numbered


def _label(one: TimedAction, several: bool) -> str:
    microbatch = "" if one.action.microbatch is None else str(one.action.microbatch)
    return f"{one.action.stage}.{microbatch}" if several else microbatch or "U"
