"""Execution of a microbatch: recomputation has no side effects, waiting ends, weights follow the samples. The task
lists equal those that Varuna's own generator printed. Varuna is not needed.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.pool import WorkerPool
from tests.varuna_plugin import cases, models
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.varuna_plugin import executor, options
from varuna_capslog.varuna_plugin.executor import Microbatches

RECORDED = json.loads((Path(__file__).parent / "recorded_schedules.json").read_text(encoding="utf-8"))
"""Output of `genschedule`, compiled outside this project: all lists of small pipelines (f forward, r recomputation,
b backward, then the microbatch), and for large pipelines the first 16 digits of the SHA-256 of its output for all
stages, a line each."""


class OneStage:
    """Stand-in for a PartitionedModel. Like Varuna's, its forward restores the random state before a recomputation."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.device, self.kept = module, torch.device("cpu"), dict[int, Any]()
        norms = [module] if isinstance(module, nn.BatchNorm1d) else []
        self.capslog = SimpleNamespace(
            begin=lambda: None, active=True, left=True, entry=None, exit=None, draws=None, norms=norms
        )

    def forward(self, inputs: tuple[int, torch.Tensor], recompute: bool = False) -> torch.Tensor:
        microbatch, x = inputs
        if recompute:
            torch.set_rng_state(self.kept[microbatch])
        else:
            self.kept[microbatch] = torch.get_rng_state()
        return self.module(x)

    def run(self, microbatch: int, x: torch.Tensor, recompute: bool = False) -> torch.Tensor:
        result: torch.Tensor = executor.forward(OneStage.forward, self, (microbatch, x), recompute=recompute)
        return result


def test_random_numbers_go_on_after_a_recomputation() -> None:
    """Varuna leaves the random state of the recomputed microbatch, so that the next forward drew the numbers of the
    microbatch after it.
    """
    stage, x = OneStage(nn.Dropout(0.5)), torch.ones(64)
    torch.manual_seed(3)
    stream = [stage.run(microbatch, x) for microbatch in range(4)]
    torch.manual_seed(3)
    first, second = stage.run(0, x), stage.run(1, x)
    again = stage.run(0, x, recompute=True)
    third = stage.run(2, x)
    stage.run(1, x, recompute=True)
    fourth = stage.run(3, x)
    assert torch.equal(again, first)
    for ours, theirs in zip((first, second, third, fourth), stream, strict=True):
        assert torch.equal(ours, theirs)


def test_running_statistics_are_counted_once() -> None:
    stage, inputs = OneStage(nn.BatchNorm1d(3)), [torch.randn(4, 3) for _ in range(3)]
    plain = nn.BatchNorm1d(3)
    for microbatch, x in enumerate(inputs):
        stage.run(microbatch, x)
        plain(x)
    result = stage.run(0, inputs[0], recompute=True)
    result.square().sum().backward()
    assert isinstance(stage.module, nn.BatchNorm1d)
    assert int(stage.module.num_batches_tracked or 0) == 3
    for name, buffer in plain.named_buffers():
        assert torch.equal(dict(stage.module.named_buffers())[name], buffer)


def test_a_mean_loss_weighs_microbatches_by_samples() -> None:
    batches = Microbatches([{"a": 1}, {"a": 1}], [3, 1])
    assert [executor._divisor(batches, batch) for batch in batches.values()] == [4 / 3, 4.0]
    options.configure(loss="sum")
    try:
        assert executor._divisor(batches, batches[1]) == 1.0
    finally:
        options.configure()


def test_waiting_for_a_dead_thread_ends() -> None:
    queue = executor.WatchedQueue()
    queue.put(1)
    queue.put(CapslogError("rank 3 is gone"))
    assert queue.get() == 1
    for _ in range(2):  # every reader learns of it
        with pytest.raises(CapslogError, match="rank 3 is gone"):
            queue.get()
    options.configure(timeout_seconds=0.05)
    try:
        with pytest.raises(CapslogError, match=r"waited 1.05 s for a microbatch"):
            executor.WatchedQueue().get()
    finally:
        options.configure()


def hang(communicator: Communicator) -> tuple[str, float]:
    """Train while rank 1 sleeps in its second step; return this rank's error and the seconds until it came."""
    case = cases.Case([0, 4])
    with cases.patched(case.cuts, timeout_seconds=15.0) as varuna:
        torch.manual_seed(0)
        model = models.Model(varuna.CutPoint)
        trainer = varuna.Varuna(model, cases.stage_map(2, 1), models.get_batch, 8, 2, device="cpu")
        trainer.set_optimizer(torch.optim.SGD(trainer.parameters(), lr=0.1))
        trainer.step(cases.joined(case.feed(0)[0]))
        options.configure(case.cuts, timeout_seconds=2.0)
        if trainer.stage == 1:
            naps = [6.0]
            model.head.register_forward_pre_hook(lambda module, inputs: time.sleep(naps.pop() if naps else 0))
        began = time.monotonic()
        try:
            trainer.step(cases.joined(case.feed(1)[0]))
        except ValueError as error:
            return str(error), time.monotonic() - began
        return "", time.monotonic() - began


def test_a_hanging_rank_is_named_after_the_timeout(pool: WorkerPool) -> None:
    (text, seconds), _ = pool.run(hang, 2)
    assert "from rank 1: nothing came for 2 s" in text or "connection lost" in text or "waited 2 s" in text, text
    assert seconds < 30


@pytest.mark.parametrize("size", RECORDED["lists"])
def test_small_pipelines_list_by_list(size: str) -> None:
    stages, microbatches = map(int, size.split(","))
    for stage, text in enumerate(RECORDED["lists"][size]):
        recorded = [("frb".index(kind), int(number)) for kind, number in re.findall(r"([frb])(\d+)", text)]
        assert executor.varuna_tasks(microbatches, stage, stages) == recorded


def test_large_pipelines_by_digest() -> None:
    assert len(RECORDED["digests"]) == 72
    for size, expected in RECORDED["digests"].items():
        stages, microbatches = map(int, size.split(","))
        digest = hashlib.sha256()
        for stage in range(stages):
            tasks = executor.varuna_tasks(microbatches, stage, stages)
            digest.update(("".join(f"{task},{number};" for task, number in tasks) + "\n").encode())
        assert digest.hexdigest()[:16] == expected, size


@pytest.mark.parametrize(("microbatches", "stage", "stages"), [(0, 0, 1), (4, 2, 2), (4, -1, 2)])
def test_numbers_that_make_no_pipeline_are_refused(microbatches: int, stage: int, stages: int) -> None:
    with pytest.raises(CapslogError, match="at least one microbatch and a stage"):
        executor.varuna_tasks(microbatches, stage, stages)
