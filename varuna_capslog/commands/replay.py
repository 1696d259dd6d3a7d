"""The part of `capslog simulate` that replays a trace of preemptions: its defaults, its table, its files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from varuna_capslog.commands.arguments import blocks_of, print_json, print_table

if TYPE_CHECKING:
    from varuna_capslog.commands.simulate import SimulateFlags
    from varuna_capslog.config.settings import Config
    from varuna_capslog.planners.seconds import Link
    from varuna_capslog.planning.trace_replay import Replay
    from varuna_capslog.profiles.record import Profile
    from varuna_capslog.schedules import RunShape

__all__ = ["print_replay", "replay_trace"]


def replay_trace(
    given: SimulateFlags, trace: Path, profile: Profile, settings: Config | None, run: RunShape, link: Link
) -> Replay:
    """Reads the trace and replays it with a step that is run like `run`.

    given: the flags of --trace; what is None comes from the config, or is the command's default.
    """
    from varuna_capslog.base import units
    from varuna_capslog.planners import DEFAULT_MICROBATCHES_PER_STAGE
    from varuna_capslog.planning.replanning import JOINT, Replanner
    from varuna_capslog.planning.trace_replay import Pauses, Prices, most_nodes, read_trace, replay

    capacity = None if given.capacity is None else units.parse_bytes(given.capacity, "capacity")
    duration = None if given.duration is None else units.parse_seconds(given.duration)
    names = ("planned-pause", "crash-pause", "restart-pause", "notice")
    pauses = Pauses(*(units.parse_seconds(getattr(given, name.replace("-", "_")), name) for name in names))
    prices = Prices(given.spot_price, given.on_demand_price)
    events = read_trace(trace)
    most = given.devices or most_nodes(events)
    minibatch = given.minibatch
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
        planner=given.planner or JOINT,
        capacity=capacity,
        run=run,
        blocks=blocks_of(settings),
        link=link,
    )
    return replay(events, answer, devices=most, pauses=pauses, prices=prices, duration_seconds=duration)


def print_replay(found: Replay, trace: Path, output: Path | None, as_json: bool) -> None:
    """Prints the result as a table or JSON, and writes replay.json and replay.png into a folder if asked to."""
    if output is not None:
        from varuna_capslog.base import files
        from varuna_capslog.reports.forecasts import draw_replay

        files.write_json(output / "replay.json", found.to_json())
        draw_replay(output / "replay.png", found)
    if as_json:
        print_json(found.to_json())
        return
    title = f"{trace.name}: {found.duration_seconds / 3600:.2f} h, at most {found.devices} devices"
    print_table(title, ("", ""), list(_rows(found).items()), left=(0,))
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
