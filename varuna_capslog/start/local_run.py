"""A whole run on this machine: prepares its folder, then starts and watches its workers until they end."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable

from varuna_capslog.base.fork_server import ForkServer
from varuna_capslog.base.supervisor import Forks, Interrupted, Starter, Supervisor, reserve
from varuna_capslog.config.settings import Config
from varuna_capslog.elastic.host.workers import HostOptions
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile, read_profile
from varuna_capslog.start.callbacks import Callbacks
from varuna_capslog.start.elastic_host import run_here, server_of, take_held, training_modules
from varuna_capslog.start.prepare import check_names, prepare_run

__all__ = ["prepared_run", "run_elastic", "run_workers", "train_here", "worker_starter"]

Say = Callable[[str], None]


def train_here(
    config: Config,
    show_plan: Callable[[Plan, Profile | None], object],
    say: Say,
    show: bool = True,
    callbacks: Callbacks | None = None,
) -> None:
    """Profile, plan and train; return when the training has ended.

    Args:
        show_plan: called with the plan, and the profile where one was made, before the first worker starts.
        say: called with a line for each event of the workers.
        show: draw progress bars.
        callbacks: the caller's functions.

    Raises:
        DoesNotFit: no plan fits; no worker was started.
        CapslogError: the config, the model or a worker failed.
        Interrupted: the run was asked to stop; the same call continues it.
        Exception: of a callback; the run has stopped, and its last step is saved.
    """
    callbacks = callbacks or Callbacks(config.run_dir, {})
    with reserve(config.run_dir):  # no other run may change the plan from here on
        if config.elastic.enabled:
            options = HostOptions(config.run_dir, num_workers=config.world_size)
            with server_of(config) as server:
                show_plan(*prepared_run(config, show, server))
                options = dataclasses.replace(options, fork_server=server, look=callbacks.look)
                with callbacks:
                    run_elastic(config, options, "the same command continues")
            return
        with worker_starter(config) as starter:
            show_plan(*prepared_run(config, show, starter.server))
            if config.resume == "auto":
                take_held(config.run_dir)  # an elastic run may have stopped here between two checkpoints
            with callbacks:
                run_workers(config, say, starter, look=callbacks.look)


def prepared_run(config: Config, show: bool = True, server: ForkServer | None = None) -> tuple[Plan, Profile | None]:
    """Return a run's plan, and its profile where there is one; see `prepare.prepare_run`. server: the workers' fork
    server; without torch in this process, its fork runs this function, so that slow modules are imported once.
    """
    if server is not None and "torch" not in sys.modules:
        check_names(config)  # errors that need no import are raised at once
        plan_and_profile: tuple[Plan, Profile | None] = server.call(f"{__name__}:prepared_run", config, show)
        return plan_and_profile
    plan, path = prepare_run(config, show), config.run_dir / "profile.json"
    return plan, read_profile(path) if plan.profile_digest and path.exists() else None


def run_workers(
    config: Config, say: Say, starter: Starter, workers: int | None = None, look: Callable[[], bool] = lambda: False
) -> None:
    """Start a run's workers (default number: the config's world size), wait for their end. look: see `Supervisor`."""
    Supervisor(
        config.run_dir,
        starter,
        workers or config.world_size,
        environment={"OMP_NUM_THREADS": str(config.train.threads)},
        say=say,
        look=look,
    ).run()


def worker_starter(config: Config, *flags: str) -> Forks:
    """Return a starter of workers with these flags; its fork server begins to import their modules."""
    return Forks(
        "varuna_capslog.start.worker:forked",
        [str(config.run_dir), *flags],
        (*training_modules(config), "varuna_capslog.training.run"),
        {"OMP_NUM_THREADS": str(config.train.threads)},
    )


def run_elastic(config: Config, options: HostOptions, continued: str) -> None:
    """Train as the host that begins the run. Raises Interrupted, with the hint `continued`, when all devices left."""
    from varuna_capslog.elastic.host.terminal import Terminal

    with Terminal(config.run_dir, config.train.max_steps, options.name, config.train.max_seconds) as terminal:
        end = run_here(config, dataclasses.replace(options, say=terminal.say))
    if end.how == "left":
        where = f"{continued} the run in {config.run_dir}"
        raise Interrupted(f"all devices have left, and the run is parked; {where}", 143)
