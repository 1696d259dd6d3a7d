"""`capslog plan`: where to cut, for a config, an ordinary module, or a profile that was taken before."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError, DoesNotFit
from varuna_capslog.commands import shared
from varuna_capslog.commands.ordinary_model import (
    ModelFlags,
    announced,
    config_of_model,
    overrides_of,
    say_assumptions,
    with_folder,
)
from varuna_capslog.commands.plan_inference import InferenceFlags, check_purpose, plan_for_inference
from varuna_capslog.commands.plan_stages import draw_plan, print_treatments
from varuna_capslog.commands.shared import option

if TYPE_CHECKING:
    from varuna_capslog.commands.plan_time import PlanRequest
    from varuna_capslog.config.settings import Config
    from varuna_capslog.planners.seconds import Link

__all__ = ["plan"]


@dataclass(frozen=True)
class PlanFlags(InferenceFlags, ModelFlags):
    """The command line of `plan`."""

    profile: Annotated[
        list[Path] | None,
        option(
            "Plan for this profile instead of measuring; with --joint one per microbatch size to choose from.", False
        ),
    ] = None
    devices: shared.Devices = None
    planner: Annotated[
        str | None,
        option(
            "varuna, mcap-bf, mcap-bo, capslog, capslog-tb, exact, throughput, gpipe or gpipe-size; budget, dawnpiper "
            "and vpipe also choose which layers run again or are offloaded; pipedream, piper, graphpipe and "
            "capture the replicas of every stage; madpipe several stages on one rank, and when each starts; auto "
            "asks all of them and takes the fastest that fits.",
            "pipeline.planner, or budget where it can plan the run, else exact",
        ),
    ] = None
    memory: Annotated[
        str | None,
        option("Memory model: additive, composition, gpipe, 1f1b, varuna, ranks, or auto.", "pipeline.memory, or auto"),
    ] = None
    capacity: Annotated[
        str | None,
        option(
            "Memory of each device: 16GiB, or one size per device: 16GiB,16GiB,8GiB or 16GiB*2,8GiB.",
            "pipeline.capacity, or that of a --device cuda:KIND, or no limit",
        ),
    ] = None
    numerics: Annotated[
        str | None,
        option(
            "How far the results of layers may be from those as configured, for variants that budget chooses: same "
            "(bits), close (1e-5) or loose (1e-2). By estimates.",
            "numerics of CONFIG, or same",
            metavar="[same|close|loose]",
        ),
    ] = None
    node_devices: shared.NodeDevices = None
    minibatch: Annotated[
        int | None,
        option("Samples of one step, where time counts.", "CONFIG's; else 4 microbatches per device", min=1),
    ] = None
    search_seconds: Annotated[
        float | None,
        option(
            "When budget ends its search, with the best plan so far; auto asks no further planner then.",
            "pipeline.search_seconds, or never",
        ),
    ] = None
    bandwidth: shared.Bandwidth = None
    latency: shared.Latency = "0s"
    host_bandwidth: shared.HostBandwidth = None
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Print the front of memory against step time; -o draws it (.png).")
    ] = False
    joint: Annotated[
        bool, typer.Option("--joint", help="Share --devices out among pipelines of any length, for the shortest step.")
    ] = False
    speeds: Annotated[str | None, option("Of each device with --joint, such as 1*512,0.6*512.", "1, the profile's")] = (
        None
    )
    blocks: Annotated[
        int | None, option("Accumulation blocks of a step with --joint.", "CONFIG's, or the microbatches", min=1)
    ] = None
    maximize: Annotated[
        str | None,
        option(
            "Find the largest microbatch, minibatch or image-size that fits the capacity, by estimates.",
            False,
            metavar="[microbatch|minibatch|image-size]",
        ),
    ] = None
    output: Annotated[
        Path | None, shared.output_option("File for the plan; a .png draws each rank's memory over time.")
    ] = None
    as_json: shared.AsJson = False
    trust: shared.Trust = False


@shared.options_of(PlanFlags)
def plan(given: PlanFlags) -> None:
    """Choose the cuts. Exit status 3 when nothing fits (the plan is written all the same)."""
    from varuna_capslog.commands.plan_front import plan_front
    from varuna_capslog.commands.plan_time import plan_jointly
    from varuna_capslog.config import defaults

    given = with_folder(given)
    if check_purpose(given):
        plan_for_inference(given)
        return
    if given.config is not None and given.model is not None:
        raise CapslogError("both a CONFIG and --model are given; plan for one of them")
    if given.profile and given.model is not None:
        raise CapslogError("both --profile and --model (or --hf) are given, but a profile is of one model; choose one")
    if given.pareto and given.joint:
        raise CapslogError(
            "--pareto is a front of cuts for one pipeline, --joint one plan of many; ask for one of them"
        )
    if given.planner == "joint" and given.pareto:
        raise CapslogError("--pareto is a front of one pipeline, planner joint makes several; choose another planner")
    if given.planner not in (None, "joint") and given.joint:
        raise CapslogError(f"--joint is planner joint, but --planner {given.planner} names another; give one of them")
    _check_numerics(given)
    if not given.joint and (given.speeds is not None or given.blocks is not None):
        raise CapslogError("--speeds and --blocks belong to --joint")
    if given.maximize is not None:
        _check_maximize(given, given.maximize)
        given = dataclasses.replace(given, estimate=True)
    if given.search_seconds is not None and (given.pareto or given.joint):
        raise CapslogError("--search-seconds ends the search for one plan; leave it out of --pareto and --joint")
    if given.search_seconds is not None and given.search_seconds <= 0:
        raise CapslogError(f"--search-seconds is {given.search_seconds:g}; give a number above 0, or leave it out")
    names = ("devices", "planner", "memory", "capacity", "search_seconds", "node_devices")
    pipeline = {name: value for name in names if (value := getattr(given, name)) is not None}
    settings = None
    if given.config is not None:
        changes = [*overrides_of(given), *(f"pipeline.{key}={value}" for key, value in pipeline.items())]
        if given.minibatch is not None:
            changes.append(f"train.minibatch_size={given.minibatch}")
        settings = shared.load(given.config, given.overrides, *changes, *shared.SEARCHED, trust=given.trust)
    elif given.model is not None:
        if given.devices is None:
            raise CapslogError("--model needs --devices N, the number of devices to plan for")
        settings = config_of_model(given, pipeline, given.minibatch)
    elif overrides_of(given):
        raise CapslogError("--device, --estimate and --measure go with a CONFIG or --model; a profile is of one device")
    elif not given.profile:
        raise CapslogError("nothing to plan for: give a CONFIG file, --profile FILE or --model package.module:function")
    elif given.devices is None:
        raise CapslogError("--profile without a CONFIG needs --devices N, the number of devices to plan for")
    if given.numerics is not None:
        if settings is None or settings.pipeline.planner != defaults.FASTEST:
            raise CapslogError(f"--numerics lets planner {defaults.FASTEST} choose variants; name no other planner")
        settings = settings.model_copy(update={"numerics": given.numerics})
    if given.maximize is not None:
        assert settings is not None, "refused without a CONFIG and --model"
        _maximize(settings, given, given.maximize)
        return
    with announced(None if given.model is None else settings):
        settings, request = _request(settings, given)
    if given.pareto or given.joint:
        request = dataclasses.replace(request, run=request.run.settled())
    if given.pareto:
        named = None if settings is None else settings.pipeline.planner
        plan_front(request, given.planner or named or defaults.SMALLEST, given.output, given.as_json)
    elif given.joint:
        plan_jointly(request, given.speeds, given.blocks or shared.blocks_of(settings), given.output, given.as_json)
    else:
        _plan_one(request, settings, given)


def _plan_one(request: PlanRequest, config: Config | None, given: PlanFlags) -> None:
    """One pipeline by one planner."""
    profile = request.only_profile()
    if config is None:
        from varuna_capslog.start.of_profile import plan_of_profile

        found = plan_of_profile(
            profile,
            request.devices,
            given.planner,
            request.memory,
            request.capacity,
            request.minibatch_size,
            request.link,
            given.search_seconds,
        )
        run = request.run
    else:
        from varuna_capslog.schedules import RunShape
        from varuna_capslog.start.prepare import plan_run

        run = RunShape.of_config(config)
        found = plan_run(config, profile, request.link, request.memo)
    if given.output is not None and given.output.suffix.lower() == ".png":
        for note in draw_plan(given.output, found, profile, run, request.link):
            shared.say(f"note: {note}", err=True)
    elif given.output is not None:
        from varuna_capslog.plans.plan import write_plan

        write_plan(given.output, found)
    if given.as_json:
        shared.print_json(found.to_json())
    else:
        shared.print_plan(found, profile, memory=False)
        print_treatments(found, run, profile, request.link)
    if found.fits is False:
        raise DoesNotFit("; ".join(found.notes))
    for note in found.notes:
        shared.say(f"note: {note}", err=True)


def _check_numerics(given: PlanFlags) -> None:
    """Refuses --numerics where nothing chooses variants."""
    if given.numerics is None:
        return
    fields.choice(given.numerics, "--numerics", ("same", "close", "loose"))
    if given.profile or given.pareto or given.joint or given.maximize or (given.config or given.model) is None:
        raise CapslogError(
            "--numerics lets planner budget choose the variants of one plan, by runs of its own; give a CONFIG or "
            "--model, without --profile, --pareto, --joint and --maximize"
        )


def _check_maximize(given: PlanFlags, what: str) -> None:
    """Refuses what --maximize cannot choose, and flags that do not go with it."""
    from varuna_capslog.base import fields
    from varuna_capslog.commands.plan_largest import MAXIMIZED

    fields.refuse_unknown([what], list(MAXIMIZED), "choice of --maximize")
    if given.config is None and given.model is None:
        raise CapslogError("--maximize estimates a model for every value it tries: give a CONFIG file or --model")
    if given.estimate is False:
        raise CapslogError("--maximize estimates, and never measures; leave --measure out")
    others = {"--profile": given.profile, "--pareto": given.pareto, "--joint": given.joint}
    for name, value in others.items():
        if value:
            raise CapslogError(f"--maximize looks for one size of one pipeline; leave {name} out")
    if what == "minibatch" and given.minibatch is not None:
        raise CapslogError("--maximize minibatch looks for the samples of a step; leave --minibatch out")


def _maximize(config: Config, given: PlanFlags, what: str) -> None:
    """The largest value, and with --model what its estimate assumed."""
    from varuna_capslog.commands.plan_largest import plan_largest
    from varuna_capslog.planners import JOINT

    if config.pipeline.planner == JOINT:
        raise CapslogError(f"--maximize plans for one pipeline and its copies; choose another planner than {JOINT}")
    link = _link(given)
    keeps_samples = given.config is not None or given.minibatch is not None
    found = plan_largest(what, config, keeps_samples, link, given.output, given.as_json)
    if given.model is not None:
        say_assumptions(found)


def _link(given: PlanFlags) -> Link:
    return shared.link_of(
        given.bandwidth, given.latency, host_bandwidth=given.host_bandwidth, node_devices=given.node_devices
    )


def _request(config: Config | None, given: PlanFlags) -> tuple[Config | None, PlanRequest]:
    """The config, with the variants that a planner has chosen, and what is planned for: from the config, or from the
    flags and what a profile says of its run.
    """
    from varuna_capslog.base import units
    from varuna_capslog.commands.plan_time import PlanRequest
    from varuna_capslog.config import defaults
    from varuna_capslog.profiles.record import read_profile
    from varuna_capslog.schedules import RunShape
    from varuna_capslog.start.of_profile import run_of_profile

    link = _link(given)
    read = [read_profile(path) for path in given.profile or ()]
    if config is not None:
        from varuna_capslog.start.layerwise_start import configured_link
        from varuna_capslog.start.prepare import estimate_memo, profile_and_variants, profile_run

        pipeline, memo, show = config.pipeline, estimate_memo(config), not given.as_json
        if not read and (given.pareto or given.joint):
            read = [profile_run(config, show, memo)]
        elif not read:
            config, profile = profile_and_variants(config, show, memo, link, shared.tell)
            read = [profile]
        return config, PlanRequest(
            read,
            pipeline.devices,
            RunShape.of_config(config).unsized(),
            pipeline.memory,
            pipeline.capacity,
            config.train.minibatch_size,
            configured_link(config, link),
            memo,
        )
    assert given.devices is not None, "needed without a config"
    memory = given.memory or defaults.MEMORY
    return None, PlanRequest(
        read,
        given.devices,
        run_of_profile(read[0], memory),
        memory,
        None if given.capacity is None else units.parse_capacity(given.capacity),
        given.minibatch,
        link,
    )
