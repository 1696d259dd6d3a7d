"""`pipeline.plan=FILE` with stages of several pieces of a chain with branches: one sentence per refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine import models
from tests.start.test_choices import command, config_of, write
from varuna_capslog import cli
from varuna_capslog.plans.plan import Plan, read_plan
from varuna_capslog.schedules import schedule_of, to_strings
from varuna_capslog.start.choices import with_given_plan
from varuna_capslog.start.prepare import prepare_run

Rows = list[list[str]]

TOWERS: dict[str, Any] = {
    "format": "varuna-capslog/plan/2",
    "num_layers": 8,
    "schedule": "1f1b",
    "routes": "direct",
    "units": {"per_step": 4, "samples": 2, "blocks": 4},
    "stages": [
        {"layers": [[0, 2]], "ranks": [0]},
        {"layers": [[2, 4]], "ranks": [1]},
        {"layers": [[4, 7]], "ranks": [0]},
        {"layers": [[7, 8]], "ranks": [1]},
    ],
}
"""The first tower, layers 0 to 3, on both ranks, the second one on rank 0, their join on rank 1."""


def stages(*rows: tuple[list[list[int]], int]) -> dict[str, Any]:
    return {"stages": [{"layers": layers, "ranks": [rank]} for layers, rank in rows]}


def first_stage(**what: int) -> dict[str, Any]:
    return {"stages": [TOWERS["stages"][0] | what, *TOWERS["stages"][1:]]}


def actions(rows: Rows) -> dict[str, Any]:
    return {"actions": rows, "schedule": None}


def made() -> Rows:
    """The lists of the schedule under the graph of the layers."""
    graph = Plan.from_json(TOWERS).stage_graph(models.GRAPHS["towers"].build_chain().edges)
    return [list(row) for row in to_strings(schedule_of("1f1b", graph))]


def swapped(rank: int, first: str, second: str) -> Rows:
    rows = made()
    names = {first: second, second: first}
    rows[rank] = [names.get(name, name) for name in rows[rank]]
    return rows


def waiting() -> Rows:
    """Rank 0 wants the gradient of the second tower's first microbatch before it has sent on the first tower."""
    rows = made()
    rows[0] = ["2F0", "2B0", "0F0", "0B0", *(name for name in rows[0] if not name.endswith("0"))]
    return rows


BAD = {
    "circle": (
        stages(([[0, 1], [5, 6]], 0), ([[1, 3], [4, 5]], 1), ([[3, 4], [6, 8]], 1)),
        "stages 0 (rank 0, layers 0 and 5) and 1 (rank 1, layers 1 to 2 and 4) wait for each other; cut the layers so",
    ),
    "not convex": (
        stages(([[0, 1], [2, 3]], 0), ([[1, 2], [3, 8]], 1)),
        "stage 0 (rank 0, layers 0 and 2) reaches its layer 2 only through layers of other stages; a stage must be",
    ),
    "relayed pieces": (
        {"routes": "relay"} | stages(([[0, 1], [4, 5]], 0), ([[1, 4], [5, 8]], 1)),
        "stage 0 (rank 0, layers 0 and 4) holds several pieces of the chain, which needs routes 'direct'; routes is",
    ),
    "order on one rank": (
        actions(swapped(1, "1F0", "3F0")),
        "actions: rank 1, position 0, stage 3, microbatch 0: 3F0 is refused: forward before 1F0, which makes its input",
    ),
    "action lacking": (
        actions([[name for name in row if name != "2B3"] for row in made()]),
        "actions: rank 0, stage 2, at the end of its list: missing 2B3, every stage runs every microbatch",
    ),
    "deadlock": (
        actions(waiting()),
        "actions wait for ever: rank 0 at 2RECV_B0 (position 2) waits for the gradient of microbatch 0 from stage 3",
    ),
    "limit of the lists": (
        actions(made()) | first_stage(in_flight=1),
        "stage 0, microbatch 1: 0F1 is refused: 1 microbatches are in flight on the stage and the limit is 1",
    ),
    "limit of the schedule": (
        {"schedule": "gpipe"} | first_stage(in_flight=1),
        "stage 0 takes 4 microbatches and may have 1 in flight, but gpipe runs all forwards before the first backward",
    ),
    "grain": (
        {"units": TOWERS["units"] | {"blocks": 2}} | first_stage(grain=3),
        "stage 0 (rank 0, layers 0 to 1) has grain 3, which does not divide the 2 units of a block; choose a grain",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_the_graph_does_not_allow_is_one_sentence_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    change, message = BAD[case]
    path = write(tmp_path, TOWERS | change)
    words = command(tmp_path, "run", f"pipeline.plan={path}", "model.graph=towers", "train.accumulation_blocks=null")
    assert cli._run(words) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "decides:" not in line]
    assert len(lines) == 1
    assert str(path) in lines[0]
    assert message in lines[0]
    assert not list((tmp_path / "run").glob("workers/*.json"))
    assert not list((tmp_path / "run").glob("plan-*.json"))


def test_the_fold_judges_direct_routes_and_grains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 3 on small devices, bytes of the ranks on large ones. A plan that fits by the fold is rehearsed."""
    grained = TOWERS | {"units": TOWERS["units"] | {"blocks": 1}} | first_stage(grain=2)
    for name, plan in (("direct", TOWERS), ("grain", grained)):
        path = write(tmp_path, plan)
        words = [f"pipeline.plan={path}", "model.graph=towers", "train.accumulation_blocks=null"]
        words += ["profile.source=estimated", "pipeline.capacity=20KiB"]
        assert cli._run(command(tmp_path, name, *words)) == 3
        refused = read_plan(tmp_path / name / "plan-0.json")
        assert refused.fits is False
        assert "when its own program is rehearsed" not in capsys.readouterr().err
        pipeline = {"capacity": "10MiB"}
        config = config_of(
            path, {"accumulation_blocks": plan["units"]["blocks"]}, pipeline=pipeline, model={"graph": "towers"},
            profile={"source": "estimated"}, run_dir=str(tmp_path / f"{name} fits"),
        )  # fmt: skip
        prepared = prepare_run(with_given_plan(config), show=False)
        assert prepared.fits is True
        for ours, theirs in zip(prepared.ranks, refused.ranks, strict=True):
            assert ours.bytes == pytest.approx(theirs.bytes, rel=0.05)
        assert max(rank.bytes or 0 for rank in prepared.ranks) == prepared.peak_bytes
