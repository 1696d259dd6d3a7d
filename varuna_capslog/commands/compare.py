"""`capslog compare`: every planner's answer for one model side by side."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.commands import shared
from varuna_capslog.commands.shared import option

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from varuna_capslog.planning.comparison import Row
    from varuna_capslog.profiles.record import Profile

__all__ = ["compare"]


@dataclass(frozen=True)
class CompareFlags:
    """The command line of `compare`."""

    config: shared.OptionalConfigFile = None
    overrides: shared.Overrides = None
    profile: shared.ProfileFile = None
    devices: shared.Devices = None
    planners: Annotated[
        str | None,
        option(
            "Only these, such as varuna,exact. mcap-bo, which searches for up to a minute, is asked only here.",
            "every planner but mcap-bo",
        ),
    ] = None
    memory: Annotated[str | None, option("Memory model.", "as capslog plan chooses it")] = None
    capacity: Annotated[
        str | None, option("Memory of each device: 16GiB, or one size per device.", "CONFIG's, or no limit")
    ] = None
    node_devices: shared.NodeDevices = None
    schedule: Annotated[
        str | None, option("Such as 1f1b; see pipeline.schedule.", "CONFIG's, or as plan chooses it")
    ] = None
    microbatches: Annotated[int | None, option("Of one pipeline and step.", "CONFIG's, or 4 per device", min=1)] = None
    bandwidth: shared.Bandwidth = None
    latency: shared.Latency = "0s"
    host_bandwidth: shared.HostBandwidth = None
    output: Annotated[Path | None, shared.output_option("Folder for the picture and JSON.")] = None
    as_json: shared.AsJson = False
    trust: shared.Trust = False


@shared.options_of(CompareFlags)
def compare(given: CompareFlags) -> None:
    """Ask every planner but mcap-bo: peak, margin to the capacity, simulated step time and search time of each."""
    from varuna_capslog.base import units
    from varuna_capslog.memory import AUTO
    from varuna_capslog.planners import AUTOMATIC
    from varuna_capslog.planning.comparison import compare as ask
    from varuna_capslog.schedules import RunShape
    from varuna_capslog.start.of_profile import run_of_profile

    if given.config is None and given.profile is None:
        raise CapslogError("nothing to compare for: give a CONFIG file or --profile FILE")
    settings, run, limit = None, None, None
    devices, memory = given.devices, given.memory
    if given.config is not None:
        from varuna_capslog.start.default_planner import with_default_capacity

        # planner auto leaves the schedule open that CONFIG leaves open, as `plan` does with each of the planners
        changes = [f"pipeline.planner={AUTOMATIC}", *([] if devices is None else [f"pipeline.devices={devices}"])]
        settings = shared.load(given.config, given.overrides, *changes, *shared.SEARCHED, trust=given.trust)
        pipeline = with_default_capacity(settings).pipeline
        devices, limit, memory = pipeline.devices, pipeline.capacity, memory or pipeline.memory
        run = RunShape.of_config(settings).share(pipeline.replicas)
    costs = shared.profile_of(given.profile, settings, show=not given.as_json)
    run = run or run_of_profile(costs, memory or AUTO)
    limit = limit if given.capacity is None else units.parse_capacity(given.capacity)
    if given.schedule is not None:
        run = dataclasses.replace(run, schedule=given.schedule)
    if given.microbatches is not None:
        run = dataclasses.replace(run, num_microbatches=given.microbatches, num_blocks=1)
    if devices is None:
        raise CapslogError("--profile without a CONFIG needs --devices N, the number of devices to plan for")
    names = None if given.planners is None else [name.strip() for name in given.planners.split(",")]
    link = shared.link_of(
        given.bandwidth, given.latency, host_bandwidth=given.host_bandwidth, node_devices=given.node_devices
    )
    if settings is not None:
        from varuna_capslog.start.layerwise_start import configured_link

        link = configured_link(settings, link)
    with _progress() as progress:
        rows = ask(
            costs, devices, names=names, run=run, memory=memory or AUTO, capacity=limit, link=link, progress=progress
        )
    if given.output is not None:
        from varuna_capslog.base import files
        from varuna_capslog.reports.forecasts import draw_comparison

        files.write_json(given.output / "comparison.json", [row.to_json() for row in rows])
        draw_comparison(given.output / "comparison.png", rows)
    if given.as_json:
        shared.print_json([row.to_json() for row in rows])
        return
    _print(rows, costs, devices)
    if given.output is not None:
        shared.say(f"written to {given.output}: comparison.png, comparison.json")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """Shows on standard error which planner is asked: a bar with the seconds on a terminal, else a line for each."""
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
    from varuna_capslog.base.units import format_bytes
    from varuna_capslog.reports.wording import duration

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
        """Whether no plan is faster, or how far the step is above a bound."""
        if row.step_seconds is None or not row.bound_seconds or row.proven:
            return "yes" if row.proven else ""
        return f"within {(row.step_seconds / row.bound_seconds - 1) * 100:.1f} %"

    title = f"{profile.model or 'model'}: {profile.num_layers} layers on {devices} devices"
    reasons = [f"{row.planner}: {row.reason}" for row in rows if row.reason is not None]
    headings = ("planner", "peak", "margin", "step", "bubble", "search", "proven")
    shared.print_table(title, headings, map(cells, rows), left=(0,), notes=reasons)
