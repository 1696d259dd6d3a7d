"""Mistakes of users: each ends in one sentence on every rank, without a hang or a wrong number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.pool import WorkerPool
from tests.varuna_plugin import cases, mistakes, models

SENTENCES: dict[str, tuple[dict[str, Any], str]] = {
    "leak": ({}, "the result of 'first'), which another stage computes: a value that is needed behind a cut"),
    "skip": ({}, "the forward ended without reaching CutPoint 'cut'"),
    "pair": ({}, "the same number of tensors in the same structure"),
    "unfrozen": ({}, "needs a gradient now, but did not when Varuna was built"),
    "moving": ({}, "a forward changes the buffers count, which are no running statistics"),
    "untraceable": ({}, "cannot be traced on get_batch_fn(2, device='cpu'): RuntimeError"),
    "ranks differ": ({}, "rank 1: cuts is [0, 2]; no stage can begin at 2"),
    "fp16": ({"fp16": True}, "fp16=True is not there"),
    "map": ({"stage_to_rank_map": "0;0;"}, "must name each of the 2 ranks once"),
    "batch": ({"stage_to_rank_map": "0,1;", "batch_size": 3}, "cannot be shared by 2 replicas"),
    "stages": ({"stage_to_rank_map": "0,1;"}, "make 2 stages, but Varuna was started with 1"),
    "size": ({"batch_size": 6}, "has 4 rows, but Varuna was built for 6"),
    "ties": ({"shared_weights": [("first.weight", "lm_head_weight")]}, "names 'lm_head_weight', which is no parameter"),
}


@pytest.mark.parametrize("kind", SENTENCES)
def test_a_mistake_ends_in_a_sentence(pool: WorkerPool, kind: str) -> None:
    change, expected = SENTENCES[kind]
    texts = pool.run(mistakes.sentence, 2, kind, change)
    # the rank that made the mistake names it, the other at least ends
    assert any(expected in text for text in texts), texts
    assert not any(text.startswith("loss") for text in texts), texts


def test_a_map_without_its_last_semicolon_is_read_whole(pool: WorkerPool) -> None:
    # Varuna loses the last stage and trains the rest
    texts = pool.run(mistakes.sentence, 2, "", {"stage_to_rank_map": "0;1"})
    assert all(text.startswith("loss") for text in texts), texts


def test_another_models_pickles_in_the_folder_mean_nothing(pool: WorkerPool, tmp_path: Path) -> None:
    """Varuna takes over `_tmp_*` files of any model that once ran in the current folder."""
    stale = dict.fromkeys(("_tmp_ord_mod", "_tmp_inp_shapes", "_tmp_shape_changes", "_tmp_pstage_mapping"), b"stale")
    for name, content in stale.items():
        (tmp_path / name).write_bytes(content)
    results = pool.run(mistakes.with_stale_files, 2, tmp_path)
    expected = cases.oracle(cases.Case([0, 3], steps=1))
    assert cases.worst([result["outcome"] for result in results], expected)["loss"] <= 1e-5
    assert all(result["files"] == stale for result in results)


def test_a_model_with_autocast_of_its_own(pool: WorkerPool) -> None:
    """Cut tensors are then bfloat16; the pieces round where one process rounds."""
    torch.manual_seed(0)
    model = mistakes.WithAutocast(models.PlainCut)
    minibatch, total = models.batch(4, 8, 8), 0.0
    for start in (0, 2):
        loss = model(minibatch["images"][start : start + 2], minibatch["targets"][start : start + 2]) / 2
        loss.backward()
        total += float(loss.detach())
    for result in pool.run(mistakes.autocast, 3, [0, 1, 3]):
        assert result["loss"] == pytest.approx(total, rel=1e-5)
        for name, gradient in result["gradients"].items():
            expected = model.get_parameter(name).grad
            assert expected is not None
            assert float((gradient - expected).abs().max()) <= 1e-2 * float(expected.abs().max()) + 1e-6, name
