"""The Pareto front of peak against step time as a picture, for `capslog plan --pareto`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from varuna_capslog.planners.throughput import Fastest
from varuna_capslog.reports import style

__all__ = ["draw_front"]


def draw_front(path: Path, front: Sequence[Fastest], title: str, capacity: int | None = None) -> None:
    """Draws the points (peak, step time) and the steps between them as PNG; `capacity` in bytes as a line.

    Filled points are proven to be the fastest within their peak; of a hollow one the thin line down to its bound says
    how much faster a cut list could be.

    Raises CapslogError where the file cannot be written.
    """
    unit, name = style.byte_unit(point.peak_bytes for point in front)
    second, second_name = style.second_unit(max(point.step_seconds for point in front))
    peaks = [point.peak_bytes / unit for point in front]
    steps = [point.step_seconds / second for point in front]
    with style.picture(path, 4.2) as figure:
        axes = figure.add_subplot()
        axes.step(peaks, steps, where="post", color=style.SKY, zorder=1)
        for point, peak, step in zip(front, peaks, steps, strict=True):
            axes.plot(
                [peak],
                [step],
                marker="o",
                markersize=6,
                color=style.BLUE,
                markerfacecolor=style.BLUE if point.proven else "white",
                zorder=3,
            )
            if not point.proven:
                axes.plot([peak, peak], [point.bound_seconds / second, step], color=style.GREY, linewidth=0.8, zorder=2)
        if capacity is not None:
            axes.axvline(capacity / unit, color=style.ALARM, linewidth=1)
            axes.annotate(
                "capacity", (capacity / unit, 1), xycoords=("data", "axes fraction"), xytext=(-4, -12),
                textcoords="offset points", ha="right", color=style.ALARM, fontsize=8.5,
            )  # fmt: skip
        axes.set_xlabel(f"predicted peak of the largest stage ({name})")
        axes.set_ylabel(f"simulated step time ({second_name})")
        axes.set_title(title)
        axes.grid(True)
