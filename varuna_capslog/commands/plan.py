"""`capslog plan`: where to cut, for a config, an ordinary module, or a profile that was taken before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from varuna_capslog.commands.arguments import AsJson, Overrides, print_json, print_plan
from varuna_capslog.errors import CapslogError, DoesNotFit

if TYPE_CHECKING:
    from varuna_capslog.config import Config
    from varuna_capslog.plan import Plan
    from varuna_capslog.profiles.record import Profile

__all__ = ["plan"]


def plan(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="The run's YAML file.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    profile: Annotated[
        Path | None, typer.Option(help="Plan for this profile instead of measuring.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PACKAGE.MODULE:FUNCTION",
            help="Plan for the ordinary module that this function returns; needs no CONFIG.",
            show_default=False,
        ),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="NAME=DTYPE[SIZE,...]",
            help="One input of --model, batch first, such as x=float32[1,3,224,224]; may be repeated.",
            show_default="the example inputs that the function returns",
        ),
    ] = None,
    cut_points: Annotated[
        str | None,
        typer.Option(
            help="Submodules of --model to cut before, such as layer2,layer3.", show_default="every repeated block"
        ),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Devices to plan for.", show_default="pipeline.devices of CONFIG")
    ] = None,
    planner: Annotated[
        str | None, typer.Option(help="varuna, capslog or exact.", show_default="pipeline.planner, or exact")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory model: additive, composition, gpipe, 1f1b, varuna, or auto.",
            show_default="pipeline.memory, or auto",
        ),
    ] = None,
    capacity: Annotated[
        str | None,
        typer.Option(
            help="Memory of each device: 16GiB, or one size per device: 16GiB,16GiB,8GiB.",
            show_default="pipeline.capacity, or no limit",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File for the plan.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Choose the cuts with the smallest peak. Exit status 3 when nothing fits (the plan is written all the same)."""
    from varuna_capslog.config import load_config

    if config is not None and model is not None:
        raise CapslogError("both a CONFIG and --model are given; plan for one of them")
    if model is None and (inputs or cut_points):
        raise CapslogError("--input and --cut-points describe the model of --model; in a CONFIG set keys under model")
    flags = {"devices": devices, "planner": planner, "memory": memory, "capacity": capacity}
    given = {key: value for key, value in flags.items() if value is not None}
    if config is not None:
        # Planning means searching: cuts that the config fixes are set aside.
        changes = [f"pipeline.{key}={value}" for key, value in given.items()]
        settings = load_config(config, [*(overrides or ()), *changes, "pipeline.cuts=null"])
        found, costs = _of_config(settings, profile, show=not as_json)
    elif model is not None:
        found, costs = _of_config(_config_of_model(model, inputs, cut_points, given), profile, show=not as_json)
    elif profile is not None:
        found, costs = _of_profile(profile, devices, planner, memory, capacity)
    else:
        raise CapslogError("nothing to plan for: give a CONFIG file, --profile FILE or --model package.module:function")
    if output is not None:
        from varuna_capslog.plan import write_plan

        write_plan(output, found)
    if as_json:
        print_json(found.to_json())
    else:
        print_plan(found, costs)
    if found.fits is False:
        raise DoesNotFit("; ".join(found.notes))
    for note in found.notes:
        typer.echo(f"note: {note}", err=True)


def _config_of_model(
    model: str, inputs: list[str] | None, cut_points: str | None, pipeline: dict[str, int | str]
) -> Config:
    from varuna_capslog.config import Config, section
    from varuna_capslog.model_workload import config_values

    devices = pipeline.get("devices")
    if not isinstance(devices, int):
        raise CapslogError("--model needs --devices N, the number of devices to plan for")
    names = None if cut_points is None else [name.strip() for name in cut_points.split(",")]
    values = config_values(model, inputs or [], names, devices)
    return section(Config, values | {"pipeline": pipeline}, "")


def _of_config(config: Config, profile: Path | None, show: bool) -> tuple[Plan, Profile]:
    from varuna_capslog.prepare import plan_run, profile_run
    from varuna_capslog.profiles.record import read_profile

    costs = profile_run(config, show) if profile is None else read_profile(profile)
    return plan_run(config, costs), costs


def _of_profile(
    profile: Path, devices: int | None, planner: str | None, memory: str | None, capacity: str | None
) -> tuple[Plan, Profile]:
    from varuna_capslog import units
    from varuna_capslog.planners import plan as search
    from varuna_capslog.profiles.record import read_profile
    from varuna_capslog.settings import Pipeline

    if devices is None:
        raise CapslogError("--profile without a CONFIG needs --devices N, the number of devices to plan for")
    defaults = Pipeline()
    found = search(
        costs := read_profile(profile),
        devices,
        planner=planner or defaults.planner,
        memory=memory or defaults.memory,
        capacity=None if capacity is None else units.parse_capacity(capacity),
    )
    return found, costs
