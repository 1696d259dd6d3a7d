"""`capslog compare`: the plans of several planners for one model, side by side."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from varuna_capslog.commands import shared
from varuna_capslog.commands.help import SEARCH
from varuna_capslog.commands.questions import QuestionFlags, costs_of, question_of, read_profiles, settled
from varuna_capslog.commands.shared import option
from varuna_capslog.planning.registry import REGISTRY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from varuna_capslog.planning.comparison import Row
    from varuna_capslog.planning.problem import Problem
    from varuna_capslog.profiles.record import Profile

__all__ = ["compare"]

_ALL = "all"
"""Value of --planners for every planner."""


@dataclass(frozen=True)
class CompareFlags(QuestionFlags):
    """The command line of `compare`."""

    profile: shared.ProfileFile = None
    planners: Annotated[
        str | None,
        option(
            "Planners to ask, such as varuna,exact; all: every planner, also where its search takes long.",
            "those whose search is quick for so many layers and devices",
            panel=SEARCH,
        ),
    ] = None
    output: Annotated[Path | None, shared.output_option("Folder for the picture and JSON.")] = None


@shared.options_of(CompareFlags)
def compare(flags: CompareFlags) -> None:
    """Show planners side by side: peak, margin to the capacity, simulated step time, search time."""
    from varuna_capslog.planners import BUDGET
    from varuna_capslog.planning.problem import Problem

    flags = settled(flags)
    (profile,) = read_profiles([flags.profile] if flags.profile else None, flags) or (None,)
    # planner budget leaves the open keys of CONFIG open, so that each planner sets them as in `capslog plan`
    config, costs, _ = costs_of(flags, question_of(flags, BUDGET, profile), profile, choose=False)
    problem = Problem.of_config(config, costs)
    rows = _rows(problem, flags.planners)
    if flags.output is not None:
        from varuna_capslog.base import files
        from varuna_capslog.reports.curves import draw_comparison

        files.write_json(flags.output / "comparison.json", [row.to_json() for row in rows])
        asked = [row for row in rows if row.asked]
        draw_comparison(flags.output / "comparison.png", _title(problem, asked), asked, problem.usable)
    if flags.as_json:
        shared.print_json([row.to_json() for row in rows])
        return
    _print(rows, costs, config.pipeline.devices)
    if flags.output is not None:
        shared.say(f"written to {flags.output}: comparison.png, comparison.json")


def _rows(problem: Problem, planners: str | None) -> list[Row]:
    from varuna_capslog.planning.comparison import compare

    names = None if planners is None else [name.strip() for name in planners.split(",")]
    if names == [_ALL]:
        names = list(REGISTRY)
    with _progress() as progress:
        return compare(problem, names, progress)


def _title(problem: Problem, rows: Sequence[Row]) -> str:
    """Return the title of the picture: the model, its devices, and the schedules of the plans."""
    from varuna_capslog.reports.markup import plural
    from varuna_capslog.reports.style import device_kind, schedules_text, title_of

    kind = device_kind(problem.profile.conditions, [device.speed for device in problem.devices])
    devices = f"{plural(len(problem.devices), 'device')}{kind}"
    schedules = schedules_text([None if row.plan is None else row.plan.schedule for row in rows])
    number = problem.run.num_microbatches
    count = None if number is None else plural(number, "microbatch", "es")
    return title_of("Plans", problem.profile.model, devices, schedules, count)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """Show the current planner on standard error: a bar with the seconds on a terminal, else a line for each."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total, name: shared.say(f"asking {name} ({done + 1} of {total})", err=True)
        return
    text = TextColumn("{task.description}")
    columns = (SpinnerColumn(), text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("asking planners", total=None)
        yield lambda done, total, name: bar.update(task, completed=done, total=total, description=f"asking {name}")


def _print(rows: Sequence[Row], profile: Profile, devices: int) -> None:
    from varuna_capslog.base.units import format_bytes, format_percent
    from varuna_capslog.reports.markup import duration

    def cells(row: Row) -> list[str]:
        if row.plan is None:
            return [row.planner, *(["-"] * 6)]
        return [
            row.planner,
            "unknown" if row.peak_bytes is None else format_bytes(row.peak_bytes),
            "" if row.margin_bytes is None else format_bytes(row.margin_bytes),
            "unknown" if row.step_seconds is None else duration(row.step_seconds),
            "" if row.bubble_fraction is None else f"{100 * row.bubble_fraction:.1f} %",
            "" if row.search_seconds is None else duration(row.search_seconds),
            _gap(row),
        ]

    def _gap(row: Row) -> str:
        """Return the step's excess over the bound of all plans, in percent."""
        if row.step_seconds is None or not row.bound_seconds:
            return ""
        return "0 %" if row.proven else format_percent(row.step_seconds / row.bound_seconds - 1)

    title = f"{profile.model or 'model'}: {profile.num_layers} layers on {devices} devices"
    left_out, rows = [row.planner for row in rows if not row.asked], [row for row in rows if row.asked]
    reasons = [f"{row.planner}: {row.reason}" for row in rows if row.reason is not None]
    if left_out:
        reasons.append(
            f"not asked, since their searches may take long for {profile.num_layers} layers on {devices} devices: "
            f"{', '.join(left_out)}; --planners {left_out[-1]} asks one, --planners {_ALL} every planner"
        )
    if without_room := [row.planner for row in rows if row.fits is False]:
        reasons.insert(0, f"do not fit: {', '.join(without_room)}")
    headings = ("planner", "peak", "margin", "step", "bubble", "search", "above bound")
    shared.print_table(title, headings, map(cells, rows), left=(0,), notes=reasons)
