"""The bytes of a stage, compared with the fold of a plan with this stage, and its seconds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.memory.machine import Model, profile_of
from tests.memory.test_fold import intervals
from tests.planners.intervals.stages import random_profile
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.fold import fold
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.planners.intervals import Handling, again_seconds, combined_seconds, stage_bytes
from varuna_capslog.planners.seconds import LayerSeconds
from varuna_capslog.planning.playing import stage_seconds
from varuna_capslog.plans.parts import INTERVAL_KINDS, MemoryInterval, PlanStage, Units
from varuna_capslog.schedules import Action, RunShape, Schedule

KEEP = RunShape(recompute=False, schedule="1f1b")


def lists(number: int, stages: int, in_flight: int, calls: int, handling: Handling) -> Schedule:
    """Return the lists of one rank per stage. Earlier stages run all forwards first, later ones each backward at once.

    in_flight: calls in flight of stage `number`.
    """
    rows = []
    for stage in range(stages):
        most = calls if stage < number else in_flight if stage == number else 1
        order = [("F", call) for call in range(most)]
        for call in range(calls):
            order += [("B", call), *([("F", call + most)] if call + most < calls else [])]
        row: list[Action] = []
        for kind, call in order:
            if stage == number and kind == "B":
                row += [Action(stage, "L", call)] * handling.later + [Action(stage, "R", call)] * handling.recomputed
            if stage == number and kind == "B" and handling.split:
                row += [Action(stage, "I", call), Action(stage, "W", call)]
            else:
                row.append(Action(stage, kind, call))
            if stage == number and kind == "F":
                row += [Action(stage, "O", call)] * handling.later
        rows.append(row)
    return rows


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_the_fold_of_a_whole_plan_has_the_same_peak(later: bool, split: bool) -> None:
    """Equal to the byte, except for lists with an O or with split backwards, about which a stage alone knows less."""
    draw = random.Random(f"{later} {split}")
    for _ in range(60):
        size, blocks, in_flight = draw.randrange(3, 7), draw.choice([1, 2]), draw.randrange(2, 5)
        model = replace(Model.random(draw, size, True), statistics=[0] * size)
        ranges = RangeBytes(profile_of(model, "cuda"), "ranks", True)
        cuts = [0, *sorted(draw.sample(range(1, size), 2)), size]
        number, calls = draw.randrange(3), 2 * in_flight + 4
        first, end = cuts[number : number + 2]
        chosen = intervals(draw, first, end, INTERVAL_KINDS)
        stages = [PlanStage(((cuts[stage], cuts[stage + 1]),), (stage,)) for stage in range(3)]
        stages[number] = replace(stages[number], memory=chosen)
        recomputed = any(interval.recomputes for interval in chosen)
        handling = Handling(
            recomputed, later and any(interval.offloads for interval in chosen), split, waiting_blocks=blocks - 1
        )
        rows = lists(number, 3, in_flight, calls, handling)
        folded = max(fold(ranges, stages, Units(calls, 1, blocks), rows, KEEP)[number].bytes)
        peak_bytes = stage_bytes(ranges, first, end, chosen, in_flight, handling)
        assert folded <= peak_bytes
        if not (handling.later or split):
            assert folded == peak_bytes


def test_reruns_take_what_a_simulated_stage_takes() -> None:
    """The forwards and backward of a call in `planning.stage_seconds` are its own seconds plus the reruns."""
    draw = random.Random(3)
    ended_with_the_loss = 0
    for _ in range(60):
        size = draw.randrange(2, 7)
        profile = random_profile(draw, size)
        ranges, seconds = RangeBytes(profile, "ranks", True), LayerSeconds.of_profile(profile)
        first = draw.randrange(size)
        end = draw.randrange(first + 1, size + 1)
        chosen = intervals(draw, first, end, ["recompute", "recompute+offload"])
        if any(end < size and not ranges.carries[interval.end] for interval in chosen) or ranges.statistics(first, end):
            continue
        stage = stage_seconds(profile, [PlanStage(((first, end),), (0,), memory=chosen)])
        assert stage.recompute
        assert stage.bare_forward
        assert stage.backward_again
        plain_seconds = float(stage.forward[0] + stage.backward[0])
        played = stage.bare_forward[0] + stage.recompute[0] + stage.backward_again[0]
        assert again_seconds(ranges, seconds, first, end, chosen) == pytest.approx(played - plain_seconds, abs=1e-12)
        ended_with_the_loss += bool(chosen) and chosen[-1].end == size
    assert ended_with_the_loss


def test_frozen_layers_do_not_run_again_and_statistics_need_the_first_forward() -> None:
    model = replace(Model.random(random.Random(1), 3, True), statistics=[0, 0, 3])
    profile = profile_of(model, "cuda")
    layers = tuple(replace(layer, forward_seconds=1.0, backward_seconds=2.0) for layer in profile.layers)
    tensors = tuple(replace(tensor, gradient=tensor.gradient and tensor.writer != 0) for tensor in profile.tensors)
    profile = replace(profile, layers=layers, tensors=tensors)
    ranges, seconds = RangeBytes(profile, "ranks", True), LayerSeconds.of_profile(profile)
    recomputed = [MemoryInterval(layer, layer + 1, "recompute") for layer in range(3)]
    assert [again_seconds(ranges, seconds, 0, 3, [interval]) for interval in recomputed] == [0.0, 1.0, 1.0]
    without = profile_of(replace(model, statistics=[0, 0, 0]), "cuda")
    ranges = RangeBytes(replace(without, layers=layers), "ranks", True)
    assert [again_seconds(ranges, seconds, 0, 3, [interval]) for interval in recomputed] == [1.0, 1.0, 0.0]


def test_copies_beside_the_computation_and_before_it() -> None:
    assert combined_seconds(Handling(host_bandwidth=4.0), 3.0, 2) == 3.0
    assert combined_seconds(Handling(host_bandwidth=4.0), 3.0, 8) == 4.0
    assert combined_seconds(Handling(host_bandwidth=4.0, copies_beside=False), 3.0, 8) == 7.0
    assert combined_seconds(Handling(), 3.0, 8) == 3.0
    with pytest.raises(CapslogError, match="host_bandwidth is 0; give bytes per second above 0, or none"):
        Handling(host_bandwidth=0)
