"""`plugin.run_elastic`: a script's training on Varuna whose workers may leave, be lost and come while it runs.

The script is run twice over: once as the user started it, where `run_elastic` becomes the host that starts and watches
the workers; and once in each worker, where it takes part. `main` is what a worker runs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import runpy
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from varuna_capslog.base import units
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.settings import Elastic
from varuna_capslog.membership.entries import NoticeEntry
from varuna_capslog.membership.generation import Stamp
from varuna_capslog.memory import AUTO
from varuna_capslog.profiles.record import Profile, read_profile
from varuna_capslog.varuna_plugin.recognise import find_varuna

if TYPE_CHECKING:
    from varuna_capslog.start.member_worker import Wish

__all__ = ["ElasticEnd", "main", "run_elastic"]

_MODULES = (
    "varuna_capslog.elastic.member.runtime",
    "varuna_capslog.varuna_plugin.elastic.work",
    "varuna_capslog.varuna_plugin.elastic.run",
    "varuna_capslog.varuna_plugin.install",
    "varuna_capslog.varuna_plugin.gradients",
    "varuna_capslog.varuna_plugin.schedule",
    "torch._dynamo",  # the first optimizer imports it, in one to two seconds
    "torch._subclasses.fake_tensor",
)

_status = 0
"""Of this worker's part; what the process ends with when the script has ended well."""

_stop_wished: Callable[[], bool] = lambda: False  # noqa: E731
"""Whether somebody asked this worker for a stop at the next boundary."""


class ElasticEnd:
    """How it ended, as seen by the script.

    Attributes:
        worker: whether this is a worker's process; False: the host's.
        step: the last one applied here; None on the host.
        stopped: somebody asked for a stop, or this worker was released, before all steps were made.
    """

    def __init__(self, worker: bool, step: int | None, stopped: bool) -> None:
        self.worker, self.step, self.stopped = worker, step, stopped


def run_elastic(
    build_model: Callable[[], nn.Module],
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    get_batch: Callable[[int], dict[str, Any]],
    *,
    steps: int,
    batch_size: int,
    chunk_size: int,
    run_dir: str | os.PathLike[str],
    workers: int,
    clip_grad_max_norm: float | None = None,
    loss: Literal["mean", "sum"] = "mean",
    schedule: Callable[[torch.optim.Optimizer, int], None] | None = None,
    profile: Profile | str | os.PathLike[str] | None = None,
    planner: str = "exact",
    memory: str = AUTO,
    capacity: int | str | None = None,
    checkpoint_every: int | None = None,
    on_step: Callable[[int, float, float], None] | None = None,
    seed: int = 0,
    timeout_seconds: float = 30.0,
    elastic: Elastic | None = None,
) -> ElasticEnd:
    """Trains on Varuna with this machine's workers until all steps are made; a later call goes on from `run_dir`.

    Changes: SIGUSR1 to a worker's process, `capslog notice` and notice files make workers leave; `capslog morph`
    changes their number; a worker that is killed, fails, stands still or hangs is left behind. At the next step
    boundary the others search new cuts and go on, in the same processes. Losses stay those of an undisturbed run.

    Args:
        workers: that the run begins with, one per stage (fewer stages where the model has fewer pieces).
        capacity: bytes of each device, also as text ("16GiB"); checked where a profile is given.

    All others: see `elastic_job.Job`. `get_batch` counts steps from 1.

    Raises:
        CapslogError: no fitting Varuna, or an impossible value; on a host also what `Host.run` raises.
        StepRefused: in a worker, when a step was not finite.
    """
    if steps < 1 or workers < 1:
        raise CapslogError(f"steps={steps}, workers={workers}: both must be at least 1")
    find_varuna()
    place, settings = Path(run_dir).absolute(), elastic or Elastic()
    if "CAPSLOG_MEMBER" not in os.environ:
        return _host(place, workers, settings)
    from varuna_capslog.varuna_plugin.elastic.job import Job

    limit = units.parse_bytes(capacity, "capacity") if isinstance(capacity, str) else capacity or 0
    if profile is not None and not isinstance(profile, Profile):
        profile = read_profile(Path(profile))
    return _take_part(
        Job(
            build_model,
            build_optimizer,
            get_batch,
            steps,
            batch_size,
            chunk_size,
            place,
            clip_grad_max_norm,
            loss,
            schedule,
            profile,
            planner,
            memory,
            limit,
            checkpoint_every,
            on_step,
            seed,
            timeout_seconds,
            settings,
        )
    )


# -- the host


def _host(run_dir: Path, workers: int, settings: Elastic) -> ElasticEnd:
    from varuna_capslog.elastic.host.fork_server import PRELOADED
    from varuna_capslog.elastic.host.host import Host
    from varuna_capslog.varuna_plugin.building import temporary_folder
    from varuna_capslog.varuna_plugin.elastic.disk import begin_with

    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None:
        raise CapslogError("run_elastic must be called by a script in a file, which its workers run, too")
    run_dir.mkdir(parents=True, exist_ok=True)
    step, path = begin_with(run_dir)
    host = Host(
        run_dir,
        entry="varuna_capslog.varuna_plugin.elastic.run:main",
        arguments=[str(run_dir), os.path.abspath(script), *sys.argv[1:]],
        num_workers=workers,
        keys={"first-plan": "1", "resumed-step": str(step), "resumed-path": path},
        first=Stamp(step, 0),
        settings=settings,
        say=_say,
        modules=(*PRELOADED, *_MODULES, "varuna"),
    )
    try:
        end = host.run()
    finally:
        shutil.rmtree(temporary_folder(host.address.rpartition(":")[2]), ignore_errors=True)
    return ElasticEnd(False, None, end.stopped)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


# -- a worker


def main(arguments: Sequence[str]) -> int:
    """Runs the script in a worker; returns the exit status.

    Args:
        arguments: the run's folder, the script, and its own arguments.
    """
    from varuna_capslog.start.member_worker import report_failures

    script = arguments[1]
    sys.argv = list(arguments[1:])
    sys.path.insert(0, os.path.dirname(script))
    # the checkpoints' tracker files lie in a folder named after it
    os.environ["MASTER_PORT"] = os.environ["CAPSLOG_STORE"].rpartition(":")[2]
    logging.basicConfig(stream=sys.stderr, format="%(message)s")

    def part(wish: Wish) -> int:
        global _stop_wished
        _stop_wished = lambda: wish.stop  # noqa: E731
        from varuna_capslog.varuna_plugin.install import install

        with contextlib.redirect_stdout(sys.stderr):
            install()
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                return end.code if isinstance(end.code, int) else 1
        return _status

    return report_failures(Path(arguments[0]), os.environ["CAPSLOG_MEMBER"], part)


class _Leaving:
    """SIGUSR1, Varuna's signal of a preemption: this worker is to leave the run."""

    def __init__(self, me: str, store: Any) -> None:
        self._me, self._store = me, store
        self._heard: queue.SimpleQueue[None] = queue.SimpleQueue()
        signal.signal(signal.SIGUSR1, self._hear)
        threading.Thread(target=self._tell, name="notices", daemon=True).start()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard.put(None)

    def _tell(self) -> None:
        """A thread of its own: a handler must not wait for the store."""
        while True:
            self._heard.get()
            with contextlib.suppress(CapslogError):
                self._store.append(NoticeEntry(self._me, source="signal").to_json())


def _take_part(job: Any) -> ElasticEnd:
    """This worker's part of the run."""
    global _status
    from varuna_capslog.elastic.member.peers import local_address
    from varuna_capslog.elastic.member.runtime import Runtime
    from varuna_capslog.elastic.member.timeouts import Patience
    from varuna_capslog.elastic.store.torch_store import open_store
    from varuna_capslog.start.member_worker import probe_of
    from varuna_capslog.start.worker import choose_device
    from varuna_capslog.varuna_plugin.elastic.work import VarunaWork

    me, address = os.environ["CAPSLOG_MEMBER"], os.environ["CAPSLOG_STORE"]
    store = open_store(address, os.environ.get("CAPSLOG_STORE_IDENTITY"))
    _Leaving(me, store)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    step, path = store.get("resumed-step", 10.0), store.get("resumed-path", 10.0)
    if step is None or path is None:
        raise CapslogError("the store does not say with which boundary the run begins; start it anew")
    stamp = Stamp(int(step), 0)
    device = choose_device("auto", int(os.environ.get("CAPSLOG_LOCAL_RANK", "0")))
    work = VarunaWork(me, job, store.rendezvous, device, {stamp: Path(path)} if path else {}, _stop_wished)
    work.placer.prepare(len(store.read().members) + 2)
    elastic = job.elastic
    runtime = Runtime(
        me,
        os.environ.get("CAPSLOG_HOST", "host"),
        work,
        store,
        store.identity,
        os.environ.get("CAPSLOG_ADDRESS") or local_address(address),
        job.capacity,
        stamp,
        elastic.protection == "sync",
        elastic.shadows,
        Patience(job.timeout_seconds, elastic.patience_seconds),
        probe_of(me, job.run_dir),
        _stop_wished,
    )
    try:
        end = runtime.run()
    finally:
        work.close()
    _status = 130 if end.stopped and work.asked else 0
    return ElasticEnd(True, end.step, end.stopped or end.released)
