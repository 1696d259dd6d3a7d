"""Training on the real Varuna while workers are lost, leave and join gives the results of an undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.varuna_plugin.elastic_live import Cradle, Live, Truth, check, final_of, oracle, truth_of
from varuna_capslog.base import files
from varuna_capslog.varuna_plugin import FoundVaruna

STEPS = 12


@pytest.fixture(scope="module")
def cradle(varuna: FoundVaruna, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cradle]:
    shared_cradle = Cradle(tmp_path_factory.mktemp("cradle"))
    yield shared_cradle
    shared_cradle.fork_server.close()


@pytest.fixture(scope="module")
def truth(cradle: Cradle, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """Results of a single undisturbed worker."""
    run_dir = tmp_path_factory.mktemp("truth")
    return truth_of(run_dir, Live(cradle, run_dir, 1, "--steps", str(STEPS)).finish())


def test_one_worker_computes_what_plain_torch_does(truth: Truth) -> None:
    torch.set_num_threads(1)
    expected = oracle(1, STEPS)
    for step in range(1, STEPS + 1):
        assert truth.loss[step] == pytest.approx(expected.loss[step], abs=1e-6)
        assert truth.norm[step] == pytest.approx(expected.norm[step], rel=1e-5)
    for name, tensor in expected.final.items():
        assert torch.allclose(truth.final[name], tensor, rtol=0, atol=1e-6), name
    assert expected.loss[1] != pytest.approx(expected.loss[STEPS], abs=0.05), "it must have learnt something"


def test_four_three_two_four(cradle: Cradle, truth: Truth, tmp_path: Path) -> None:
    """Workers leave by SIGKILL and by Varuna's signal, and others join; the survivors' processes stay."""
    live = Live(cradle, tmp_path, 4, "--steps", "40", "--pause", "0.05")
    live.reaches(3)
    live.signal("m1", signal.SIGKILL)
    live.size_is(3)
    live.signal("m0", signal.SIGUSR1)
    live.size_is(2)
    pids = dict(live.pids)
    for _ in range(2):
        live.join()
    live.size_is(4)
    ended = live.finish()
    members = ended.members()
    assert members[:3] == [["m0", "m1", "m2", "m3"], ["m0", "m2", "m3"], ["m2", "m3"]]
    assert sorted(members[-1]) == ["m2", "m3", "m4", "m5"], "whoever asks first comes first"
    assert [len(cuts) for cuts in ended.cuts()][:3] == [4, 3, 2]
    assert {name: ended.status[name] for name in ("m0", "m1", "m2", "m3")} == {"m0": 0, "m1": -9, "m2": 0, "m3": 0}
    assert {name: ended.pids[name] for name in pids} == pids
    alone = Live(cradle, tmp_path / "alone", 1, "--steps", "40").finish()
    check(ended, truth_of(tmp_path / "alone", alone))
    assert {step: alone.rows[step]["loss"] for step in truth.loss} == truth.loss


def test_a_layer_of_several_stages_changes_hands(cradle: Cradle, tmp_path: Path) -> None:
    """Gradients of its uses are summed by stage, so rounding depends on the cuts; copies in all stages stay equal."""
    live = Live(cradle, tmp_path, 4, "--steps", str(STEPS), "--model", "shared", "--pause", "0.05")
    live.reaches(3)
    live.signal("m2", signal.SIGKILL)
    live.size_is(3)
    live.signal("m1", signal.SIGUSR1)
    ended = live.finish()
    assert ended.members()[1] == ["m0", "m1", "m3"]
    expected = oracle(3, STEPS)
    for step, row in ended.rows.items():
        assert row["loss"] == pytest.approx(expected.loss[step], abs=1e-5)
        assert row["grad_norm"] == pytest.approx(expected.norm[step], rel=1e-4)
    final = final_of(tmp_path)
    for name, tensor in expected.final.items():
        assert torch.allclose(final[name], tensor, rtol=0, atol=1e-5), name


def test_more_workers_than_pieces(cradle: Cradle, truth: Truth, tmp_path: Path) -> None:
    """The fifth worker has nothing to compute; it takes over when another one is lost."""
    live = Live(cradle, tmp_path, 5, "--steps", str(STEPS), "--pause", "0.05")
    live.reaches(4)
    live.signal("m0", signal.SIGKILL)
    ended = live.finish()
    assert ended.members() == [["m0", "m1", "m2", "m3", "m4"], ["m1", "m2", "m3", "m4"]]
    assert ended.cuts() == [[0, 1, 2, 3]] * 2
    check(ended, truth)


@pytest.mark.parametrize(
    ("place", "step", "victim"),
    [("forward", 5, "m2"), ("backward", 5, "m0"), ("optimizer", 5, "m3"), ("checkpoint", 4, "m1")],
)
def test_a_worker_is_killed(cradle: Cradle, truth: Truth, tmp_path: Path, place: str, step: int, victim: str) -> None:
    options = ("--steps", str(STEPS), "--checkpoint-every", "4", "--die", f"{place}:{step}:{victim}")
    ended = Live(cradle, tmp_path, 4, *options).finish()
    others = [member for member in ("m0", "m1", "m2", "m3") if member != victim]
    assert ended.members() == [["m0", "m1", "m2", "m3"], others], ended.describe()
    assert ended.status == dict.fromkeys(others, 0) | {victim: -9}, ended.describe()
    check(ended, truth)


def test_a_second_worker_is_killed_while_the_others_open(cradle: Cradle, truth: Truth, tmp_path: Path) -> None:
    """The first attempt at the new generation fails, and the next generation begins from the same boundary."""
    live = Live(cradle, tmp_path, 4, "--steps", str(STEPS), "--pause", "0.05", "--die", "open:2:m3")
    live.reaches(4)
    live.signal("m1", signal.SIGKILL)
    ended = live.finish()
    assert ended.members() == [["m0", "m1", "m2", "m3"], ["m0", "m2"]], ended.describe()
    assert ended.status == {"m0": 0, "m1": -9, "m2": 0, "m3": -9}
    check(ended, truth)


def test_a_step_that_is_not_finite_is_refused_and_leaves_the_boundary_before_it(cradle: Cradle, tmp_path: Path) -> None:
    ended = Live(cradle, tmp_path, 2, "--steps", str(STEPS), "--nan-at", "4").finish()
    assert set(ended.status.values()) == {4}, ended.describe()
    assert sorted(ended.rows) == [1, 2, 3]
    cause = files.read_json(tmp_path / "workers" / "m0.error.json")["cause"]
    assert "step 4: not finite: loss nan" in cause


def test_a_run_without_its_store_stops_with_all_it_has_and_goes_on(
    cradle: Cradle, truth: Truth, tmp_path: Path
) -> None:
    live = Live(cradle, tmp_path, 3, "--steps", str(STEPS), "--pause", "0.05")
    live.reaches(5)
    live.server.close()
    live.signal("m1", signal.SIGKILL)
    ended = live.finish()
    assert ended.status["m1"] == -9
    assert max(ended.rows) < STEPS, "it ended before the store was lost"
    assert "on disk" in files.read_json(tmp_path / "workers" / "m0.error.json")["cause"]
    again = Live(cradle, tmp_path, 2, "--steps", str(STEPS), first=5).finish()
    assert len(list(tmp_path.glob("resumed-*"))) == 1, again.describe()
    check(again, truth)


def test_a_stop_writes_a_checkpoint_from_which_other_workers_go_on(
    cradle: Cradle, truth: Truth, tmp_path: Path
) -> None:
    live = Live(cradle, tmp_path, 4, "--steps", str(STEPS), "--pause", "0.05")
    live.reaches(4)
    live.signal("m2", signal.SIGINT)
    stopped = live.finish()
    assert set(stopped.status.values()) == {130}, stopped.describe()
    assert 4 <= max(stopped.rows) < STEPS
    again = Live(cradle, tmp_path, 3, "--steps", str(STEPS), first=5).finish()
    assert [len(names) for names in again.members()] == [4, 3]
    check(again, truth)


def test_the_script_is_its_own_host(varuna: FoundVaruna, truth: Truth, tmp_path: Path) -> None:
    """Started as by a user: for some steps, then for the remaining ones with another number of workers."""
    script, run_dir = str(Path(__file__).with_name("elastic_script.py")), tmp_path / "run"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for steps, workers in (("5", "2"), (str(STEPS), "3")):
        command = [sys.executable, script, str(run_dir), "--steps", steps, "--workers", workers]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "ended, stopped=False" in done.stderr
    rows = {row["step"]: row["loss"] for row in files.read_jsonl(run_dir / "metrics.jsonl")}
    assert rows == truth.loss
    begins = [event for event in files.read_jsonl(run_dir / "events.jsonl") if event["kind"] == "begin"]
    assert [(event["step"], len(event["members"])) for event in begins] == [(1, 2), (6, 3)]
    final = final_of(run_dir)
    assert all(torch.equal(final[name], tensor) for name, tensor in truth.final.items())
    assert not list(tmp_path.glob("_tmp_*")), "Varuna's files in the current folder"
