"""One machine's part in the elastic run of a script, from its folder to its end: `capslog script`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.settings import Elastic
from varuna_capslog.elastic.host.fork_server import PRELOADED
from varuna_capslog.elastic.host.hooks import check_same_folder
from varuna_capslog.elastic.host.host import Host, HostEnd, HostOptions
from varuna_capslog.elastic.network import network_variables
from varuna_capslog.elastic.script.work import saved_states
from varuna_capslog.membership.generation import Stamp
from varuna_capslog.start.elastic_host import wait_for_store

__all__ = ["join_script", "run_script"]

_ENTRY = "varuna_capslog.elastic.script:main"
_MODULES = (*PRELOADED, "torch._dynamo", "torch._subclasses.fake_tensor")
_NOTE = "script.json"


def run_script(
    path: Path,
    arguments: Sequence[str],
    run_dir: Path,
    num_workers: int,
    settings: Elastic,
    say: Callable[[str], None] = lambda line: None,
    *,
    name: str | None = None,
    serve_at: str = "127.0.0.1:0",
    hosts: int = 1,
    begun: Callable[[Host], None] = lambda host: None,
) -> HostEnd:
    """Serves the store and runs the script on this machine's workers until the run ends, everywhere.

    The run goes on from the newest checkpoint in its folder.

    Args:
        arguments: the script's own.
        name, serve_at, hosts, say: see `Host`.
        begun: given the host before it runs.

    Raises:
        WorkerFailed, Interrupted: see `Host.run`.
        CapslogError: there is no such script.
    """
    keys, first = _starting_point(run_dir)
    order = _order(path, arguments, run_dir, settings)
    files.write_json(run_dir / _NOTE, order)
    host = Host(
        HostOptions(
            run_dir,
            _ENTRY,
            order,
            num_workers,
            name=name,
            serve_at=serve_at,
            keys=keys,
            first=first,
            hosts=hosts,
            environment=network_variables(serve_at),
            settings=settings,
            say=say,
            modules=_MODULES,
        )
    )
    begun(host)
    return host.run()


def join_script(
    path: Path,
    arguments: Sequence[str],
    run_dir: Path,
    num_workers: int,
    store: str,
    say: Callable[[str], None] = lambda line: None,
    *,
    name: str | None = None,
    wait_seconds: float = 600.0,
) -> HostEnd:
    """Waits for the machine that serves the store, then takes part until the run ends or all workers here have left.

    Args:
        run_dir: which all machines share; the settings are those that the serving machine wrote there.
        store: host:port.

    Raises:
        WorkerFailed, Interrupted: see `Host.run`.
        CapslogError: nobody serves the store in time, or `run_dir` is not the folder that the serving machine uses.
    """
    identity = wait_for_store(store, wait_seconds, say)
    check_same_folder(run_dir, store, identity)
    settings = Elastic.model_validate(files.read_json(run_dir / _NOTE)["elastic"])
    return Host(
        HostOptions(
            run_dir,
            _ENTRY,
            _order(path, arguments, run_dir, settings),
            num_workers,
            name=name,
            store=store,
            environment=network_variables(store),
            settings=settings,
            say=say,
            modules=_MODULES,
        )
    ).run()


def _order(path: Path, arguments: Sequence[str], run_dir: Path, settings: Elastic) -> dict[str, Any]:
    if not path.is_file():
        raise CapslogError(f"there is no script {path}; check the path")
    return {
        "run_dir": str(run_dir),
        "script": str(path.resolve()),
        "arguments": list(arguments),
        "elastic": settings.model_dump(mode="json"),
    }


def _starting_point(run_dir: Path) -> tuple[dict[str, str], Stamp]:
    """What the store must say before the first worker looks, and the boundary that the run begins with.

    A run that goes on counts its generations anew; in the run's files they follow those that are there.
    """
    saved, metrics = saved_states(run_dir), run_dir / "metrics.jsonl"
    lines = files.last_lines(metrics) if metrics.exists() else []
    numbers = [stamp.generation for stamp, _ in saved] + [int(line.get("generation", 0)) for line in lines]
    stamp, path = saved[-1] if saved else (Stamp(0, 0), None)
    keys = {
        "first-plan": str(max(numbers, default=0) + 1),
        "resumed-step": str(stamp.step),
        "resumed-path": "" if path is None else str(path.absolute()),
    }
    return keys, Stamp(stamp.step, 0)
