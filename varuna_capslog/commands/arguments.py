"""Arguments that several sub-commands share, and what they print alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from varuna_capslog.base.errors import CapslogError

if TYPE_CHECKING:
    from varuna_capslog.config.reading import Config
    from varuna_capslog.planners.seconds import Link
    from varuna_capslog.plans.plan import Plan
    from varuna_capslog.profiles.record import Profile

__all__ = [
    "AsJson",
    "Bandwidth",
    "ConfigFile",
    "Devices",
    "Latency",
    "OptionalConfigFile",
    "Overrides",
    "ProfileFile",
    "RunDirectory",
    "blocks_of",
    "link_of",
    "print_json",
    "print_plan",
    "profile_of",
    "run_config",
]

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.", show_default=False)]
OptionalConfigFile = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help="The run's YAML file.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Config keys to change, such as train.max_steps=10."),
]
RunDirectory = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.", show_default=False)]
ProfileFile = Annotated[
    Path | None, typer.Option("--profile", help="Profile of the model.", show_default="that of CONFIG, taken now")
]
Devices = Annotated[
    int | None, typer.Option(min=1, help="Devices to plan for.", show_default="pipeline.devices of CONFIG")
]
Bandwidth = Annotated[
    str | None, typer.Option(help="Of every link, such as 1GiB/s.", show_default="bytes take no time")
]
Latency = Annotated[str, typer.Option(help="Of every message, such as 0.1ms.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of a table.")]


def run_config(run_dir: Path) -> Config:
    """The resolved config of an existing run, with `run_dir` as it is now (the folder may have been moved)."""
    from varuna_capslog.config.reading import load_config

    path = run_dir / "config.yaml"
    if not path.is_file():
        raise CapslogError(
            f"{run_dir} is not the folder of a run: it holds no config.yaml; give the run_dir of a training"
        )
    config = load_config(path)
    config.run_dir = run_dir
    return config


def profile_of(path: Path | None, config: Config | None, show: bool) -> Profile:
    """The profile in a file, or else that of the config, taken now; `show` draws a progress bar."""
    if path is not None:
        from varuna_capslog.profiles.record import read_profile

        return read_profile(path)
    assert config is not None
    from varuna_capslog.start.prepare import profile_run

    return profile_run(config, show)


def blocks_of(config: Config | None) -> int | None:
    """The accumulation blocks that a config sets; without the key it has one per replica, which says nothing."""
    if config is None or config.num_blocks <= config.pipeline.replicas:
        return None
    return config.num_blocks


def link_of(bandwidth: str | None, latency: str, copy_bandwidth: str | None = None) -> Link:
    """The link that --bandwidth, --latency and --copy-bandwidth describe."""
    from varuna_capslog.base import units
    from varuna_capslog.planners.seconds import Link

    return Link(
        None if bandwidth is None else units.parse_rate(bandwidth, "--bandwidth"),
        units.parse_seconds(latency, "--latency"),
        None if copy_bandwidth is None else units.parse_rate(copy_bandwidth, "--copy-bandwidth"),
    )


def print_json(value: Any) -> None:
    """Prints one JSON document."""
    typer.echo(json.dumps(value, indent=1, allow_nan=False))


def print_plan(plan: Plan, profile: Profile | None = None) -> None:
    """Prints the stages: layers (by name where a profile knows them), predicted peak and what is left of the device
    beside it and its headroom.
    """
    from rich.console import Console
    from rich.table import Table

    from varuna_capslog.base.units import format_bytes
    from varuna_capslog.planning.verdict import judge_plan

    table = Table(title=f"{plan.planner or 'given cuts'}: {len(plan.cuts)} stages of {plan.num_layers} layers")
    for heading in ("stage", "rank", "layers", "from", "to", "peak", "margin"):
        table.add_column(heading, justify="left" if heading in ("from", "to") else "right")
    ranks, verdict = plan.placement(), judge_plan(plan, profile)
    for stage, (first, end) in enumerate(plan.stages()):
        names = [profile.layers[index].name for index in (first, end - 1)] if profile else [str(first), str(end - 1)]
        peak = None if plan.stage_bytes is None else plan.stage_bytes[stage]
        margin = "" if verdict is None else format_bytes(verdict.margins[stage])
        shown = "unknown" if peak is None else format_bytes(peak)
        table.add_row(str(stage), str(ranks[stage]), str(end - first), *names, shown, margin)
    console = Console()
    console.print(table)
    if plan.search_seconds is not None:
        console.print(f"found in {plan.search_seconds * 1e3:.3g} ms", highlight=False)
