"""`capslog check`: finds what would stop a run or spoil its training, before it begins."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from varuna_capslog.base.errors import RunFinding, findings_of
from varuna_capslog.commands import shared

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config

__all__ = ["check"]

_BEFORE = {"fact": "", "note": "note: ", "stops": "stops the run: ", "does_not_fit": "does not fit: "}


@dataclass(frozen=True)
class CheckFlags:
    """The command line of `check`."""

    config: shared.ConfigFile
    overrides: shared.Overrides = None
    as_json: shared.AsJson = False
    trust: shared.Trust = False


@shared.options_of(CheckFlags)
def check(flags: CheckFlags) -> None:
    """Find what would stop a run or spoil its training (exit status 2), or does not fit (3); train nothing."""
    findings: list[RunFinding] = []
    with contextlib.redirect_stdout(sys.stderr) if flags.as_json else contextlib.nullcontext():
        for finding in _findings(flags):
            findings.append(finding)
            if not flags.as_json:
                text = finding.text.removeprefix(_BEFORE[finding.kind])
                shared.say(f"{finding.part}: {_BEFORE[finding.kind]}{' '.join(text.split())}")
    if flags.as_json:
        shared.print_json([{name: getattr(finding, name) for name in ("part", "kind", "text")} for finding in findings])
    kinds = [finding.kind for finding in findings]
    against = kinds.count("stops") + kinds.count("does_not_fit")
    if against:
        shared.tell(f"{against} of these would stop the run or teach it wrong things; mend them and check again")
        raise typer.Exit(2 if "stops" in kinds else 3)
    if not flags.as_json:
        shared.say("nothing stops this run")


def _findings(flags: CheckFlags) -> Iterator[RunFinding]:
    configs: list[Config] = []

    def load() -> tuple[RunFinding, ...]:
        configs.append(shared.load(flags.config, flags.overrides, trust=flags.trust))
        return ()

    yield from (dataclasses.replace(finding, part="config") for finding in findings_of(load))
    if configs:
        from varuna_capslog.start.readiness import check_run

        yield from check_run(configs[0], shared.tell, show=not flags.as_json and sys.stdout.isatty())
