"""Lasting bytes of device libraries, such as cuBLAS's workspaces: once per rank, in every count of bytes.

The closed forms counted them only if the running layer had them, or again for every such layer behind a layer without;
the fold and the planners of memory intervals left them out.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable

from tests.memory import chains, machine
from varuna_capslog.memory import MEMORY_MODELS
from varuna_capslog.memory.fold import fold
from varuna_capslog.memory.inflight import RANKS
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.planners.intervals.tables import stage_bytes
from varuna_capslog.plans.parts import PlanStage, Units, scheduled
from varuna_capslog.plans.rules import stage_graph
from varuna_capslog.profiles.record import ActionBytes, Profile, layers_of_runs
from varuna_capslog.schedules import RunShape

NOTHING = ActionBytes(0, 0, 0, 0, 0, 0)


def with_lasting(profile: Profile, sizes: list[int]) -> Profile:
    """Return the profile with lasting bytes: `sizes` by layer; a pair keeps the larger of its two."""
    rows = []
    for row in profile.observations:
        kept = max(sizes[slice(*row.layers)])
        actions = dataclasses.replace(row.action_bytes or NOTHING, lasting_bytes=kept)
        rows.append(dataclasses.replace(row, peak_bytes=row.peak_bytes + kept, action_bytes=actions))
    layers = layers_of_runs([layer.name for layer in profile.layers], rows)
    return dataclasses.replace(profile, layers=layers, observations=tuple(rows))


def ranges(size: int) -> Iterable[tuple[int, int]]:
    return ((first, end) for first in range(size) for end in range(first + 1, size + 1))


def test_the_closed_forms_count_it_once_for_a_stage() -> None:
    draw = random.Random("lasting")
    for _ in range(20):
        size = draw.randrange(1, 8)
        sizes = [draw.choice([0, 40, 1000]) for _ in range(size)]
        plain = chains.profile_of(*chains.random_chain(draw, size))
        for model in ("additive", "composition", "1f1b"):
            costs, run = MEMORY_MODELS[model].stage_costs, RunShape(4, "1f1b")
            before, after = (costs(profile, run) for profile in (plain, with_lasting(plain, sizes)))
            for first, end in ranges(size):
                more = after.stage_bytes(first, end, 0, 2) - before.stage_bytes(first, end, 0, 2)
                assert more == max(sizes[first:end]), (model, sizes, first, end)


def test_the_fold_and_the_choice_of_intervals_count_it_once_for_a_rank() -> None:
    """A rank of two stages counts the lasting bytes once; the choice of intervals sees one stage."""
    draw = random.Random("ranks")
    for _ in range(20):
        sizes = [draw.choice([0, 40, 1000]) for _ in range(6)]
        plain = machine.profile_of(machine.Model.random(draw, 6, True), "cuda")
        stages = [PlanStage(((0, 2),), (0,)), PlanStage(((2, 4),), (1,)), PlanStage(((4, 6),), (0,))]
        units, run = Units(4, 1, 1), RunShape(4, "1f1b", False)
        rows = scheduled("1f1b", stages, stage_graph(stages, units), run)
        before, after = (fold(profile, stages, units, rows, run) for profile in (plain, with_lasting(plain, sizes)))
        more = [
            lasting_fold.peak_bytes - plain_fold.peak_bytes
            for plain_fold, lasting_fold in zip(before, after, strict=True)
        ]
        assert more == [max(*sizes[:2], *sizes[4:]), max(sizes[2:4])]
        bytes_of, bytes_with = (RangeBytes(profile, RANKS, False) for profile in (plain, with_lasting(plain, sizes)))
        for first, end in ranges(6):
            rise = stage_bytes(bytes_with, first, end, (), 2) - stage_bytes(bytes_of, first, end, (), 2)
            assert rise == max(sizes[first:end])


def test_a_profile_of_peaks_alone_is_as_before() -> None:
    """M_i and M_a of the paper contain the lasting bytes already, as do the peaks of rows without action_bytes."""
    plain = chains.profile_of(*chains.random_chain(random.Random(5), 5))
    sums = MEMORY_MODELS["additive"].stage_costs(plain, RunShape())
    for first, end in ranges(5):
        added = sum(layer.added_bytes or 0 for layer in plain.layers[first + 1 : end])
        assert sums.stage_bytes(first, end) == plain.layers[first].isolated_bytes + added
    profile = with_lasting(plain, [7] * 5)
    silent = tuple(dataclasses.replace(row, action_bytes=None) for row in profile.observations[:1])
    mixed = dataclasses.replace(profile, observations=(*silent, *profile.observations[1:]))
    assert RangeBytes(mixed, RANKS, True).resident([0]) == plain.observations[0].static_bytes


def test_a_profile_file_says_it_where_it_is_known() -> None:
    plain = machine.profile_of(machine.Model.random(random.Random(1), 3, True), "cuda")
    assert "lasting_bytes" not in str(plain.to_json())
    profile = with_lasting(plain, [8, 0, 8])
    assert Profile.from_json(profile.to_json()) == profile
