"""Groups without global state, and `abort`, which rests on gloo's behaviour and not on its documentation."""

from __future__ import annotations

import threading
import time
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from tests.engine.pool import WorkerPool
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.communicator import Communicator, PeerLost, connect, connect_group
from varuna_capslog.model.chain import TensorSpec

CPU = torch.device("cpu")
SPEC = TensorSpec((4,))


def open_group(outer: Communicator, prefix: str, timeout_seconds: float = 30.0) -> Communicator:
    """Open a further group of the same ranks, with a separate client of the store."""
    assert isinstance(outer._store, dist.TCPStore)
    store = dist.TCPStore("127.0.0.1", outer._store.port, is_master=False, wait_for_workers=False)
    prefix = f"{outer.generation}/{prefix}"
    return connect_group(store, prefix, outer.rank, outer.world_size, timeout_seconds)


def talk(communicator: Communicator) -> list[Any]:
    """Return a sum, a gather and the messages from the neighbours, as this rank gets them."""
    rank, world = communicator.rank, communicator.world_size
    neighbours = dict.fromkeys([(rank + 1) % world, (rank - 1) % world], SPEC)
    messages = dict.fromkeys(neighbours, torch.full((4,), float(rank)))
    theirs = communicator.exchange(messages, neighbours, 7, torch.device("cpu"))
    return [
        communicator.sum_numbers([(rank + 0.5) * (place == rank) for place in range(world)]),
        communicator.gather(("rank", rank)),
        {peer: tensor.tolist() for peer, tensor in theirs.items()},
    ]


def two_at_once(outer: Communicator) -> list[Any]:
    first, second = open_group(outer, "one"), open_group(outer, "other")
    results = [talk(second), talk(first)]
    first.abort()
    results += [talk(second), talk(outer)]
    third = open_group(outer, "third")
    first.close()
    results.append(talk(third))
    for communicator in (second, third):
        communicator.close()
    return results


def test_several_groups_live_in_one_process(pool: WorkerPool) -> None:
    for rank, results in enumerate(pool.run(two_at_once, 3)):
        for result in results:
            sums, gathered, theirs = result
            assert sums == [0.5, 1.5, 2.5]
            assert gathered == [("rank", 0), ("rank", 1), ("rank", 2)]
            assert theirs == {peer: [float(peer)] * 4 for peer in range(3) if peer != rank}


def blocked(outer: Communicator, operation: str, aborts: int) -> dict[str, Any]:
    """Every rank waits for a message, or a vote, that never comes; rank `aborts` ends it all from another thread."""
    group = open_group(outer, f"{operation}-{aborts}")
    group.describe_ranks({1: "rank 1 (stage 7)"})
    talk(group)
    began: list[float] = []

    def end() -> None:
        time.sleep(0.3)  # until all are blocked
        began.append(time.time())
        group.abort()
        group.abort()

    thread = threading.Thread(target=end)
    if group.rank == aborts:
        thread.start()
    messages = []
    for attempt in range(2):
        try:
            if operation == "receive":
                group.receive(SPEC, (group.rank + 1) % group.world_size, 99, CPU).wait()
            elif group.rank == 0:
                group.receive(SPEC, 1, 99, CPU).wait()
            else:
                group.barrier()  # which rank 0 does not reach
        except PeerLost as error:
            messages.append(str(error))
        if attempt == 0:
            ended = time.time()
    if group.rank == aborts:
        thread.join()
        # ended for good: nothing is even tried
        for call in (
            lambda: group.send(torch.zeros(4), (group.rank + 1) % group.world_size, 3),
            lambda: group.sum_numbers([0.0]),
            lambda: group.gather(1),
        ):
            with pytest.raises(PeerLost, match="its generation was ended here"):
                call()
    group.close()
    talk(outer)
    return {"said": messages, "ended": ended, "began": began}


@pytest.mark.parametrize(("what", "aborts"), [("receive", 0), ("receive", 2), ("vote", 1)])
def test_abort_ends_a_blocked_rank_and_its_healthy_neighbours(pool: WorkerPool, what: str, aborts: int) -> None:
    results = pool.run(blocked, 4, what, aborts)
    (began,) = results[aborts]["began"]
    for rank, result in enumerate(results):
        late = result["ended"] - began
        # the timeout is 30 s; nothing but the abort can end the wait in a tenth of it
        assert 0 <= late < 3, f"torch {torch.__version__}: rank {rank} was blocked {late:.1f} s after an abort"
        assert len(result["said"]) == 2, f"torch {torch.__version__}: rank {rank} heard of no abort: {result['said']}"
    if what == "receive" and aborts == 0:
        assert results[0]["said"][0].endswith("was waiting for rank 1 (stage 7) when its generation was ended here")


def neighbour_is_dead(outer: Communicator) -> str:
    """Rank 1 has closed its connections; the others end theirs to each other all the same."""
    group = open_group(outer, "dead", timeout_seconds=5.0)
    talk(group)
    if group.rank == 1:
        group.abort()
    outer.barrier()  # rank 1 is gone
    message = ""
    if group.rank == 0:
        time.sleep(0.2)
        group.abort()
    elif group.rank == 2:
        try:
            group.receive(SPEC, 0, 99, CPU).wait()
        except PeerLost as error:
            message = str(error)
    outer.barrier()  # a group that is thrown away would close its connections, too
    group.close()
    return message


def test_abort_reaches_the_healthy_where_the_first_peer_is_gone_already(pool: WorkerPool) -> None:
    results = pool.run(neighbour_is_dead, 3)
    assert results[2].startswith("rank 2 was waiting for rank 0: connection lost")


def one_is_missing(outer: Communicator) -> str:
    outcome = ""
    if outer.rank == 0:
        try:
            open_group(outer, "missing", timeout_seconds=0.5)
            outcome = "joined"
        except PeerLost as error:
            outcome = str(error)
    outer.barrier()  # rank 0 may still be connecting to a rank that ends at once
    return outcome


def test_a_rank_that_does_not_come_is_one_sentence(pool: WorkerPool) -> None:
    assert "rank 0 could not join 2 ranks as" in pool.run(one_is_missing, 2)[0]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[enforce fail at device.cc:84] ifa != nullptr. Unable to find address for: eth9", "user"),
        ("The server socket has failed to listen on any local network address. EADDRINUSE", "user"),
        ("Timed out after 61 seconds waiting for clients. 1/2 clients joined.", "peer"),
        ("The client socket has failed to connect to any network address of (127.0.0.1, 1)", "peer"),
        ("Gloo connectFullMesh failed with [pair.cc:144] Connection closed by peer", "peer"),
    ],
)
def test_only_what_lies_with_others_is_called_a_lost_peer(
    text: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong GLOO_SOCKET_IFNAME counted as a lost peer, so that the rank that waited was named (vllm#7074)."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(text)

    monkeypatch.setattr(dist, "init_process_group", fail)
    with pytest.raises(CapslogError, match="rank 0 could not join 1 ranks") as caught:
        connect(0, 1, "127.0.0.1", 0, host_store=True)
    assert caught.value.kind == kind


def test_one_rank_needs_no_group() -> None:
    alone = connect_group(dist.HashStore(), "alone", 0, 1)
    assert alone.gather("x") == ["x"]
    alone.abort()
    with pytest.raises(PeerLost):
        alone.barrier()
