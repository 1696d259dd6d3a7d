"""One machine's part in the elastic run of a script, from its folder to its end: `capslog script`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.settings import Elastic
from varuna_capslog.elastic.host.fork_server import PRELOADED
from varuna_capslog.elastic.host.host import Host, HostEnd
from varuna_capslog.elastic.host.options import HostOptions
from varuna_capslog.elastic.member.start_up import Beginning
from varuna_capslog.elastic.script.work import saved_states
from varuna_capslog.start.elastic_host import find_run

__all__ = ["ScriptCommand", "join_script", "run_script"]

_ENTRY = "varuna_capslog.elastic.script:main"
_MODULES = (*PRELOADED, "torch._dynamo", "torch._subclasses.fake_tensor")
_NOTE = "script.json"


@dataclass(frozen=True)
class ScriptCommand:
    """A script and its own arguments.

    Raises:
        CapslogError: there is no such script.
    """

    path: Path
    arguments: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.path.is_file():
            raise CapslogError(f"there is no script {self.path}; check the path")

    def order(self, run_dir: Path, settings: Elastic) -> dict[str, Any]:
        """What a worker is called with; see `script.main`."""
        return {
            "run_dir": str(run_dir),
            "script": str(self.path.resolve()),
            "arguments": list(self.arguments),
            "elastic": settings.model_dump(mode="json"),
        }


def run_script(
    command: ScriptCommand, options: HostOptions, begun: Callable[[Host], None] = lambda host: None
) -> HostEnd:
    """Serves the store and runs the script on this machine's workers until the run ends, everywhere.

    The run goes on from the newest checkpoint in its folder.

    Args:
        options: this machine's, with the section `elastic`; workers and where the run begins are filled in here.
        begun: called with the host before it runs.

    Raises:
        WorkerFailed, Interrupted: see `Host.run`.
    """
    beginning = _starting_point(options.run_dir)
    files.write_json(options.run_dir / _NOTE, command.order(options.run_dir, options.settings))
    options = dataclasses.replace(_of_script(options, command), keys=beginning.keys(), first=beginning.stamp)
    host = Host(options)
    begun(host)
    return host.run()


def join_script(command: ScriptCommand, options: HostOptions, wait_seconds: float = 600.0) -> HostEnd:
    """Waits for the machine that serves the store, then takes part until the run ends or all workers here have left.

    Args:
        options: this machine's, with the address of the store; the settings are those that the serving machine wrote
            into the run's folder, which all machines share.

    Raises:
        WorkerFailed, Interrupted, CapslogError: see `Host.run` and `find_run`.
    """
    find_run(options, wait_seconds)
    settings = Elastic.model_validate(files.read_json(options.run_dir / _NOTE)["elastic"])
    return Host(_of_script(dataclasses.replace(options, settings=settings), command)).run()


def _of_script(options: HostOptions, command: ScriptCommand) -> HostOptions:
    return dataclasses.replace(
        options,
        entry=_ENTRY,
        arguments=command.order(options.run_dir, options.settings),
        modules=_MODULES,
    )


def _starting_point(run_dir: Path) -> Beginning:
    """The newest checkpoint; the generations follow all that the run's files count."""
    saved, metrics = saved_states(run_dir), run_dir / "metrics.jsonl"
    lines = files.last_lines(metrics) if metrics.exists() else []
    numbers = [stamp.generation for stamp, _ in saved] + [int(line.get("generation", 0)) for line in lines]
    first = max(numbers, default=0) + 1
    return Beginning(first, saved[-1][0].step, saved[-1][1]) if saved else Beginning(first)
