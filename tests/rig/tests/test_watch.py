"""A fault that is armed in a member while it runs."""

from __future__ import annotations

import pytest

from tests.rig.faults import Fault
from tests.rig.watch import SEGMENT, arm, armed


def test_an_armed_fault_happens_once_at_its_point_in_its_member_and_segment(tmp_path, monkeypatch):
    monkeypatch.setenv(SEGMENT, "2")
    probe, probe_of_other = armed("a-1", tmp_path), armed("a-2", tmp_path)
    probe("vote")  # nothing is armed yet
    arm(tmp_path, "1", Fault("a-1", "vote", "raise"))
    probe("vote")  # it is armed in a member of the same name of another segment
    arm(tmp_path, "2", Fault("a-1", "vote", "raise"))
    probe_of_other("vote")
    probe("apply")
    with pytest.raises(RuntimeError, match="'vote'"):
        probe("vote")
    probe("vote")
    folder = tmp_path / "chaos" / "armed"
    assert sorted(path.name for path in folder.iterdir()) == ["1-a-1.json", "2-a-1.fired"]


def test_a_fault_that_is_taken_back_does_not_happen(tmp_path, monkeypatch):
    monkeypatch.setenv(SEGMENT, "1")
    arm(tmp_path, "1", Fault("a-1", "vote", "raise"))
    (tmp_path / "chaos" / "armed" / "1-a-1.json").unlink()
    armed("a-1", tmp_path)("vote")
    arm(tmp_path, "1", Fault("a-1", "apply", "raise"))
    with pytest.raises(RuntimeError, match="'apply'"):
        armed("a-1", tmp_path)("apply")
