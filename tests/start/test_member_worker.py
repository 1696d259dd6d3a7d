"""The process of one member: the facts that it announces, and the settings that it takes from the config."""

from __future__ import annotations

import errno
import io
import os
import types

import pytest
import torch

from varuna_capslog.base import files
from varuna_capslog.base.errors import DiskFailed
from varuna_capslog.config.settings import Config
from varuna_capslog.elastic.member.start_up import MemberStart, report_failures
from varuna_capslog.membership.generation import Generation
from varuna_capslog.plans.plan import Plan
from varuna_capslog.start import member_worker
from varuna_capslog.start.member_worker import MemberFile, capacity_of, least_bytes


def test_a_members_file_names_its_stage_in_the_newest_generation(tmp_path, monkeypatch):
    monkeypatch.setenv("CAPSLOG_HOST", "a")
    file = MemberFile(tmp_path, "a-1")
    path = tmp_path / "workers/a-1.json"
    for generation, stages, stage in ((0, [2], 2), (3, [], None), (1, [0], None), (4, [0, 2], [0, 2])):
        file.write_stage(generation, stages)
        assert files.read_json(path)["stage"] == stage
    assert files.read_json(path) == {
        "member": "a-1", "pid": os.getpid(), "host": "a", "stage": [0, 2], "generation": 4
    }  # fmt: skip


@pytest.mark.parametrize(
    ("capacity", "device", "alone", "found"),
    [
        (None, 0, True, 0),
        (8, 5, True, 8),
        ([8, 4, 6], 0, True, 8),
        ([8, 4, 6], 2, True, 6),
        ([8, 4, 6], 3, True, 4),
        ([8, 4, 6], 0, False, 4),
    ],
)
def test_a_list_of_capacities_is_of_one_host(monkeypatch, capacity, device, alone, found):
    monkeypatch.delenv("CAPSLOG_ONE_HOST", raising=False)
    if alone:
        monkeypatch.setenv("CAPSLOG_ONE_HOST", "1")
    assert capacity_of(capacity, device) == found


def test_a_failure_ends_a_member_also_where_its_log_cannot_take_it(tmp_path, monkeypatch):
    def part(wish):
        raise DiskFailed("no space")

    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("CAPSLOG_MEMBER", "a-1")
    monkeypatch.setattr("sys.stderr", Full())
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    assert report_failures(tmp_path, part) == 2
    assert files.read_json(tmp_path / "workers/a-1.error.json")["cause"] == "no space"


def test_a_member_needs_room_for_the_smallest_place_of_a_plan():
    assert least_bytes(Plan.of_cuts(8, (0, 2))) is None
    assert least_bytes(Plan.of_cuts(8, (0, 2), stage_bytes=(7, 5))) == 5


@pytest.mark.parametrize(
    ("newest", "calls"),
    [
        (Generation(0, ()), ["prepare"]),
        (Generation(1, ("a-1", "b-1")), ["prepare"]),
        (Generation(1, ("b-1",)), ["warm up", "prepare"]),
        (Generation(4, ("b-1", "c-1")), ["warm up", "prepare"]),
    ],
)
def test_only_a_member_that_comes_later_warms_up(newest, calls, tmp_path, monkeypatch):
    """Members that begin together trained a microbatch before their first step: a microbatch later for nothing."""
    made = []
    placer = types.SimpleNamespace(prepare=lambda devices, capacity: made.append("prepare"))
    loop = types.SimpleNamespace(run_began=0.0)
    work = types.SimpleNamespace(placer=placer, loop=loop, warm_up=lambda: made.append("warm up"))
    plan = Plan.of_cuts(4, (0,), num_microbatches=1, microbatch_size=1, model="m")
    stand_ins = {
        "enter": lambda *_: (MemberStart("a-1", tmp_path), types.SimpleNamespace(read=lambda: newest)),
        "load_config": lambda path: Config.model_validate({"workload": "a:b"}),
        "load_workload": lambda config: None,
        "read_plan": lambda path: plan,
        "choose_device": lambda *_: torch.device("cpu"),
        "run_age": lambda *_: 0.0,
        "take_part": lambda *_: ("end", 0),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(member_worker, name, stand_in)
    monkeypatch.setattr("gc.freeze", lambda: None)
    monkeypatch.setenv("CAPSLOG_MEMBER", "a-1")
    assert member_worker.main([str(tmp_path)], member_worker.Equipment(work=lambda *_: work)) == 0
    assert made == calls
