"""A plan's step worked out by hand, formulas for equal stages, and the trace that Perfetto opens."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.playing import copy_seconds, stage_seconds, with_step_seconds
from varuna_capslog.planning.simulation import Simulation, simulate_plan
from varuna_capslog.plans.parts import MemoryInterval, PlanStage, Units
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.conditions import UPDATE_RATE
from varuna_capslog.profiles.record import LayerProfile, Profile, TensorRecord
from varuna_capslog.reports.step import COPY_THREAD, trace_events
from varuna_capslog.schedules import RunShape


def make_profile(layers: int = 4, **conditions: Any) -> Profile:
    """Layer k: forward k + 1 s, backward 2 s, 100 bytes behind it, 10 bytes of parameters."""
    rows = [
        LayerProfile(
            f"l{number}",
            isolated_bytes=1000,
            added_bytes=500 if number else None,
            static_bytes=400,
            saved_bytes=100,
            boundary_bytes=100,
            parameter_bytes=10,
            forward_seconds=float(number + 1),
            backward_seconds=2.0,
        )
        for number in range(layers)
    ]
    return Profile(tuple(rows), conditions={"microbatch_size": 2, **conditions})


def make_plan(**parts: Any) -> Plan:
    return Plan.of_cuts(**{"num_layers": 4, "cuts": (0, 2), "schedule": "gpipe", "num_microbatches": 2, **parts})


def test_a_step_by_hand() -> None:
    profile = make_profile(**{UPDATE_RATE: 0.05})
    # Stage 0: F 3, B 4; stage 1: F 7, B 4; a message 1 s + 100 bytes at 100 bytes/s; update 20 bytes * 0.05 = 1 s.
    step = simulate_plan(profile, make_plan(), recompute=False, link=Link(100.0, 1.0))
    # 0F0 0-3, 0F1 3-6; 1F0 5-12, 1F1 12-19; 1B0 19-23, 1B1 23-27; 0B0 25-29, 0B1 29-33; U 33-34 on both.
    assert step.step_seconds == 34.0
    assert step.pipelines[0].timeline.busy_seconds == [3 + 3 + 4 + 4 + 1, 7 + 7 + 4 + 4 + 1]
    assert step.bubble_fraction == pytest.approx(1 - (15 + 23) / 68)
    assert (step.samples, step.update_seconds, step.exchange_seconds) == (4, 1.0, 0.0)
    assert step.samples_per_second == pytest.approx(4 / 34)
    assert step.notes == []
    # M_i + M_a of two layers = 1500 with one graph, and a graph of 200 beside it.
    assert step.pipelines[0].peaks == [1700, 1700]
    # The sender's copy time is added: 1 s + 100 bytes / 50 bytes/s after each F of stage 0 and B of stage 1.
    copying = simulate_plan(profile, make_plan(), recompute=False, link=Link(100.0, 1.0, copy_bandwidth=50.0))
    # 0F0 0-3 -6, 0F1 6-9 -12; 1F0 6-13, 1F1 13-20; 1B0 20-24 -27, 1B1 27-31 -34; 0B0 27-31, 0B1 34-38; U 38-39.
    assert copying.step_seconds == 39.0


def test_parts_of_layers_run_again_inside_the_backward() -> None:
    """Of layers 0 and 1 for 0.25 s and 0.5 s. A profile that does not tell these seconds plays no such step."""
    memory = (MemoryInterval(0, 2, "recompute", ("attention",)),)
    stages = (PlanStage(((0, 2),), (0,), memory=memory), PlanStage(((2, 4),), (1,), memory=()))
    plan = Plan(4, stages, Units(2, 2, 1), "gpipe")
    told = make_profile(seconds_of_parts=[[0, ["attention"], 0.25], [1, ["attention"], 0.5], [1, ["mlp"], 9.0]])
    seconds = stage_seconds(told, stages)
    assert seconds.forward == [3.0, 7.0]
    assert seconds.backward == [4.75, 4.0]
    assert seconds.other["I"] == [2.75, 2.0]
    assert seconds.other["W"] == [2.0, 2.0]
    # 0F0 0-3, 0F1 3-6; 1F0 3-10, 1F1 10-17; 1B0 17-21, 1B1 21-25; 0B0 21-25.75, 0B1 25.75-30.5
    assert simulate_plan(told, plan).step_seconds == 30.5
    assert with_step_seconds(told, plan, RunShape(recompute=False)).step_seconds == 30.5
    plain = make_profile()
    with pytest.raises(CapslogError, match="does not tell how long attention of layer 0 take to run again; estimate"):
        simulate_plan(plain, plan)
    assert with_step_seconds(plain, plan, RunShape(recompute=False)).step_seconds is None


def test_a_step_prints_as_a_table_of_its_ranks() -> None:
    """`print(plan.simulate())` printed the repr of every field: 43,909 characters for the plan of a small ViT."""
    step = simulate_plan(make_profile(**{UPDATE_RATE: 0.05}), make_plan(), recompute=False, link=Link(100.0, 1.0))
    lines = str(step).splitlines()
    rows = [line.strip("│").replace(" ", "").split("│") for line in lines if line.startswith("│")]
    # By hand in the test above: of 34 s rank 0 works 15, rank 1 works 23.
    assert rows == [["0", "0", "15s", "55.9%", "2", "1.66KiB"], ["1", "1", "23s", "32.4%", "2", "1.66KiB"]]
    assert lines[0].strip() == "gpipe, 2 microbatches"
    assert lines[-1] == "step 34 s, bubble 44.1 %, 0.1176 samples/s, largest peak 1.66 KiB"
    assert repr(step) == f"Simulation(gpipe, 2 microbatches: {lines[-1]})"
    assert "<td" in step._repr_html_()
    assert "pipeline" not in str(step), "there is one"
    unknown = replace(step, pipelines=[replace(step.pipelines[0], memory=None, folds=None)] * 2, notes=["as told"])
    assert unknown._repr_html_().count("unknown") == 4
    assert "pipeline" in str(unknown)
    assert str(unknown).endswith("step 34 s, bubble 44.1 %, 0.1176 samples/s\nas told")
    margins = step.table([2000, 1024]).rows
    assert [row[-1] for row in margins] == ["300 B", "-676 B"]


def test_recomputation_leaves_out_what_the_last_stage_makes_twice() -> None:
    step = simulate_plan(make_profile(), make_plan(cuts=(0,)), recompute=True)
    # 4 layers on one rank: F0 makes nothing, F1 neither, R0 10, B0 8, R1 10, B1 8.
    assert step.step_seconds == 36.0
    stages, keeps = make_plan().stages, RunShape(schedule="gpipe", recompute=False)
    assert stage_seconds(make_profile(), stages).bare_forward == [3.0, 0.0]
    assert stage_seconds(make_profile(), stages, keeps).bare_forward == [3.0, 7.0]


def test_what_runs_again_follows_the_memory_intervals_of_the_plan() -> None:
    """The layers take 1, 2, 3 and 4 s forward and 2 s each backward."""

    def step(memory: tuple[MemoryInterval, ...]) -> Simulation:
        plan = Plan(4, (PlanStage(((0, 4),), (0,), memory=memory),), Units(2, 2, 1), "gpipe")
        return simulate_plan(make_profile(), plan, recompute=True)

    # The config would recompute; a plan that keeps everything does not: two forwards of 10 s, two backwards of 8.
    assert step(()).step_seconds == 36.0
    # F 10, F 10; R of the layer 2 alone (3 s); layer 0 (1 s) inside B.
    again = step((MemoryInterval(0, 1, "recompute"), MemoryInterval(2, 3, "recompute")))
    assert again.step_seconds == 2 * 10 + 2 * (3 + 1 + 8)
    assert again.recompute
    # An interval at the end of the chain is left out of F and made in R: F 3, F 3, R 7, B 8; the copies take no time.
    moved = step((MemoryInterval(0, 2, "offload"), MemoryInterval(2, 4, "recompute+offload")))
    assert moved.step_seconds == 2 * 3 + 2 * (7 + 8)
    assert [str(span.action) for span in moved.pipelines[0].timeline.actions[0]][:6] == [
        "0F0", "0O0", "0F1", "0O1", "0L0", "0R0",
    ]  # fmt: skip
    assert "memory over time is unknown: stages are kept, recomputed or offloaded in parts" in moved.notes


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_equal_stages_have_the_known_bubble(name: str, stages: int) -> None:
    rows = [replace(layer, forward_seconds=1.0, backward_seconds=2.0) for layer in make_profile().layers]
    plan = make_plan(cuts=tuple(range(0, 4, 4 // stages)))
    step = simulate_plan(Profile(tuple(rows)), plan, schedule=name, num_microbatches=6, recompute=False)
    assert step.bubble_fraction == pytest.approx((stages - 1) / (6 + stages - 1))
    assert step.step_seconds == pytest.approx((6 + stages - 1) * 3 * 4 / stages)
    assert step.samples_per_second is None


def test_pipelines_of_different_length_end_together() -> None:
    stages = (
        PlanStage(((0, 2),), (0,), (0, 1)),
        PlanStage(((2, 4),), (1,), (0, 1)),
        PlanStage(((0, 4),), (2,), (2,)),
    )
    plan = Plan(4, stages, Units(3, 2, 3), "gpipe")
    step = simulate_plan(make_profile(**{UPDATE_RATE: 0.05}), plan, recompute=False, link=Link(100.0, 0.0))
    # Pipeline 0: 0F0 0-3, 1F0 4-11, 1F1 11-18, 1B0 18-22, 1B1 22-26, 0B1 27-31. Pipeline 1: 10 + 8. The largest stage
    # has 40 bytes of gradients for one other pipeline: 0.4 s. Then the slowest update: 40 * 0.05 = 2 s.
    assert step.exchange_seconds == pytest.approx(0.4)
    assert step.step_seconds == pytest.approx(31 + 0.4 + 2.0)
    assert [pipeline.ranks for pipeline in step.pipelines] == [[0, 1], [2]]
    assert step.num_microbatches == 3
    assert step.pipelines[1].timeline.actions[0][-1].start_seconds == pytest.approx(31.4)


def test_what_is_assumed_or_missing_is_said() -> None:
    step = simulate_plan(make_profile(), Plan.of_cuts(4, (0, 2), profile_digest="sha256:0", microbatch_size=1))
    assert step.num_microbatches == 8
    assert step.schedule == "varuna"
    text = " ".join(step.notes)
    for expected in ("for another profile", "microbatches of 2 samples, the plan has 1", "8 per pipeline", UPDATE_RATE):
        assert expected in text
    bare = [LayerProfile(f"l{n}", 9, 1 if n else None, forward_seconds=1.0, backward_seconds=1.0) for n in range(4)]
    less = simulate_plan(Profile(tuple(bare)), make_plan(), link=Link(1.0))
    assert less.pipelines[0].memory is None
    assert less.peak_bytes is None
    assert "no static_bytes or saved_bytes" in " ".join(less.notes)
    assert "no boundary_bytes" in " ".join(less.notes)


def test_mistakes_are_named() -> None:
    with pytest.raises(CapslogError, match="the profile has 3 layers, the plan 4"):
        simulate_plan(make_profile(3), make_plan())
    with pytest.raises(CapslogError, match=r"no forward_seconds for layers\[0\]"):
        simulate_plan(Profile((LayerProfile("a", 1),)), Plan.of_cuts(1, (0,)))
    with pytest.raises(CapslogError, match="copy_bandwidth is 0"):
        Link(copy_bandwidth=0.0)
    with pytest.raises(CapslogError, match="0 microbatches"):
        simulate_plan(make_profile(), make_plan(), num_microbatches=0)


def test_pieces_of_one_stage_must_follow_each_other_in_the_graph_that_the_profile_knows() -> None:
    """Layer 0 feeds 1 and 2, and both feed 3. One stage may hold 0 and 3 only together with 1 and 2."""
    edges = ((0, (1, 2)), (1, (3,)), (2, (3,)), (3, (4,)))
    tensors = tuple(TensorRecord(f"t{writer}", 100, True, writer, readers) for writer, readers in edges)
    profile = replace(make_profile(), tensors=tensors)
    around = (PlanStage(((0, 1), (3, 4)), (0,)), PlanStage(((1, 3),), (1,)))
    plan = Plan(4, around, Units(2, 2, 1), "gpipe", routes="direct")
    with pytest.raises(CapslogError, match=r"stage 0 \(rank 0, layers 0 and 3\) reaches its layer 3 only through"):
        simulate_plan(profile, plan)
    with pytest.raises(CapslogError, match="it is not known which layers read from which; give a profile with tensors"):
        simulate_plan(make_profile(), plan)  # which does not know the graph
    sides = (PlanStage(((0, 2),), (0,)), PlanStage(((2, 4),), (1,)))
    assert simulate_plan(profile, Plan(4, sides, Units(2, 2, 1), "gpipe")).notes


def towers_profile() -> Profile:
    """Layers 0 and 1 are a tower, 2 and 3 another one, and 4 reads both; layer 3 also reads the first tower's output.

    Forwards take 2, 3, 1, 1 and 1 s, backwards 2 s each. Tensors have 100 bytes; layer 2 also hands on 50 bytes without
    a gradient.
    """
    edges = ((None, (0, 2)), (0, (1,)), (1, (3, 4)), (2, (3,)), (3, (4,)), (4, (5,)))
    tensors = [
        TensorRecord(f"t{n}", 100, writer is not None, writer, readers) for n, (writer, readers) in enumerate(edges)
    ]
    tensors.append(TensorRecord("mask", 50, False, 2, (3,)))
    rows = zip(make_profile(5).layers, (2.0, 3.0, 1.0, 1.0, 1.0), strict=True)
    layers = tuple(replace(layer, forward_seconds=took) for layer, took in rows)
    return Profile(layers, conditions={"microbatch_size": 2, UPDATE_RATE: 0.05}, tensors=tuple(tensors))


def towers_plan(**parts: Any) -> Plan:
    """A stage for each layer but the last, which shares the stage of the one before it."""
    pieces = (((0, 1),), ((1, 2),), ((2, 3),), ((3, 5),))
    stages = tuple(PlanStage(layers, (rank,)) for rank, layers in enumerate(pieces))
    return Plan(**{"num_layers": 5, "stages": stages, "units": Units(2, 2, 1), "schedule": "gpipe", **parts})


def test_two_towers_by_hand() -> None:
    """Stages 1 and 2 send to stage 3, and stage 2 waits for no other. Links carry 100 bytes/s.

    The output of stage 1 travels once, 1 s, and two gradients return, 2 s. Stage 2 sends 150 bytes and gets 100 back.
    """
    profile = replace(towers_profile(), conditions={"microbatch_size": 2})
    step = simulate_plan(profile, towers_plan(routes="direct"), link=Link(100.0))
    spans = {
        str(span.action): (span.start_seconds, span.end_seconds)
        for row in step.pipelines[0].timeline.actions
        for span in row
    }
    assert spans == {
        "0F0": (0, 2), "0F1": (2, 4), "1F0": (3, 6), "1F1": (6, 9),
        "2F0": (0, 1), "2F1": (1, 2), "3F0": (7, 9), "3F1": (10, 12),
        "3B0": (12, 16), "3B1": (16, 20), "1B0": (18, 20), "1B1": (22, 24),
        "2B0": (17, 19), "2B1": (21, 23), "0B0": (21, 23), "0B1": (25, 27),
    }  # fmt: skip
    arrivals = {
        (message.message.kind, message.message.way): message.end_seconds
        for message in step.pipelines[0].timeline.messages
    }
    assert arrivals["activation", (2, 3)] == 4.0, "the second message waits for the first"
    assert (arrivals["gradient", (3, 1)], arrivals["gradient", (3, 2)]) == (22.0, 21.0)
    assert step.step_seconds == 27.0
    assert step.pipelines[0].memory is None
    assert any("the ranks' bytes are unknown" in note and "needs observations" in note for note in step.notes)
    # The number of microbatches as an argument, and a profile without the graph.
    again = simulate_plan(profile, towers_plan(routes="direct"), num_microbatches=2, link=Link(100.0))
    assert again.step_seconds == 27.0
    with pytest.raises(CapslogError, match="give a profile with tensors"):
        simulate_plan(replace(profile, tensors=()), towers_plan(routes="direct"))
    # Relayed, stage 2 waits for stage 1: 0F0 0-2, 1F0 2-5, 2F0 5-6, 3F0 6-8, 3F1 9-11, then 4, 2, 2, and two times 2.
    relayed = simulate_plan(profile, towers_plan())
    assert relayed.step_seconds == 11 + 4 + 4 + 2 + 2 + 2
    assert simulate_plan(profile, towers_plan(routes="direct")).step_seconds == 2 + 6 + 2 + 8 + 2 + 2


def test_parallel_stages_hold_no_more_than_their_own_way_to_the_loss_asks_for() -> None:
    """Equal layers: three stages instead of four on the longest way, so a step of M takes M + 2 periods, not M + 3."""
    layers = tuple(
        replace(layer, forward_seconds=float(n < 4), backward_seconds=2.0 * (n < 4))
        for n, layer in enumerate(towers_profile().layers)
    )
    profile = Profile(layers, tensors=towers_profile().tensors)
    for routes, in_flight, periods in (("direct", [3, 2, 2, 1], 8 + 2), ("relay", [4, 3, 2, 1], 8 + 3)):
        step = simulate_plan(profile, towers_plan(routes=routes, schedule="1f1b", units=Units(8, 2, 1)))
        assert step.pipelines[0].timeline.max_in_flight == in_flight
        assert step.step_seconds == 3 * periods


def test_where_no_gradient_travels_nobody_waits_for_one() -> None:
    profile = towers_profile()
    frozen = tuple(replace(tensor, gradient=tensor.gradient and tensor.writer != 2) for tensor in profile.tensors)
    step = simulate_plan(replace(profile, tensors=frozen), towers_plan(routes="direct"))
    messages = step.pipelines[0].timeline.messages
    assert {message.message.way for message in messages if message.message.kind == "gradient"} == {(1, 0), (3, 1)}


def test_a_stage_of_several_pieces_takes_the_sums_of_its_own_layers() -> None:
    """Stage 0 holds layers 0 and 2, stage 1 the layers 1, 3 and 4."""
    stages = (PlanStage(((0, 1), (2, 3)), (0,), memory=None), PlanStage(((1, 2), (3, 5)), (1,), memory=None))
    plan = towers_plan(stages=stages, routes="direct")
    seconds = stage_seconds(towers_profile(), stages, RunShape(2, "gpipe", recompute=True))
    assert (seconds.forward, seconds.backward) == ([3.0, 5.0], [4.0, 6.0])
    assert seconds.other["U"] == [20 * 0.05, 30 * 0.05]
    # R runs the last piece again, the backward the first one; the end of the chain is left out of F.
    assert (seconds.recompute, seconds.backward_again) == ([1.0, 2.0], [4.0 + 2.0, 6.0 + 3.0])
    assert seconds.bare_forward == [3.0, 3.0]
    kept = simulate_plan(towers_profile(), plan, recompute=False, link=Link(100.0))
    # 0F 0-3-6; both values and the mask travel together, 2.5 s: 1F 5.5-10.5-15.5; 1B 15.5-21.5-27.5; t0 and t2 have a
    # gradient each, 2 s: 0B ends at 27.5 + 2 + 4; the update of stage 1 takes 1.5 s.
    assert kept.step_seconds == pytest.approx(33.5 + 1.5)


def test_own_actions_are_checked_against_the_graph_that_the_profile_knows() -> None:
    """The reader of the file alone cannot know that stage 3 waits for stage 2."""
    stages = tuple(
        replace(stage, ranks=(rank,)) for stage, rank in zip(towers_plan().stages, (0, 1, 2, 2), strict=True)
    )

    def step(last: tuple[str, ...]) -> Simulation:
        rows = (("0F0", "0F1", "0B0", "0B1"), ("1F0", "1F1", "1B0", "1B1"), last)
        return simulate_plan(towers_profile(), towers_plan(stages=stages, schedule=None, routes="direct", actions=rows))

    assert step(("2F0", "3F0", "3B0", "2B0", "2F1", "3F1", "3B1", "2B1")).step_seconds > 0
    with pytest.raises(CapslogError, match=r"3F0.*2F0"):
        step(("3F0", "2F0", "3B0", "2B0", "2F1", "3F1", "3B1", "2B1"))


def test_copies_run_beside_the_computation_or_take_its_time() -> None:
    """Two microbatches of 10 s forward and 8 s backward; each offloads 400 bytes, 4 s there and 4 s back."""
    plan = Plan(4, (PlanStage(((0, 4),), (0,), memory=(MemoryInterval(0, 4, "offload"),)),), Units(2, 2, 1), "gpipe")
    link = Link(host_bandwidth=100.0)
    blocked = simulate_plan(make_profile(), plan, link=link)
    names = [str(span.action) for span in blocked.pipelines[0].timeline.actions[0]]
    copies = [name for name in names if name[1] in "OL"]
    assert blocked.step_seconds == 2 * (10 + 8) + 4 * len(copies)
    beside = simulate_plan(make_profile(device="cuda:0"), plan, link=link)
    timeline = beside.pipelines[0].timeline
    assert [str(span.action) for span in timeline.copies] == copies
    assert timeline.busy_seconds == [2 * (10 + 8)]
    assert 2 * (10 + 8) <= beside.step_seconds < blocked.step_seconds
    forced = simulate_plan(make_profile(), plan, link=replace(link, copies_beside=True))
    assert forced.step_seconds == beside.step_seconds
    assert {event["tid"] for event in trace_events(beside)["traceEvents"] if event.get("cat") == "copy"} == {
        COPY_THREAD
    }
    inputs = (replace(plan.stages[0], memory=(MemoryInterval(0, 4, "recompute+offload"),)),)
    with pytest.raises(CapslogError, match="the profile has no tensors"):
        simulate_plan(make_profile(), replace(plan, stages=inputs), link=link)
    with pytest.raises(CapslogError, match="host_bandwidth is 0"):
        Link(host_bandwidth=0.0)


def test_what_an_interval_moves_is_what_it_begins_with() -> None:
    profile = towers_profile()
    stage = PlanStage(((3, 5),), (0,), memory=(MemoryInterval(3, 5, "recompute+offload"),))
    # Layers 3 and 4 read t1 (of layer 1), t2 and the mask: 250 bytes.
    for routes in ("relay", "direct"):
        assert copy_seconds(profile, [stage], routes, 10.0) == {"O": [25.0], "L": [25.0]}
    first = replace(stage, layers=((1, 2),), memory=(MemoryInterval(1, 2, "recompute+offload"),))
    # Layer 1 reads 100 bytes; relayed, the input that layer 2 reads passes through it too.
    assert copy_seconds(profile, [first], "direct", 10.0)["O"] == [10.0]
    assert copy_seconds(profile, [first], "relay", 10.0)["O"] == [20.0]


def test_a_plan_is_given_the_seconds_of_its_step() -> None:
    plan, run = make_plan(), RunShape(2, "gpipe", recompute=False)
    timed_plan = with_step_seconds(make_profile(), plan, run)
    assert timed_plan == replace(plan, step_seconds=simulate_plan(make_profile(), plan, recompute=False).step_seconds)
    assert timed_plan.step_seconds is not None
    assert with_step_seconds(make_profile(), make_plan(num_microbatches=None), run).step_seconds is None
    bare = Profile(tuple(LayerProfile(f"l{n}", 9, 1 if n else None) for n in range(4)))
    assert with_step_seconds(bare, plan, run) is plan
    direct = towers_plan(routes="direct")
    assert with_step_seconds(towers_profile(), direct, run).step_seconds == pytest.approx(22.0 + 20 * 0.05)
    assert with_step_seconds(replace(towers_profile(), tensors=()), direct, run) is direct


def test_a_plans_own_actions_are_played() -> None:
    rows = (("0F0", "0F1", "0B0", "0B1", "0U"), ("1F0", "1B0", "1F1", "1B1"))
    plan = Plan(4, (PlanStage(((0, 2),), (0,)), PlanStage(((2, 4),), (1,))), Units(2, 2, 1), actions=rows)
    step = simulate_plan(make_profile(), plan)
    assert not step.recompute, "what no memory interval names is kept"
    assert [str(span.action) for span in step.pipelines[0].timeline.actions[1]] == list(rows[1])
    gpipe_step = simulate_plan(make_profile(), plan, schedule="gpipe", recompute=False)
    assert [str(span.action) for span in gpipe_step.pipelines[0].timeline.actions[1]] == ["1F0", "1F1", "1B0", "1B1"]


# -- the trace


@pytest.fixture(params=["one", "interleaved", "two pipelines", "a replicated stage", "two towers"])
def simulation(request: pytest.FixtureRequest) -> Simulation:
    profile = make_profile(**{UPDATE_RATE: 0.05})
    plan = make_plan(num_microbatches=4, schedule="varuna")
    if request.param == "interleaved":
        stages = tuple(PlanStage(((n, n + 1),), (n % 2,), memory=None) for n in range(4))
        plan = Plan(4, stages, Units(4, 2, 1), "varuna")
    elif request.param == "two pipelines":
        pieces = [(0, (0, 2), 0), (0, (2, 4), 1), (1, (0, 1), 2), (1, (1, 4), 3)]
        stages = tuple(PlanStage((layers,), (rank,), (number,), memory=None) for number, layers, rank in pieces)
        plan = Plan(4, stages, Units(4, 2, 2), "varuna")
    elif request.param == "a replicated stage":
        pieces = [(None, (0, 2), 0), ((0,), (2, 3), 1), ((1,), (2, 3), 2), (None, (3, 4), 0)]
        stages = tuple(PlanStage((layers,), (rank,), blocks, memory=None) for blocks, layers, rank in pieces)
        plan = Plan(4, stages, Units(4, 2, 2), "varuna")
    elif request.param == "two towers":
        profile, plan = towers_profile(), towers_plan(routes="direct")
    return simulate_plan(profile, plan, link=Link(1000.0, 0.001))


def test_the_trace_is_one_that_perfetto_opens(simulation: Simulation, tmp_path: Path) -> None:
    """The rules of the Chrome trace event format that Perfetto's importer relies on."""
    path = tmp_path / "perfetto.json"
    path.write_text(json.dumps(trace_events(simulation), allow_nan=False))
    trace = json.loads(path.read_text())
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    slices: dict[tuple[int, int], list[tuple[float, float, str]]] = defaultdict(list)
    named: set[tuple[str, int, int]] = set()
    flows: dict[str, dict[str, Any]] = defaultdict(dict)
    counters: dict[tuple[int, str], list[tuple[float, int]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert event["ts"] >= 0
        kind = event["ph"]
        if kind == "M":
            named.add((event["name"], event["pid"], event["tid"]))
        elif kind == "X":
            assert event["dur"] >= 0
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
        elif kind in "sf":
            assert kind not in flows[event["id"]], "an arrow has one begin and one end"
            assert (event.get("bp") == "e") == (kind == "f")
            flows[event["id"]][kind] = event
        else:
            assert kind == "C"
            assert list(event["args"]) == ["bytes"]
            counters[event["pid"], event["name"]].append((event["ts"], event["args"]["bytes"]))
    # Every track has a name; slices of a track do not overlap.
    for (pid, tid), spans in slices.items():
        assert ("thread_name", pid, tid) in named
        assert ("process_name", pid, 0) in named
        for before, after in zip(sorted(spans), sorted(spans)[1:], strict=False):
            assert before[1] <= after[0] + 1e-6, (pid, tid, before, after)
    # Every message is an arrow that begins and ends inside a slice of the thread it names, forward in time.
    messages = [message for pipeline in simulation.pipelines for message in pipeline.timeline.messages]
    assert len(flows) == len(messages) > 0
    for flow in flows.values():
        assert flow["s"]["ts"] <= flow["f"]["ts"]
        assert {flow["s"][name] for name in ("name", "cat")} == {flow["f"][name] for name in ("name", "cat")}
        for event in flow.values():
            spans = slices[event["pid"], event["tid"]]
            assert any(begin <= event["ts"] < end for begin, end, _ in spans), event
    # Counters are memory over time.
    peaks = [peak for pipeline in simulation.pipelines for peak in pipeline.peaks or []]
    assert sorted(max(size for _, size in course) for course in counters.values()) == sorted(peaks)
    for course in counters.values():
        assert [time for time, _ in course] == sorted(time for time, _ in course)
    ends = max(end for spans in slices.values() for _, end, _ in spans)
    assert ends == pytest.approx(simulation.step_seconds * 1e6)


def test_an_arrow_goes_from_the_action_that_made_the_message() -> None:
    step = simulate_plan(make_profile(), make_plan(), recompute=False, link=Link(100.0, 1.0))
    events = trace_events(step)["traceEvents"]
    arrow = [event for event in events if event.get("cat") == "message"][:2]
    # The activation of microbatch 0: made by 0F0 (0-3 s), waited for by 1F0 (from 5 s on).
    assert [(event["ph"], event["pid"]) for event in arrow] == [("s", 0), ("f", 1)]
    assert [event["ts"] for event in arrow] == pytest.approx([3e6, 5e6], abs=0.01)
