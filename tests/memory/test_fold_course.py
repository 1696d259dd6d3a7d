"""Bytes of a stage over time, compared with courses computed by hand and with the schedules' memory models."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tests.schedules.cases import parse_csv
from varuna_capslog.memory import MEMORY_MODELS
from varuna_capslog.memory.fold import RankFold, StageMemory, fold_course, memory_courses, peak_of, stage_memory
from varuna_capslog.profiles.record import LayerProfile, Observation, Profile, layers_of_runs
from varuna_capslog.schedules import Action, RunShape, StageSeconds, TimedAction, make_schedule, simulate

PARTS = StageMemory(static_bytes=1000, saved_bytes=100, working_bytes=130, bare_bytes=20, input_bytes=7)


def test_one_stage_without_recomputation() -> None:
    schedule = parse_csv("0F0,0F1,0B0,0B1")
    timeline = simulate(schedule, StageSeconds([1.0], [2.0]))
    # 0F0 0-1 builds a graph (130 at work, 100 after), 0F1 1-2 a second one beside it; 0B0 2-4 takes the first away.
    assert memory_courses(timeline.actions, schedule, [PARTS]) == [
        [(0.0, 1000), (0.0, 1130), (1.0, 1230), (4.0, 1130), (6.0, 1000)]
    ]


def test_two_stages_with_recomputation_and_inputs_on_the_device() -> None:
    schedule = make_schedule("1f1b", 2, 3, recompute=True)
    timeline = simulate(schedule, StageSeconds([1.0] * 2, [2.0] * 2))
    first, last = memory_courses(timeline.actions, schedule, [PARTS, PARTS])
    # F0 0-1, F1 1-2, R0 2-3, B0 4-6, F2 6-7, R1 7-8, B1 8-10, R2 10-11, B2 11-13 (see test_simulate).
    assert first == [
        (0.0, 1000),
        (0.0, 1020),  # F0 without a graph
        (1.0, 1027),  # F1 beside the input of 0
        (2.0, 1137),  # R0 has taken its input into the graph; that of 1 waits
        (3.0, 1107),  # the graph of 0 waits for its gradient
        (4.0, 1137),  # B0
        (6.0, 1027),  # F2 beside the input of 1
        (7.0, 1137),  # R1, B1 beside the input of 2
        (10.0, 1130),  # R2, B2
        (13.0, 1000),
    ]
    # The last stage's forwards keep their graph: F0 1-2, B0 2-4, F1 4-5, B1 5-7, F2 7-8, B2 8-10.
    assert last == [(0.0, 1000), (1.0, 1130), (10.0, 1000)]


def test_the_course_of_a_folded_rank() -> None:
    schedule = parse_csv("0F0,0F1,0B0,0B1")
    row = simulate(schedule, StageSeconds([1.0], [2.0])).actions[0]
    rank_fold = RankFold((110, 120, 125, 115), 130, between_bytes=(10, 20, 30, 21, 11))
    course = [(0.0, 10), (0.0, 110), (1.0, 120), (2.0, 125), (4.0, 115), (6.0, 11), (6.0, 130)]
    assert fold_course(row, rank_fold) == course
    assert peak_of(course) == rank_fold.peak_bytes
    late = dataclasses.replace(row[3], start_seconds=5.0, end_seconds=7.0)
    update = TimedAction(0, Action(0, "U"), 9.0, 10.0)
    assert fold_course([*row[:3], late, update], rank_fold)[4:] == [(4.0, 21), (5.0, 115), (7.0, 11), (9.0, 130)]


def _profile(recompute: bool) -> Profile:
    """Return a CUDA estimate of four layers: runs of singles and pairs, each field with another number."""
    action = "recompute" if recompute else "none"
    runs = []
    for first, end in [(0, 1), (1, 2), (2, 3), (3, 4), (0, 2), (1, 3), (2, 4)]:
        weight = sum(1 + layer for layer in range(first, end))
        runs.append(
            Observation(
                layers=(first, end),
                device="cuda",
                microbatch_size=1,
                input=[1],
                peak_bytes=10_000 * weight,
                memory_action=action,
                static_bytes=4_000 * weight,
                saved_bytes=3_000 * weight,
                transient_bytes=6_000 * weight,
                boundary_in_bytes=100 + first,
                boundary_out_bytes=100 + end,
                forward_seconds=1.0,
                backward_seconds=2.0,
            )
        )
    layers = layers_of_runs([f"l{layer}" for layer in range(4)], runs)
    return Profile(layers, source="estimated", conditions={"recompute": recompute}, observations=tuple(runs))


@pytest.mark.parametrize("stage_inputs", ["host", "device"])
@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [("gpipe", False), ("gpipe", True), ("1f1b", False), ("1f1b", True), ("varuna", True)],
)
def test_the_courses_peak_where_the_memory_model_says(schedule: str, recompute: bool, stage_inputs: str) -> None:
    profile = _profile(recompute)
    for cuts in itertools.chain.from_iterable(itertools.combinations(range(1, 4), count) for count in range(4)):
        ends = [*cuts, 4]
        stages = list(zip([0, *cuts], ends, strict=True))
        run = RunShape(6, schedule, recompute, stage_inputs)
        parts = stage_memory(profile, stages, run)
        assert not isinstance(parts, str)
        actions = make_schedule(schedule, len(stages), 6, recompute=recompute)
        timeline = simulate(actions, StageSeconds([1.0] * len(stages), [2.0] * len(stages)))
        peaks = [peak_of(course) for course in memory_courses(timeline.actions, actions, parts)]
        model = MEMORY_MODELS[schedule].stage_costs(profile, run).peaks([0, *cuts])
        assert peaks == model, stages


def test_a_profile_of_sums_uses_the_additive_peak() -> None:
    layers = (
        LayerProfile("a", 900, None, 500, 100, boundary_bytes=40),
        LayerProfile("b", 700, 150, 50, 100, boundary_bytes=0),
    )
    single_stage = stage_memory(Profile(layers), [(0, 2)], RunShape(stage_inputs="device"))
    # M_i + M_a = 1050; a bare forward: the largest of 900 - 500 and 700 - 50, at most what the whole stage needs.
    assert single_stage == [StageMemory(550, 200, 500, 500, 0)]
    parts = stage_memory(Profile(layers), [(0, 1), (1, 2)], RunShape(stage_inputs="device"))
    assert not isinstance(parts, str)
    assert [part.input_bytes for part in parts] == [0, 40]
    assert "no static_bytes" in str(stage_memory(Profile((LayerProfile("a", 9),)), [(0, 1)], RunShape()))
