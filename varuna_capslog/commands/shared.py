"""Arguments and options of several sub-commands, the values made of them, and the printing of tables."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.tables import printable
from varuna_capslog.commands.help import DEVICES, MODEL, OUTPUT

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config
    from varuna_capslog.plans.plan import Plan
    from varuna_capslog.profiles.record import Profile

__all__ = [
    "SEARCHED",
    "AsJson",
    "ConfigFile",
    "Devices",
    "DryRun",
    "HostName",
    "Machines",
    "OptionalConfigFile",
    "Overrides",
    "ProfileFile",
    "RunDirectory",
    "StoreAddress",
    "Trust",
    "Wait",
    "blocks_of",
    "load",
    "option",
    "options_of",
    "output_option",
    "print_json",
    "print_plan",
    "print_table",
    "profile_of",
    "run_config",
    "say",
    "tell",
    "trusted_config",
    "words_of",
]

Options = TypeVar("Options")

_MOST_SAID = 4000
"""Most characters of a line; the middle of a longer line is left out."""

SEARCHED = ("pipeline.cuts=null", "pipeline.plan=null")
"""Overrides of a command that searches for a plan: it ignores the cuts or the plan of the config."""


def option(text: str, shown: bool | str = True, *names: str, panel: str | None = None, **rules: Any) -> Any:
    """Return an option with help `text` and `shown` as its default in the help.

    names: names of the option; default: the field's. panel: section of the help, a constant of `commands.help`.
    """
    return typer.Option(*names, help=text, show_default=shown, rich_help_panel=panel, **rules)


_CONFIG = typer.Argument(
    metavar="CONFIG", help="The run's YAML file. A config is code: it names functions to run.", show_default=False
)
ConfigFile = Annotated[Path, _CONFIG]
OptionalConfigFile = Annotated[Path | None, _CONFIG]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Config keys to change, such as train.max_steps=10."),
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Run the code that a config names, although somebody else started its run."),
]
RunDirectory = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.", show_default=False)]
ProfileFile = Annotated[
    Path | None, option("Profile of the model.", "that of CONFIG, taken now", "--profile", panel=MODEL)
]
Devices = Annotated[
    str | None,
    option(
        "A number, or kinds of GPUs with their memory and speed: 4, '2x a100-80gb' or '2x rtx4090, rtx3090'.",
        "pipeline.devices of CONFIG",
        panel=DEVICES,
    ),
]
AsJson = Annotated[bool, option("Print JSON for programs instead of a table.", True, "--json", panel=OUTPUT)]
StoreAddress = Annotated[
    str | None,
    option(
        "Address of the store of the run to join, as --serve says it on the first machine.", False, metavar="ADDRESS"
    ),
]
Machines = Annotated[int, option("Number of machines that begin together; more may join.", min=1)]
HostName = Annotated[str | None, option("Name of this machine.", "the system's")]
Wait = Annotated[float, option("Longest wait for the store, in seconds.", min=0)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done and stop.")]


def output_option(text: str, shown: bool | str = False) -> Any:
    """Return the option -o."""
    return option(text, shown, "-o", "--output", panel=OUTPUT)


def options_of(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Make a function of one dataclass a command: every field is a parameter, with typer's annotation and default."""
    hints = get_type_hints(options, include_extras=True)
    signature = inspect.signature(options)
    parameters = [parameter.replace(annotation=hints[name]) for name, parameter in signature.parameters.items()]
    parameters.sort(key=lambda parameter: parameter.name in ("as_json", "trust"))  # the last ones of every command

    def decorate(run: Callable[[Options], None]) -> Callable[..., None]:
        @functools.wraps(run)
        def command(**values: Any) -> None:
            run(options(**values))

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = hints
        return command

    return decorate


def load(path: Path, overrides: Sequence[str] | None, *more: str, trust: bool = False) -> Config:
    """Load the config of CONFIG and overrides, and print the decisions of its `pipeline.plan` on standard error.

    more: overrides of the command itself, applied last.

    Raises CapslogError like `start/named_code.check_config`.
    """
    from varuna_capslog.start.choices import load_run_config
    from varuna_capslog.start.named_code import check_config

    check_config(path, [*(overrides or ()), *more], trust)
    return load_run_config(path, [*(overrides or ()), *more], tell)


def run_config(run_dir: Path) -> Config:
    """Load the resolved config of an existing run, with `run_dir` as it is now (the folder may have been moved)."""
    from varuna_capslog.config.reading import load_config

    path = run_dir / "config.yaml"
    if not path.is_file():
        raise CapslogError(
            f"{run_dir} is not the folder of a run: it holds no config.yaml; give the run_dir of a training"
        )
    config = load_config(path)
    config.run_dir = run_dir
    return config


def trusted_config(run_dir: Path, trust: bool) -> Config:
    """Load like `run_config`, for commands that run the code that the config names. Raises CapslogError like
    `start/named_code.check_run`.
    """
    from varuna_capslog.start.named_code import check_run

    config = run_config(run_dir)
    check_run(run_dir, config, trust)
    return config


def profile_of(path: Path | None, config: Config | None, show: bool) -> Profile:
    """Return the profile in a file; without a file, make the config's profile. `show` draws a progress bar."""
    if path is not None:
        from varuna_capslog.profiles.record import read_profile

        return read_profile(path)
    assert config is not None
    from varuna_capslog.start.prepare import profile_run

    return profile_run(config, show)


def words_of(config: Path | None, overrides: Sequence[str] | None) -> tuple[Path | None, list[str]]:
    """Return CONFIG and the KEY=VALUE words of a command; the first word may be a KEY=VALUE instead of CONFIG."""
    words = [*([] if config is None else [str(config)]), *(overrides or ())]
    named = bool(words) and ("=" not in words[0] or Path(words[0]).is_file())
    return (Path(words[0]), words[1:]) if named else (None, words)


def blocks_of(config: Config) -> int | None:
    """Return the accumulation blocks that a config sets; None for the default of one per replica."""
    if config.num_blocks <= config.pipeline.replicas:
        return None
    return config.num_blocks


def say(line: str, err: bool = False) -> None:
    """Print a line on standard output, or on standard error, with escapes in place of control characters."""
    if len(line) > _MOST_SAID:
        line = f"{line[: _MOST_SAID // 2]} ... {line[-_MOST_SAID // 2 :]}"
    typer.echo(printable(line), err=err)


def tell(line: str) -> None:
    """Print a message of the command itself on standard error."""
    say(f"capslog: {line}", err=True)


def print_json(value: Any) -> None:
    """Print one JSON document."""
    typer.echo(json.dumps(value, indent=1, allow_nan=False))


def print_table(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Collection[int] = (),
    notes: Iterable[str] = (),
) -> None:
    """Print a table, right-aligned except the columns in `left`, and a line below it for each note."""
    from varuna_capslog.base.tables import Table

    Table(title, headings, list(rows), left, list(notes)).print()


def print_plan(plan: Plan, profile: Profile | None = None, memory: bool = True) -> None:
    """Print the table of a plan's stages; see `reports.tables.plan_table`."""
    from varuna_capslog.reports.tables import plan_table

    plan_table(plan, profile, memory).print()
