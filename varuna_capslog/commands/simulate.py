"""`capslog simulate`: one step of a plan before it runs, or a recorded trace of preemptions replayed with planners."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.commands.arguments import (
    AsJson,
    Bandwidth,
    Latency,
    OptionalConfigFile,
    Overrides,
    ProfileFile,
    link_of,
    print_json,
    profile_of,
)

if TYPE_CHECKING:
    from varuna_capslog.config.reading import Config
    from varuna_capslog.planning.simulation import Simulation
    from varuna_capslog.plans.plan import Plan
    from varuna_capslog.profiles.record import Profile
    from varuna_capslog.schedules import RunShape

__all__ = ["simulate"]


def simulate(
    config: OptionalConfigFile = None,
    overrides: Overrides = None,
    profile: ProfileFile = None,
    plan: Annotated[Path | None, typer.Option(help="Plan to play.", show_default="that of CONFIG's planner")] = None,
    bandwidth: Bandwidth = None,
    latency: Latency = "0s",
    copy_bandwidth: Annotated[
        str | None,
        typer.Option(
            help="At which a rank copies its messages itself, as over gloo, instead of computing.",
            show_default="sending costs a rank nothing",
        ),
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help="gpipe, 1f1b or varuna.", show_default="the plan's, or varuna")
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(min=1, help="Of one pipeline and step.", show_default="the plan's, or 4 for each stage"),
    ] = None,
    recompute: Annotated[
        bool | None,
        typer.Option(
            "--recompute/--no-recompute", help="With recomputation or not.", show_default="CONFIG's, or as profiled"
        ),
    ] = None,
    stage_inputs: Annotated[
        str | None,
        typer.Option(
            help="Where inputs kept for recomputation wait: host or device.", show_default="CONFIG's, or as profiled"
        ),
    ] = None,
    cores: Annotated[
        int | None, typer.Option(min=1, help="Cores that all ranks share.", show_default="one for each rank")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for pictures, traces and JSON.", show_default=False)
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Replay these preemptions instead of one step; lines of milliseconds,add|remove,node.",
            show_default=False,
        ),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="--trace: most devices to rent.", show_default="as the trace has")
    ] = None,
    planner: Annotated[
        str | None, typer.Option(help="--trace: joint, or a planner of one pipeline.", show_default="joint")
    ] = None,
    minibatch: Annotated[
        int | None,
        typer.Option(min=1, help="--trace: samples of a step.", show_default="CONFIG's, or 4 microbatches a device"),
    ] = None,
    capacity: Annotated[
        str | None,
        typer.Option(help="--trace: memory of every device, such as 16GiB.", show_default="CONFIG's, or no limit"),
    ] = None,
    duration: Annotated[
        str | None, typer.Option(help="--trace: until when, such as 8h.", show_default="the trace's last event")
    ] = None,
    notice: Annotated[
        str, typer.Option(help="--trace: how long before a leave it is announced; AWS's 2 min.")
    ] = "120s",
    planned_pause: Annotated[str, typer.Option(help="--trace: of a join or announced leave; assumed.")] = "1s",
    crash_pause: Annotated[str, typer.Option(help="--trace: of a leave without notice; assumed.")] = "10s",
    restart_pause: Annotated[str, typer.Option(help="--trace: from too few devices on; torchrun's, measured.")] = "45s",
    spot_price: Annotated[float, typer.Option(help="--trace: dollars per device and hour; assumed.")] = 0.918,
    on_demand_price: Annotated[float, typer.Option(help="--trace: the same on demand; AWS p3.2xlarge.")] = 3.06,
    as_json: AsJson = False,
) -> None:
    """Play one step of a plan: step time, bubbles, memory over time; with --trace, goodput and cost on spot nodes."""
    from varuna_capslog.base import units
    from varuna_capslog.commands.replay import ReplayFlags, print_replay, replay_trace
    from varuna_capslog.planning.simulation import simulate_plan
    from varuna_capslog.planning.trace_replay import Pauses, Prices

    if config is None and profile is None:
        raise CapslogError(
            "nothing to simulate: give a CONFIG file, or --profile FILE with --plan FILE or --trace FILE"
        )
    if config is None and plan is None and trace is None:
        raise CapslogError("--profile without a CONFIG needs --plan FILE, or --trace FILE to replay; give one of them")
    link = link_of(bandwidth, latency, copy_bandwidth)
    settings = None
    if config is not None:
        from varuna_capslog.config.reading import load_config

        settings = load_config(config, overrides or ())
    costs = profile_of(profile, settings, show=not as_json)
    run = _run(settings, costs, {"schedule": schedule, "recompute": recompute, "stage_inputs": stage_inputs})
    if trace is not None:
        flags = ReplayFlags(
            trace,
            planner,
            minibatch,
            None if capacity is None else units.parse_bytes(capacity, "capacity"),
            devices,
            None if duration is None else units.parse_seconds(duration),
            Pauses(
                units.parse_seconds(planned_pause, "planned-pause"),
                units.parse_seconds(crash_pause, "crash-pause"),
                units.parse_seconds(restart_pause, "restart-pause"),
                units.parse_seconds(notice, "notice"),
            ),
            Prices(spot_price, on_demand_price),
        )
        print_replay(replay_trace(flags, costs, settings, run, link), trace, output, as_json)
        return
    played = _plan(settings, costs, plan)
    step = simulate_plan(
        costs,
        played,
        schedule=schedule,
        num_microbatches=microbatches,
        recompute=run.recompute,
        stage_inputs=run.stage_inputs,
        link=link,
        speeds=None if cores is None else [1.0] * cores,
    )
    if settings is not None and plan is None and settings.pipeline.replicas > 1:
        step.notes.append(
            f"pipeline.replicas={settings.pipeline.replicas}: one replica is played, and the exchange of gradients "
            "between replicas takes no time here"
        )
    _show(step, played, output, as_json)


def _run(settings: Config | None, costs: Profile, flags: Mapping[str, Any]) -> RunShape:
    """How a step is run: as the flags say, else the config, else as the profile was taken."""
    from varuna_capslog.schedules import RunShape

    if settings is None:
        run = RunShape.of_conditions(costs.conditions)
    else:
        pipeline = settings.pipeline
        run = RunShape(None, pipeline.schedule, pipeline.recompute, pipeline.stage_inputs)
    return dataclasses.replace(run, **{name: value for name, value in flags.items() if value is not None})


def _show(step: Simulation, played: Plan, output: Path | None, as_json: bool) -> None:
    """Prints the step as a table or JSON, and writes its files into a folder if asked to."""
    if output is not None:
        _write(output, step, played)
    if as_json:
        print_json(step.to_json())
        return
    _print(step, played)
    if output is not None:
        typer.echo(
            f"written to {output}: step.png, step.svg, perfetto.json (open it in ui.perfetto.dev), simulation.json"
        )


def _plan(settings: Config | None, costs: Profile, plan: Path | None) -> Plan:
    """The given plan, or the one that the config's planner finds; one that does not fit is played all the same."""
    if plan is not None:
        from varuna_capslog.plans.plan import read_plan

        return read_plan(plan)
    assert settings is not None
    from varuna_capslog.start.prepare import plan_run

    return plan_run(settings, costs)


def _write(folder: Path, step: Simulation, plan: Plan) -> None:
    from varuna_capslog.base import files
    from varuna_capslog.reports.gantt import draw_simulation
    from varuna_capslog.reports.perfetto import trace_events

    files.write_json(folder / "simulation.json", step.to_json())
    files.write_json(folder / "perfetto.json", trace_events(step))
    draw_simulation(folder / "step.png", step, _capacity_of_rows(step, plan))


def _capacity_of_rows(step: Simulation, plan: Plan) -> list[int] | None:
    """The capacity of each rank, in the order of the simulation's rows."""
    return plan.capacities_of(rank for one in step.pipelines for rank in one.ranks)


def _print(step: Simulation, plan: Plan) -> None:
    from rich.console import Console
    from rich.table import Table

    from varuna_capslog.base.units import format_bytes
    from varuna_capslog.reports.wording import duration

    title = f"{step.schedule}{' with recomputation' if step.recompute else ''}, {step.num_microbatches} microbatches"
    table = Table(title=title)
    columns = ("pipeline", "rank", "stages", "busy", "idle", "in flight", "peak", "margin")
    for heading in columns if len(step.pipelines) > 1 else columns[1:]:
        table.add_column(heading, justify="right")
    capacities = iter(_capacity_of_rows(step, plan) or [])
    for number, pipeline in enumerate(step.pipelines):
        peaks, line = pipeline.peaks, pipeline.timeline
        for rank, stages, busy in zip(pipeline.ranks, pipeline.stage_of_row, line.busy_seconds, strict=True):
            capacity = next(capacities, None)
            peak = None if peaks is None else sum(peaks[stage] for stage in stages)
            cells = [
                str(rank),
                ", ".join(map(str, stages)),
                duration(busy),
                f"{100 * (1 - busy / step.step_seconds):.1f} %" if step.step_seconds else "",
                ", ".join(str(line.max_in_flight[stage]) for stage in stages),
                "unknown" if peak is None else format_bytes(peak),
                "" if peak is None or capacity is None else format_bytes(capacity - peak),
            ]
            table.add_row(*([str(number)] if len(step.pipelines) > 1 else []), *cells)
    console = Console()
    console.print(table)
    rate = "" if step.samples_per_second is None else f", {step.samples_per_second:.4g} samples/s"
    console.print(
        f"step {duration(step.step_seconds)}, bubble {100 * step.bubble_fraction:.1f} %{rate}", highlight=False
    )
    for note in (*plan.notes, *step.notes):
        typer.echo(f"note: {note}", err=True)
