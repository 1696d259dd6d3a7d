"""The `capslog` command: the sub-commands of `varuna_capslog.commands`, and their common handling of errors.

A user's mistake ends in one sentence on standard error and the error's exit status; a traceback appears only with
CAPSLOG_DEBUG=1. This module and the commands import torch only when a command runs, so that `--help` is instant.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from varuna_capslog.base.errors import CapslogError, needed
from varuna_capslog.base.processes import collecting_rarely
from varuna_capslog.base.tables import lasting_output, log_to
from varuna_capslog.base.version import __version__
from varuna_capslog.commands import shared
from varuna_capslog.commands.compare import compare
from varuna_capslog.commands.export import export
from varuna_capslog.commands.fits import fits
from varuna_capslog.commands.front import front
from varuna_capslog.commands.help import FIRST_STEPS, SUMMARIES, HelpCommand
from varuna_capslog.commands.largest import largest
from varuna_capslog.commands.lint import lint
from varuna_capslog.commands.measure import profile, variants
from varuna_capslog.commands.plan import plan
from varuna_capslog.commands.questions import former_option
from varuna_capslog.commands.results import evaluate, predict, report
from varuna_capslog.commands.script import refuse_chaos, script
from varuna_capslog.commands.setup import check, init
from varuna_capslog.commands.simulate import simulate
from varuna_capslog.commands.train import host, morph, notice, train

__all__ = ["app", "main", "program"]

app = typer.Typer(
    name="capslog",
    help="Find where to cut a network into pipeline stages that fit the memory there is, and train it that way.",
    epilog=FIRST_STEPS,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# in the order in which a new user needs them, for `capslog --help`
_COMMANDS = (init, fits, profile, variants, plan, front, largest, compare, simulate, export, lint, check, train, host)
for _command in _COMMANDS:
    # a pasted layout may contain options of its own system
    settings = {"ignore_unknown_options": True} if _command is lint else None
    app.command(cls=HelpCommand, short_help=SUMMARIES[_command.__name__], context_settings=settings)(_command)
# all words after FILE are the script's arguments
app.command(
    cls=HelpCommand,
    short_help=SUMMARIES["script"],
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)(script)
for _command in (morph, notice, evaluate, predict, report):
    app.command(cls=HelpCommand, short_help=SUMMARIES[_command.__name__])(_command)


@app.command(
    "chaos",
    hidden=True,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def _chaos() -> None:
    refuse_chaos("chaos")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main(
    arguments: Sequence[str] | None = None, commands: typer.Typer | None = None, name: str = "capslog"
) -> NoReturn:
    """Run the command line, then raise SystemExit with its exit status, 0 only for success. `commands`, `name`: of
    another program that reports errors in the same way.
    """
    sys.exit(_run(list(sys.argv[1:] if arguments is None else arguments), commands, name))


def program() -> NoReturn:
    """Run the process `capslog` with its command-line arguments, and exit."""
    sys.exit(_run(sys.argv[1:]))


def _run(arguments: list[str], commands: typer.Typer | None = None, name: str = "capslog") -> int:
    lost: list[str] = []

    def say_lost(sentence: str) -> None:
        lost.append(sentence)
        _say(sentence)

    with lasting_output(say_lost):
        status = _status_of(arguments, commands, name)
    # lost output is no failure of a training, but of all other commands
    return status or 2 if lost and not {"train", "host", "script"} & {*arguments[:1]} else status


def _status_of(arguments: list[str], commands: typer.Typer | None, name: str) -> int:
    # for torch here and in workers: while a peak is measured, its allocator warns of expected events
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    debug = os.environ.get("CAPSLOG_DEBUG", "") not in ("", "0")
    log_to(sys.stderr)
    try:
        with collecting_rarely(), needed("this command"):
            status = (commands or app)(arguments or ["--help"], standalone_mode=False, prog_name=name)
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except CapslogError as error:
        if debug:
            raise
        _say(str(error))
        return error.exit_status
    except Exception as error:
        usage = getattr(error, "format_message", None)
        if usage is not None:  # an unknown option, a missing argument
            command = getattr(getattr(error, "ctx", None), "command_path", name)
            moved = former_option(getattr(error, "option_name", ""))
            _say(moved or f"{_with_what_was_written(usage(), arguments).rstrip('.')}; see {command} --help")
            return 2
        if debug:
            raise
        from varuna_capslog.base.failures import shortage  # slow, so not at the start of every command

        defect = f"unexpected {type(error).__name__}: {error}; this is a defect: CAPSLOG_DEBUG=1 shows where"
        _say(str(shortage(error) or defect))
        return 1
    if status == 130:
        _say("interrupted")
    return status if isinstance(status, int) else 0


def _with_what_was_written(sentence: str, arguments: list[str]) -> str:
    """Return the sentence on an invalid option, with the value from the command line where both are known."""
    option, _, rule = sentence.removeprefix("Invalid value for ").partition(": Input should ")
    words = [word for argument in arguments for word in argument.split("=", 1 if argument.startswith("--") else 0)]
    names = [name.strip(" '") for name in option.split("/")]
    written = [after for word, after in itertools.pairwise(words) if word in names]
    return f"{names[-1]} is {written[-1]!r} but must {rule}" if rule and written else sentence


def _say(sentence: str) -> None:
    shared.tell(" ".join(sentence.split()))


if __name__ == "__main__":
    program()
