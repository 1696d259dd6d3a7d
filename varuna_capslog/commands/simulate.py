"""`capslog simulate`: one step of a plan before it runs, or a recorded trace of preemptions replayed with planners."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.gpus import parse_devices
from varuna_capslog.base.units import parse_rate
from varuna_capslog.commands import shared
from varuna_capslog.commands.help import DEVICES, MODEL, TRACE
from varuna_capslog.commands.questions import config_of_keys, keys_of
from varuna_capslog.commands.shared import option

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config
    from varuna_capslog.planners.seconds import Link
    from varuna_capslog.planning.simulation import Simulation
    from varuna_capslog.planning.trace_replay import Replay
    from varuna_capslog.plans.plan import Plan
    from varuna_capslog.profiles.record import Profile
    from varuna_capslog.schedules import RunShape

__all__ = ["simulate"]


@dataclass(frozen=True)
class StepFlags:
    """Flags of one simulated step of a plan, and of its output."""

    config: shared.OptionalConfigFile = None
    overrides: shared.Overrides = None
    profile: shared.ProfileFile = None
    plan: Annotated[Path | None, option("Plan to simulate.", "that of CONFIG's planner", panel=MODEL)] = None
    copy_bandwidth: Annotated[
        str | None,
        option(
            "Bandwidth at which a rank copies its messages instead of computing, as over gloo.",
            "sending costs a rank nothing",
            panel=DEVICES,
        ),
    ] = None
    shared_links: Annotated[
        bool,
        option("One link for both directions between two ranks.", True, "--shared-links", panel=DEVICES),
    ] = False
    copies_beside: Annotated[
        bool | None,
        option(
            "Copies to the host beside the computation, or in the rank's own time.",
            "beside, but not on a CPU",
            "--copies-beside/--copies-block",
            panel=DEVICES,
        ),
    ] = None
    cores: Annotated[int | None, option("Cores that all ranks share.", "one for each rank", min=1, panel=DEVICES)] = (
        None
    )
    output: Annotated[Path | None, shared.output_option("Folder for pictures, traces and JSON.")] = None


@dataclass(frozen=True)
class SimulateFlags(StepFlags):
    """The command line of `simulate`: one step, or with --trace a replay."""

    trace: Annotated[
        Path | None,
        option(
            "Recorded preemptions to replay instead of one step; lines of milliseconds,add|remove,node.",
            False,
            panel=TRACE,
        ),
    ] = None
    devices: Annotated[
        str | None,
        option("Most devices to rent, of one kind: 32 or '32x v100-16gb'.", "as the trace has", panel=TRACE),
    ] = None
    planner: Annotated[str | None, option("Planner: joint, or one of a single pipeline.", "joint", panel=TRACE)] = None
    minibatch: Annotated[
        int | None,
        option("Global batch size.", "CONFIG's, or 4 microbatches a device", min=1, panel=TRACE),
    ] = None
    capacity: Annotated[
        str | None,
        option("Memory of every device, such as 16GiB.", "CONFIG's, the kind's, or no limit", panel=TRACE),
    ] = None
    duration: Annotated[
        str | None, option("Time to replay, such as 8h.", "until the trace's last event", panel=TRACE)
    ] = None
    notice: Annotated[str, option("Time from a preemption notice to the leave, as AWS gives.", panel=TRACE)] = "120s"
    planned_pause: Annotated[str, option("Pause for a join or an announced leave; assumed.", panel=TRACE)] = "1s"
    crash_pause: Annotated[str, option("Pause for a leave without notice; assumed.", panel=TRACE)] = "10s"
    restart_pause: Annotated[str, option("Restart after too few devices; torchrun's, measured.", panel=TRACE)] = "45s"
    spot_price: Annotated[float, option("Dollars per spot device and hour; assumed.", panel=TRACE)] = 0.918
    on_demand_price: Annotated[float, option("Dollars per device and hour on demand; AWS p3.2xlarge.", panel=TRACE)] = (
        3.06
    )
    as_json: shared.AsJson = False
    trust: shared.Trust = False


@shared.options_of(SimulateFlags)
def simulate(flags: SimulateFlags) -> None:
    """Simulate a step of a plan: time, bubbles, memory; with --trace, goodput and cost on spot machines."""
    from varuna_capslog.planners.seconds import Link
    from varuna_capslog.planning.simulation import simulate_plan
    from varuna_capslog.schedules import RunShape
    from varuna_capslog.start.prepare import divided_profile

    config_file, overrides = shared.words_of(flags.config, flags.overrides)
    flags = dataclasses.replace(flags, config=config_file, overrides=overrides)
    if flags.config is None and flags.profile is None:
        raise CapslogError(
            "nothing to simulate: give a CONFIG file, or --profile FILE with --plan FILE or --trace FILE"
        )
    if flags.config is None and flags.plan is None and flags.trace is None:
        raise CapslogError("--profile without a CONFIG needs --plan FILE, or --trace FILE to replay; give one of them")
    keys, settings = keys_of(flags.overrides), _config(flags)
    costs = shared.profile_of(flags.profile, settings, show=not flags.as_json)
    plan = None if flags.trace is not None else _plan(settings, costs, flags.plan)
    devices = 1 if plan is None else plan.num_ranks
    config = settings or config_of_keys(costs, {"pipeline.devices": devices, **keys})
    if plan is not None and plan.parallel is not None:
        changes = {"parallel": vars(plan.parallel)}
        config = config.model_copy(update={"pipeline": config.pipeline.model_copy(update=changes)})
        costs = divided_profile(config, costs)
    elif config.pipeline.parallel is not None:
        raise CapslogError("pipeline.parallel divides stages in another system, which is not replayed; leave it out")
    link = dataclasses.replace(
        Link.of_config(config),
        copy_bandwidth=None if flags.copy_bandwidth is None else parse_rate(flags.copy_bandwidth, "--copy-bandwidth"),
        shared=flags.shared_links,
        copies_beside=flags.copies_beside,
    )
    run = RunShape.of_config(config).unsized().settled()
    if plan is None:
        assert flags.trace is not None
        replayed = _replay_trace(flags, flags.trace, costs, config, run, link)
        if flags.output is not None:
            _write_replay(flags.output, replayed, _replay_title(flags, replayed, costs, run))
        _print_replay(replayed, flags.trace, flags.output, flags.as_json)
        return
    pipelines = max(len(plan.paths()), config.pipeline.replicas)  # a plan in short form describes one pipeline
    count = config.num_microbatches // pipelines if "train.minibatch_size" in keys else None
    step = simulate_plan(
        costs,
        plan,
        schedule=run.schedule if "pipeline.schedule" in keys else None,
        num_microbatches=count,
        recompute=run.recompute,
        run=run,
        link=link,
        speeds=None if flags.cores is None else [1.0] * flags.cores,
    )
    if settings is not None and plan.short and flags.plan is None and settings.pipeline.replicas > 1:
        step.notes.append(
            f"pipeline.replicas={settings.pipeline.replicas}: one replica is played, and the exchange of gradients "
            "between replicas takes no time here"
        )
    if flags.output is not None:
        _write(flags.output, step, plan, costs)
    if flags.as_json:
        shared.print_json(step.to_json())
        return
    _print(step, plan)
    from varuna_capslog.planners import MADPIPE

    if plan.planner == MADPIPE:
        from varuna_capslog.planning.placed.periodic import two_versions_note
        from varuna_capslog.planning.problem import Problem

        limits = plan.capacities_of(range(plan.num_ranks))
        if (note_text := two_versions_note(Problem.of(costs, plan.num_ranks, limits, link=link))) is not None:
            shared.say(f"note: {note_text}", err=True)
    if flags.output is not None:
        shared.say(
            f"written to {flags.output}: step.png, step.svg, perfetto.json (open it in ui.perfetto.dev), "
            "simulation.json"
        )


def _config(flags: SimulateFlags) -> Config | None:
    """Return the config of CONFIG; None without one."""
    if flags.config is None:
        return None
    aside = () if flags.plan is None else ("pipeline.plan=null",)  # --plan is simulated in its place
    return shared.load(flags.config, flags.overrides, *aside, trust=flags.trust)


def _plan(settings: Config | None, costs: Profile, plan: Path | None) -> Plan:
    """Return the plan of the file, or else that of the config's planner, even if it does not fit."""
    if plan is not None:
        from varuna_capslog.plans.plan import read_plan

        file_plan = read_plan(plan)
        file_plan.check_trains(str(plan))
        if None not in (file_plan.model, costs.model) and file_plan.model != costs.model:
            raise CapslogError(
                f"{plan} is a plan of the model {file_plan.model}, the profile is of {costs.model}; give the profile "
                "that the plan was made of"
            )
        return file_plan
    assert settings is not None
    from varuna_capslog.start.prepare import plan_run

    return plan_run(settings, costs)


def _write(folder: Path, step: Simulation, plan: Plan, costs: Profile) -> None:
    from varuna_capslog.base import files
    from varuna_capslog.reports.step import Limits, draw_simulation, simulation_title, trace_events

    files.write_json(folder / "simulation.json", step.to_json())
    files.write_json(folder / "perfetto.json", trace_events(step))
    title = simulation_title(step, plan, costs)
    draw_simulation(folder / "step.png", title, step, Limits.of(step, plan, costs))


def _print(step: Simulation, plan: Plan) -> None:
    step.table(plan.capacities_of(row.rank for row in step.rank_steps)).print()
    for note in (*plan.notes, *step.notes):
        shared.say(f"note: {note}", err=True)


def _replay_trace(
    flags: SimulateFlags, trace: Path, profile: Profile, config: Config, run: RunShape, link: Link
) -> Replay:
    """Read the trace and replay it with steps of the run shape `run`.

    flags: the options of --trace; a value of None is replaced by the config's, or by the command's default.
    """
    from varuna_capslog.base import units
    from varuna_capslog.planners import DEFAULT_MICROBATCHES_PER_STAGE, JOINT
    from varuna_capslog.planning.trace_replay import Pauses, Prices, Replanner, most_nodes, read_trace, replay
    from varuna_capslog.start.ordinary import check_kinds

    rented = None if flags.devices is None else parse_devices(flags.devices, "--devices")
    limit = config.pipeline.capacity if isinstance(config.pipeline.capacity, int) else None
    if rented is not None and rented.kinds:
        check_kinds(rented, profile)
        if len(set(rented.kinds)) > 1 or flags.capacity is not None:
            raise CapslogError(
                f"--trace rents devices of one kind, which says their memory, but --devices is {flags.devices}"
                f"{'' if flags.capacity is None else ' and --capacity is given'}; give one kind or a number"
            )
        limit = rented.pipeline_keys["capacity"]
    capacity = limit if flags.capacity is None else units.parse_memory(flags.capacity, "capacity")
    duration = None if flags.duration is None else units.parse_seconds(flags.duration)
    names = ("planned-pause", "crash-pause", "restart-pause", "notice")
    pauses = Pauses(*(units.parse_seconds(getattr(flags, name.replace("-", "_")), name) for name in names))
    prices = Prices(flags.spot_price, flags.on_demand_price)
    events = read_trace(trace)
    most = most_nodes(events) if rented is None else rented.count
    minibatch, size = flags.minibatch, profile.conditions.get("microbatch_size", 1)
    if flags.config is not None or "train.minibatch_size" in keys_of(flags.overrides):
        minibatch = minibatch or config.train.minibatch_size
    if minibatch is None:
        minibatch = DEFAULT_MICROBATCHES_PER_STAGE * most * (size if isinstance(size, int) else 1)
        shared.say(f"note: a step of {minibatch} samples is assumed; --minibatch says otherwise", err=True)
    answer = Replanner(
        profile,
        minibatch,
        planner=flags.planner or JOINT,
        capacity=capacity,
        run=run,
        blocks=shared.blocks_of(config),
        link=link,
    )
    return replay(events, answer, devices=most, pauses=pauses, prices=prices, duration_seconds=duration)


def _replay_title(flags: SimulateFlags, replayed: Replay, profile: Profile, run: RunShape) -> str:
    """Return the title of the picture of a replay."""
    from varuna_capslog.planners import JOINT
    from varuna_capslog.reports.style import device_kind, title_of

    devices = f"at most {replayed.devices} devices{device_kind(profile.conditions)}"
    planner = f"planner {flags.planner or JOINT}"
    trace = None if flags.trace is None else f"trace {flags.trace.name}"
    return title_of("Replay", profile.model, devices, planner, f"schedule {run.schedule}", trace)


def _write_replay(folder: Path, replayed: Replay, title: str) -> None:
    """Write replay.json and replay.png into the folder."""
    from varuna_capslog.base import files
    from varuna_capslog.reports.curves import draw_replay

    files.write_json(folder / "replay.json", replayed.to_json())
    draw_replay(folder / "replay.png", title, replayed)


def _print_replay(replayed: Replay, trace: Path, output: Path | None, as_json: bool) -> None:
    """Print the result as a table or JSON; output: the folder with the written files, if any."""
    if as_json:
        shared.print_json(replayed.to_json())
        return
    title = f"{trace.name}: {replayed.duration_seconds / 3600:.2f} h, at most {replayed.devices} devices"
    shared.print_table(title, ("", ""), list(_replay_rows(replayed).items()), left=(0,))
    pauses = replayed.pauses
    shared.say(
        f"assumed pauses: {pauses.planned:g} s for a join or announced leave (notice {pauses.notice:g} s), "
        f"{pauses.crash:g} s for a crash, {pauses.restart:g} s for a restart",
        err=True,
    )
    if output is not None:
        shared.say(f"written to {output}: replay.png, replay.json")


def _replay_rows(replayed: Replay) -> dict[str, str]:
    from varuna_capslog.reports.markup import duration

    count = {
        kind: sum(change.kind == kind for change in replayed.changes) for kind in ("join", "leave", "crash", "stop")
    }
    hours = replayed.device_hours
    dollars = [
        "nothing trained" if value is None else f"{value:,.2f}"
        for value in (replayed.spot_dollars_per_million, replayed.on_demand_dollars_per_million)
    ]
    return {
        "joins, leaves, crashes, stops": ", ".join(map(str, count.values())),
        "devices on average": f"{hours * 3600 / replayed.duration_seconds:.1f}",
        "idle device time": f"{100 * replayed.idle_device_hours / hours:.1f} %" if hours else "",
        "goodput": f"{replayed.goodput:.4g} samples/s",
        "share of the ideal": f"{100 * replayed.share_of_ideal:.2f} %",
        "paused": duration(replayed.paused_seconds),
        "stopped, nothing fits": duration(replayed.stopped_seconds),
        "slowest search": duration(replayed.slowest_search_seconds),
        f"$ per million samples, spot at {replayed.prices.spot:g} $/h": dollars[0],
        f"$ per million samples, on demand at {replayed.prices.on_demand:g} $/h": dollars[1],
    }
