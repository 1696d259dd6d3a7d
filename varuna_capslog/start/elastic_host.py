"""One machine's part of an elastic run, from a prepared folder to its end: `capslog train` with `elastic.enabled`, and
`capslog host`.

The machine that serves the store finds out where the run goes on (a checkpoint, or what members left behind when they
stopped) and tells the store; the others wait for that. Then a `Host` starts and watches the workers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import load_config
from varuna_capslog.config.settings import Config
from varuna_capslog.elastic.host.fork_server import PRELOADED
from varuna_capslog.elastic.host.hooks import check_same_folder
from varuna_capslog.elastic.host.host import Host, HostEnd, HostOptions
from varuna_capslog.elastic.member.held_state import recover
from varuna_capslog.elastic.network import network_variables
from varuna_capslog.elastic.store.torch_store import StoreGone, open_store
from varuna_capslog.membership.generation import Stamp
from varuna_capslog.plans.folder import latest_plan

__all__ = ["check_elastic", "join_run", "run_here", "starting_point", "wait_for_store"]

_LOOK_SECONDS = 0.5

_MODULES = (
    *PRELOADED,
    "varuna_capslog.elastic.member.runtime",
    "varuna_capslog.elastic.member.pipeline_work",
    "torch.utils.tensorboard",
    "torch._dynamo",  # the first optimizer imports it, in one to two seconds
    "torch._subclasses.fake_tensor",
    "rich.progress",
)


def starting_point(config: Config, say: Callable[[str], None] = lambda line: None) -> tuple[dict[str, str], Stamp]:
    """What the store must say before the first worker looks, and the boundary that the run begins with.

    Args:
        say: told from which checkpoint, and which were passed over.

    Raises:
        CapslogError: nothing is prepared, or there is no checkpoint where `resume` says.
    """
    from varuna_capslog.training.checkpoint import Checkpoint, latest_checkpoint, open_checkpoint

    planned = latest_plan(config.run_dir)
    if planned is None:
        raise CapslogError(f"{config.run_dir} holds no plan-<generation>.json; start the run with `capslog train`")
    found: Checkpoint | None = None
    if config.resume == "auto":
        recover(config.run_dir)
        found, skipped = latest_checkpoint(config.run_dir / "checkpoints")
        for problem in skipped:
            say(f"passed over a checkpoint: {problem}")
    elif config.resume != "never":
        found = open_checkpoint(Path(config.resume))
    step = found.step if found is not None else 0
    if found is not None:
        say(f"resumed after step {found.step} from {found.path}")
    keys = {
        "first-plan": str(planned[0]),
        "resumed-step": str(step),
        "resumed-path": str(found.path.absolute()) if found is not None else "",
    }
    return keys, Stamp(step, 0)


def check_elastic(config: Config) -> None:
    """Refuses what live changes do not go with, before anything is profiled.

    Raises:
        CapslogError: another engine or transport, or an agent above that ends all workers when one is lost.
    """
    if config.engine != "capslog":
        raise CapslogError(f"elastic.enabled needs engine=capslog; engine={config.engine} restarts from checkpoints")
    if config.pipeline.transport != "gloo":
        raise CapslogError(
            f"elastic.enabled needs pipeline.transport=gloo; {config.pipeline.transport} groups cannot be left alone"
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise CapslogError(
            "elastic.enabled cannot work under torchrun, whose agent ends all workers when one is lost; start `capslog "
            "host` on each machine instead (launch/elastic.sh), or switch elastic.enabled off"
        )


def run_here(
    config: Config,
    say: Callable[[str], None] = lambda line: None,
    modules: Sequence[str] = (),
    *,
    num_workers: int | None = None,
    name: str | None = None,
    serve_at: str = "127.0.0.1:0",
    hosts: int = 1,
) -> HostEnd:
    """Serves the store and trains with this machine's workers until the run ends, everywhere.

    Args:
        say: prints one line for the user.
        modules: imported ahead for all workers, besides those of the engine and of the workload.
        num_workers: of this machine; None: all that the config wants.
        name, serve_at, hosts: see `Host`.

    Raises:
        WorkerFailed, Interrupted: see `Host.run`.
        CapslogError: `engine: varuna`, which has no part in this; or nothing to begin with.
    """
    check_elastic(config)
    keys, stamp = starting_point(config, say)
    return Host(
        HostOptions(
            config.run_dir,
            num_workers=num_workers or config.world_size,
            name=name,
            serve_at=serve_at,
            hosts=hosts,
            keys=keys,
            first=stamp,
            environment=_environment(config, serve_at) | ({"CAPSLOG_ONE_HOST": "1"} if hosts == 1 else {}),
            settings=config.elastic,
            say=say,
            modules=_modules(config, modules),
        )
    ).run()


def join_run(
    config: Config,
    store: str,
    num_workers: int,
    say: Callable[[str], None] = lambda line: None,
    modules: Sequence[str] = (),
    *,
    name: str | None = None,
    wait_seconds: float = 600.0,
) -> HostEnd:
    """Waits for the machine that serves the store, then takes part with this machine's workers until the run ends or
    all of them have left.

    Args:
        config: only its `run_dir` counts, which all machines share; the rest is what the serving machine wrote there.
        store: host:port.
        wait_seconds: for the store, which is served once the run is profiled and planned.

    Raises:
        WorkerFailed, Interrupted: see `Host.run`.
        CapslogError: nobody serves the store in time, or `run_dir` is not the folder that the serving machine uses.
    """
    check_elastic(config)
    identity = wait_for_store(store, wait_seconds, say)
    check_same_folder(config.run_dir, store, identity)
    here = load_config(config.run_dir / "config.yaml")
    here.run_dir = config.run_dir
    return Host(
        HostOptions(
            config.run_dir,
            num_workers=num_workers,
            name=name,
            store=store,
            environment=_environment(here, store),
            settings=here.elastic,
            say=say,
            modules=_modules(here, modules),
        )
    ).run()


def _modules(config: Config, more: Sequence[str]) -> tuple[str, ...]:
    return (*_MODULES, config.workload.partition(":")[0], *more)


def _environment(config: Config, store: str) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(config.train.threads), **network_variables(store)}


def wait_for_store(store: str, seconds: float, say: Callable[[str], None]) -> str:
    """The identity of the store, once it says with which plan the run begins, and the run is one that lives: a store
    that outlives machines may hold one that has ended.
    """
    until, told = time.monotonic() + seconds, False
    signs: dict[str, Sequence[str]] = {}
    while True:
        try:
            client = open_store(store)
            try:
                if client.get("first-plan", wait_seconds=_LOOK_SECONDS) is None:
                    why = "it does not say with which plan the run begins"
                else:
                    before, now = signs.get(client.identity), client.signs()
                    if now is None or before not in (None, now):
                        return client.identity
                    signs[client.identity], why = now, "no machine of the run there gives a sign of life"
            finally:
                client.close()
        except StoreGone as error:
            why = str(error)
        if time.monotonic() >= until:
            raise CapslogError(
                f"nobody serves the run's store at {store} ({why}); start a machine with "
                f"--serve {store}, or check the address"
            )
        if not told:
            told = True
            say(f"waiting for the run's store at {store}, up to {seconds:g} s")
        time.sleep(_LOOK_SECONDS)
