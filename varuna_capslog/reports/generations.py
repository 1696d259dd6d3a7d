"""The picture of a run whose members changed: the memory of every stage before and after each change.

`changes` calls it. It draws the given numbers and judges nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.patheffects import withStroke

from varuna_capslog.reports.memory import shows_capacity
from varuna_capslog.reports.style import ALARM, AMBER, BLUE, GREEN, GREY, INK, PALE, WIDTH, byte_unit, picture, shorten

__all__ = ["COLOURS", "MOST_GENERATIONS", "Era", "draw_generations"]

MOST_GENERATIONS = 16
"""More generations than this beside each other cannot be read."""
COLOURS = {"lost": ALARM, "left": AMBER, "joined": GREEN}
"""The colour of a change's line, by the kind of change."""

_MOST_WORDS = 8
"""More generations than this leave no space for words under them, only for their numbers."""
_INSIDE = WIDTH - 0.9


@dataclass(frozen=True)
class Era:
    """One generation.

    Attributes:
        steps: the first and the last one that it made; None where no step is known.
        why: what began it, in few words.
        change: "lost", "left", "joined", or anything else for another reason.
        predicted, measured: bytes of each stage; None if unknown.
        capacity: of each stage's device in bytes, or None.
    """

    number: int
    steps: tuple[int, int] | None
    why: str
    change: str
    predicted: Sequence[int] | None
    measured: Sequence[int] | None
    capacity: Sequence[int] | None

    @property
    def stages(self) -> int:
        """0 where nothing is known."""
        return len(self.predicted or self.measured or ())


def draw_generations(path: Path, eras: Sequence[Era]) -> None:
    """Per generation two bars for each stage, predicted and measured, in bytes; a line for each change between them.

    At most `MOST_GENERATIONS`, with at least one bar among them.
    """
    peaks = [peak for era in eras for peak in (*(era.predicted or ()), *(era.measured or ()))]
    divisor, unit = byte_unit(peaks)
    widest = max(era.stages for era in eras)
    room = _INSIDE / len(eras)  # inches for each
    slot = min(1 / (widest + 1.0), 1.1 / room)  # of the room, for one stage
    width = 0.4 * slot
    size = min(8.5, 72 * room * width / 2.5)
    names: dict[str, None] = {}  # each label once, in the order in which they are drawn
    with picture(path, height=3.9) as figure:
        axes = figure.add_subplot()
        for place, era in enumerate(eras):
            if place % 2:
                axes.axvspan(place - 0.5, place + 0.5, color=PALE, zorder=0, linewidth=0)
            if place:
                axes.axvline(place - 0.5, color=COLOURS.get(era.change, GREY), linewidth=1.6)
            limits = era.capacity if shows_capacity(era.capacity, peaks) else None
            for stage in range(era.stages):
                middle = place + (stage - (era.stages - 1) / 2) * slot
                for values, side, label, colour, hatch in (
                    (era.predicted, -1, "predicted by the plan", AMBER, "////"),
                    (era.measured, 1, "measured", BLUE, None),
                ):
                    if values is None:
                        continue
                    height = values[stage] / divisor
                    bar = axes.bar(
                        middle + side * width / 2,
                        height,
                        0.94 * width,
                        color=colour,
                        hatch=hatch,
                        edgecolor="white",
                        linewidth=0,
                        label="" if label in names else label,
                    )
                    names[label] = None
                    if size >= 5:
                        text = f"{height:.2f}" if height < 10 else f"{height:.1f}" if height < 100 else f"{height:.0f}"
                        (written,) = axes.bar_label(bar, [text], padding=2, fontsize=size)
                        written.set(zorder=5, path_effects=[withStroke(linewidth=3, foreground="white")])
                if limits is not None:
                    axes.hlines(
                        limits[stage] / divisor,
                        middle - slot / 2,
                        middle + slot / 2,
                        colors=ALARM,
                        linestyles="--",
                        label="" if "capacity" in names else "capacity of the device",
                    )
                    names["capacity"] = None
        for change, colour in COLOURS.items():
            if any(era.change == change for era in eras[1:]):
                axes.plot([], [], color=colour, linewidth=1.6, label=f"a device {change}")
        axes.set_xlim(-0.5, len(eras) - 0.5)
        axes.set_xticks(range(len(eras)), [_words(era, len(eras), room) for era in eras], color=INK)
        axes.tick_params(axis="x", length=0, labelsize=8)
        if len(eras) > _MOST_WORDS:
            axes.set_xlabel("generation")
        axes.set_ylabel(f"peak of each stage [{unit}]")
        axes.margins(y=0.12)
        axes.grid(axis="y")
        # bars before lines
        handles, labels = axes.get_legend_handles_labels()
        order = sorted(range(len(labels)), key=lambda index: labels[index].startswith("a device"))
        handles, labels = [handles[index] for index in order], [labels[index] for index in order]
        figure.legend(handles, labels, loc="outside upper left", ncols=6, columnspacing=1.3, handlelength=1.6)


def _words(era: Era, count: int, room: float) -> str:
    """The text under a generation: its number, its steps, and its cause."""
    if count > _MOST_WORDS:
        return str(era.number)
    longest = round(room / 0.068)
    steps = "no step" if era.steps is None else f"steps {era.steps[0]:,}\N{EN DASH}{era.steps[1]:,}"
    return "\n".join(shorten(line, longest) for line in (f"generation {era.number}", steps, era.why))
