"""The picture of a replayed trace of preemptions: devices over time, and the goodput they give.

`capslog simulate --trace -o` calls it with a `Replay`. It draws and judges nothing.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.ticker import MaxNLocator

from varuna_capslog.planning.trace_replay import Replay
from varuna_capslog.reports.style import ALARM, AMBER, BLUE, GREY, SKY, picture

__all__ = ["draw_replay"]

_MARKS = {"leave": (AMBER, "leave, announced"), "crash": (ALARM, "crash"), "stop": (ALARM, "nothing fits")}


def draw_replay(path: Path, found: Replay) -> None:
    """Devices rented and used over the hours; below, samples per second as planned and the average that was reached."""
    hours = [change.seconds / 3600 for change in found.changes]
    end = found.duration_seconds / 3600
    times = [0.0, *hours, end]
    rented, used, rates = (
        [0, *values, *values[-1:]] if values else [0, 0]
        for values in (
            [change.devices for change in found.changes],
            [change.devices_used for change in found.changes],
            [change.samples_per_second for change in found.changes],
        )
    )
    with picture(path, height=4.6) as figure:
        above, below = figure.subplots(2, 1, sharex=True)
        above.fill_between(times, rented, step="post", color=SKY, linewidth=0, label="devices rented")
        above.step(times, used, where="post", color=BLUE, linewidth=1.0, label="used")
        for kind, (colour, label) in _MARKS.items():
            places = [hour for hour, change in zip(hours, found.changes, strict=True) if change.kind == kind]
            if places:
                above.plot(places, [0] * len(places), "|", color=colour, markersize=7, label=label, clip_on=False)
        above.set_ylabel("devices")
        above.yaxis.set_major_locator(MaxNLocator(integer=True))
        above.set_ylim(0, 1.08 * max(rented, default=1))
        below.step(times, rates, where="post", color=BLUE, linewidth=1.0, label="planned")
        label = f"reached on average: {100 * found.share_of_ideal:.2f} % of the ideal"
        below.axhline(found.goodput, color=GREY, linestyle="--", linewidth=1.0, label=label)
        below.set_ylabel("samples per second")
        below.set_ylim(0, 1.08 * max(rates, default=1) or 1)
        below.set_xlim(0, end)
        below.set_xlabel("hours since the first machine joined")
        for axes in (above, below):
            axes.grid(axis="y")
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, ncols=5)
