"""The part of `capslog simulate` that replays a trace of preemptions: its defaults, its table, its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from varuna_capslog.commands.arguments import blocks_of, print_json

if TYPE_CHECKING:
    from varuna_capslog.config.reading import Config
    from varuna_capslog.planners.seconds import Link
    from varuna_capslog.planning.trace_replay import Pauses, Prices, Replay
    from varuna_capslog.profiles.record import Profile
    from varuna_capslog.schedules import RunShape

__all__ = ["ReplayFlags", "print_replay", "replay_trace"]


@dataclass(frozen=True)
class ReplayFlags:
    """What the flags of --trace say; what is None comes from the config, or is the command's default."""

    trace: Path
    planner: str | None
    minibatch: int | None
    capacity: int | None
    devices: int | None
    duration_seconds: float | None
    pauses: Pauses
    prices: Prices


def replay_trace(flags: ReplayFlags, profile: Profile, settings: Config | None, run: RunShape, link: Link) -> Replay:
    """Reads the trace and replays it with a step that is run like `run`."""
    from varuna_capslog.planners import DEFAULT_MICROBATCHES_PER_STAGE
    from varuna_capslog.planning.replanning import JOINT, Replanner
    from varuna_capslog.planning.trace_replay import most_nodes, read_trace, replay

    events = read_trace(flags.trace)
    most = flags.devices or most_nodes(events)
    minibatch, capacity = flags.minibatch, flags.capacity
    size = profile.conditions.get("microbatch_size", 1)
    if settings is not None:
        pipeline = settings.pipeline
        minibatch = minibatch or settings.train.minibatch_size
        if capacity is None and isinstance(pipeline.capacity, int):
            capacity = pipeline.capacity
    if minibatch is None:
        minibatch = DEFAULT_MICROBATCHES_PER_STAGE * most * (size if isinstance(size, int) else 1)
        typer.echo(f"note: a step of {minibatch} samples is assumed; --minibatch says otherwise", err=True)
    answer = Replanner(
        profile,
        minibatch,
        planner=flags.planner or JOINT,
        capacity=capacity,
        run=run,
        blocks=blocks_of(settings),
        link=link,
    )
    return replay(
        events,
        answer,
        devices=most,
        pauses=flags.pauses,
        prices=flags.prices,
        duration_seconds=flags.duration_seconds,
    )


def print_replay(found: Replay, trace: Path, output: Path | None, as_json: bool) -> None:
    """Prints the result as a table or JSON, and writes replay.json and replay.png into a folder if asked to."""
    if output is not None:
        from varuna_capslog.base import files
        from varuna_capslog.reports.replay import draw_replay

        files.write_json(output / "replay.json", found.to_json())
        draw_replay(output / "replay.png", found)
    if as_json:
        print_json(found.to_json())
        return

    from rich.console import Console
    from rich.table import Table

    table = Table("", "", title=f"{trace.name}: {found.duration_seconds / 3600:.2f} h, at most {found.devices} devices")
    table.columns[1].justify = "right"
    for name, value in _rows(found).items():
        table.add_row(name, value)
    Console().print(table)
    pauses = found.pauses
    typer.echo(
        f"assumed pauses: {pauses.planned:g} s for a join or announced leave (notice {pauses.notice:g} s), "
        f"{pauses.crash:g} s for a crash, {pauses.restart:g} s for a restart",
        err=True,
    )
    if output is not None:
        typer.echo(f"written to {output}: replay.png, replay.json")


def _rows(found: Replay) -> dict[str, str]:
    from varuna_capslog.reports.wording import duration

    count = {kind: sum(change.kind == kind for change in found.changes) for kind in ("join", "leave", "crash", "stop")}
    hours = found.device_hours
    dollars = [
        "nothing trained" if value is None else f"{value:,.2f}"
        for value in (found.spot_dollars_per_million, found.on_demand_dollars_per_million)
    ]
    return {
        "joins, leaves, crashes, stops": ", ".join(map(str, count.values())),
        "devices on average": f"{hours * 3600 / found.duration_seconds:.1f}",
        "idle device time": f"{100 * found.idle_device_hours / hours:.1f} %" if hours else "",
        "goodput": f"{found.goodput:.4g} samples/s",
        "share of the ideal": f"{100 * found.share_of_ideal:.2f} %",
        "paused": duration(found.paused_seconds),
        "stopped, nothing fits": duration(found.stopped_seconds),
        "slowest search": duration(found.slowest_search_seconds),
        f"$ per million samples, spot at {found.prices.spot:g} $/h": dollars[0],
        f"$ per million samples, on demand at {found.prices.on_demand:g} $/h": dollars[1],
    }
