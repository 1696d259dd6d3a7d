"""Faults at named points of a member's life."""

from __future__ import annotations

import json
import threading
import time

import pytest

from tests.rig.faults import Fault, faults_of, prober
from varuna_capslog.base.errors import CapslogError


def test_a_fault_happens_at_its_point_in_its_member_and_at_its_count(tmp_path):
    probe = prober([Fault("a", "vote", "raise", 2), Fault("b", "vote", "raise")], "a", tmp_path)
    probe("apply")
    probe("vote")
    with pytest.raises(RuntimeError, match="'vote'"):
        probe("vote")
    probe("vote")


def test_a_member_waits_at_its_point_until_it_may_go_on(tmp_path):
    probe = prober([Fault("a", "vote", "wait", name="here")], "a", tmp_path)
    passed = threading.Event()
    threading.Thread(target=lambda: (probe("vote"), passed.set()), daemon=True).start()
    until = time.monotonic() + 10.0
    while not (tmp_path / "here.here").exists():
        assert time.monotonic() < until
        time.sleep(0.001)
    assert not passed.wait(0.05)
    (tmp_path / "here.go").touch()
    assert passed.wait(10.0)


def test_faults_are_read_from_text():
    faults = [Fault("a", "vote"), Fault("b", "action 3", "stop", 2)]
    assert faults_of(json.dumps([fault.to_json() for fault in faults])) == faults


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{", "not a JSON list of faults"),
        ('[{"member": "a"}]', "not a JSON list of faults"),
        ('[{"member": "a", "point": "vote", "do": "dance"}]', "dance"),
        ('[{"member": "a", "point": "vote", "count": 0}]', "count"),
    ],
)
def test_wrong_faults_are_named(text, message):
    with pytest.raises(CapslogError, match=message):
        faults_of(text)
