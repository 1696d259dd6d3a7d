"""The three parts of a step by themselves: what the vote tells all ranks, and that nothing changes before `apply`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.engine import cases, models
from tests.engine.pool import WorkerPool
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.pipeline import EngineOptions, Layout, PipelineEngine
from varuna_capslog.engine.vote import Verdict

TWO = Layout((0, 7), (0, 1))


def step_in_parts(communicator: Communicator, layout: Layout, ballots: list[bytes], poison: bool) -> dict[str, Any]:
    """Two steps by `compute`, `vote`, `apply`; the second one may be poisoned.

    Between vote and apply rank 0 leaves the others for good: what follows must be local.
    """
    engine = PipelineEngine(
        models.build_chain(),
        models.loss,
        layout,
        EngineOptions(**(cases.SETTINGS | {"clip_norm": 0.5})),
        communicator,
        torch.device("cpu"),
    )
    tensors = [t for layer in engine.layers for t in (*layer.parameters.values(), *layer.buffers.values())]
    untouched, verdicts = [], []
    for step in (1, 2):
        minibatch, inputs = models.make_minibatch(4, step)
        if poison and step == 2:
            minibatch.targets[1][0, 0, 0] = float("nan")
        before = [tensor.clone() for tensor in tensors]
        engine.compute(step, minibatch, inputs.__getitem__)
        wishes = step == 1 and communicator.rank == communicator.world_size - 1
        verdict = engine.vote(step, minibatch, wishes, ballots[communicator.rank] if step == 1 else b"")
        untouched.append(all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True)))
        if verdict.refusal is None:
            communicator.world_size, kept = 1, communicator.world_size  # a word to anybody would now go wrong
            communicator.sum_ = communicator.send = communicator.receive = None  # type: ignore[assignment, method-assign]
            engine.apply(verdict)
            communicator.world_size = kept
            for name in ("sum_", "send", "receive"):
                delattr(communicator, name)
        else:
            engine.forget()
        verdicts.append(verdict)
    layers = engine.layers
    return {
        "untouched": untouched,
        "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts],
        "state": {f"{layer.name}.{n}": p.detach().clone() for layer in layers for n, p in layer.parameters.items()},
        "buffers": {f"{layer.name}.{n}": b.clone() for layer in layers for n, b in layer.buffers.items()},
        "idle": engine.idle,
        "name": layout.describe(communicator.rank),
    }


def test_idle_ranks_vote_and_the_step_is_as_without_them(pool: WorkerPool) -> None:
    """Four ranks are connected, two have stages."""
    alone = pool.run(cases.train, 2, TWO, {"clip_norm": 0.5}, 2)
    ballots = [b"", b"leave: me", b"", bytes(range(256)) * 9]
    results = pool.run(step_in_parts, 4, TWO, ballots, False)
    assert [result["idle"] for result in results] == [False, False, True, True]
    assert results[2]["name"] == "rank 2 (idle)"
    for result in results:
        assert result["verdicts"] == results[0]["verdicts"]
        first, second = (Verdict(**verdict) for verdict in result["verdicts"])
        assert (first.stop, second.stop) == (True, False)
        assert (list(first.ballots), second.ballots) == (ballots, ())
        assert [first.parts, second.parts] == alone[0]["parts"]
        assert [first.grad_norm, second.grad_norm] == alone[0]["norms"]
        assert result["untouched"] == [True, True]
    for rank in (0, 1):
        for kind in ("state", "buffers"):
            assert results[rank][kind].keys() == alone[rank][kind].keys()
            assert all(torch.equal(results[rank][kind][name], t) for name, t in alone[rank][kind].items())


def test_replicas_of_the_vote_apply_alone(pool: WorkerPool) -> None:
    """With two replicas the running statistics of the other one are there before the vote."""
    alone = pool.run(cases.train, 1, Layout((0,), (0,)), {"clip_norm": 0.5}, 2)[0]
    for result in pool.run(step_in_parts, 3, Layout((0,), (0,), 2), [b""] * 3, False)[:2]:
        for kind in ("state", "buffers"):
            assert all(torch.equal(result[kind][name], tensor) for name, tensor in alone[kind].items())


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_refused_step_is_a_verdict_with_a_sentence(pool: WorkerPool, ranks: int) -> None:
    results = pool.run(step_in_parts, ranks, TWO, [b"x"] * ranks, True)
    for result in results:
        first, second = (Verdict(**verdict) for verdict in result["verdicts"])
        assert (first.finite, first.refusal, first.ballots) == (True, None, (b"x",) * ranks)
        assert not second.finite
        assert second.refusal is not None
        assert "step 2: the loss is not finite in microbatch 1" in second.refusal
        assert result["untouched"] == [True, True]
