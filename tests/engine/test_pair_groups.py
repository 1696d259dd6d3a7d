"""Groups of two ranks without tags, whose operations never end by themselves: opening, waiting, ending."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine import models
from tests.rig import nccl_failures
from varuna_capslog.base.errors import CapslogError, PeerLost
from varuna_capslog.engine.communicator import Communicator, connect_group
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pair_groups import NotOpened, Opener, PairGroups, Progress, opener_of
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.recipe import EngineOptions, LearningRate, Recipe
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.chain import TensorSpec

CPU = torch.device("cpu")
SECONDS = datetime.timedelta(seconds=60)
FLAWLESS = "0,0,0"


@pytest.fixture(autouse=True)
def _flawless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nccl_failures.MANNERS, FLAWLESS)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def two_ranks(store: dist.Store) -> list[PairGroups]:
    """The groups of ranks 0 and 1, in both directions."""
    ranks = [PairGroups(rank, store, SECONDS, CPU, lambda doing: None) for rank in range(2)]

    pairs = ((0, 1), (1, 0))
    for rank in range(2):
        ranks[rank].begin(pairs, device_of(rank))
    for groups in ranks:
        for pair in pairs:
            groups.wait(pair)
    return ranks


def device_of(rank: int) -> Opener:
    """Opener for a rank that lives in this process, as if it had a process to itself."""

    def opener(store: dist.Store, number: int, timeout: datetime.timedelta) -> nccl_failures.StandIn:
        return nccl_failures.open_group(store, number, timeout, device=f"device {rank}")

    return opener


def sent(groups: PairGroups, value: float, to: int, rank: int) -> Any:
    group, number = groups.route(rank, to)
    return group.send([torch.full((4,), value).view(torch.uint8)], number, 0)


def received(groups: PairGroups, source: int, rank: int) -> tuple[torch.Tensor, Any]:
    room = torch.zeros(4)
    group, number = groups.route(source, rank)
    return room, group.recv([room.view(torch.uint8)], number, 0)


def test_messages_meet_in_order_in_both_directions() -> None:
    ranks = two_ranks(dist.HashStore())
    rooms = [received(ranks[1], 0, 1) for _ in range(3)] + [received(ranks[0], 1, 0)]
    for value in (1.0, 2.0, 3.0):
        sent(ranks[0], value, 1, 0)
    sent(ranks[1], 4.0, 0, 1)
    for _, work in rooms:
        work.wait()
    assert [room.tolist() for room, _ in rooms] == [[value] * 4 for value in (1.0, 2.0, 3.0, 4.0)]
    for groups in ranks:
        groups.abort()


def test_a_dead_peer_says_nothing_and_an_abort_ends_the_wait_with_noise(threads: ThreadPoolExecutor) -> None:
    ranks = two_ranks(dist.HashStore())
    ranks[0].abort()  # as if its process had been killed
    room, work = received(ranks[1], 0, 1)
    waiting = threads.submit(work.wait)
    time.sleep(0.1)
    assert not waiting.done()
    ranks[1].abort()
    waiting.result(timeout=30)
    assert room.isnan().all(), "what arrived is worthless, and no error says so"
    with pytest.raises(RuntimeError, match="aborted"):
        received(ranks[1], 0, 1)


def test_many_generations_leave_nothing_behind() -> None:
    store, before = dist.HashStore(), threading.active_count()
    for generation in range(20):
        ranks = two_ranks(dist.PrefixStore(str(generation), store))
        received(ranks[1], 0, 1)  # under way for ever
        for groups in ranks:
            groups.abort()
    assert nccl_failures.left_open() == 0
    until = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.02)
    assert threading.active_count() <= before


def test_a_peer_that_never_comes_does_not_hold_an_abort(threads: ThreadPoolExecutor) -> None:
    groups = PairGroups(0, dist.HashStore(), SECONDS, CPU, lambda doing: None)
    groups.begin([(0, 1)], device_of(0))
    opening = threads.submit(groups.wait, (0, 1))
    time.sleep(0.1)
    assert not opening.done()
    assert not groups.settled
    began = time.monotonic()
    groups.abort()
    opening.result(timeout=30)
    assert time.monotonic() - began < 2


def refused(store: dist.Store, number: int, timeout: datetime.timedelta) -> Any:
    raise RuntimeError("NCCL error: unhandled system error\nand a long trace")


def test_a_group_that_cannot_be_opened_is_one_sentence() -> None:
    alone = Communicator(0, 2, "g", SECONDS, None, dist.HashStore())
    alone.describe_ranks({1: "rank 1 (stage 1)"})
    with pytest.raises(NotOpened) as caught:
        alone.open_pair_groups([(0, 1)], refused, CPU)
    wanted = "rank 0 was opening a group with rank 1 (stage 1): NCCL error: unhandled system error"
    assert str(caught.value) == wanted
    assert alone.aborted


def test_two_ranks_of_one_device_are_refused(threads: ThreadPoolExecutor) -> None:
    store = dist.HashStore()
    openings: list[Future[Any]] = [threads.submit(device_of(0), store, number, SECONDS) for number in range(2)]
    for opening in openings:
        with pytest.raises(RuntimeError, match="both ranks are on device device 0"):
            opening.result(timeout=30)


def test_a_peer_that_does_not_answer_is_named(threads: ThreadPoolExecutor) -> None:
    """NCCL itself would wait for ever; here a watch ends the generation."""
    store = dist.HashStore()
    communicators = [Communicator(rank, 2, "g", datetime.timedelta(seconds=0.5), None, store) for rank in range(2)]
    openings = [
        threads.submit(communicator.open_pair_groups, [(0, 1), (1, 0)], device_of(communicator.rank), CPU)
        for communicator in communicators
    ]
    for opening in openings:
        opening.result(timeout=30)
    waiting = communicators[1].receive(TensorSpec((4,)), 0, 7, CPU)
    waiting.wait()  # returns, though nothing came
    for doing in (lambda: communicators[1].check_open("computing"), communicators[1].barrier):
        with pytest.raises(PeerLost, match=r"rank 1 was waiting for rank 0: no answer within 0\.5 s"):
            doing()
    communicators[0].abort()


def test_a_watch_counts_from_the_last_progress() -> None:
    late: list[str] = []
    progress = Progress(0.4, CPU, late.append)
    time.sleep(0.6)  # nothing is waited for
    for _ in range(4):
        with progress.waiting("a short wait"):
            time.sleep(0.2)
    assert late == []
    with progress.waiting("a long wait"):
        time.sleep(1.0)
    assert late == ["a long wait: no answer within 0.4 s"]
    progress.close()


class Sluggish:
    """A group with the manners that only NCCL has, not the stand-in: it connects in its first message, and may take its
    time to end.

    Args:
        connects, ends: what its first message and its end wait for.
    """

    def __init__(self, connects: threading.Event, ends: threading.Event) -> None:
        self.connects, self.ends = connects, ends
        self.begun, self.aborted = threading.Event(), 0

    def send(self, tensors: list[torch.Tensor], number: int, tag: int) -> Any:
        self.begun.set()
        assert self.connects.wait(10)
        done: Future[None] = Future()
        done.set_result(None)
        done.wait = done.result  # type: ignore[attr-defined]
        return done

    recv = send

    def abort(self) -> None:
        self.ends.wait(10)
        self.aborted += 1


def happened() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def test_a_watch_that_fails_ends_what_it_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it no wait for a message over a pair group has a limit."""
    monkeypatch.setattr("varuna_capslog.engine.pair_groups._is_past", lambda event: {}["nobody expected this"])
    heard: list[str] = []
    progress = Progress(0.05, CPU, heard.append)
    with progress.waiting("waiting for rank 1"):
        until = time.monotonic() + 10
        while not heard and time.monotonic() < until:
            time.sleep(0.01)
    assert heard[0].startswith("waiting for messages: the thread pair-progress failed with KeyError")


def test_an_opening_that_is_broken_off_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = PairGroups(0, dist.HashStore(), SECONDS, CPU, lambda why: None)

    def leave(*_: Any) -> None:
        raise SystemExit(3)

    monkeypatch.setattr(groups, "_connect", leave)
    groups.begin([(0, 1), (0, 2)], device_of(0))
    for pair in ((0, 1), (0, 2)):
        with pytest.raises(CapslogError, match="open-pairs failed with SystemExit: 3"):
            groups.wait(pair)
    groups.abort()


def test_a_group_that_connects_after_the_abort_is_ended_too() -> None:
    """NCCL's abort ends what is connected by then; the first message may be connecting still."""
    connects = threading.Event()
    group = Sluggish(connects, happened())
    groups = PairGroups(0, dist.HashStore(), SECONDS, CPU, lambda doing: None)
    groups.begin([(0, 1)], lambda store, number, timeout: group)
    assert group.begun.wait(5)
    groups.abort()
    assert group.aborted == 1
    connects.set()
    until = time.monotonic() + 5
    while not groups.settled and time.monotonic() < until:
        time.sleep(0.01)
    assert group.aborted == 2


def test_every_abort_waits_until_the_groups_have_ended(threads: ThreadPoolExecutor) -> None:
    """Otherwise one thread would reuse memory that the group of another thread's abort still writes to."""
    ends = threading.Event()
    group = Sluggish(happened(), ends)
    groups = PairGroups(0, dist.HashStore(), SECONDS, CPU, lambda doing: None)
    groups.begin([(0, 1)], lambda store, number, timeout: group)
    groups.wait((0, 1))
    aborts = [threads.submit(groups.abort) for _ in range(2)]
    time.sleep(0.2)
    assert not any(abort.done() for abort in aborts)
    ends.set()
    for abort in aborts:
        abort.result(timeout=30)
    assert group.aborted == 1
    with pytest.raises(RuntimeError, match="were aborted"):
        groups.route(0, 1)


def test_peers_learn_of_an_abort_though_a_group_of_two_waits_for_them_to_end_it(threads: ThreadPoolExecutor) -> None:
    """The vote must fail first, so that the peer ends its group: some versions of NCCL end one only together."""
    store, ends = dist.HashStore(), threading.Event()
    ranks = list(threads.map(lambda rank: connect_group(store, "g", rank, 2, 20), range(2)))
    group = Sluggish(happened(), ends)
    ranks[0].open_pair_groups([(0, 1)], lambda store, number, timeout: group, CPU)
    ranks[1].abort_with(ends.set)
    vote = threads.submit(ranks[1].barrier)
    time.sleep(0.1)
    began = time.monotonic()
    ranks[0].abort()
    with pytest.raises(PeerLost):
        vote.result(timeout=30)
    assert time.monotonic() - began < 3, "else it waits out the seconds that are granted to an abort"


def test_an_error_about_noise_is_the_loss_of_a_peer() -> None:
    """A loss may refuse what an aborted message left behind, with an error of its own that means nothing."""
    chain = models.build_chain()
    alone = Communicator(0, 1, "g", SECONDS)

    def loss(outputs: Any, targets: Any, normalisers: Any) -> Any:
        alone.abort()
        raise ValueError("matrix contains invalid numeric entries")

    options = EngineOptions(4, recipe=Recipe(LearningRate(1e-3)))
    engine = PipelineEngine(chain, loss, Layout.pipelines((0,), len(chain)), options, alone, CPU)
    minibatch, inputs = models.make_minibatch(4, 1)
    with pytest.raises(PeerLost, match="its generation was ended here"):
        train_step(engine, 1, minibatch, inputs.__getitem__)


def test_transports_are_named_by_config() -> None:
    assert opener_of("gloo") is None
    assert opener_of("tests.rig.nccl_failures:open_group") is nccl_failures.open_group
    wrong = "tests.rig.nccl_failures:open_grup"
    with pytest.raises(CapslogError, match=rf"pipeline\.transport='{wrong}'.*did you mean 'open_group'"):
        opener_of(wrong)
