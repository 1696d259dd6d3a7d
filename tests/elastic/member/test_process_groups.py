"""The data path of the next generation, opened while the present one trains."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from tests.rig import nccl_failures
from varuna_capslog.elastic.member.process_groups import Pairs, ProcessGroups
from varuna_capslog.elastic.member.start_up import Timeouts
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.membership.generation import Generation

CPU = torch.device("cpu")
MEMBERS = ("m0", "m1")
PAIRS = [(0, 1), (1, 0)]


class QuietInbox:
    """Inbox of a member that receives nothing."""

    def engage(self, generation: int, members: frozenset[str]) -> None:
        """Do nothing: no member is lost."""

    def guard(self, communicator: Communicator | None) -> None:
        """Do nothing: no call is aborted."""

    def disturbed(self) -> bool:
        """Return False: nothing disturbs."""
        return False


def paths(begin_pairs: Callable[[Communicator, Pairs], None]) -> list[ProcessGroups]:
    store = dist.HashStore()
    timeouts = Timeouts(peer=20.0, gather=20.0)
    return [
        ProcessGroups(member, QuietInbox(), lambda: store, timeouts, lambda: None, begin_pairs)  # type: ignore[arg-type]
        for member in MEMBERS
    ]


def until_met(path: ProcessGroups, record: Generation, seconds: float = 60.0) -> bool:
    until = time.monotonic() + seconds
    while not path.has_met(record, [("join", "m1")], set()):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def take_both(data_paths: Sequence[ProcessGroups], record: Generation) -> list[Communicator]:
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda path: path.take(record), data_paths))
    return [group[0] for group in groups if group is not None]


def test_groups_of_two_ranks_are_open_before_the_change_that_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nccl_failures.MANNERS, "0,0,0")
    opened: list[int] = []

    def opener(store: dist.Store, number: int, timeout: datetime.timedelta) -> nccl_failures.StandIn:
        time.sleep(0.3)
        opened.append(number)
        return nccl_failures.open_group(store, number, timeout, f"device {len(opened)}")

    first, second = paths(lambda communicator, pairs: communicator.begin_pair_groups(pairs, opener, CPU))
    present = Generation(3, ("m0",))
    for path in (first, second):
        path.meet(4, MEMBERS, PAIRS)
    assert not until_met(first, present, 0.2), "they are being opened"
    assert until_met(first, present)
    assert until_met(second, present)
    assert sorted(opened) == [0, 0, 1, 1]
    ranks = take_both((first, second), Generation(4, MEMBERS))
    began = time.monotonic()
    for rank in ranks:
        rank.open_pair_groups(PAIRS, opener, CPU)
    assert time.monotonic() - began < 0.3, "nothing is opened again"
    assert len(opened) == 4
    for path in (first, second):
        path.close()
    assert nccl_failures.left_open() == 0
