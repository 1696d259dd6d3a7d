"""End of a member once the log says that the run has ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from varuna_capslog.elastic.member.runtime import End, Runtime
from varuna_capslog.membership.changes import Phase
from varuna_capslog.membership.entries import Roster

FAILURE = {"failure": {"member": "n", "cause": "no space", "kind": "user"}}


@pytest.mark.parametrize(
    ("phase", "more", "ends"),
    [(Phase.RUN, {}, False), (Phase.RUN, FAILURE, True), (Phase.CHANGE, {}, True), (Phase.OUTSIDE, FAILURE, True)],
)
def test_whoever_trains_comes_to_its_own_end_unless_all_have_failed(
    phase: Phase, more: dict[str, Any], ends: bool
) -> None:
    roster = Roster()
    runtime: Any = SimpleNamespace(roster=roster, state=SimpleNamespace(phase=phase), _end=None)
    Runtime._end_with_others(runtime)
    assert runtime._end is None, "nothing was told"
    roster.take({"kind": "finished", "step": 7, "stopped": True, **more})
    Runtime._end_with_others(runtime)
    assert runtime._end == (End(7, False, True) if ends else None)
