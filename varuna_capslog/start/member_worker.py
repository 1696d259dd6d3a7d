"""The process of one member of an elastic run, started by the host's supervisor.

It joins the store, takes part until the run ends or it is released, and leaves: done (0), asked to stop (130), or
failed, with one sentence in `workers/<member>.error.json`. What it needs stands in the run's folder and the store.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.elastic.member.equipment import Equipment

__all__ = ["Papers", "Wish", "capacity_of", "main", "report_failures"]

_MORE_DEVICES = 2
"""So many more than there are now may come without a search that takes longer than milliseconds."""


class Wish:
    """Whether somebody asked for a stop at the next boundary."""

    def __init__(self) -> None:
        self.stop = False
        signal.signal(signal.SIGINT, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.stop = True


class Papers:
    """`workers/<member>.json`: what the host has written there when it started this process, and this member's stage.

    Called by threads that may overtake each other.
    """

    def __init__(self, run_dir: Path, me: str) -> None:
        self._path = run_dir / "workers" / f"{me}.json"
        self._known = {"member": me, "pid": os.getpid(), "host": os.environ.get("CAPSLOG_HOST", "host")}
        self._newest, self._lock = -1, threading.Lock()

    def placed(self, generation: int, stages: Sequence[int]) -> None:
        """The stage of this generation, several in a list, none of a member that only keeps copies."""
        from varuna_capslog.base import files

        stage = list(stages) if len(stages) > 1 else stages[0] if stages else None
        with self._lock:
            if generation > self._newest:
                self._newest = generation
                files.write_json(self._path, {**self._known, "stage": stage, "generation": generation})


def main(arguments: Sequence[str] = (), equipment: Equipment | None = None) -> int:
    """Runs one member; returns the exit status.

    Args:
        arguments: the run's folder.
        equipment: what a rig gives the member in place of the real things.
    """
    run_dir, me = Path(arguments[0]), os.environ["CAPSLOG_MEMBER"]
    return report_failures(run_dir, me, lambda wish: _take_part(run_dir, me, wish, equipment or Equipment()))


def report_failures(run_dir: Path, me: str, part: Callable[[Wish], int]) -> int:
    """A member's whole part; how it fails stands in `workers/<me>.error.json`. Returns the exit status."""
    from varuna_capslog.base import files

    wish = Wish()
    try:
        return part(wish)
    except Exception as error:
        from varuna_capslog.start.worker import failure_kind, say_cause

        cause = say_cause(me, error)
        report = {
            "rank": -1,
            "member": me,
            "stage": None,
            "step": None,
            "microbatch": None,
            "kind": failure_kind(error),
            "peer": None,
            "cause": cause,
            "time": time.time(),
        }
        with contextlib.suppress(CapslogError):
            files.write_json(run_dir / "workers" / f"{me}.error.json", report)
        return error.exit_status if isinstance(error, CapslogError) else 1


def _take_part(run_dir: Path, me: str, wish: Wish, equipment: Equipment) -> int:
    import torch

    from varuna_capslog.config.reading import load_config
    from varuna_capslog.elastic.member.peers import local_address
    from varuna_capslog.elastic.member.pipeline_work import PipelineWork
    from varuna_capslog.elastic.member.runtime import Runtime
    from varuna_capslog.elastic.member.timeouts import Patience
    from varuna_capslog.elastic.store.torch_store import open_store
    from varuna_capslog.membership.generation import Stamp
    from varuna_capslog.model.workload import load_workload
    from varuna_capslog.plans.plan import read_plan
    from varuna_capslog.profiles.record import read_profile
    from varuna_capslog.start.worker import choose_device

    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    address = os.environ["CAPSLOG_STORE"]
    store = (equipment.open_store or open_store)(address, os.environ.get("CAPSLOG_STORE_IDENTITY"))
    config = load_config(run_dir / "config.yaml")
    torch.set_num_threads(config.train.threads)
    first = int(_told(store.get("first-plan", 10.0), "which plan the run begins with"))
    resumed = Stamp(int(_told(store.get("resumed-step", 10.0), "which boundary the run begins with")), 0)
    path = _told(store.get("resumed-path", 10.0), "which checkpoint the run begins with")
    profile_file = run_dir / "profile.json"
    profile = read_profile(profile_file) if profile_file.exists() else None
    device = choose_device(config.device, int(os.environ.get("CAPSLOG_LOCAL_RANK", "0")))
    work = (equipment.work or PipelineWork)(
        me,
        config,
        load_workload(config),
        read_plan(run_dir / f"plan-{first}.json"),
        profile,
        device,
        first - 1,
        {resumed: Path(path)} if path else {},
        lambda: wish.stop,
        Papers(run_dir, me).placed,
        equipment.observer,
    )
    began = store.get("began")
    if began is None:
        store.put("began", repr(time.time()))
    else:
        work.began(max(0.0, time.time() - float(began)))
    newest = store.read()
    if newest.number:  # the others are at work; what takes long the first time is done before they wait for it
        work.warm_up()
    work.placer.prepare(max(config.world_size, len(newest.members)) + _MORE_DEVICES)
    gc.collect()
    gc.freeze()  # what is there by now stays; later collections need not look at it
    elastic = config.elastic
    runtime = Runtime(
        me,
        os.environ.get("CAPSLOG_HOST", "host"),
        work,
        store,
        store.identity,
        os.environ.get("CAPSLOG_ADDRESS") or local_address(address),
        capacity_of(config.pipeline.capacity, int(os.environ.get("CAPSLOG_LOCAL_RANK", "0"))),
        resumed,
        elastic.protection == "sync",
        elastic.shadows,
        Patience(config.pipeline.timeout_seconds, elastic.patience_seconds),
        equipment.probe,
        lambda: wish.stop,
    )
    try:
        end = runtime.run()
    finally:
        work.close()
    return 130 if end.stopped and work.asked else 0


def capacity_of(capacity: int | Sequence[int] | None, device: int) -> int:
    """Bytes of a device of this host; 0: no limit.

    Of a list the entry of this device, where the run began on one host; else the smallest, since nobody knows whose
    devices it means.
    """
    if capacity is None or isinstance(capacity, int):
        return capacity or 0
    alone = "CAPSLOG_ONE_HOST" in os.environ
    return capacity[device] if alone and device < len(capacity) else min(capacity)


def _told(value: str | None, what: str) -> str:
    if value is None:
        raise CapslogError(
            f"the store does not say {what}: the host that began the run has not come so far; start anew"
        )
    return value
