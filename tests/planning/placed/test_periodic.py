"""Plans of planner `madpipe`: ranks with several stages, bytes by the fold, and missing fields of a profile."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.memory.machine import Model, profile_of
from tests.planners.madpipe.chains import every_allocation
from tests.planning.asking import plan
from tests.sweeps import some
from varuna_capslog import cli
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners.madpipe import COMPARED_COUNTINGS, Pattern, periodic_pattern
from varuna_capslog.planners.madpipe.allocation import Allocation, ChainCosts
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.comparison import compare
from varuna_capslog.planning.placed import periodic
from varuna_capslog.planning.placed.periodic import two_versions_note
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.simulation import simulate_plan
from varuna_capslog.planning.verdict import fold_plan
from varuna_capslog.plans.parts import PlanStage, Units
from varuna_capslog.plans.plan import Plan, read_plan
from varuna_capslog.profiles.record import Profile, write_profile
from varuna_capslog.schedules import RunShape

RUN = RunShape(24, "1f1b", False)
LINK = Link(10**7)


def timed(seconds: list[float], seed: int = 5) -> Profile:
    """Return layers that take these seconds, a third of them forward, with the bytes of a random model."""
    drawn = profile_of(Model.random(random.Random(seed), len(seconds), True, 1000), "cuda")
    rows = [
        dataclasses.replace(
            row, forward_seconds=took / 3, backward_seconds=2 * took / 3, parameter_bytes=(row.static_bytes or 0) // 4
        )
        for row, took in zip(drawn.layers, seconds, strict=True)
    ]
    return dataclasses.replace(drawn, layers=tuple(rows))


UNEVEN = timed([2.0, 5.0, 5.0, 3.0])
"""Three devices of 5 s each, if the first and the last layer share one."""

MIDDLE = [(1, 2, False), (2, 3, False)]


def test_a_rank_comes_back_where_no_cuts_are_even() -> None:
    answer = plan(UNEVEN, 3, "madpipe", run=RUN, link=LINK)
    assert [(stage.layers, stage.rank) for stage in answer.stages] == [
        (((0, 1),), 0), (((1, 2),), 1), (((2, 3),), 2), (((3, 4),), 0)
    ]  # fmt: skip
    assert (answer.planner, answer.fits, answer.schedule, answer.num_ranks) == ("madpipe", True, "1f1b", 3)
    step = simulate_plan(UNEVEN, answer, link=LINK).step_seconds
    assert step == answer.step_seconds
    even = simulate_plan(UNEVEN, plan(UNEVEN, 3, "throughput", run=RUN, link=LINK), link=LINK, run=RUN).step_seconds
    assert 24 * 5 < step < 0.85 * even  # any cuts leave 7 s to a device
    assert Plan.from_json(json.loads(json.dumps(answer.to_json()))) == answer


def test_memory_that_limits_no_plan_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start of a small run solved 21 linear programs for ever more bytes, of devices that had room for all."""
    programs, pattern = list[object](), periodic.periodic_pattern

    def record(costs, *arguments):
        programs.append(costs.usable)
        return pattern(costs, *arguments)

    monkeypatch.setattr(periodic, "periodic_pattern", record)
    slow = timed([2.0, 4.0, 1.0, 1.0, 5.0])  # no pattern has the period that the loads of ranks and links allow
    run, link = RunShape(2, "1f1b", False), Link(10**4)
    answer = periodic.periodic_plan(Problem.of(slow, 2, 10**12, run, link))
    assert len(programs) <= 2 * len(COMPARED_COUNTINGS)
    unlimited = periodic.periodic_plan(Problem.of(slow, 2, None, run, link))
    assert (answer.stages, answer.actions) == (unlimited.stages, unlimited.actions)


def test_allocations_that_are_known_to_be_slow_are_left_out_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planner budget asks for plans that are faster than its own: most programs were solved for nothing."""
    programs: list[Allocation] = []

    def counted(costs: ChainCosts, allocation: Allocation, *rest: float) -> Pattern | None:
        programs.append(allocation)
        pattern = periodic_pattern(costs, allocation, *rest)
        if pattern is not None:
            lists = searches[-1]._plan(allocation, pattern.ranks(searches[-1].run.microbatches))
            step = simulate_plan(profile, lists, link=link).step_seconds
            assert allocation.step_bound(costs, searches[-1].run.microbatches) <= step * (1 + 1e-9)
        return pattern

    class Watched(periodic._Periodic):
        def __init__(self, *question: Any) -> None:
            super().__init__(*question)
            searches.append(self)

    searches: list[Watched] = []
    monkeypatch.setattr(periodic, "periodic_pattern", counted)
    monkeypatch.setattr(periodic, "_Periodic", Watched)
    refused = spared = 0
    for seed in range(12):
        draw = random.Random(seed)
        profile = timed([draw.uniform(0.2, 5.0) for _ in range(3 + seed % 3)], seed)
        devices, link, run = draw.choice((2, 3)), draw.choice((Link(), LINK)), RunShape(3 + seed % 3, "1f1b", False)
        static = sum(row.static_bytes or 0 for row in profile.layers)
        capacity = static if seed == 3 else (None, 1000 * static)[seed % 2]
        problem = Problem.of(profile, devices, capacity, run, link)
        programs.clear()
        whole, most = periodic.periodic_plan(problem), len(programs)
        assert whole.step_seconds is not None
        for part in (0.5, 1.0, 1.1):
            programs.clear()
            longest, answer = part * whole.step_seconds, None
            try:
                answer = periodic.periodic_plan(dataclasses.replace(problem, longest=longest))
            except CapslogError:
                refused += 1
            assert answer is not None or part <= 1.0
            assert answer is None or part > 1.0 or (answer.step_seconds or 0.0) >= longest * (1 - 1e-9)
            assert answer is None or part < 1.0 or (answer.stages, answer.actions) == (whole.stages, whole.actions)
            assert len(programs) <= most
            assert capacity != static or len(programs) == most, "less memory may give a faster plan"
            spared += most - len(programs)
    assert refused >= 8, "plans are left out where memory limits none"
    assert spared >= 25
    problem = dataclasses.replace(Problem.of(UNEVEN, 3, 10**12, RUN, LINK), longest=1.0)
    with pytest.raises(CapslogError, match=r"planner madpipe has no plan with a step of less than 1 s"):
        periodic.periodic_plan(problem)
    costs = ChainCosts.of_profile(UNEVEN, 3, 10**12, LINK)
    turned, even = (Allocation.of(costs, [(0, 1, lone), *MIDDLE, (3, 4, lone)]) for lone in (True, False))
    assert turned.step_bound(costs, 24) == pytest.approx(24 * 5 + 7)
    search = Watched(problem, range(5), costs)
    assert search._is_slow(costs, "least", turned)
    assert not search._is_slow(costs, "least", even), "with more memory there is another allocation"


def test_where_nothing_fits_a_slow_plan_says_what_it_lacks_too() -> None:
    problem = Problem.of(timed([1.0 + at / 3 for at in range(9)]), 3, 1, RUN, LINK)
    whole = periodic.periodic_plan(problem)
    assert periodic.periodic_plan(dataclasses.replace(problem, longest=1.0)).stages == whole.stages


def test_its_search_ends_by_its_time_with_a_plan_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time was looked at between linear programs alone, each of which may take 20 s."""
    limits, pattern = list[float](), periodic.periodic_pattern

    def record(costs, allocation, calls, limit):
        limits.append(limit)
        return pattern(costs, allocation, calls, limit)

    monkeypatch.setattr(periodic, "periodic_pattern", record)
    problem = Problem.of(UNEVEN, 3, None, RUN, LINK)
    free = periodic.periodic_plan(problem)
    assert free.notes == ()
    assert all(limit == 20.0 for limit in limits)
    limits.clear()
    short = periodic.periodic_plan(dataclasses.replace(problem, search_seconds=1e-9))
    assert limits == [0.5]
    assert "pipeline.search_seconds" in short.notes[0]
    limits.clear()
    periodic.periodic_plan(dataclasses.replace(problem, search_seconds=5.0))
    assert 0 < max(limits) <= 5.0


def test_its_ranks_hold_what_the_fold_finds_within_their_capacity() -> None:
    dice, seeds, fitting, coming_back = random.Random(2), some(range(8), 4), 0, 0
    for seed in seeds:
        profile = timed([dice.uniform(0.5, 3.0) for _ in range(7)], seed)
        free = plan(profile, 3, "madpipe", run=RUN, link=LINK)
        assert free.peak_bytes is not None
        limited = plan(profile, 3, "madpipe", capacity=int(free.peak_bytes * 0.8), run=RUN, link=LINK)
        assert [rank.bytes for rank in limited.ranks] == [fold.peak_bytes for fold in fold_plan(profile, limited, RUN)]
        assert limited.fits == all((rank.bytes or 0) <= (rank.capacity_bytes or 0) for rank in limited.ranks)
        fitting += bool(limited.fits)
        coming_back += len(limited.stages) > 3
        if not limited.fits:
            assert limited.shortfall is not None
            assert "does not fit: rank" in limited.notes[0]
    assert fitting > len(seeds) // 2
    assert coming_back > len(seeds) // 4


def test_where_the_fold_finds_more_than_the_chain_the_stages_hold_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain here counts three quarters of the bytes that a microbatch saves."""
    profile = timed([1.0, 2.0, 2.0, 1.0, 1.0, 2.0])
    free = plan(profile, 3, "madpipe", run=RUN, link=LINK).peak_bytes
    assert free is not None
    of_profile = ChainCosts.of_profile
    monkeypatch.setattr(ChainCosts, "of_profile", lambda *question: less_saved(of_profile(*question)))
    tight = plan(profile, 3, "madpipe", capacity=int(free * 0.8), run=RUN, link=LINK)
    assert tight.fits
    monkeypatch.setattr(periodic, "_ATTEMPTS", 1)
    once = plan(profile, 3, "madpipe", capacity=int(free * 0.8), run=RUN, link=LINK)
    assert (once.step_seconds or 0.0) > 1.05 * (tight.step_seconds or 0.0)  # one microbatch after the other


def test_where_the_fold_finds_less_than_the_chain_the_stages_hold_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours save some bytes together; counted for each of them, the plan was slower than plain cuts."""
    profile, of_profile = timed([1.0, 2.0, 2.0, 1.0, 1.0, 2.0]), ChainCosts.of_profile
    free = plan(profile, 3, "madpipe", run=RUN, link=LINK)
    assert free.peak_bytes is not None
    monkeypatch.setattr(ChainCosts, "of_profile", lambda *question: less_saved(of_profile(*question), 1.6))
    tight = plan(profile, 3, "madpipe", capacity=free.peak_bytes, run=RUN, link=LINK)
    assert tight.fits
    assert tight.step_seconds == pytest.approx(free.step_seconds, rel=0.02)
    monkeypatch.setattr(periodic, "_ATTEMPTS", 1)
    once = plan(profile, 3, "madpipe", capacity=free.peak_bytes, run=RUN, link=LINK)
    assert (once.step_seconds or 0.0) > 1.1 * (free.step_seconds or 0.0)


def less_saved(costs: ChainCosts, times: float = 0.75) -> ChainCosts:
    return dataclasses.replace(costs, waiting=None if costs.waiting is None else times * costs.waiting)


@pytest.mark.parametrize("seed", [0, 10, 116])
def test_devices_that_just_hold_a_plan_of_its_kind_get_one(seed: int) -> None:
    """It counted two buffers per message that a stage of the engine does not have, and said that nothing fits."""
    draw, run = random.Random(seed), RunShape(3, "1f1b", False)
    drawn = profile_of(Model.random(draw, 4, False), "cuda")
    rows = [dataclasses.replace(row, forward_seconds=draw.random(), backward_seconds=2.0) for row in drawn.layers]
    profile = dataclasses.replace(drawn, layers=tuple(rows))
    least = least_bytes(profile, 2, run)
    answer = plan(profile, 2, "madpipe", capacity=least, run=run, link=Link(10**4))
    assert answer.fits
    assert max(rank.peak_bytes for rank in fold_plan(profile, answer, run)) <= least


def least_bytes(profile: Profile, devices: int, run: RunShape) -> int:
    """Return the smallest capacity of every device that holds a plan of the kind, by trying all of them. The fewest
    bytes are those of one microbatch after the other.
    """
    peaks = []
    for parts in every_allocation(profile.num_layers, devices - 1):
        allocation = Allocation.of(ChainCosts.of_profile(profile, devices), parts)
        ranks = [stage.rank for stage in allocation.stages]
        rows: list[list[str]] = [[] for _ in {*ranks}]
        for call in range(run.microbatches):
            for stage, rank in enumerate(ranks):
                rows[rank].append(f"{stage}F{call}")
            for stage, rank in reversed([*enumerate(ranks)]):
                rows[rank].append(f"{stage}B{call}")
        stages = tuple(PlanStage(((part.first, part.end),), (part.rank,)) for part in allocation.stages)
        units, actions = Units(run.microbatches, 1, 1), tuple(map(tuple, rows))
        one_by_one = Plan(profile.num_layers, stages, units, "1f1b", actions=actions)
        peaks.append(max(rank.peak_bytes for rank in fold_plan(profile, one_by_one, run)))
    return min(peaks)


def test_more_layers_than_are_searched_go_together() -> None:
    profile = timed([0.1 + (at % 7) / 3 for at in range(80)])
    answer = plan(profile, 4, "madpipe", run=RUN, link=LINK)
    work = sum(profile.column("forward_seconds")) + sum(profile.column("backward_seconds"))
    assert answer.step_seconds is not None
    assert answer.step_seconds < 1.25 * 24 * work / 4
    assert [layer for stage in answer.stages for layer in stage.numbers] == list(range(80))


def test_what_2bw_would_take_is_said_beside_the_plan_and_never_planned(capsys: pytest.CaptureFixture[str]) -> None:
    row = compare(Problem.of(UNEVEN, 3, None, RUN, LINK), ["madpipe"])[0]
    note = two_versions_note(Problem.of(UNEVEN, 3, None, link=LINK))
    assert row.reason == note
    assert note is not None
    assert "(2BW) and without a flush, MadPipe has a period of 5 s per microbatch; no plan trains so" in note
    assert row.plan is not None
    assert not row.plan.notes
    assert None not in (row.step_seconds, row.bubble_fraction, row.search_seconds, row.proven)
    assert "finds nothing that fits" in (two_versions_note(Problem.of(UNEVEN, 3, 1000, link=LINK)) or "")
    bare = [dataclasses.replace(layer, parameter_bytes=None) for layer in UNEVEN.layers]
    assert two_versions_note(Problem.of(dataclasses.replace(UNEVEN, layers=tuple(bare)), 3, 10**9, link=LINK)) is None


def test_the_commands_write_and_play_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, written = tmp_path / "profile.json", tmp_path / "plan.json"
    write_profile(profile, UNEVEN)
    words = ["plan", "--profile", str(profile), "--devices", "3", "--planner", "madpipe", "--minibatch", "24"]
    assert cli._run([*words, "pipeline.bandwidth=10MB/s", "-o", str(written)]) == 0
    assert [stage.rank for stage in read_plan(written).stages] == [0, 1, 2, 0]
    capsys.readouterr()
    played = ["simulate", "--profile", str(profile), "--plan", str(written), "pipeline.bandwidth=10MB/s"]
    assert cli._run(played) == 0
    shown = capsys.readouterr()
    assert "0, 3" in shown.out
    assert "no plan trains so" in shown.err


@pytest.mark.parametrize(
    ("field", "words", "sentence"),
    [
        ("forward_seconds", [], "the profile has no forward_seconds for layers[0] (layer0)"),
        ("boundary_bytes", ["pipeline.bandwidth=1GB/s"], "the profile has no boundary_bytes for layers[0] (layer0)"),
        ("boundary_bytes", ["--capacity", "1GiB"], "the profile has no boundary_bytes for layers[0] (layer0)"),
        ("saved_bytes", ["--capacity", "1GiB"], "the profile has no saved_bytes for layers[0] (layer0)"),
        ("", ["--planner", "madpip"], "unknown planner 'madpip'; did you mean 'madpipe'?"),
        ("", ["--devices", "5"], "5 devices but only 4 layers"),
    ],
)
def test_what_a_profile_lacks_is_said_by_the_name_of_its_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, words: list[str], sentence: str
) -> None:
    bare = [dataclasses.replace(row, **({field: None} if field else {})) for row in UNEVEN.layers]
    path = tmp_path / "profile.json"
    write_profile(path, dataclasses.replace(UNEVEN, layers=tuple(bare)))
    command = ["plan", "--profile", str(path), "--devices", "2", "--planner", "madpipe", *words]
    assert cli._run(command) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_other_memory_models_are_refused() -> None:
    with pytest.raises(CapslogError, match="memory is 'gpipe', but ranks of planner 'madpipe' may have several stages"):
        plan(UNEVEN, 2, "madpipe", "gpipe", run=RUN)
