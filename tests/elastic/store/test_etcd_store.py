"""Store on etcd, which outlives the loss of machines, its own included. Real servers; skipped without etcd."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.elastic.etcd import start_etcd
from tests.elastic.script.test_script import run_here
from tests.forks import Fork, start_command
from tests.rig.etcd_servers import EtcdServers
from tests.secret import SECRET
from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.secret import Secret, run_secret
from varuna_capslog.commands.train import check_address
from varuna_capslog.elastic.network import network_variables, parse_address
from varuna_capslog.elastic.store.etcd_gateway import Etcd, b64
from varuna_capslog.elastic.store.etcd_store import EtcdMembershipStore, begin_run
from varuna_capslog.elastic.store.log import pack_entry
from varuna_capslog.elastic.store.opening import MembershipStore, StoreGone, StoreRefuses, open_store
from varuna_capslog.engine.communicator import connect_group
from varuna_capslog.membership.entries import read
from varuna_capslog.membership.generation import EMPTY
from varuna_capslog.start.elastic_host import wait_for_store

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "ddp_elastic.py"


def wait_until(condition: Callable[[], Any], seconds: float = 90.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


@contextlib.contextmanager
def living(store: MembershipStore) -> Iterator[None]:
    """Give a machine's signs of life meanwhile."""
    ended = threading.Event()

    def beat() -> None:
        for number in itertools.count(1):
            store.give_sign("h", str(number))
            if ended.wait(0.2):
                return

    with ThreadPoolExecutor(1) as threads:
        beats = threads.submit(beat)
        try:
            yield
        finally:
            ended.set()
        beats.result()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    servers = start_etcd(tmp_path_factory.mktemp("cluster"), 3)
    yield servers
    servers.close()


def test_any_server_may_be_killed_or_hang_and_come_back_and_nothing_is_missed(cluster: EtcdServers) -> None:
    address = cluster.address("kills")
    begin_run(address, 1.0, SECRET)
    store = open_store(address, SECRET)
    heard: list[dict[str, Any]] = []
    lost: list[str] = []
    store.follow(heard.append, lost.append)
    record = store.compare_and_set(0, EMPTY.successor(["a"]))
    for number in range(3):  # the leader among them
        cluster.kill(number)
        store.append({"kind": "killed", "number": number})
        record = store.compare_and_set(record.number, record.successor([f"b{number}"]))
        cluster.start_again(number)
        cluster.wait()
    for number in range(3):
        cluster.processes[number].send_signal(signal.SIGSTOP)
        try:
            store.append({"kind": "stopped", "number": number})
            wait_until(lambda: len(heard) == len(store.history()))
        finally:
            cluster.processes[number].send_signal(signal.SIGCONT)
    assert store.read(known=4).members == ("b2",)
    wait_until(lambda: len(heard) == len(store.history()) == 10)
    assert [entry["number"] for entry in heard] == [1, 0, 2, 1, 3, 2, 4, 0, 1, 2]
    assert not lost
    store.close()


def test_endpoints_that_say_nothing_leave_time_for_one_that_answers(cluster: EtcdServers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        silent = [f"127.0.0.1:{server.getsockname()[1]}" for server in (first, second)]
        address = f"etcd://{','.join(silent)},127.0.0.1:{cluster.ports[0]}/silent"
        begin_run(address, 1.0, SECRET)
        store = open_store(address, SECRET, answer_seconds=3.0)
        store.append({"kind": "x"})
        assert len(store.history()) == 1
        store.close()


def test_without_a_majority_the_store_is_gone_for_calls_and_followers(tmp_path: Path) -> None:
    servers = start_etcd(tmp_path)
    try:
        address = servers.address("alone")
        begin_run(address, 1.0, SECRET)
        store, lost = open_store(address, SECRET, answer_seconds=0.5), []
        store.follow(lambda entry: None, lost.append)
        store.append({"kind": "x"})
        servers.kill()
        with pytest.raises(StoreGone, match="is gone"):
            store.read()
        wait_until(lambda: lost)
        servers.start_again()
        servers.wait()
        assert len(store.history()) == 1, "it comes back with what it held"
        begin_run(address, 1.0, SECRET)
        for call in (store.look, store.read, lambda: store.append({"kind": "x"})):
            with pytest.raises(StoreGone, match="started anew"):
                call()
        with pytest.raises(StoreGone, match="started anew"):
            EtcdMembershipStore(address, SECRET, store.identity)
        assert open_store(address, SECRET).read() == EMPTY
        with pytest.raises(StoreGone, match="holds no run"):
            open_store(servers.address("nothing"), SECRET)
    finally:
        servers.close()


def test_groups_of_torch_meet_there(cluster: EtcdServers) -> None:
    address = cluster.address("groups")
    begin_run(address, 1.0, SECRET)

    def member(rank: int) -> float:
        store = open_store(address, SECRET)
        communicator = connect_group(store.rendezvous(), "g", rank, 3, 20.0)
        total = communicator.add(torch.tensor([float(rank + 1)]))
        communicator.barrier()
        communicator.close()
        store.close()
        return total.item()

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(member, range(3))) == [6.0] * 3


def test_a_run_that_lives_is_not_removed_by_another(cluster: EtcdServers) -> None:
    address = cluster.address("guard")
    begin_run(address, 0.4, SECRET)
    store = open_store(address, SECRET)
    store.give_sign("h", "0")
    with living(store), pytest.raises(CapslogError, match="a run is going on"):
        begin_run(address, 4.0, SECRET)
    store.look()
    assert begin_run(address, 0.4, SECRET) != store.identity  # silent for long enough
    store.close()


def test_a_machine_that_comes_early_waits_for_the_next_run_and_not_for_one_that_has_ended(
    cluster: EtcdServers, tmp_path: Path
) -> None:
    secret = run_secret(tmp_path, create=True)
    address = cluster.address("early")
    begin_run(address, 0.4, secret)
    ended = open_store(address, secret)
    ended.put("first-plan", "1")
    ended.give_sign("h", "7")
    with pytest.raises(CapslogError, match=r"no machine of the run there gives a sign of life.*--serve"):
        wait_for_store(tmp_path, address, 1.5, lambda line: None)
    with ThreadPoolExecutor(1) as threads:
        early = threads.submit(wait_for_store, tmp_path, address, 60.0, lambda line: None)
        time.sleep(1.0)
        assert not early.done()
        begin_run(address, 0.4, secret)
        begun = open_store(address, secret)
        begun.put("first-plan", "1")
        with living(begun):
            assert early.result() == begun.identity != ended.identity
    ended.close()
    begun.close()


def test_what_is_not_signed_is_passed_over_and_named(cluster: EtcdServers, caplog: pytest.LogCaptureFixture) -> None:
    """A client may write into etcd without knowing the secret."""
    address = cluster.address("signed")
    begin_run(address, 1.0, SECRET)
    store, heard = open_store(address, SECRET), []
    store.follow(heard.append, heard.append)
    store.append({"kind": "x", "number": 0})
    store.put("a", "1")
    assert store.count("n") == 1
    _, prefix = parse_address(address)
    root, stranger = f"{prefix}/{store.identity}", store._etcd
    signed = stranger.stored(f"{root}/log/{0:012d}")
    assert signed is not None

    def write(key: str, value: bytes) -> None:
        stranger.call("kv/put", {"key": b64(f"{root}/{key}"), "value": b64(value)})

    write(f"log/{1:012d}", pack_entry({"kind": "finished", "step": 1, "stopped": False}).encode())
    write(f"log/{2:012d}", signed)  # of another place
    wait_until(lambda: len(heard) == 3)
    store.append({"kind": "x", "number": 3})
    wait_until(lambda: len(heard) == 4)
    kinds = ["x", "unsigned", "unsigned", "x"]
    assert [entry["kind"] for entry in heard] == [entry["kind"] for entry in store.history()] == kinds
    assert read(heard[1]) is None
    assert store.read() == EMPTY
    assert caplog.text.count("is not signed with this run's secret and is ignored") == 2
    write("key/a", b"2")
    assert store.get("a") is None
    write("count/n", b"0")
    with pytest.raises(StoreGone, match=r"the counter .*/count/n in the store at .* is not signed"):
        store.count("n")
    with pytest.raises(StoreRefuses, match="is not signed with this machine's secret; give all machines the same file"):
        open_store(address, Secret.new())
    stranger.call("kv/deleterange", {"key": b64(f"{root}/log/{1:012d}")})
    with pytest.raises(StoreGone, match=f"has lost {root}/log/{1:012d}"):
        store.history()
    assert "tests know" not in caplog.text
    store.close()


def test_addresses() -> None:
    assert parse_address("etcd://a:1,b:2/x/y") == ((("a", 1), ("b", 2)), "x/y")
    assert parse_address("h:3") == ((("h", 3),), "")
    assert network_variables("etcd://127.0.0.1:1/x") == {"GLOO_SOCKET_IFNAME": "lo"}
    check_address("etcd://a:1/x")
    for wrong in ("etcd://a/x", "etcd://a:1", "etcd://a:1/", "etcd://a:1,b/x", "etcd://a:1,b:65536/x"):
        with pytest.raises(CapslogError, match="etcd://"):
            check_address(wrong)


def test_a_run_that_begins_while_another_machine_looks_is_found(
    cluster: EtcdServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for a run with another secret, since the first question came before it and the second after."""
    address = cluster.address("early")
    get = Etcd.get

    def before_it_begins(etcd: Etcd, key: str) -> str | None:
        monkeypatch.setattr(Etcd, "get", get)
        begin_run(address, 1.0, SECRET)
        return None

    monkeypatch.setattr(Etcd, "get", before_it_begins)
    assert open_store(address, SECRET).read() == EMPTY


def test_the_host_that_began_the_run_is_killed_and_the_run_goes_on(
    tmp_path: Path, cluster: EtcdServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, address = tmp_path / "run", cluster.address("live")

    def start(name: str, *words: str) -> Fork:
        command = ["script", "--nproc", "1", "--run-dir", str(run), "--name", name, *words]
        command += ["--elastic", "lease_seconds=1.5", "--elastic", "patience_seconds=0.3", str(EXAMPLE)]
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (tmp_path / name).open("wb") as output:
            return start_command([*command, "--steps", "100000"], variables, output.fileno(), output.fileno(), ROOT)

    def said(name: str) -> str:
        return (tmp_path / name).read_text()

    def rows() -> list[dict[str, Any]]:
        path = run / "metrics.jsonl"
        return files.read_jsonl(path) if path.exists() else []

    def trains(members: int) -> bool:
        assert second.poll() is None, said("two")
        assert members == 1 or first.poll() is None, said("one")
        return bool(rows()) and rows()[-1]["world_size"] == members

    first = start("one", "--serve", address, "--nnodes", "2")
    second = start("two", "--store", address)
    try:
        wait_until(lambda: trains(2), 90)
        first.kill()  # its worker dies with it
        first.wait()
        wait_until(lambda: trains(1), 30)
        reached = rows()[-1]["step"]
        wait_until(lambda: rows()[-1]["step"] > reached + 20)
        second.send_signal(signal.SIGINT)
        assert second.wait(60) == 130, said("two")
    finally:
        for name, process in (("one", first), ("two", second)):
            if process.poll() is None:
                process.kill()
                print(said(name))  # noqa: T201 - shown where the test fails
    accepted = {row["step"]: row["loss"] for row in rows()}
    assert list(accepted) == list(range(1, len(accepted) + 1))
    assert len(rows()) - len(accepted) <= 1
    lines, _ = run_here(EXAMPLE, len(accepted), monkeypatch)
    truth = [float(line.split()[-1]) for line in lines]
    assert [round(loss, 9) for loss in accepted.values()] == truth
