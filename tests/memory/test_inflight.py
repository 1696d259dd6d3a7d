"""Graphs and inputs in flight under each schedule, compared with running the schedule's actions one by one."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from tests.memory.chains import profile_of, random_chain, run_stage
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory import MEMORY_MODELS, NEVER
from varuna_capslog.memory.costs import full_matrix
from varuna_capslog.memory.inflight import InFlight, waiting
from varuna_capslog.schedules import RunShape, graph_keeping_forwards, make_schedule

SCHEDULES = [("gpipe", False), ("gpipe", True), ("1f1b", False), ("1f1b", True), ("varuna", True)]


def held_beside_the_one_at_work(name: str, recompute: bool, stages: int, microbatches: int) -> list[tuple[int, int]]:
    """Return the most graphs and inputs of other microbatches held while a stage builds or consumes a graph."""
    schedule = make_schedule(name, stages, microbatches, recompute=recompute)
    keeping = graph_keeping_forwards(schedule)
    most_held = []
    for stage, actions in enumerate(schedule):
        graphs: set[int] = set()
        inputs: set[int] = set()
        most = [0, 0]
        for action in actions:
            microbatch = action.microbatch
            assert microbatch is not None
            with_graph = action.kind in "RB" or (stage, microbatch) in keeping
            inputs.discard(microbatch)
            if with_graph:
                most = [max(most[0], len(graphs - {microbatch})), max(most[1], len(inputs))]
            if action.kind == "B":
                graphs.discard(microbatch)
            else:
                (graphs if with_graph else inputs).add(microbatch)
        assert not graphs
        assert not inputs
        most_held.append((most[0], most[1]))
    return most_held


@pytest.mark.parametrize(("name", "recompute"), SCHEDULES)
def test_as_many_wait_as_the_schedule_leaves_waiting(name: str, recompute: bool) -> None:
    for stages, microbatches in [(1, 3), (2, 1), (3, 8), (4, 2), (5, 5), (8, 32)]:
        run = RunShape(microbatches, name, recompute, "device")
        predicted = [(held.graphs, held.inputs) for held in waiting(run, stages, one_memory=False)]
        true = held_beside_the_one_at_work(name, recompute, stages, microbatches)
        if name == "1f1b" or (name, recompute) == ("gpipe", False):
            assert predicted == true, (stages, microbatches)
        # The last stage runs each backward at once, so no input waits; other stages may stay below their limits.
        for stage, (graphs, inputs) in enumerate(predicted):
            assert graphs == true[stage][0]
            assert true[stage][1] <= inputs <= true[stage][1] + 1, (stages, microbatches, stage)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("stage_inputs", ["host", "device"])
@pytest.mark.parametrize(("name", "recompute"), SCHEDULES)
def test_peaks_are_those_of_the_run_and_what_waits(name: str, recompute: bool, stage_inputs: str, device: str) -> None:
    rng = random.Random(f"{name} {recompute}")
    for _ in range(10):
        layers, boundaries = random_chain(rng, rng.randrange(2, 7))
        size = len(layers)
        run = RunShape(4, name, recompute, stage_inputs)
        costs = MEMORY_MODELS[name].stage_costs(profile_of(layers, boundaries, device), run)
        assert not costs.position_free
        stages = rng.randrange(1, size + 1)
        on_device = stage_inputs == "device" or device == "cpu"
        held = waiting(run, stages, one_memory=device == "cpu")
        for stage, (graphs, inputs, outputs) in enumerate(held):
            assert inputs == 0 or on_device
            assert outputs == 0 or device == "cpu"
            matrix = costs.matrix(stage, stages)
            for first in range(size):
                for end in range(first + 1, size + 1):
                    peak, _, saved = run_stage(layers, boundaries, first, end)
                    expected = peak + graphs * saved + inputs * boundaries[first] + outputs * boundaries[end]
                    assert costs.stage_bytes(first, end, stage, stages) == expected
            assert np.array_equal(matrix, full_matrix(costs, stage, stages))
            assert np.all(matrix[np.tri(size, size + 1, dtype=bool)] == NEVER)


def test_equation_of_1f1b() -> None:
    """Sec. 3.2 of PipeDream-Flush: at most S - s microbatches in flight on stage s, and never more than there are."""
    assert waiting(RunShape(8, "1f1b", False), 4, False) == [InFlight(k, 0, 0) for k in (3, 2, 1, 0)]
    assert waiting(RunShape(2, "1f1b", False), 4, False) == [InFlight(k, 0, 0) for k in (1, 1, 1, 0)]
    assert waiting(RunShape(None, "1f1b", False), 4, False) == waiting(RunShape(64, "1f1b", False), 4, False)
    assert waiting(RunShape(8, "1f1b", True, "device"), 4, False) == [InFlight(0, k, 0) for k in (3, 2, 1, 0)]
    assert waiting(RunShape(8, "1f1b", True, "host"), 4, False) == [InFlight(0, 0, 0)] * 4


def test_varuna_on_cuda_is_the_composition_wherever_a_stage_stands() -> None:
    profile = profile_of(*random_chain(random.Random(5), 6))
    costs = MEMORY_MODELS["varuna"].stage_costs(profile, RunShape(8))
    composed = MEMORY_MODELS["composition"].stage_costs(profile, RunShape(8))
    for stage in range(3):
        assert np.array_equal(costs.matrix(stage, 3), composed.matrix())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("action", ["recompute", "none"])
@pytest.mark.parametrize("source", ["measured", "estimated"])
def test_what_a_profiling_run_held_of_a_second_microbatch_is_taken_out(source: str, action: str, device: str) -> None:
    """A run that another stage follows has a second microbatch in flight; counting it twice was 10 % of a stage."""
    layers, boundaries = random_chain(random.Random(6), 5)
    profile = profile_of(layers, boundaries, device)
    rows = []
    for row in profile.observations:
        extra = 0
        if row.layers[1] < 5:
            extra += (row.saved_bytes or 0) if action == "none" else (boundaries[row.layers[0]] * (device == "cpu"))
            extra += boundaries[row.layers[1]] * (device == "cpu")
        rows.append(dataclasses.replace(row, memory_action=action, peak_bytes=row.peak_bytes + extra))
    seen = dataclasses.replace(profile, source=source, observations=tuple(rows))
    for name, recompute in SCHEDULES:
        run = RunShape(6, name, recompute)
        pure = MEMORY_MODELS[name].stage_costs(profile, run)
        costs = MEMORY_MODELS[name].stage_costs(seen, run)
        for stage in range(3):
            assert np.array_equal(costs.matrix(stage, 3), pure.matrix(stage, 3))


def test_gpipe_needs_the_number_of_microbatches() -> None:
    profile = profile_of(*random_chain(random.Random(7), 3))
    with pytest.raises(CapslogError, match="memory model 'gpipe' counts all microbatches"):
        MEMORY_MODELS["gpipe"].stage_costs(profile, RunShape(None, "gpipe", False))


def test_missing_boundaries_are_named() -> None:
    profile = profile_of(*random_chain(random.Random(8), 3))
    rows = tuple(dataclasses.replace(row, boundary_in_bytes=None) for row in profile.observations)
    with pytest.raises(CapslogError, match=r"'1f1b' needs boundary_in_bytes of the observation of layers \[0, 1\]"):
        MEMORY_MODELS["1f1b"].stage_costs(
            dataclasses.replace(profile, observations=rows), RunShape(4, "1f1b", True, "device")
        )


def test_a_model_describes_its_own_schedule() -> None:
    for name in ("gpipe", "1f1b", "varuna"):
        for schedule in ("gpipe", "1f1b", "varuna"):
            gap = MEMORY_MODELS[name].gap(RunShape(None, schedule, False, "device"))
            assert (gap is None) == (name == schedule)
            assert gap is None or f"use memory model '{schedule}'" in gap
