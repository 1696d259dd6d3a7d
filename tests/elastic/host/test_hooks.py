"""Requests to a run by programs and people: from a worker, from the host's process, from a shell."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.elastic.host.test_host import Start
from tests.elastic.machines import write_config
from tests.waiting import wait_until
from varuna_capslog import cli
from varuna_capslog.base import clock, files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.elastic import on_notice, request_morph
from varuna_capslog.elastic.host.hooks import belong, deadline_fields, give_notice, notice_of, outlook, seconds_left
from varuna_capslog.elastic.notices.interface import Kind, Notice
from varuna_capslog.membership.entries import AnnounceEntry, HintEntry, NoticeEntry
from varuna_capslog.plans.plan import Plan, write_plan


@pytest.fixture
def start() -> Iterator[Start]:
    running = Start()
    yield running
    for run in reversed(running):
        run.close()


def test_the_hooks_are_there_without_torch():
    code = "import sys; import varuna_capslog.elastic as e; e.on_notice; e.request_morph; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
    with pytest.raises(AttributeError, match="no attribute 'on_notise'"):
        __import__("varuna_capslog.elastic").elastic.on_notise  # noqa: B018


def test_a_worker_may_ask_for_another_number_of_devices(tmp_path, start):
    run = start(tmp_path, 3, do={"1": "wait=go ask=2 hang"})
    for number in (1, 2, 3):
        run.seen(f"h-{number}")
    run.go()
    wait_until(lambda: run.told("notice"))
    assert [(entry["devices"]) for entry in run.of("request")] == [2]
    assert [(entry["member"], entry["source"]) for entry in run.of("notice")] == [("h-3", "request")]


def test_the_hosts_process_and_others_may_ask_too(tmp_path, start, capsys):
    run = start(tmp_path, 3)
    run.seen("h-3")
    assert files.read_json(tmp_path / "workers/store.json")["address"] == run.host.link.address
    request_morph(2)
    wait_until(lambda: run.told("notice") == ["h-3"])
    assert cli._run(["morph", str(tmp_path), "--devices", "1"]) == 0
    wait_until(lambda: run.told("notice") == ["h-3", "h-2"])
    assert "asked for 1 device(s)" in capsys.readouterr().out
    with pytest.raises(CapslogError, match="needs at least one"):
        request_morph(0)


def test_a_wish_that_cannot_be_met_is_refused_and_one_that_can_says_what_follows(tmp_path, start, capsys):
    run = start(tmp_path, 3, name="a")
    run.seen("a-3")
    assert cli._run(["morph", str(tmp_path), "--devices", "30"]) == 2
    refusal = capsys.readouterr().err
    assert "30 devices: this run's hosts start at most 3 worker(s) (a: 3)" in refusal
    assert f"--store {run.host.link.address}" in refusal
    write_config(tmp_path, 3, min_devices=2)
    assert outlook(3, tmp_path) == "3 worker(s) are there already, nothing changes"
    write_plan(tmp_path / "plan-0.json", Plan.of_cuts(num_layers=1, cuts=(0,)))
    assert outlook(3, tmp_path).endswith(
        "1 layers in 2 replicas (train.accumulation_blocks=2): at most 2 devices train, the other 1 only keep copies"
    )
    write_plan(tmp_path / "plan-1.json", Plan.of_cuts(num_layers=2, cuts=(0,)))
    assert outlook(3, tmp_path).endswith("at most 2 devices train, the other 1 only keep copies")
    config = tmp_path / "config.yaml"
    config.write_text(config.read_text().replace("planner: exact", "planner: joint"))
    assert outlook(3, tmp_path).endswith("nothing changes"), "a pipeline of one stage beside one of two"
    write_plan(tmp_path / "plan-2.json", Plan.of_cuts(num_layers=1, cuts=(0,)))
    assert outlook(3, tmp_path).endswith("1 layers in 2 blocks: at most 2 devices train, the others keep copies")
    assert outlook(1, tmp_path) == (
        "a-2, a-3 of 3 worker(s) will leave at a step boundary, once their layers moved; "
        "elastic.min_devices is 2: the run will wait with fewer"
    )
    assert run.of("request") == [], "only asked what would be"
    request_morph(2, tmp_path)
    wait_until(lambda: run.told("notice") == ["a-3"])
    assert outlook(3, tmp_path).startswith("starting 1 on a beside the 2 that are there")


def test_a_notice_from_a_person_reaches_the_host_and_whoever_watches_notices(tmp_path, start, capsys):
    heard: list[Notice] = []
    take_back = on_notice(heard.append)
    run = start(tmp_path, 2)
    run.seen("h-2")
    assert cli._run(["notice", str(tmp_path), "--member", "h-2", "--seconds", "7"]) == 0
    wait_until(lambda: run.of("notice"))
    first = run.of("notice")[0]
    assert (first["member"], first["urgent"]) == ("h-2", False)
    assert 0 < first["deadline"] - time.time() <= 7.0, "a time of day, not the seconds that are left"
    assert heard == [], "the host itself does not leave"
    assert cli._run(["notice", str(tmp_path), "--hint"]) == 0
    wait_until(lambda: sorted(run.told("hint")) == ["h-1", "h-2"])
    assert cli._run(["notice", str(tmp_path), "--urgent", "--seconds", "20"]) == 0
    wait_until(lambda: len(run.of("notice")) == 3)
    wait_until(lambda: len(heard) == 2)
    take_back()
    assert [notice.kind for notice in heard] == [Kind.HINT, Kind.NOW]
    assert all(entry["urgent"] and 15 < entry["deadline"] - time.time() <= 20 for entry in run.of("notice")[1:])
    assert "told that host h is to leave" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--host", "far"], "no host 'far' in this run; there are h"),
        (["--member", "h-9"], "no worker 'h-9' in this run; there are h-1"),
        (["--urgent", "--hint"], "exclude each other"),
    ],
)
def test_nobody_is_meant_who_is_not_there(tmp_path, start, capsys, arguments, sentence):
    run = start(tmp_path, 1)
    run.seen("h-1")
    assert cli._run(["notice", str(tmp_path), *arguments]) == 2
    assert sentence in capsys.readouterr().err
    assert not run.of("announce")
    assert not run.of("notice")


def test_where_two_runs_share_a_process_one_must_be_named(tmp_path, monkeypatch):
    """Regression: a request without a name was sent to the run that had begun last."""
    monkeypatch.delenv("CAPSLOG_STORE", raising=False)
    with contextlib.ExitStack() as stack:
        for identity in ("one", "other", "other"):
            belong(stack, f"127.0.0.1:{len(identity)}", identity, tmp_path)
        with pytest.raises(CapslogError, match="this process belongs to 2 runs; say which one is meant by its run_dir"):
            request_morph(2)
    with pytest.raises(CapslogError, match="belongs to no run"):
        request_morph(2)


def test_without_a_run_it_says_so(tmp_path, start, capsys, monkeypatch):
    monkeypatch.delenv("CAPSLOG_STORE", raising=False)
    with pytest.raises(CapslogError, match="belongs to no run"):
        request_morph(2)
    with pytest.raises(CapslogError, match=r"no elastic run is going on in .* no workers/store.json"):
        give_notice(tmp_path)
    run = start(tmp_path, 1, all="leave=0")
    run.end()
    with pytest.raises(CapslogError, match="no run is going on in"):
        give_notice(tmp_path)


def test_an_entry_says_what_its_notice_said():
    leave = notice_of(NoticeEntry("h-1", False, time.time() + 4.0, "aws"), "h")
    assert (leave.kind, leave.source, leave.hosts) == (Kind.LEAVE, "aws", ("h",))
    assert leave.deadline is not None
    assert 3.0 < leave.deadline.remaining(time.monotonic()) <= 4.0
    assert leave.deadline.based_on == "4 s from when it was told"
    assert notice_of(NoticeEntry("h-1", True), "h").kind is Kind.NOW
    assert notice_of(HintEntry("h-1"), "h").deadline is None
    assert notice_of(AnnounceEntry("h", "now"), "h").kind is Kind.NOW


@pytest.mark.parametrize(
    ("jump", "left"), [(0.0, 60.0), (-7200.0, 60.0), (7200.0, 0.0), (30.0, 30.0)],
    ids=["agree", "two hours back", "two hours ahead", "read late"],
)  # fmt: skip
def test_a_clock_that_jumps_never_makes_a_deadline_later(jump: float, left: float):
    """Either machine's clock may jump. A worker that leaves too early loses nothing, one that stays too long may."""
    clock.use(lambda: 1_800_000_000.0)
    try:
        entry = NoticeEntry("h-1", **deadline_fields(60.0))
        clock.use(lambda: 1_800_000_000.0 + jump)
        assert seconds_left(entry) == pytest.approx(left)
    finally:
        clock.use(None)
    assert seconds_left(NoticeEntry("h-1")) is None


def test_a_folder_of_an_older_run_is_not_taken_for_the_new_one(tmp_path: Path, start):
    run = start(tmp_path, 1)
    run.seen("h-1")
    place = tmp_path / "workers/store.json"
    files.write_json(place, {**files.read_json(place), "identity": "another"})
    with pytest.raises(CapslogError, match="was started anew"):
        request_morph(1, tmp_path)
