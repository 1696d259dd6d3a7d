"""`capslog host`: two machines as two process groups, one of which is lost and comes back; refused settings."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.elastic.machines import CAPSLOG, PROGRAM, Machines, free_port, write_config
from tests.elastic.member.test_holdings_held_state import leave
from tests.secret import SECRET
from tests.waiting import wait_until
from varuna_capslog import cli
from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import load_config
from varuna_capslog.elastic.host.hooks import check_same_folder
from varuna_capslog.elastic.host.workers import HostOptions
from varuna_capslog.elastic.network import address_towards, interface_of, network_variables
from varuna_capslog.elastic.store.opening import StoreServer, open_store
from varuna_capslog.plans.plan import Plan, write_plan
from varuna_capslog.start.elastic_host import check_elastic, join_run, starting_point


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    cluster = Machines(tmp_path)
    yield cluster
    cluster.close()


def test_a_machine_is_lost_whole_and_another_of_its_name_joins(tmp_path, machines):
    config, address = write_config(tmp_path, patience_seconds=5.0), f"127.0.0.1:{free_port()}"
    common = [CAPSLOG, "host", str(config), "--nnodes", "2", "--nproc", "1"]
    # the order does not matter: b waits for the store
    b = machines.start([*common, "--name", "b", "--store", address])
    a = machines.start([*common, "--name", "a", "--serve", address])
    machines.wait_for_members("a-1", "b-1")
    (begun,) = machines.events("start")
    assert len(begun["members"]) == 2, "one has trained alone while the other loaded"
    machines.wait_for_steps(3)
    machines.kill(b)
    machines.wait_for_members("a-1")
    wait_until(lambda: machines.events("lost"))  # written by the host, while the members go on
    assert machines.events("lost")[0]["why"] == "host b has ended: its connection to the store was closed"
    back = machines.start([*common, "--name", "b", "--store", address])
    machines.wait_for_members("a-1", "b.2-1")
    machines.wait_for_steps(3)
    a.send_signal(signal.SIGINT)
    assert (machines.end(a), machines.end(back)) == (130, 130), machines.said()
    assert "as asked on another host" in machines.text(2)
    machines.check_losses(tmp_path / "truth")


def test_a_run_that_waits_can_be_stopped_and_one_whose_disk_is_full_ends_with_one_sentence(tmp_path, machines):
    config = write_config(tmp_path, min_devices=2)
    train = ["train", str(config)]
    process = machines.start([CAPSLOG, *train])
    machines.wait_for_steps(3)
    os.kill(files.read_json(machines.run_dir / "workers/" / f"{socket.gethostname()}-2.json")["pid"], signal.SIGKILL)
    machines.wait_for(lambda: machines.events("waiting"), "a run that waits")
    process.send_signal(signal.SIGINT)
    assert machines.end(process) == 130, machines.said()
    assert len(re.findall("waiting for 1 more", machines.text(0))) == 1
    assert "continues the run in" in machines.text(0)
    number = machines.events("waiting")[0]["generation"]
    assert number == 1
    assert (machines.run_dir / "plan-1.json").exists()
    # no file may grow beyond 32 KiB, as if the disk were full
    with open(machines.run_dir / "metrics.jsonl", "a") as file:
        file.write("\n" * (32 * 1024 - file.tell() - 700))
    limited = ["bash", "-c", 'ulimit -f 32; exec "$@"', "train", *PROGRAM, *train]
    assert machines.end(machines.start(limited), 90) == 2, machines.said()
    log = machines.text(1)
    assert len(re.findall("File too large; free space", log)) == 1, log
    assert f"resumed after step {machines.events('resume')[-1]['step']} from" in log
    assert machines.events("resume")[-1]["generation"] >= number, "a number that was given counts on"


def test_a_folder_that_is_not_shared_is_refused(tmp_path):
    server = StoreServer(SECRET)
    port = server.port
    client = open_store(f"127.0.0.1:{port}", SECRET)
    client.put("first-plan", "0")
    config = load_config(write_config(tmp_path))
    files.write_json(tmp_path / "run/workers/store.json", {"address": "far:1", "identity": "another run"})
    with pytest.raises(CapslogError, match="is not the folder that the host with the store at"):
        check_same_folder(config.run_dir, f"127.0.0.1:{port}", client.identity, seconds=0.2)
    client.close()
    server.close()


def test_a_store_that_nobody_serves_is_waited_for_so_long_and_no_longer(tmp_path):
    messages: list[str] = []
    config = load_config(write_config(tmp_path))
    options = HostOptions(config.run_dir, store=f"127.0.0.1:{free_port()}", say=messages.append)
    with pytest.raises(CapslogError, match=r"nobody serves the run's store at 127\.0\.0\.1:\d+ .* --serve"):
        join_run(config, options, wait_seconds=0.6)
    assert len(messages) == 1


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


def test_an_address_in_etcd_is_one(tmp_path, capsys):
    config = write_config(tmp_path)
    assert cli._run(["host", str(config), "--serve", "etcd://a:1,b:2/run", "--dry-run"]) == 0
    assert "begin a run in the store at etcd://a:1,b:2/run" in capsys.readouterr().out
    assert cli._run(["host", "--help"]) == 0
    assert "etcd://HOST:PORT" in capsys.readouterr().out


def test_what_a_run_goes_on_from_is_said(tmp_path):
    run_dir = tmp_path / "run"
    config = load_config(write_config(tmp_path))
    write_plan(run_dir / "plan-0.json", Plan.of_cuts(num_layers=11, cuts=(0, 5)))
    leave(run_dir, 4)
    messages: list[str] = []
    assert starting_point(config, messages.append)[1].step == 4
    (run_dir / "checkpoints/step-00000009").mkdir()
    assert starting_point(config, messages.append)[1].step == 4
    assert [line.partition(str(run_dir))[0] for line in messages] == [
        "resumed after step 4 from ",
        "passed over a checkpoint: ",
        "resumed after step 4 from ",
    ]


def test_a_dry_run_starts_nothing(tmp_path, capsys):
    config = write_config(tmp_path)
    assert cli._run(["host", str(config), "--serve", "a:1", "--nnodes", "2", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "would profile, plan and serve the store at a:1; 1 worker(s) here" in out
    assert not (tmp_path / "run").exists()


def test_live_changes_are_refused_under_torchrun(tmp_path, monkeypatch):
    config = load_config(write_config(tmp_path))
    check_elastic(config)
    elastic = config.elastic.model_copy(update={"small_motion": "always", "shadows": False})
    with pytest.raises(CapslogError, match=r"elastic\.small_motion=always needs elastic\.shadows=true"):
        check_elastic(config.model_copy(update={"elastic": elastic}))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(CapslogError, match="cannot work under torchrun"):
        check_elastic(config)


def test_members_are_told_the_address_that_leads_to_the_store(monkeypatch):
    monkeypatch.delenv("CAPSLOG_ADDRESS", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    only_gloo = {"GLOO_SOCKET_IFNAME": "lo"}
    assert network_variables("127.0.0.1:1") == only_gloo, "it would ask for this machine's name at every change"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.99") is None
    outwards = address_towards("203.0.113.1:1")
    if outwards is None:
        pytest.skip("this machine has no network but the loopback")
    variables = network_variables("203.0.113.1:1")
    assert variables["CAPSLOG_ADDRESS"] == outwards
    assert interface_of(outwards) == variables.get("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("CAPSLOG_ADDRESS", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert network_variables("203.0.113.1:1") == {}, "what the user set was changed"
