"""Process of one member of an elastic run of the pipeline engine, started by the host's supervisor.

It joins the store, takes part until the run ends or it is released, and leaves: done (0), asked to stop (130), or
failed, with one sentence in `workers/<member>.error.json`. It reads its config from the run's folder and the store.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from varuna_capslog.base import files
from varuna_capslog.base.failures import StopWish
from varuna_capslog.base.secret import Secret
from varuna_capslog.base.tables import log_to
from varuna_capslog.config.reading import load_config
from varuna_capslog.elastic.host.leases import run_age
from varuna_capslog.elastic.member.pipeline_work import PipelineRun, PipelineWork
from varuna_capslog.elastic.member.runtime import Runtime, take_part
from varuna_capslog.elastic.member.start_up import RuntimeOptions, Timeouts, enter, local_rank, report_failures
from varuna_capslog.elastic.store.opening import MembershipStore, open_store
from varuna_capslog.engine.executor import Observer
from varuna_capslog.model.workload import load_workload
from varuna_capslog.plans.plan import Plan, read_plan
from varuna_capslog.profiles.record import read_profile
from varuna_capslog.training.run_setup import check_devices, check_room, choose_device

__all__ = ["MemberFile", "MemberParts", "capacity_of", "least_bytes", "main"]

_MORE_DEVICES = 2
"""Plans are prepared for this many more devices than there are, so that a join needs no long search."""


@dataclass(frozen=True)
class MemberParts:
    """Parts of a member; a test or a measurement replaces some.

    Attributes:
        probe: as in `RuntimeOptions`.
        observer: observes the member's engines.
        work: returns the training; has the arguments of `PipelineWork`.
        open_store: called with the store's address, the run's secret and the store's identity.
        runtime: class of the runtime.
    """

    probe: Callable[[str], None] = lambda point: None
    observer: Observer | None = None
    work: Callable[..., PipelineWork] = PipelineWork
    open_store: Callable[[str, Secret, str | None], MembershipStore] = open_store
    runtime: type[Runtime] = Runtime


class MemberFile:
    """`workers/<member>.json`: facts that the host wrote when it started this process, and this member's stage."""

    def __init__(self, run_dir: Path, me: str) -> None:
        self._path = run_dir / "workers" / f"{me}.json"
        self._known = {"member": me, "pid": os.getpid(), "host": os.environ.get("CAPSLOG_HOST", "host")}
        self._newest, self._lock = -1, threading.Lock()

    def write_stage(self, generation: int, stages: Sequence[int]) -> None:
        """Write this generation's stage: a number, a list of several, or null for a member that only keeps copies.
        Threads may call this out of order, so a generation older than the newest is ignored.
        """
        stage = list(stages) if len(stages) > 1 else stages[0] if stages else None
        with self._lock:
            if generation > self._newest:
                self._newest = generation
                files.write_json(self._path, {**self._known, "stage": stage, "generation": generation})


def main(arguments: Sequence[str] = (), parts: MemberParts | None = None) -> int:
    """Run one member of the run in the folder `arguments[0]`; return the exit status."""
    run_dir = Path(arguments[0])
    return report_failures(run_dir, lambda wish: _take_part(run_dir, wish, parts or MemberParts()))


def _take_part(run_dir: Path, wish: StopWish, parts: MemberParts) -> int:
    log_to(sys.stderr)
    start, store = enter(run_dir, wish, parts.open_store)
    config = load_config(run_dir / "config.yaml")
    torch.set_num_threads(config.train.threads)
    profile = run_dir / "profile.json"
    run = PipelineRun(
        config,
        load_workload(config),
        read_plan(run_dir / f"plan-{start.offset + 1}.json"),
        read_profile(profile) if profile.exists() else None,
    )
    device, file = choose_device(config.device, local_rank()), MemberFile(run_dir, start.me)
    check_devices(config.pipeline.transport, device, local_rank())
    check_room(device, least_bytes(run.plan), f"member {start.me}, in the smallest place of the run's first plan,")
    work = parts.work(start, run, device, file.write_stage, parts.observer)
    newest_generation = store.read()
    if newest_generation.number:  # others train already: make slow first calls now, before they wait for this member
        work.loop.run_began = time.monotonic() - run_age(store, start.host)
        work.warm_up()
    capacity = capacity_of(config.pipeline.capacity, local_rank())
    work.placer.prepare(max(config.world_size, len(newest_generation.members)) + _MORE_DEVICES, capacity)
    gc.collect()
    gc.freeze()  # later collections need not scan the present objects
    options = RuntimeOptions(
        capacity=capacity,
        sync=config.elastic.protection == "sync",
        shadows=config.elastic.shadows,
        timeouts=Timeouts(config.pipeline.timeout_seconds, config.elastic.patience_seconds),
        probe=parts.probe,
    )
    return take_part(start, store, work, options, parts.runtime)[1]


def least_bytes(plan: Plan) -> int | None:
    """Return the bytes of the smallest rank of a plan, since a member may get any rank; None: not known."""
    return min((rank.bytes for rank in plan.ranks if rank.bytes is not None), default=None)


def capacity_of(capacity: int | Sequence[int] | None, device: int) -> int:
    """Return the capacity in bytes of a device of this host; 0: no limit. From a list, take the device's entry if the
    run began on one host, else the smallest entry, since the list may refer to another host's devices.
    """
    if capacity is None or isinstance(capacity, int):
        return capacity or 0
    one_host = "CAPSLOG_ONE_HOST" in os.environ
    return capacity[device] if one_host and device < len(capacity) else min(capacity)
