"""Memory intervals: stages keep, recompute or offload, and a step has the bits of one rank that keeps everything."""

from __future__ import annotations

import dataclasses
import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine import cases
from tests.engine.compare import merged
from tests.engine.layouts import Cuts, random_layout, rectangle, with_intervals
from tests.engine.pool import WorkerPool
from tests.memory.machine import Model, profile_of
from tests.planning.asking import plan
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.offload import TierOptions
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.probe import PeakProbe, resident_tensors
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.chain import Chain, Layer, TensorSpec
from varuna_capslog.model.workload import Minibatch
from varuna_capslog.planners.seconds import Link
from varuna_capslog.plans.parts import MemoryInterval
from varuna_capslog.schedules import RunShape

KEEPS: dict[str, Any] = {"num_blocks": 4, "schedule": "1f1b", "recompute": False}
TWO_STAGES = Layout((rectangle(0, 6, 0), rectangle(6, 11, 1)), 4)


@functools.cache
def one_rank(pool: WorkerPool) -> dict[str, Any]:
    return pool.run(cases.train, 1, Cuts((0,), (0,)), KEEPS, 2)[0]


def trained(pool: WorkerPool, layout: Layout, copies: str = "plain", **options: Any) -> Any:
    return pool.run(cases.train, layout.world_size, layout, KEEPS | options, 2, torch.float32, None, copies)


def differences(results: list[dict[str, Any]], expected: dict[str, Any]) -> list[str]:
    different = [
        f"{kind} of a rank" for kind in ("parts", "norms") for report in results if report[kind] != expected[kind]
    ]
    for kind in ("gradients", "state", "buffers"):
        ours = merged(results, kind)
        assert ours.keys() == expected[kind].keys()
        different += [f"{kind} {name}" for name in ours if not torch.equal(ours[name], expected[kind][name])]
    return different


@pytest.mark.parametrize("seed", range(6))
def test_any_intervals_give_the_bits_of_one_rank_that_keeps_all(pool: WorkerPool, seed: int) -> None:
    schedule = ["1f1b", "gpipe", "zb-h1", "varuna", "kfkb", "interleaved"][seed % 6]
    layout = with_intervals(random_layout(seed, 11, 4, 4), seed)
    if schedule in ("gpipe", "kfkb"):
        stages = tuple(dataclasses.replace(stage, in_flight=None) for stage in layout.stages)
        layout = dataclasses.replace(layout, stages=stages)
    results = trained(pool, layout, schedule=schedule)
    assert not differences(results, one_rank(pool))
    assert all(report["host bytes"][0] == 0 for report in results)


@pytest.mark.parametrize("planner", ["dawnpiper", "vpipe"])
def test_the_intervals_of_a_planner_give_the_bits_of_one_rank_that_keeps_all(pool: WorkerPool, planner: str) -> None:
    profile = profile_of(Model.random(random.Random(5), 11, True, 100), "cuda")
    rows = [dataclasses.replace(row, forward_seconds=1.0, backward_seconds=2.0) for row in profile.layers]
    profile, run = dataclasses.replace(profile, layers=tuple(rows)), RunShape(4, "gpipe", False)
    most = plan(profile, 2, planner, run=run).peak_bytes
    assert most is not None
    link = Link(host_bandwidth=5e3, copies_beside=True)
    stages = plan(profile, 2, planner, capacity=most * 3 // 5, run=run, link=link).stages
    assert {interval.kind for stage in stages for interval in stage.memory or ()} == {"offload", "recompute"}
    assert not differences(trained(pool, Layout(stages, 4), schedule="gpipe"), one_rank(pool))


@pytest.mark.parametrize("again", [False, True])
def test_given_lists_say_whether_open_stages_recompute_whatever_the_run_says(pool: WorkerPool, again: bool) -> None:
    """They were refused at the first step where they had no R and the run recomputes."""
    rows = [[f"{stage}{kind}{call}" for kind in "FB" for call in range(4)] for stage in range(2)]
    if again:
        rows[0] = [text for call in rows[0] for text in ([call.replace("B", "R"), call] if "B" in call else [call])]
    actions = tuple(map(tuple, rows))
    results = trained(pool, TWO_STAGES, schedule="varuna", recompute=not again, actions=actions)
    assert not differences(results, one_rank(pool))


@pytest.mark.parametrize(("copies", "seed"), [("slow", 1), ("late", 3), ("reordered", 1)])
def test_copies_that_come_late_change_no_bit(pool: WorkerPool, seed: int, copies: str) -> None:
    layout = with_intervals(TWO_STAGES, seed, ("offload", "recompute+offload"))
    results = trained(pool, layout, copies, schedule="gpipe")
    assert not differences(results, one_rank(pool))
    assert all(in_use == 0 and most > 0 for in_use, most in (report["host bytes"] for report in results))


def test_the_comparison_notices_what_is_read_too_early(pool: WorkerPool) -> None:
    layout = with_intervals(TWO_STAGES, 1, ("offload", "recompute+offload"))
    expected = one_rank(pool)
    try:
        different = differences(trained(pool, layout, "early", schedule="gpipe"), expected)
    except RuntimeError as error:  # autograd itself notices a tensor that changed in place, or a step is refused
        different = [str(error)]
    assert different


def test_a_copy_that_fails_ends_the_step_in_one_sentence(pool: WorkerPool) -> None:
    layout = with_intervals(Layout((rectangle(0, 11, 0),), 4), 1, ("offload",))
    with pytest.raises(RuntimeError, match=r"HostTierFailed: a copy to or from the host tier \(memory\) failed: OSErr"):
        trained(pool, layout, "failing", schedule="gpipe")


def test_a_full_tier_ends_the_step_in_one_sentence(pool: WorkerPool) -> None:
    layout = with_intervals(Layout((rectangle(0, 11, 0),), 4), 1, ("offload",))
    full = r"CapslogError: the host tier is full: it may hold 10000 bytes \(pipeline.host_capacity\), \d+ are in use"
    with pytest.raises(RuntimeError, match=full):
        trained(pool, layout, schedule="gpipe", tier=TierOptions(capacity=10000))


def test_the_tier_may_be_files(pool: WorkerPool, tmp_path: Path) -> None:
    layout = with_intervals(TWO_STAGES, 2, ("offload", "recompute+offload"))
    results = trained(pool, layout, schedule="gpipe", tier=TierOptions(str(tmp_path)))
    assert not differences(results, one_rank(pool))
    assert not list(tmp_path.iterdir())


class _Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.line(x))


def peak_of(memory: tuple[MemoryInterval, ...]) -> int:
    """The most bytes beside the parameters in a step of eight microbatches, by torch's allocator: a layer saves what it
    writes, 1 MiB, and the first also what it reads.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    chain = Chain([Layer(f"l{i}", _Wide()) for i in range(6)], ("x",), ("x",), "wide")
    alone, cpu = Communicator(0, 1, 0, 1), torch.device("cpu")  # type: ignore[arg-type]
    layout = Layout((dataclasses.replace(rectangle(0, 6, 0), memory=memory),))
    options = EngineOptions(8, "gpipe", recompute=False, clip_norm=1.0)
    engine = PipelineEngine(chain, lambda out, *_: {"loss": out["x"].square().mean()}, layout, options, alone, cpu)
    minibatch = Minibatch([{"x": TensorSpec((4096, 64))}] * 8, [None] * 8, {})

    def load(_: int) -> dict[str, Tensor]:
        return {"x": torch.ones(4096, 64)}

    train_step(engine, 1, minibatch, load)
    resident = resident_tensors(engine.layers, engine.optimizer)
    with PeakProbe(cpu, resident) as probe:
        train_step(engine, 2, minibatch, load)
    return probe.peak_bytes - sum(tensor.untyped_storage().nbytes() for tensor in resident)


def test_what_is_offloaded_is_not_on_the_device() -> None:
    """Example by hand, in MiB: a graph saves 7, 1 of them the output that the loss reads; a backward needs 4 more."""

    def peak(*kinds: str) -> int:
        return round(peak_of(tuple(MemoryInterval(0, 6, kind) for kind in kinds)) / (1 << 20))

    assert peak() == 8 * 7 + 4
    # In 0B0: the graph of call 0 is back, that of call 1 comes, that of call 7 leaves; the loss holds its 8 outputs.
    assert [peak("offload") for _ in range(3)] == [7 + 7 + 6 + 8 + 4] * 3
    # In 0B0: the graph of call 0 was made anew and the input of call 1 comes; the loss comes after the recomputation.
    assert peak("recompute+offload") == 7 + 1 + 4
    # All eight inputs stay.
    assert peak("recompute") == 7 + 7 + 4
