"""torch reads an exported schedule and runs it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.pipelining.schedules import _Action, _add_send_recv

from varuna_capslog import cli
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planning.export import torch_csv
from varuna_capslog.plans.parts import PlanStage, Units
from varuna_capslog.plans.plan import Plan, stages_of_pipelines, write_plan
from varuna_capslog.schedules import RunShape, make_schedule, to_strings

KEEPS = RunShape(recompute=False)


def plan_of(schedule: str, placement: list[int], replicas: int = 1) -> Plan:
    cuts = list(range(len(placement)))
    return Plan(len(cuts), stages_of_pipelines(len(cuts), cuts, replicas, 2, placement), Units(4, 1, 2), schedule)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "kfkb", "zb-h1"])
def test_torch_reads_the_actions_and_finds_no_deadlock(name: str) -> None:
    placement = [0, 1, 0, 1]
    text = torch_csv(plan_of(name, placement), KEEPS)
    rows = [[_Action.from_str(cell) for cell in line.split(",")] for line in text.splitlines()]
    expected = to_strings(make_schedule(name, 4, 4, placement))
    assert [[str(action) for action in row] for row in rows] == expected
    # torch adds the messages itself, and raises on a deadlock
    lowered = _add_send_recv(dict(enumerate(rows)), lambda stage: placement[stage], 4)
    assert [[str(action) for action in lowered[rank] if "_" not in str(action)] for rank in range(2)] == expected


def test_what_torch_does_not_have_is_refused() -> None:
    with pytest.raises(CapslogError, match=r"rank 0: torch's schedules have no recompute \(0R0\)"):
        torch_csv(plan_of("varuna", [0, 1]), KEEPS)
    with pytest.raises(CapslogError, match="the plan has 2 ways through its stages"):
        torch_csv(plan_of("1f1b", [0, 1], 2), KEEPS)
    stages = (PlanStage(((0, 1),), (0,), memory=None), PlanStage(((1, 2),), (1,), memory=None))
    with pytest.raises(CapslogError, match="units"):
        torch_csv(Plan(2, stages, Units(), "1f1b"), KEEPS)


def test_direct_routes_are_exported_where_the_stages_are_a_line() -> None:
    stages = tuple(PlanStage(((n, n + 1),), (n,)) for n in range(3))
    plan = Plan(3, stages, Units(4, 1, 1), "1f1b", routes="direct")
    line, skipping = [(0, 1), (1, 2)], [(0, 1), (0, 2), (1, 2)]
    assert torch_csv(plan, KEEPS, line) == torch_csv(replace(plan, routes="relay"), KEEPS)
    with pytest.raises(CapslogError, match=r"routes is 'direct' and stage 0 hands on to stage 2"):
        torch_csv(plan, KEEPS, skipping)
    with pytest.raises(CapslogError, match="it is not known which layers read from which"):
        torch_csv(plan, KEEPS)


def test_the_command_writes_the_file_and_keeps_to_the_runs_own_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plan(tmp_path / "plan.json", plan_of("kfkb", [0, 1]))
    with pytest.raises(SystemExit, match="0"):
        cli.main(["export", str(tmp_path / "plan.json"), "--k", "4", "-o", str(tmp_path / "schedule.csv")])
    expected = torch_csv(plan_of("kfkb", [0, 1]), RunShape(recompute=False, k=4))
    assert (tmp_path / "schedule.csv").read_text() == expected
    assert expected.startswith("0F0,0F1,0F2,0F3,0B0")
    with pytest.raises(SystemExit, match="2"):
        cli.main(["export", str(tmp_path / "plan.json"), "--to", "torch-cvs"])
    assert "did you mean 'torch-csv'?" in capsys.readouterr().err
