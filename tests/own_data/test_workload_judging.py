"""The targets that losses of transformers' models count, beside the losses of whole batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from varuna_capslog.model.chain import Chain
from varuna_capslog.own_data.workload import counted_by_model

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "decoder": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=16, **SIZES)
    ),
    "masked": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, **SIZES
        )
    ),
    "encoder and decoder": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=16, d_ff=16, d_kv=8, num_heads=2, num_layers=2, decoder_start_token_id=0, **SIZES)
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_weighted_microbatches_have_the_loss_of_the_whole_batch(name: str) -> None:
    torch.manual_seed(0)
    model: Any = MODELS[name]().eval()
    tokens = torch.randint(3, 32, (4, 12))
    labels = tokens.clone()
    for row, ignored in enumerate((0.05, 0.5, 0.8, 0.95)):
        labels[row, torch.rand(12) < ignored] = -100
    chain = Chain.from_module(model, None, {"input_ids": tokens[:1], "labels": tokens[:1]})
    part_of = counted_by_model(chain)
    assert part_of is not None
    assert part_of({"labels": tokens[:1]}) == 1.0
    parts = [part_of({"labels": labels[row : row + 1]}) for row in range(4)]
    with torch.no_grad():
        rows = [model(input_ids=tokens[row : row + 1], labels=labels[row : row + 1]).loss for row in range(4)]
        whole = float(model(input_ids=tokens, labels=labels).loss)
    assert len(set(parts)) > 2
    weighted = sum(part * float(loss) for part, loss in zip(parts, rows, strict=True) if part) / sum(parts)
    assert weighted == pytest.approx(whole, rel=1e-6)
