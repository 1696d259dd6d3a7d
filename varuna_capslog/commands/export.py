"""`capslog export`: a plan in the form of another system."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from varuna_capslog.commands import shared

__all__ = ["export"]


def export(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file, or a run's folder.", show_default=False)],
    to: Annotated[str, shared.option("torch-csv: the schedule, for torch.distributed.pipelining.", "torch-csv")] = (
        "torch-csv"
    ),
    output: Annotated[Path | None, shared.output_option("Write the file here.", "standard output")] = None,
    recompute: Annotated[
        bool | None,
        typer.Option("--recompute/--no-recompute", help="For stages whose memory the plan leaves open."),
    ] = None,
    profile: Annotated[
        Path | None, shared.option("Says which layers read which, for a plan with routes direct.", "the run's, or none")
    ] = None,
    k: Annotated[int | None, shared.option("Microbatches of a group of the schedule kfkb.", "the run's, or 2")] = None,
) -> None:
    """Write a plan in the form of another system."""
    from varuna_capslog.base import fields, files
    from varuna_capslog.base.errors import CapslogError
    from varuna_capslog.planning.export import torch_csv
    from varuna_capslog.plans.plan import latest_plan, read_plan
    from varuna_capslog.profiles.record import read_profile
    from varuna_capslog.schedules import RunShape

    fields.refuse_unknown([to], ["torch-csv"], "form")
    run = RunShape(recompute=False)
    if plan.is_dir():
        found = latest_plan(plan)
        if found is None:
            raise CapslogError(f"{plan} holds no plan-<generation>.json; give a plan file, or the folder of a run")
        run, read = RunShape.of_config(shared.run_config(plan)), found[1]
        if profile is None and (plan / "profile.json").is_file():
            profile = plan / "profile.json"
    else:
        read = read_plan(plan)
    given: dict[str, Any] = {"recompute": recompute, "k": k}
    run = dataclasses.replace(run, **{name: value for name, value in given.items() if value is not None})
    edges = None if profile is None or read.routes == "relay" else read_profile(profile).known_edges
    text = torch_csv(read, run, edges)
    if output is None:
        typer.echo(text, nl=False)
    else:
        files.write_text(output, text)
        typer.echo(f"written to {output}")
