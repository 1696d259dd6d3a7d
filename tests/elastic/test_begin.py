"""`capslog host`: two machines as two process groups; one is lost whole and comes back; what does not go together."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.elastic.machines import CAPSLOG, Machines, free_port, write_config
from varuna_capslog import cli, files
from varuna_capslog.config import load_config
from varuna_capslog.elastic.begin import check_elastic, join_run
from varuna_capslog.elastic.hooks import check_same_folder
from varuna_capslog.elastic.network import address_towards, interface_of, network_variables
from varuna_capslog.elastic.store import open_store, serve_store
from varuna_capslog.errors import CapslogError


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    found = Machines(tmp_path)
    yield found
    found.close()


def test_a_machine_is_lost_whole_and_another_of_its_name_joins(tmp_path, machines):
    config, address = write_config(tmp_path), f"127.0.0.1:{free_port()}"
    common = [*CAPSLOG, "host", str(config), "--nnodes", "2", "--nproc", "1"]
    # the order does not matter: b waits for the store
    b = machines.start([*common, "--name", "b", "--store", address])
    a = machines.start([*common, "--name", "a", "--serve", address])
    machines.wait_for_members("a-1", "b-1")
    machines.wait_for_steps(3)
    assert "waiting for the run's store" in machines.text(0)
    machines.kill(b)
    machines.wait_for_members("a-1")
    assert machines.events("lost")[0]["why"] == "host b does not answer for 2 s"
    back = machines.start([*common, "--name", "b", "--store", address])
    machines.wait_for_members("a-1", "b.2-1")
    machines.wait_for_steps(3)
    a.send_signal(signal.SIGINT)
    assert (machines.end(a), machines.end(back)) == (130, 0), machines.said()
    assert "the run has ended" in machines.text(2)
    machines.check_losses(tmp_path / "truth")


def test_a_folder_that_is_not_shared_is_refused(tmp_path):
    server, port = serve_store()
    client = open_store(f"127.0.0.1:{port}")
    client.put("first-plan", "0")
    config = load_config(write_config(tmp_path))
    files.write_json(tmp_path / "run/workers/store.json", {"address": "far:1", "identity": "another run"})
    with pytest.raises(CapslogError, match="is not the folder that the host with the store at"):
        check_same_folder(config.run_dir, f"127.0.0.1:{port}", client.identity, seconds=0.2)
    client.close()
    server.close()


def test_a_store_that_nobody_serves_is_waited_for_so_long_and_no_longer(tmp_path):
    said: list[str] = []
    config = load_config(write_config(tmp_path))
    with pytest.raises(CapslogError, match=r"nobody serves the run's store at 127\.0\.0\.1:\d+ .* --serve"):
        join_run(config, f"127.0.0.1:{free_port()}", 1, said.append, wait_seconds=0.6)
    assert len(said) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "give either --serve"),
        (["--serve", "a:1", "--store", "b:2"], "give either --serve"),
        (["--serve", "here"], "'here' is not HOST:PORT"),
        (["--serve", "a:99999"], "is not HOST:PORT"),
        (["--serve", "a:1", "--nnodes", "3"], "cannot be spread evenly over --nnodes 3"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, capsys, arguments, sentence):
    config = write_config(tmp_path)
    assert cli._run(["host", str(config), *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_dry_run_starts_nothing(tmp_path, capsys):
    config = write_config(tmp_path)
    assert cli._run(["host", str(config), "--serve", "a:1", "--nnodes", "2", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "would profile, plan and serve the store at a:1; 1 worker(s) here" in out
    assert not (tmp_path / "run").exists()


def test_live_changes_are_refused_under_torchrun(tmp_path, monkeypatch):
    config = load_config(write_config(tmp_path))
    check_elastic(config)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(CapslogError, match="cannot work under torchrun"):
        check_elastic(config)


def test_members_are_told_the_address_that_leads_to_the_store(monkeypatch):
    monkeypatch.delenv("CAPSLOG_ADDRESS", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert network_variables("127.0.0.1:1") == {}, "on one machine nothing must be said"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.99") is None
    outwards = address_towards("203.0.113.1:1")
    if outwards is None:
        pytest.skip("this machine has no network but the loopback")
    found = network_variables("203.0.113.1:1")
    assert found["CAPSLOG_ADDRESS"] == outwards
    assert interface_of(outwards) == found.get("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("CAPSLOG_ADDRESS", "127.0.0.1")
    assert network_variables("203.0.113.1:1") == {}, "what the user set was changed"
