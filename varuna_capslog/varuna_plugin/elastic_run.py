"""`plugin.run_elastic`: trains a script's model on Varuna while workers may leave, fail and join.

The script runs in two kinds of processes. In the process that the user started, `run_elastic` is the host, which starts
and watches the workers. In each worker (`main`) it trains.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from varuna_capslog.base import units
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.failures import StopWish
from varuna_capslog.base.fork_server import PRELOADED
from varuna_capslog.base.tables import log_to
from varuna_capslog.config.settings import Elastic
from varuna_capslog.elastic.member.start_up import (
    Beginning,
    RuntimeOptions,
    Timeouts,
    enter,
    local_rank,
    report_failures,
)
from varuna_capslog.elastic.notices.interface import Notice
from varuna_capslog.elastic.notices.signals import SignalListener, plain
from varuna_capslog.membership.entries import NoticeEntry
from varuna_capslog.profiles.record import Profile, read_profile
from varuna_capslog.training.run_setup import choose_device
from varuna_capslog.varuna_plugin.elastic_pieces import ElasticTraining
from varuna_capslog.varuna_plugin.install import find_varuna, install, temporary_folder

__all__ = ["ElasticEnd", "main", "run_elastic"]

_MODULES = (
    "varuna_capslog.elastic.member.runtime",
    "varuna_capslog.varuna_plugin.elastic_work",
    "varuna_capslog.varuna_plugin.gradients",
    "torch._dynamo",  # the first optimizer imports it, in one to two seconds
    "torch._subclasses.fake_tensor",
)


@dataclasses.dataclass(frozen=True)
class ElasticEnd:
    """End of an elastic run, as seen by the script.

    Attributes:
        worker: True in a worker's process, False in the host's.
        step: last step applied here; None on the host.
        stopped: a stop was asked for, or this worker was released, before all steps were made.
    """

    worker: bool
    step: int | None
    stopped: bool


def run_elastic(
    build_model: Callable[[], nn.Module],
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    get_batch: Callable[[int], dict[str, Any]],
    *,
    run_dir: str | os.PathLike[str],
    workers: int,
    profile: Profile | str | os.PathLike[str] | None = None,
    capacity: int | str | None = None,
    **options: Any,
) -> ElasticEnd:
    """Train on Varuna with this machine's workers until all steps are made; a later call continues from `run_dir`.

    SIGUSR1 to a worker's process, `capslog notice` and notice files make workers leave; `capslog morph` changes their
    number; a worker that is killed, fails, is suspended or hangs is lost. At the next step boundary the remaining
    workers search new cuts and continue, in the same processes. Losses stay those of an undisturbed run.

    Args:
        workers: number of workers at the start, one per stage (fewer stages where the model has fewer pieces).
        capacity: bytes of each device, also as text ("16GiB"); checked where a profile is given.

    All other arguments, `options` among them, are fields of `ElasticTraining`; `steps`, `batch_size` and `chunk_size`
    must be given. `get_batch` is called with steps from 1.

    Raises:
        CapslogError: no fitting Varuna, or an impossible value; on a host also as `Host.run`.
        StepRefused: in a worker, when a step was not finite.
    """
    options["elastic"] = options.get("elastic") or Elastic()
    job = ElasticTraining(build_model, build_optimizer, get_batch, run_dir=Path(run_dir).absolute(), **options)
    if job.steps < 1 or workers < 1:
        raise CapslogError(f"steps={job.steps}, workers={workers}: both must be at least 1")
    find_varuna()
    if "CAPSLOG_MEMBER" not in os.environ:
        return _host(job.run_dir, workers, job.elastic)
    return _take_part(job, profile, capacity)


# -- the host


def _host(run_dir: Path, workers: int, settings: Elastic) -> ElasticEnd:
    from varuna_capslog.elastic.host.host import Host
    from varuna_capslog.elastic.host.workers import HostOptions
    from varuna_capslog.varuna_plugin.checkpoint import begin_with

    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None:
        raise CapslogError("run_elastic must be called by a script in a file, which its workers run, too")
    run_dir.mkdir(parents=True, exist_ok=True)
    beginning = Beginning(1, *begin_with(run_dir))
    options = HostOptions(
        run_dir,
        entry="varuna_capslog.varuna_plugin.elastic_run:main",
        arguments=[str(run_dir), os.path.abspath(script), *sys.argv[1:]],
        num_workers=workers,
        keys=beginning.keys(),
        first=beginning.stamp,
        settings=settings,
        say=lambda line: sys.stderr.writelines([f"{line}\n"]),
        modules=(*PRELOADED, *_MODULES, "varuna"),
    )
    host = Host(options)
    try:
        end = host.run()
    finally:
        shutil.rmtree(temporary_folder(host.link.address.rpartition(":")[2]), ignore_errors=True)
    return ElasticEnd(False, None, end.stopped)


# -- a worker


def main(arguments: Sequence[str]) -> int:
    """Run the script in a worker; return the exit status. arguments: the run's folder, the script, the script's own."""
    from varuna_capslog.elastic.script import MemberScript

    run_dir, script = Path(arguments[0]), arguments[1]
    # the checkpoints' tracker files lie in a folder named after the port
    os.environ["MASTER_PORT"] = os.environ["CAPSLOG_STORE"].rpartition(":")[2]
    log_to(sys.stderr)

    def part(wish: StopWish) -> int:
        with contextlib.redirect_stdout(sys.stderr):
            install()
        member = MemberScript(run_dir, wish, Elastic())
        code = member.run(script, arguments[2:], os.path.dirname(script))
        if code not in (None, 0):
            return code if isinstance(code, int) else 1
        return member.status or 0

    return report_failures(run_dir, part)


def _take_part(
    job: ElasticTraining, profile: Profile | str | os.PathLike[str] | None, capacity: int | str | None
) -> ElasticEnd:
    """Run this worker's part. SIGUSR1, Varuna's signal of a preemption, makes the worker leave the run."""
    from varuna_capslog.elastic.member.runtime import take_part
    from varuna_capslog.elastic.script import current_script
    from varuna_capslog.varuna_plugin.elastic_work import VarunaWork

    member = current_script()
    if member is None:
        raise CapslogError("run_elastic found CAPSLOG_MEMBER, but no worker of a run runs this script; unset it")
    limit = units.parse_memory(capacity, "capacity") if isinstance(capacity, str) else capacity or 0
    if profile is not None and not isinstance(profile, Profile):
        profile = read_profile(profile)
    job = dataclasses.replace(job, profile=profile, capacity=limit)
    start, store = enter(job.run_dir, member.wish)
    elastic = job.elastic

    def tell(notice: Notice) -> None:
        with contextlib.suppress(CapslogError):
            store.append(NoticeEntry(start.me, source=notice.source).to_json())

    # the listener runs `tell` in its own thread, since a signal handler must not wait for the store
    SignalListener({signal.SIGUSR1: plain()[signal.SIGUSR1]}).start(tell)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    work = VarunaWork(start, job, store.rendezvous, choose_device("auto", local_rank()))
    work.placer.candidates.prepare(len(store.read().members) + 2)
    options = RuntimeOptions(
        capacity=job.capacity,
        sync=elastic.protection == "sync",
        shadows=elastic.shadows,
        timeouts=Timeouts(job.timeout_seconds, elastic.patience_seconds),
    )
    end, member.status = take_part(start, store, work, options)
    return ElasticEnd(True, end.step, end.stopped or end.released)
