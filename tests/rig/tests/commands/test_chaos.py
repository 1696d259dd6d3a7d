"""`launch/chaos.sh` as users call it: two machines, a few faults, also of the network, and a verdict."""

from __future__ import annotations

import json
import time

import pytest
from typer.testing import CliRunner

from tests.elastic.etcd import find_etcd
from tests.rig.commands.chaos import app
from varuna_capslog.base.errors import CapslogError

FAULTS = ("kill", "cut", "in-apply", "clock", "memory")


def test_a_run_on_two_machines_comes_through_a_kill_a_cut_a_loss_inside_apply_a_lack_and_a_clock_that_jumps(
    tmp_path, forked_servers
):
    results = tmp_path / "results.jsonl"
    words = ["--faults", "5", "--workers", "1", "--seed", "352", "--mean", "50ms", "--kinds", ",".join(FAULTS)]
    folder = tmp_path / "run"
    done = CliRunner().invoke(app, [*words, "-o", str(folder), "--results", str(results), "--json"])
    assert done.exit_code == 0, done.output
    row = json.loads(results.read_text())
    assert json.loads(done.stdout) == row
    assert (row["outcome"], row["breaches"], row["faults"]) == ("passed", [], 5)
    assert {class_row["kind"] for class_row in row["classes"]} == set(FAULTS)
    jumped = [json.loads(line)["time"] < time.time() - 3600 for line in (folder / "events.jsonl").open()]
    assert any(jumped), "the host went on with another time of day"
    assert all(class_row["recovered"] == class_row["count"] for class_row in row["classes"])
    assert {1, 2} <= set(row["layouts"])
    assert row["joins"] >= 1
    assert row["steps"] > 3
    # the records behind the verdict can be read
    records = [json.loads(line) for file in (folder / "chaos" / "records").iterdir() for line in file.open()]
    assert max(line["step"] for line in records if line["kind"] == "step") >= row["steps"]
    metrics = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]
    assert metrics == list(range(1, row["steps"] + 1))


def test_every_generation_may_run_a_plan_that_its_founder_drew(tmp_path, forked_servers):
    """Plans with stages of any kind, direct routes and orders pass the verdict through a kill and a notice, also where
    tensors are sent as over NCCL. The number of generations depends on the machine's speed, so up to three runs draw.
    """
    drawn = []
    for seed in ("5", "6", "7"):
        folder = tmp_path / seed
        words = ["model.towers=true", "train.accumulation_blocks=4", "pipeline.schedule=zb-h1", "--plans"]
        words += ["--network", "loopback", "--faults", "2", "--seed", seed]
        words += ["pipeline.transport=tests.rig.nccl_failures:open_group"]
        words += ["--mean", "50ms", "--kinds", "kill,notice", "-o", str(folder), "--json"]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        report = json.loads(done.stdout)
        assert (report["outcome"], report["faults"], report["plans"]) == ("passed", 2, True)
        log = [json.loads(line) for line in (folder / "chaos" / "log.jsonl").open()]
        records = [entry["record"] for entry in log if entry["kind"] == "generation"]
        carried = [record["plan"] for record in records if "plan" in record]
        assert len(carried) >= 3
        assert len({json.dumps(plan) for plan in carried}) == len(carried)
        drawn += carried
        if len({plan["routes"] for plan in drawn}) == len({plan["actions"] is None for plan in drawn}) == 2:
            return
    raise AssertionError("one of the kinds of plan was never drawn")


def test_a_run_loses_a_server_of_its_store_together_with_a_worker_and_goes_on(tmp_path, forked_servers):
    find_etcd()
    words = ["--store", "etcd", "--network", "loopback", "--hosts", "1", "--workers", "2", "--faults", "2"]
    folder = tmp_path / "run"
    done = CliRunner().invoke(app, [*words, "--kinds", "store", "--mean", "50ms", "-o", str(folder), "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["outcome"], report["faults"], report["store"], report["store_losses"]) == ("passed", 2, "etcd", 0)
    log = [json.loads(line) for line in (folder / "chaos" / "log.jsonl").open()]
    assert {entry["segment"] for entry in log} == {1}, "nothing was started again"
    assert sum(entry["kind"] == "dead" for entry in log) >= 2


def test_a_folder_that_holds_a_run_is_refused(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    done = CliRunner().invoke(app, ["-o", str(tmp_path)])
    assert isinstance(done.exception, CapslogError)
    assert "holds a run already" in str(done.exception)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kinds", "kil"], "kil"),
        (["--network", "loopback", "--kinds", "cut"], "--network relay"),
        (["--network", "wires"], "wires"),
        (["--store", "etcd"], "--network loopback"),
        (["--store", "files"], "files"),
        (["--delay", "20ms"], "--network namespaces, but the network is relay"),
        (["--network", "namespaces", "--loss", "100%"], "0% to 99%"),
        (["--network", "namespaces", "--bandwidth", "fast"], "bandwidth is 'fast'"),
        (["--duration", "10m"], "10m"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_begins(words, message, tmp_path):
    done = CliRunner().invoke(app, ["-o", str(tmp_path / "run"), *words])
    assert isinstance(done.exception, CapslogError)
    assert message in str(done.exception)
    assert not (tmp_path / "run" / "chaos").exists()
