"""Ranks and microbatches that show the peaks of a whole step: the whole step of every rank is the reference."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from torch import nn

from tests.profiling.workloads import Equal
from tests.sweeps import some
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.model.chain import Chain, Layer
from varuna_capslog.plans.parts import MemoryInterval, PlanStage
from varuna_capslog.profiling import rehearsal
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.estimate import StageEstimator
from varuna_capslog.profiling.estimation.allocator import Event, replay
from varuna_capslog.profiling.rehearsal import rank_peaks, rehearse, rehearse_layout
from varuna_capslog.profiling.short_steps import Sample, ShortSteps


@pytest.mark.parametrize(
    ("schedule", "recompute", "stage_inputs"),
    [("varuna", True, "host"), ("varuna", True, "device"), ("1f1b", False, "host")],
)
def test_short_steps_have_the_peaks_of_whole_ones(schedule: str, recompute: bool, stage_inputs: str) -> None:
    """The device is a GPU: if inputs or graphs wait there, a step has as many microbatches as wait."""
    conditions = RunConditions(device="cuda", microbatch_size=64, recompute=recompute, stage_inputs=stage_inputs)
    estimator = StageEstimator(Equal(), conditions)
    cuts = tuple(range(len(estimator.chain)))
    options = EngineOptions(9, schedule=schedule, recompute=recompute, stage_inputs=stage_inputs, clip_norm=1.0)
    full = rehearse_layout(estimator, Layout.pipelines(cuts, len(estimator.chain)), options)
    assert rehearse(estimator, cuts, schedule, 9) == [rank.peak_bytes for rank in full]


class LastTrains(Equal):
    def build_chain(self) -> Chain:
        built = super().build_chain()
        for layer in built.layers[:-1]:
            layer.module.requires_grad_(False)
        return built


def test_a_last_rank_that_sends_no_gradient_has_the_peak_of_the_whole_step() -> None:
    """Its program lacks the messages that others send: a short step of all messages ended in an IndexError."""
    estimator = StageEstimator(LastTrains(), RunConditions(device="cuda", microbatch_size=64, recompute=True))
    layout, options = Layout.pipelines((0, 3), 4), EngineOptions(24, schedule="1f1b", recompute=True)
    assert ShortSteps(estimator.chain, layout, options, inputs_wait=False).sample(1) is not None
    full = rehearse_layout(estimator, layout, options)
    assert rank_peaks(estimator, layout, options) == [rank.peak_bytes for rank in full]


def chain(*modules: nn.Module) -> Chain:
    return Chain([Layer(f"layer.{index}", module) for index, module in enumerate(modules)])


def test_few_microbatches_are_enough_unless_something_is_kept_of_each() -> None:
    """Four ranks, 24 microbatches: the last rank has the losses' parts, the second has running statistics."""
    modules = [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4), nn.Linear(4, 4)]
    layout, options = Layout.pipelines((0, 1, 2, 3), 4), EngineOptions(24, schedule="varuna", recompute=True)
    short = ShortSteps(chain(*modules), layout, options, inputs_wait=False)
    counts = [short.microbatches(rank) for rank in range(4)]
    assert counts[1] == counts[3] == 24
    assert counts[0] <= 16 >= counts[2]
    few = [sample and sample.few for sample in map(short.sample, range(4))]
    assert few[:3] == [None] * 3
    assert few[3] is not None
    assert few[3] <= 8


def events_of(microbatches: int, part_bytes: int, growth: int = 0, last: int = 1) -> tuple[list[Event], list[int]]:
    """Events of a rank whose forward keeps a part and makes a graph, and whose backward frees the graph; the end takes
    memory for each part.
    """
    events, starts = [(1, 5 << 20)], []
    for microbatch in range(microbatches):
        graph, part = 10 * microbatch + 10, 10 * microbatch + 11
        starts.append(len(events))
        events += [(graph, 30 << 20), (part, part_bytes + growth * microbatch)]
        starts.append(len(events))
        events += [(graph + 5, 2 << 20), (graph, 0), (graph + 5, 0)]
    starts.append(len(events))
    return [*events, (2, last * microbatches)], starts


@pytest.mark.parametrize(("part_bytes", "growth", "last"), [(4, 0, 4), (3000, 0, 512), (1 << 19, 0, 4), (0, 0, 4)])
def test_what_a_rank_keeps_of_every_microbatch_is_counted_for_those_that_are_left_out(part_bytes, growth, last):
    sample = Sample(4, 24, (0, 0, *(20,) * 7), (2, 4, 6))
    whole, _ = events_of(24, max(part_bytes, 1), growth, last)
    assert sample.peak_bytes(*events_of(4, max(part_bytes, 1), growth, last)) == replay(whole).allocated_bytes


@pytest.mark.parametrize(("part_bytes", "growth", "last"), [(2 << 20, 0, 4), (512, 512, 4), (4, 0, 20 << 20)])
def test_large_or_unequal_parts_and_a_peak_at_the_end_take_the_whole_step(part_bytes, growth, last):
    assert Sample(4, 24, (0, 0, *(20,) * 7), (2, 4, 6)).peak_bytes(*events_of(4, part_bytes, growth, last)) is None


def events_with_an_update(microbatches: int, part_bytes: int, update: int) -> tuple[list[Event], list[int]]:
    """Events as `events_of`; the end sums the parts, frees them one after another, and then makes the update."""
    events, starts = events_of(microbatches, part_bytes, last=8)
    parts = [(10 * microbatch + 11, 0) for microbatch in range(microbatches)]
    return [*events, *parts, (2, 0), (3, update), (4, 64 << 10), (3, 0), (4, 0)], starts


@pytest.mark.parametrize(("part_bytes", "count"), [(4, 24), (8, 64)])
def test_a_peak_in_the_update_needs_no_whole_step_if_one_microbatch_less_has_the_same_end(part_bytes, count):
    """The sums over parts that fit one block are one block for any number; the last rank often peaks in the update."""
    sample = Sample(4, count, (0, 0, *(count - 4,) * 7), (2, 4, 6))
    update = 60 << 20
    whole = replay(events_with_an_update(count, part_bytes, update)[0]).allocated_bytes
    short = events_with_an_update(4, part_bytes, update)
    assert sample.peak_bytes(*short, lambda: events_with_an_update(3, part_bytes, update)) == whole
    assert sample.peak_bytes(*short) is None
    assert sample.peak_bytes(*short, lambda: events_with_an_update(3, part_bytes, update - 512)) is None


@pytest.mark.parametrize(("part_bytes", "count", "rehearsals"), [(4, 65, 0), (64, 24, 1)])
def test_sums_that_grow_out_of_their_block_take_the_whole_step(part_bytes: int, count: int, rehearsals: int) -> None:
    """Many microbatches need no second rehearsal for that: each keeps a number at least."""
    sample = Sample(4, count, (0, 0, *(count - 4,) * 7), (2, 4, 6))
    short, fewer = (events_with_an_update(number, part_bytes, 60 << 20) for number in (4, 3))
    rehearsed = list[object]()
    assert sample.peak_bytes(*short, lambda: (rehearsed.append(fewer), fewer)[1]) is None
    assert len(rehearsed) == rehearsals


def test_a_last_rank_that_peaks_in_its_update_is_rehearsed_in_few_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, rehearsed = list[int](), rehearsal._rehearse_ranks

    def record(estimator, layout, options, ranks):
        numbers.append(options.num_microbatches)
        return rehearsed(estimator, layout, options, ranks)

    estimator = StageEstimator(Equal(width=1024), RunConditions(device="cuda", microbatch_size=1, recompute=True))
    layout, options = Layout.pipelines((0, 2), 4), EngineOptions(30, schedule="1f1b", recompute=True, clip_norm=1.0)
    full = rehearse_layout(estimator, layout, options)
    monkeypatch.setattr(rehearsal, "_rehearse_ranks", record)
    assert rank_peaks(estimator, layout, options) == [rank.peak_bytes for rank in full]
    assert max(numbers) <= 8


def test_graphs_that_wait_on_the_device_take_all_microbatches() -> None:
    """GPipe runs all forwards first: waiting graphs then count only if they are on the device."""
    layout, options = Layout.pipelines((0, 1), 2), EngineOptions(24, schedule="gpipe", recompute=True)
    counts = [
        ShortSteps(chain(nn.Linear(4, 4), nn.Linear(4, 4)), layout, options, waits).microbatches(0)
        for waits in (False, True)
    ]
    assert counts[0] <= 4
    assert counts[1] == 24


def test_ranks_of_shared_parameters_are_like_no_other() -> None:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    layout, options = Layout.pipelines((0, 1, 2, 3), 4), EngineOptions(4, schedule="gpipe", recompute=True)
    short = ShortSteps(chain(first, nn.Linear(4, 4), nn.Linear(4, 4), last), layout, options, inputs_wait=False)
    assert short.doings(0) is None
    assert short.doings(3) is None
    assert short.doings(1) == short.doings(2) is not None


@pytest.mark.parametrize("seed", some(range(6), 3))
def test_stages_that_treat_their_layers_each_in_its_own_way_have_the_peaks_of_whole_steps(seed: int) -> None:
    draw = random.Random(seed)
    estimator = StageEstimator(Equal(9), RunConditions(device="cuda", microbatch_size=64, recompute=True))
    size = len(estimator.chain)
    cuts = [0, *sorted(draw.sample(range(1, size), 3))]
    stages = []
    for rank, (first, end) in enumerate(itertools.pairwise([*cuts, size])):
        middle = draw.randint(first, end)
        memory = (MemoryInterval(middle, end, "recompute"),) if middle < end and draw.random() < 0.7 else ()
        stages.append(PlanStage(((first, end),), (rank,), memory=memory, in_flight=draw.choice([None, 5])))
    layout = Layout(tuple(stages))
    options = EngineOptions(14, schedule=draw.choice(["1f1b", "varuna", "1f1b-star"]), clip_norm=1.0)
    full = rehearse_layout(estimator, layout, options)
    assert rank_peaks(estimator, layout, options) == [rank.peak_bytes for rank in full]
    assert ShortSteps.apply_to(layout, options)
    moved = dataclasses.replace(stages[0], memory=(MemoryInterval(0, stages[0].end, "offload"),))
    assert not ShortSteps.apply_to(Layout((moved, *stages[1:])), options)
