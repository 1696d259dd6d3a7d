"""Printed plans: the run that they are for, memory that adds up, distinguishable names."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace

import pytest
from torch import nn

from varuna_capslog.base.tables import Table
from varuna_capslog.commands.plan import print_treatments
from varuna_capslog.plans.parts import PlanRank
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import LayerProfile, Profile
from varuna_capslog.profiling.conditions import _modules_of_last
from varuna_capslog.reports.tables import idle_notes, plan_table, profile_table
from varuna_capslog.schedules import RunShape

GIB = 2**30
CONDITIONS = {
    "microbatch_size": 2,
    "dtype": "bfloat16",
    "optimizer": "adamw",
    "device": "cuda",
    "gpu": "t4",
    "headroom": {"fixed_bytes": GIB // 3, "fragmentation": 1.01},
}


def profile(layers: int = 8, seconds: float = 0.01) -> Profile:
    """Return equal layers with long names."""
    rows = tuple(
        LayerProfile(
            f"model.language_model.layers.{number}.mlp",
            1,
            1 if number else None,
            forward_seconds=seconds,
            backward_seconds=seconds,
        )
        for number in range(layers)
    )
    return Profile(rows, source="estimated", conditions=CONDITIONS)


def plan(cuts: tuple[int, ...] = (0, 2, 4, 6), microbatches: int = 2, **more: object) -> Plan:
    sizes = [GIB + 1234567 * number for number in range(len(cuts))]
    more = {"schedule": "1f1b", "search_seconds": 2.0, "stage_bytes": sizes, **more}
    return Plan.of_cuts(8, cuts, num_microbatches=microbatches, microbatch_size=2, **more)


def test_a_plan_says_what_it_is_for_and_how_long_the_search_took() -> None:
    """A printed plan did not tell its number of samples, its types or its device; a search of two seconds read "found
    in 2e+03 ms".
    """
    notes = plan_table(plan(), profile()).notes
    assert notes[0] == (
        "for 4 samples per step and pipeline in 2 microbatches of 2, 1f1b (one forward, one backward), bfloat16, "
        "adamw, costs estimated for cuda:t4"
    )
    assert notes[-1] == "found in 2.0 s"
    assert plan_table(plan(search_seconds=0.0234)).notes == [
        "for 4 samples per step and pipeline in 2 microbatches of 2, 1f1b (one forward, one backward)",
        "found in 23 ms",
    ]


@pytest.mark.parametrize("capacity", [2 * GIB, [2 * GIB, 3 * GIB, 2 * GIB, GIB]])
def test_peak_headroom_and_margin_add_up_to_the_capacity_on_the_screen(capacity: int | list[int]) -> None:
    """The margin of a table was less than capacity minus peak, and nothing on the screen said why."""
    table = plan_table(plan(capacity_bytes=capacity), profile())
    places = {heading.partition("\n")[0]: place for place, heading in enumerate(table.headings)}
    for number, row in enumerate(table.rows):
        peak, headroom, margin = (float(row[places[name]]) for name in ("peak", "headroom", "margin"))
        capacity_gib = capacity[number] / GIB if isinstance(capacity, list) else 2.0
        assert round(peak + headroom + margin, 2) == capacity_gib
        assert row[places["capacity"]] == ("" if isinstance(capacity, int) else f"{capacity_gib:.2f}")
    meaning = "2.00 GiB, the capacity of each device" if isinstance(capacity, int) else "capacity"
    assert f"peak + headroom + margin = {meaning}" in table.notes


def test_names_are_cut_in_their_middle_and_lines_fit_80_columns() -> None:
    """Names of layers lost their ends, so that model.language_model.layers.0 and layers.27 read the same."""
    lines = plan_table(plan(capacity_bytes=2 * GIB), profile()).text().splitlines()
    assert max(map(len, lines)) <= 80
    shown = re.findall(r"model\S*\.\.\.\S*mlp", "\n".join(lines))
    assert len(set(shown)) == len(shown) == 8


def test_columns_in_which_nothing_happens_are_left_out() -> None:
    """A table had a column of empty margins, and one of ranks that equalled the stage numbers."""
    lines = plan_table(plan(), profile()).text().splitlines()
    assert not {"rank", "margin", "headroom", "capacity", "blocks", "memory"} & set(" ".join(lines[:4]).split())
    turned = plan().stages
    turned = tuple(dataclasses.replace(stage, ranks=(3 - place,)) for place, stage in enumerate(turned))
    assert "rank" in plan_table(dataclasses.replace(plan(), stages=turned, ranks=())).text()
    table = Table("t", ["a", "b"], [["1", ""], ["2", ""]])
    assert "<th" in table.html()
    assert ">b<" not in table.html()


def test_bytes_that_only_ranks_have_stand_in_one_line() -> None:
    """Two stages on each rank had a column of "unknown" peaks above the line with the peaks of the ranks."""
    stages = tuple(
        dataclasses.replace(stage, ranks=(place % 2,), bytes=None) for place, stage in enumerate(plan().stages)
    )
    uses = tuple(PlanRank(bytes=GIB) for _ in range(2))
    table = plan_table(dataclasses.replace(plan(), stages=stages, ranks=uses))
    assert "unknown" not in table.text()
    assert "peak of each rank: 1 GiB, 1 GiB" in table.notes


def test_no_table_of_treatments_where_every_stage_keeps_everything(capsys: pytest.CaptureFixture[str]) -> None:
    """Below a plan that keeps everything, the output had a table of one full and two empty columns."""
    print_treatments(plan(), RunShape(2, "1f1b", recompute=False), profile())
    assert capsys.readouterr().out == ""
    print_treatments(plan(), RunShape(2, "1f1b", recompute=True, stage_inputs="device"), profile())
    shown = capsys.readouterr().out
    assert "recomputed" in shown
    assert "kept" not in shown
    assert "offloaded" not in shown


def test_a_pipeline_that_idles_says_so_and_what_would_help() -> None:
    """Four equal stages with two microbatches idle 60 % of a step (3 / 5 by hand), and no line said so; with four
    microbatches 3 / 7, on two devices 1 / 3.
    """
    costs = dataclasses.replace(profile(), conditions=CONDITIONS | {"recompute": False})
    assert idle_notes(plan(), costs) == [
        "devices idle 60 % of the step; 43 % with 4 microbatches per step, 33 % on 2 devices"
    ]
    assert idle_notes(plan(microbatches=4), costs) == []
    assert idle_notes(dataclasses.replace(plan(), purpose="inference"), costs) == []


def test_the_last_layer_is_named_for_all_that_it_holds() -> None:
    """The layer of a language model's last norm also has the head, but was shown as model.norm alone."""
    named = [SimpleNamespace(name=f"layers.{k}", module=nn.ModuleDict({"layers": nn.ModuleList()})) for k in range(7)]
    last = nn.ModuleDict({"norm": nn.LayerNorm(4), "lm_head": nn.Linear(4, 2)})
    chain = SimpleNamespace(layers=[*named, SimpleNamespace(name="norm", module=last)])
    holds = _modules_of_last(chain)  # type: ignore[arg-type]
    costs = dataclasses.replace(profile(), conditions={"last_layer": holds})
    assert [row[4] for row in plan_table(plan(), costs).rows][2:] == [
        "model.language_model.layers.5.mlp",
        "norm, lm_head",
    ]
    chain = SimpleNamespace(layers=[SimpleNamespace(name="head", module=last)])  # names inside of a layer do not matter
    assert _modules_of_last(chain) == ["head"]  # type: ignore[arg-type]


def test_a_plan_of_many_calls_is_shown_without_playing_them() -> None:
    """Printing a plan of 1,000 stages simulated steps of more and more microbatches, for most of a minute."""
    rows = tuple(
        LayerProfile(f"{k}", 1, 1 if k else None, forward_seconds=0.01, backward_seconds=0.01) for k in range(1000)
    )
    long = Plan.of_cuts(1000, list(range(1000)), schedule="1f1b", num_microbatches=4, microbatch_size=1)
    assert idle_notes(long, Profile(rows)) == []


def test_seconds_of_small_layers_can_be_told_apart() -> None:
    """A notebook showed "0.0 ms" and "0.1 ms" for every layer of a small model."""
    layers = (
        LayerProfile("a", 1, None, forward_seconds=0.0000347, backward_seconds=0.0000461),
        LayerProfile("b", 1, 1, forward_seconds=1.23456, backward_seconds=0.0123456),
    )
    table = profile_table(Profile(layers))
    rows = table.rows
    assert list(table.headings[4:]) == ["forward\nms", "backward\nms"]
    assert [row[4:6] for row in rows] == [["0.0347", "0.0461"], ["1235", "12.35"]]
