"""Plans of planners with memory intervals: the bytes that they report are those that the fold of their ranks finds."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest

from tests.memory.machine import Model, profile_of
from tests.planners.test_budget import timed
from tests.planning.asking import layerwise_plan, plan
from varuna_capslog import cli
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.units import format_bytes
from varuna_capslog.planners import LAYERWISE
from varuna_capslog.planners.layerwise import Layerwise
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.comparison import compare
from varuna_capslog.planning.fastest import least_seconds
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.verdict import HostMemory, fold_plan
from varuna_capslog.plans.parts import MemoryInterval
from varuna_capslog.plans.plan import Plan, read_plan
from varuna_capslog.profiles.record import Profile, write_profile
from varuna_capslog.schedules import RunShape

RUN = RunShape(8, "gpipe", False)
NAMES = tuple(LAYERWISE)


def profile_on(device: str, size: int = 10, seed: int = 5) -> Profile:
    """Layers of 1 to 2 s forward and twice that backward."""
    dice = random.Random(seed)
    profile = profile_of(Model.random(dice, size, True, 100), device)
    rows = [
        dataclasses.replace(row, forward_seconds=1 + number % 2, backward_seconds=2.0 + 2 * (number % 2))
        for number, row in enumerate(profile.layers)
    ]
    return dataclasses.replace(profile, layers=tuple(rows), conditions={**profile.conditions, "device": device})


def kinds(answer: Plan) -> set[str]:
    return {interval.kind for stage in answer.stages for interval in stage.memory or ()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_plan_holds_what_the_fold_of_its_ranks_finds_and_treats_layers_only_under_a_limit(
    name: str, device: str
) -> None:
    profile, link = profile_on(device), Link(host_bandwidth=1e5)
    free = plan(profile, 3, name, run=RUN, link=link)
    assert (free.fits, free.memory_model, kinds(free), free.short) == (True, "ranks", set(), False)
    peaks = [fold.peak_bytes for fold in fold_plan(profile, free, RUN)]
    assert [stage.bytes for stage in free.stages] == [rank.bytes for rank in free.ranks] == peaks
    tight = plan(profile, 3, name, capacity=max(peaks) * 3 // 4, run=RUN, link=link)
    assert (tight.fits, tight.capacity_bytes) == (True, max(peaks) * 3 // 4)
    assert [rank.bytes for rank in tight.ranks] == [fold.peak_bytes for fold in fold_plan(profile, tight, RUN)]
    # on a CPU the host tier is the same memory, so offloading saves nothing
    assert kinds(tight) <= ({"recompute"} if device == "cpu" else {"recompute", "offload"})
    assert kinds(tight)
    again = Plan.from_json(json.loads(json.dumps(tight.to_json())))
    assert again.stages == tight.stages


def test_on_a_cpu_layers_are_offloaded_where_the_tier_is_a_folder() -> None:
    profile = profile_on("cpu")
    most = plan(profile, 2, "dawnpiper", run=RUN).peak_bytes
    assert most is not None
    for in_files, expected in ((False, {"recompute"}), (True, {"offload"})):
        answer = layerwise_plan(profile, 2, "dawnpiper", most * 9 // 10, RUN, tier=HostMemory(in_files=in_files))
        assert kinds(answer) == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_stage_of_the_search_has_the_bytes_of_its_rank(name: str) -> None:
    """The search asks about one rank while others keep everything; the fold of a whole plan finds the same bytes."""
    profile, dice = profile_on("cuda"), random.Random(name)
    for schedule in ("gpipe", "1f1b", "kfkb"):
        run = RunShape(6, schedule, False)
        chain = Layerwise.of_profile(profile, run, 3)
        stages = [(0, 3), (3, 7), (7, 10)]
        memory = [
            tuple(
                MemoryInterval(at, at + 1, dice.choice(["recompute", "offload"]))
                for at in range(first, end)
                if dice.random() < 0.6
            )
            for first, end in stages
        ]
        treated = layerwise_plan(profile, 3, name, None, run)
        treated = dataclasses.replace(
            treated,
            stages=tuple(
                dataclasses.replace(stage, layers=(layers,), memory=kept)
                for stage, layers, kept in zip(treated.stages, stages, memory, strict=True)
            ),
        )
        expected = [fold.peak_bytes for fold in fold_plan(profile, treated, run)]
        assert [chain.peak(n, *stages[n], memory[n]) for n in range(3)] == expected


def test_a_headroom_and_capacities_of_their_own_count() -> None:
    profile = profile_on("cuda")
    free = plan(profile, 2, "dawnpiper", run=RUN)
    limits = [free.ranks[0].bytes or 0, (free.ranks[1].bytes or 0) * 2]
    assert not kinds(plan(profile, 2, "dawnpiper", capacity=limits, run=RUN))
    headroom = {"headroom": {"fixed_bytes": 1000, "fragmentation": 1.0}}
    tight = dataclasses.replace(profile, conditions=profile.conditions | headroom)
    answer = plan(tight, 2, "dawnpiper", capacity=limits, run=RUN)
    assert answer.fits
    assert (answer.ranks[0].bytes or 0) + 1000 <= limits[0]


@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_fit_names_the_rank_and_what_it_lacks(name: str) -> None:
    answer = plan(profile_on("cuda"), 3, name, capacity=1000, run=RUN)
    assert answer.fits is False
    assert answer.shortfall is not None
    assert answer.shortfall.bytes == (answer.peak_bytes or 0) - 1000
    assert len(answer.notes) == 1
    assert answer.notes[0].startswith("does not fit: rank")
    # bytes are counted in two ways, so the note names each: one says that nothing fits, the other when this plan would
    way, why = "with planner exact under schedule varuna", "since layer 6 (layer6) alone needs 69.38 KiB there"
    assert f"; {way} no number of devices would do, {why}; with " in answer.notes[0]
    size = answer.notes[0].split("; with ")[-1].split(" on every device")[0]
    assert size == format_bytes(answer.peak_bytes or 0)
    again = plan(profile_on("cuda"), 3, name, capacity=80_000, run=RUN)
    if again.fits is False and again.shortfall is not None:
        enough = again.shortfall.devices_that_fit
        assert enough is not None
        assert (
            f"; {enough} device(s) of 78.12 KiB would do with planner exact under schedule varuna"
            f"{f', and perhaps fewer with planner {name}' if enough > 4 else ''}; with " in again.notes[0]
        )
        assert plan(profile_on("cuda"), enough, "exact", capacity=80_000, run=RunShape(8, "varuna")).fits


@pytest.mark.parametrize("name", NAMES)
def test_what_is_missing_is_said_in_one_sentence(name: str) -> None:
    profile = profile_on("cuda")
    with pytest.raises(CapslogError, match="memory model 'ranks' needs"):
        plan(dataclasses.replace(profile, observations=()), 2, name, run=RUN)
    bare = dataclasses.replace(profile, layers=profile_of(Model.random(random.Random(5), 10, True), "cuda").layers)
    with pytest.raises(CapslogError, match="forward_seconds"):
        plan(bare, 2, name, run=RUN)
    with pytest.raises(CapslogError, match=r"memory is 'additive'.*only memory model 'ranks' knows"):
        plan(profile, 2, name, "additive", run=RUN)
    with pytest.raises(CapslogError, match="11 devices but only 10 layers"):
        plan(profile, 11, name, run=RUN)
    with pytest.raises(CapslogError, match="3 capacities for 2 devices"):
        plan(profile, 2, name, capacity=[1, 2, 3], run=RUN)


def test_given_cuts_are_predicted_without_asking_the_planner() -> None:
    answer = plan(profile_on("cuda"), 2, "dawnpiper", run=RUN, cuts=[0, 4])
    assert (answer.cuts, answer.planner, answer.short) == ((0, 4), None, True)


def test_one_device_and_an_unknown_number_of_microbatches() -> None:
    profile = profile_on("cuda")
    answer = plan(profile, 1, "vpipe", run=RunShape(None, "gpipe", False))
    assert (answer.cuts, answer.num_microbatches, answer.fits) == ((0,), 4, True), "four for each device"
    assert answer.peak_bytes == plan(profile, 1, "vpipe", run=RunShape(4, "gpipe", False)).peak_bytes


def test_compare_has_a_row_with_bytes_margin_and_seconds_for_each() -> None:
    profile = profile_on("cuda")
    most = plan(profile, 3, "exact", run=RUN).peak_bytes
    assert most is not None
    link = Link(host_bandwidth=1e6)
    rows = compare(Problem.of(profile, 3, most * 3 // 4, RUN, link), [*NAMES, "exact"])
    for row in rows[:-1]:
        assert row.plan is not None
        assert row.plan.fits
        assert row.margin_bytes == most * 3 // 4 - (row.peak_bytes or 0)
        assert row.step_seconds
    assert rows[-1].plan is not None
    assert rows[-1].plan.fits is False


@pytest.mark.parametrize("name", NAMES)
def test_the_command_writes_a_plan_that_is_read_again(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    profile = profile_on("cuda")
    write_profile(tmp_path / "profile.json", profile)
    most = plan(profile, 3, "exact", run=RUN).peak_bytes or 0
    words = ["plan", "--profile", str(tmp_path / "profile.json"), "--devices", "3", "--planner", name]
    words += ["--capacity", f"{most // 2}B", "pipeline.host_bandwidth=100kB/s", "--minibatch", "8"]
    words += ["pipeline.schedule=gpipe", "train.accumulation_blocks=1"] if name == "budget" else []
    assert cli._run([*words, "-o", str(tmp_path / "plan.json")]) == 0
    printed, written = capsys.readouterr().out, read_plan(tmp_path / "plan.json")
    table = printed[printed.index("what becomes of the layers") :].splitlines()
    headings = next([cell.strip() for cell in line.split("┃")] for line in table if line.startswith("┃"))
    rows = [[cell.strip() for cell in line.split("│")] for line in table if line.startswith("│")]
    for stage, cells in zip(written.stages, rows, strict=True):
        by_heading = dict(zip(headings, cells, strict=True))  # empty columns are left out
        row = [by_heading.get(heading, "") for heading in ("kept", "recomputed", "offloaded")]
        kinds_of = {
            layer: interval.kind for interval in stage.memory or () for layer in range(interval.first, interval.end)
        }
        for wanted, cell in zip(([None], ["recompute", "recompute+offload"], ["offload"]), row, strict=True):
            told = [span.split("-") for span in cell.split(" ")[0].split(",") if span]
            layers = [layer for span in told for layer in range(int(span[0]), int(span[-1]) + 1)]
            assert layers == [layer for layer in stage.numbers if kinds_of.get(layer) in wanted]
    assert (written.planner, written.fits, written.num_ranks) == (name, True, 3)
    assert kinds(written)
    assert written.step_seconds is not None
    assert written.num_microbatches == 8
    words[words.index("--capacity") + 1] = "1000B"
    assert cli._run(words) == 3
    assert "does not fit: rank" in capsys.readouterr().err


@pytest.mark.parametrize("schedule", ["auto", "1f1b", "interleaved"])
def test_no_plan_of_budget_has_fewer_seconds_than_the_least(schedule: str) -> None:
    """With links, under which a device may have several stages, and without."""
    draw, near = random.Random(schedule), 0
    for link in (None, Link(bandwidth=1e6)):
        profile, run = timed(draw, 6), RunShape(8, schedule, microbatch_size=1, num_blocks=1)
        least = least_seconds(Problem.of(profile, 3, None, run, link))
        answer = layerwise_plan(profile, 3, "budget", None, run, link)
        assert answer.step_seconds is not None
        assert least <= answer.step_seconds * (1 + 1e-9)
        near += least > 0.8 * answer.step_seconds
    assert near
