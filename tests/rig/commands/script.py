"""`launch/chaos.sh script`: a script on workers that faults strike, and the comparison with the script alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tests.rig.script_chaos import Disturber, judge_script
from tests.rig.tally import by_class
from varuna_capslog.base import files, units
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.supervisor import Interrupted
from varuna_capslog.commands.script import elastic_settings
from varuna_capslog.commands.shared import DryRun, option, options_of, say
from varuna_capslog.elastic.host.workers import HostOptions
from varuna_capslog.start.elastic_host import run_script

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@dataclass(frozen=True)
class ScriptFlags:
    """The command line."""

    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A program that calls elastic.script.train.", show_default=False)
    ]
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="All that follows is its own.")] = None
    faults: Annotated[int, typer.Option("--faults", "--chaos", min=1, help="How many.")] = 20
    seed: Annotated[int, option("Of the schedule of faults.")] = 0
    mean: Annotated[str, option("Mean time between a recovery and the next fault.")] = "500ms"
    nproc: Annotated[int, typer.Option("--nproc", "--devices", min=1, help="Workers.")] = 2
    run_dir: Annotated[Path | None, option("Of checkpoints, metrics and logs.", "runs/<name of FILE>")] = None
    elastic: Annotated[
        list[str] | None, option("A key of a config's section elastic; may be repeated.", metavar="KEY=VALUE")
    ] = None
    dry_run: DryRun = False


# the arguments after FILE are the script's
@app.command(context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]})
@options_of(ScriptFlags)
def script(flags: ScriptFlags) -> None:
    """Disturb a data-parallel program and judge it: every loss and the state at the end must be those of it alone."""
    if not flags.file.is_file():
        raise CapslogError(f"there is no script {flags.file}; check the path")
    if flags.nproc < 2:
        raise CapslogError(f"faults need at least --nproc 2, so that a worker remains; not {flags.nproc}")
    folder, settings = flags.run_dir or Path("runs") / flags.file.stem, elastic_settings(flags.elastic or [])
    if (folder / "metrics.jsonl").exists():
        raise CapslogError(f"{folder} holds a run already; chaos needs a folder of its own: give --run-dir")
    file, arguments, mean_seconds = flags.file, flags.arguments or [], units.parse_seconds(flags.mean, "mean")
    if flags.dry_run:
        say(f"would inject {flags.faults} faults into {flags.nproc} workers that run {file}, run_dir {folder}")
        return
    tell = functools.partial(say, err=True)
    disturber = Disturber(folder, flags.faults, flags.seed, mean_seconds, tell)
    try:
        run_script(file, arguments, HostOptions(folder, num_workers=flags.nproc, settings=settings), disturber.start)
    except Interrupted:  # it was stopped when all faults had struck
        pass
    finally:
        disturber.end()
    tell("comparing with the script alone")
    steps, breaches = judge_script(file, arguments, folder)
    breaches += [disturber.problem] if disturber.problem else []
    verdict = {"seed": flags.seed, "steps": steps, "breaches": breaches, "classes": by_class(disturber.hits)}
    files.write_json(folder / "chaos.json", verdict)
    say(f"seed {flags.seed}: {'failed' if breaches else 'passed'}; {len(disturber.hits)} faults, {steps} steps")
    if breaches:
        raise CapslogError(f"the run failed: {breaches[0]}; everything it wrote is in {folder}")
