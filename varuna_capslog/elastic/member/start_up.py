"""How a member's process takes part in a run, whatever it trains: open the store, build the runtime, run, end.

The pipeline engine's member (`worker`), that of a script (`script`) and that of a training on Varuna
(`varuna_plugin.elastic_run`) differ in what they train only. What a member needs to know stands in variables of its
process, which the host sets, and in the store.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

from varuna_capslog.elastic.member.beginning import Beginning, MemberStart
from varuna_capslog.elastic.member.runtime import End, Runtime
from varuna_capslog.elastic.member.runtime_options import RuntimeOptions
from varuna_capslog.elastic.member.work import Work
from varuna_capslog.elastic.network import address_towards
from varuna_capslog.elastic.store.opening import MembershipStore, open_store
from varuna_capslog.training.worker_process import StopWish, report_failure

__all__ = ["enter", "local_rank", "report_failures", "take_part"]


def enter(
    run_dir: Path,
    stop_wished: Callable[[], bool],
    opener: Callable[[str, str | None], MembershipStore] | None = None,
) -> tuple[MemberStart, MembershipStore]:
    """Opens the store and reads where the run begins.

    Args:
        opener: as `store.open_store`, which None stands for.

    Raises:
        StoreGone: the store does not answer.
        CapslogError: it does not say where the run begins.
    """
    store = (opener or open_store)(os.environ["CAPSLOG_STORE"], os.environ.get("CAPSLOG_STORE_IDENTITY"))
    beginning = Beginning.read(store)
    resumed = {} if beginning.path is None else {beginning.stamp: beginning.path}
    me, offset = os.environ["CAPSLOG_MEMBER"], beginning.first - 1
    return MemberStart(me, run_dir, offset, resumed, stop_wished, beginning.stamp), store


def take_part(
    start: MemberStart,
    store: MembershipStore,
    work: Work,
    options: RuntimeOptions,
    runtime: type[Runtime] = Runtime,
) -> tuple[End, int]:
    """Takes part until the run ends or this member is released; closes the work.

    Args:
        options: host, address, checkpoint and the wish to stop are filled in here.

    Returns:
        How it ended, and the exit status that goes with it: 0, or 130 where a person asked for the stop.

    Raises:
        CapslogError: see `Runtime.run`.
    """
    options = dataclasses.replace(
        options,
        host=os.environ.get("CAPSLOG_HOST", "host"),
        address=os.environ.get("CAPSLOG_ADDRESS") or address_towards(os.environ["CAPSLOG_STORE"]) or "127.0.0.1",
        checkpoint=start.checkpoint,
        stop_wished=start.stop_wished,
    )
    try:
        end = runtime(start.me, work, store, options).run()
    finally:
        work.close()
    return end, 130 if end.stopped and work.asked else 0


def report_failures(run_dir: Path, part: Callable[[StopWish], int]) -> int:
    """A member's whole part; how it fails stands in `workers/<member>.error.json`. Returns the exit status."""
    me, wish = os.environ["CAPSLOG_MEMBER"], StopWish()
    try:
        return part(wish)
    except Exception as error:
        where = {"rank": -1, "member": me, "stage": None, "step": None, "microbatch": None, "peer": None}
        return report_failure(run_dir, me, me, error, where)


def local_rank() -> int:
    """The number of this member's device on its host."""
    return int(os.environ.get("CAPSLOG_LOCAL_RANK", "0"))
