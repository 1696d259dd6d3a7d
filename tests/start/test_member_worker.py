"""The process of one member: the facts that it announces, and the settings that it takes from the config."""

from __future__ import annotations

import errno
import io
import os

import pytest

from varuna_capslog.base import files
from varuna_capslog.base.errors import DiskFailed
from varuna_capslog.elastic.member.start_up import report_failures
from varuna_capslog.plans.plan import Plan
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
