"""A machine's part of an elastic run, from a prepared folder to its end: `capslog train` with `elastic.enabled`,
`capslog host`, and `capslog script`.

The machine that serves the store writes into it the boundary from which the run continues: that of a checkpoint, or of
the state that stopped members wrote. Other machines wait for this entry. Then a `Host` starts and watches the workers.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from varuna_capslog.base import fields, files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.fork_server import PRELOADED, ForkServer
from varuna_capslog.base.secret import SecretMissing, run_secret
from varuna_capslog.config.reading import load_config
from varuna_capslog.config.settings import Config, Elastic
from varuna_capslog.elastic.host.hooks import check_same_folder
from varuna_capslog.elastic.host.host import Host, HostEnd
from varuna_capslog.elastic.host.workers import HostOptions, member_server
from varuna_capslog.elastic.member.start_up import Beginning
from varuna_capslog.elastic.store.opening import StoreGone, StoreRefuses, open_store
from varuna_capslog.membership.generation import Stamp
from varuna_capslog.plans.plan import latest_plan

if TYPE_CHECKING:
    from varuna_capslog.training.checkpoint import Checkpoint

__all__ = [
    "check_elastic",
    "join_run",
    "join_script",
    "member_modules",
    "newest_checkpoint",
    "run_here",
    "run_script",
    "server_of",
    "starting_point",
    "take_held",
    "training_modules",
    "wait_for_store",
]

# -- Names of modules that a fork server imports for workers, in this order.


SCRIPT_MODULES = (
    *PRELOADED,
    "torch._dynamo",  # the first optimizer imports it, in one to two seconds
    "torch._subclasses.fake_tensor",
)
"""Modules for the workers of a script's run."""


def _may_need_compiler(config: Config) -> bool:
    """Return False if the workers can make their first step without torch's compiler: each holds all layers of a chain
    that the workload itself makes, so that no layer is traced, and the optimizer is plain AdamW. If the chain or a
    later generation needs the compiler after all, each worker imports it then.
    """
    train, pipeline = config.train, config.pipeline
    one_stage = pipeline.devices == 1 and pipeline.plan is None
    plain = train.optimizer.lower() == "adamw" and not train.optimizer_args and train.compile is None
    captures = config.workload.startswith("varuna_capslog.")
    return captures or not (one_stage and plain)


def training_modules(config: Config) -> tuple[str, ...]:
    """Return the modules for the workers of a config's run."""
    loggers = ["torch.utils.tensorboard"] if "tensorboard" in config.train.loggers else []
    modules = SCRIPT_MODULES if _may_need_compiler(config) else PRELOADED
    return *modules, *loggers, "rich.progress", config.workload.partition(":")[0]


# -- Finds where a run continues, before its workers start. Imports torch only where there are files to read.


def take_held(run_dir: Path) -> None:
    """Make a checkpoint of the state in `held/`, if it is newer than the last one; see `elastic/member/holdings`."""
    if (run_dir / "held").exists():
        from varuna_capslog.elastic.member.holdings import recover

        recover(run_dir)


def newest_checkpoint(run_dir: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest complete checkpoint of a run (None if there is none), and the faults of newer checkpoints."""
    if not (run_dir / "checkpoints").exists():
        return None, []
    from varuna_capslog.training.checkpoint import latest_checkpoint

    return latest_checkpoint(run_dir / "checkpoints")


def newest_states(run_dir: Path) -> list[tuple[Stamp, Path]]:
    """Return (boundary, file) of every state that a script's run has saved, the newest last."""
    if not (run_dir / "checkpoints").exists():
        return []
    from varuna_capslog.elastic.script import saved_states

    return saved_states(run_dir)


# -- A machine's part of an elastic run


_ANSWER_SECONDS = 0.5
_LOOK_SECONDS = 0.1
"""Seconds between two attempts to reach the store. Each takes a millisecond; the first step waits for a success."""
_SCRIPT_CALL = "script.json"
"""The file in the folder of a script's run that holds the arguments of its workers."""


def starting_point(config: Config, say: Callable[[str], None] = lambda line: None) -> tuple[dict[str, str], Stamp]:
    """Return the keys that the store must hold before the first worker reads it, and the boundary where the run begins.

    Args:
        say: called with a line on the checkpoint from which the run continues, and on each skipped checkpoint.

    Raises:
        CapslogError: nothing is prepared, or there is no checkpoint where `resume` says.
    """
    planned = latest_plan(config.run_dir)
    if planned is None:
        raise CapslogError(f"{config.run_dir} holds no plan-<generation>.json; start the run with `capslog train`")
    checkpoint: Checkpoint | None = None
    if config.resume == "auto":
        take_held(config.run_dir)
        checkpoint, skipped = newest_checkpoint(config.run_dir)
        if skipped:
            from varuna_capslog.training.checkpoint import passed_over

            for line in passed_over(checkpoint, skipped):
                say(line)
    elif config.resume != "never":
        from varuna_capslog.training.checkpoint import open_checkpoint

        checkpoint = open_checkpoint(Path(config.resume))
    if checkpoint is None:
        beginning = Beginning(planned[0])
    else:
        say(f"resumed after step {checkpoint.step} from {checkpoint.path}")
        beginning = Beginning(planned[0], checkpoint.step, checkpoint.path)
    return beginning.keys(), beginning.stamp


def check_elastic(config: Config) -> None:
    """Raise CapslogError for an engine, planner or launcher that cannot change its members while it trains."""
    if config.engine != "capslog":
        raise CapslogError(f"elastic.enabled needs engine=capslog; engine={config.engine} restarts from checkpoints")
    from varuna_capslog.membership.layout_candidates import BY_TIME

    if config.elastic.rebalance and config.pipeline.planner not in BY_TIME:
        raise CapslogError(
            f"elastic.rebalance=true needs a planner that weighs time ({', '.join(BY_TIME)}), but pipeline.planner is "
            f"{config.pipeline.planner}; choose one of them, or set elastic.rebalance=false"
        )
    if config.elastic.small_motion == "always" and not config.elastic.shadows:
        raise CapslogError(
            "elastic.small_motion=always needs elastic.shadows=true, since the new cuts are prepared by copies made "
            "ahead; change one of the two"
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise CapslogError(
            "elastic.enabled cannot work under torchrun, whose agent ends all workers when one is lost; start `capslog "
            "host` on each machine instead (launch/elastic.sh), or switch elastic.enabled off"
        )


def run_here(config: Config, options: HostOptions) -> HostEnd:
    """Serve the store and train with this machine's workers until the run ends everywhere. options: this machine's;
    this function sets workers, settings and the beginning. Raises like `Host.run`, `check_elastic`, `starting_point`.
    """
    check_elastic(config)
    keys, stamp = starting_point(config, options.say)
    options = dataclasses.replace(_of_config(options, config), keys=keys, first=stamp)
    if options.hosts == 1:
        options = dataclasses.replace(options, environment={**options.environment, "CAPSLOG_ONE_HOST": "1"})
    return Host(options).run()


def join_run(config: Config, options: HostOptions, wait_seconds: float) -> HostEnd:
    """Wait for the machine that serves the store, then take part until the run ends or all workers here have left.

    Args:
        config: used for its `run_dir`, which all machines share, and for the modules that workers import (during the
            wait); all other keys are read from the config that the serving machine wrote.
        options: this machine's, with the address of the store; this function sets workers and settings.
        wait_seconds: longest wait for the store, which is served once the run is profiled and planned.

    Raises:
        WorkerFailed, Interrupted: see `Host.run`.
        CapslogError: see `check_elastic`; no machine serves the store in time, or its run folder is another.
    """
    check_elastic(config)
    with server_of(config) as server:
        _find_run(options, wait_seconds)
        options = dataclasses.replace(options, fork_server=server)
        return Host(_of_config(options, load_config(config.run_dir / "config.yaml"))).run()


def server_of(config: Config) -> ForkServer:
    """Start the fork server of this run's workers, before the host (`HostOptions.fork_server`)."""
    options = _of_config(HostOptions(config.run_dir), config)
    return member_server(options.entry, options.modules, options.environment)


def member_modules(config: Config) -> tuple[str, ...]:
    """Return the modules that the members of this run import, for `HostOptions.modules`."""
    member_code = ("varuna_capslog.elastic.member.runtime", "varuna_capslog.elastic.member.pipeline_work")
    return *training_modules(config), *member_code


def _of_config(options: HostOptions, config: Config) -> HostOptions:
    return dataclasses.replace(
        options,
        entry="varuna_capslog.start.member_worker:main",
        settings=config.elastic,
        environment={"OMP_NUM_THREADS": str(config.train.threads)},
        modules=member_modules(config),
    )


def run_script(
    script: Path, arguments: Sequence[str], options: HostOptions, begun: Callable[[Host], None] = lambda host: None
) -> HostEnd:
    """Serve the store and run a script on this machine's workers until the run ends everywhere; continue from the
    newest checkpoint in the run's folder.

    Args:
        arguments: the script's own.
        options: this machine's, with the section `elastic`; this function sets workers and the beginning.
        begun: called with the host before it runs.

    Raises:
        WorkerFailed, Interrupted: see `Host.run`.
    """
    beginning = _starting_point_of_script(options.run_dir)
    options = dataclasses.replace(_of_script(options, script, arguments), keys=beginning.keys(), first=beginning.stamp)
    files.write_json(options.run_dir / _SCRIPT_CALL, options.arguments)
    host = Host(options)
    begun(host)
    return host.run()


def join_script(script: Path, arguments: Sequence[str], options: HostOptions, wait_seconds: float) -> HostEnd:
    """Wait like `join_run`, with its errors, then run a script with the settings that the serving machine wrote."""
    _find_run(options, wait_seconds)
    path = options.run_dir / _SCRIPT_CALL
    try:
        settings = Elastic.model_validate(
            fields.mapping(files.read_json(path), f"{path}: what it holds").get("elastic")
        )
    except ValidationError as error:
        raise CapslogError(f"{path}: elastic holds no settings of this version; start the run anew") from error
    return Host(_of_script(dataclasses.replace(options, settings=settings), script, arguments)).run()


def _of_script(options: HostOptions, script: Path, arguments: Sequence[str]) -> HostOptions:
    call = {
        "run_dir": str(options.run_dir),
        "script": str(script.resolve()),
        "arguments": list(arguments),
        "elastic": options.settings.model_dump(mode="json"),
    }
    return dataclasses.replace(
        options, entry="varuna_capslog.elastic.script:main", arguments=call, modules=SCRIPT_MODULES
    )


def _starting_point_of_script(run_dir: Path) -> Beginning:
    """Return the newest checkpoint, if any, as a beginning with a generation after all those in the run's files."""
    saved, metrics = newest_states(run_dir), run_dir / "metrics.jsonl"
    lines = files.last_lines(metrics) if metrics.exists() else []
    numbers = [stamp.generation for stamp, _ in saved] + [
        number for line in lines if isinstance(number := line.get("generation"), int)
    ]
    first = max(numbers, default=0) + 1
    return Beginning(first, saved[-1][0].step, saved[-1][1]) if saved else Beginning(first)


def _find_run(options: HostOptions, wait_seconds: float) -> None:
    """Wait for the run's store, and check that the machine that serves it uses the same folder."""
    assert options.store is not None
    identity = wait_for_store(options.run_dir, options.store, wait_seconds, options.say)
    check_same_folder(options.run_dir, options.store, identity)


def wait_for_store(run_dir: Path, store: str, seconds: float, say: Callable[[str], None]) -> str:
    """Return the store's identity once it holds the run's first plan and a machine of the run gives a sign of life (a
    store that outlives machines may hold a run that has ended).

    Raises:
        StoreRefuses: the store has another secret than this machine.
        CapslogError: no machine serves the store in time, or the run's secret cannot be used.
    """
    until, reported = time.monotonic() + seconds, False
    signs: dict[str, Sequence[object]] = {}
    while True:
        try:
            client = open_store(store, run_secret(run_dir))
            try:
                if client.get("first-plan", wait_seconds=_ANSWER_SECONDS) is None:
                    why = "it does not say with which plan the run begins"
                else:
                    before, now = signs.get(client.identity), client.signs()
                    if now is None or before not in (None, now):
                        return client.identity
                    signs[client.identity], why = now, "no machine of the run there gives a sign of life"
            finally:
                client.close()
        except StoreRefuses:
            raise
        except (StoreGone, SecretMissing) as error:
            why = str(error)
        if time.monotonic() >= until:
            raise CapslogError(
                f"nobody serves the run's store at {store} ({why}); start a machine with "
                f"--serve {store}, or check the address"
            )
        if not reported:
            reported = True
            say(f"waiting for the run's store at {store}, up to {seconds:g} s")
        time.sleep(_LOOK_SECONDS)
