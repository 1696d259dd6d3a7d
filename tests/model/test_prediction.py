"""Layers for multi-token prediction: what they compute by another way, and what the chain of a plan has of them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from varuna_capslog import cli
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import load_config
from varuna_capslog.model import hugging_face
from varuna_capslog.model.prediction import LOSS_PART, PredictingModel, with_predictions
from varuna_capslog.profiles.record import read_profile
from varuna_capslog.start.prepare import check_names

transformers = pytest.importorskip("transformers")

WIDTH, WORDS, BLOCKS = 16, 64, 2


def config(predictions: int) -> transformers.LlamaConfig:
    """Llama with layers for multi-token prediction, which its class takes for a key that it does not know."""
    return transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=BLOCKS,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=WORDS,
        num_nextn_predict_layers=predictions,
        architectures=["LlamaForCausalLM"],
    )


def test_the_loss_is_that_of_the_report() -> None:
    """Each layer sees the token ahead of the last one's and predicts the token behind it."""
    torch.manual_seed(1)
    made = transformers.LlamaForCausalLM(config(2)).double()
    model = with_predictions(made)
    assert isinstance(model, PredictingModel)
    tokens = torch.randint(0, WORDS, (1, 9))
    loss = model(input_ids=tokens, labels=tokens)["loss"]

    base, layers = made.model, [model.get_submodule(f"prediction_{number}") for number in range(2)]
    state = base(input_ids=tokens).last_hidden_state
    places = torch.arange(tokens.shape[1])[None]
    rotary = base.rotary_emb(state, places)
    losses = [made(input_ids=tokens, labels=tokens).loss]
    for ahead, layer in enumerate(layers, start=1):
        embedded = torch.zeros_like(state)
        for place in range(tokens.shape[1]):
            word = tokens[0, place + ahead] if place + ahead < tokens.shape[1] else 0
            embedded[0, place] = base.embed_tokens.weight[word]
        weight = layer.projection.weight
        state = layer.token_norm(embedded) @ weight[:, :WIDTH].T + layer.state_norm(state) @ weight[:, WIDTH:].T
        state = layer.norm(layer.block(state, attention_mask=None, position_embeddings=rotary))
        logits = made.lm_head(state)[0, : tokens.shape[1] - 1 - ahead]
        losses.append(functional.cross_entropy(logits.float(), tokens[0, 1 + ahead :]))
    torch.testing.assert_close(loss, losses[0] + LOSS_PART * (losses[1] + losses[2]) / 2, rtol=1e-6, atol=0)


def test_the_chain_of_a_plan_has_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parameters: a block, the matrix of two states, three norms, and a copy of the embedding."""
    config(1).save_pretrained(tmp_path)
    flags = ["--hf", str(tmp_path), "--device", "cuda:h100-80gb", "--sequence", "16"]
    assert cli._run(["profile", *flags, "-o", str(tmp_path / "profile.json")]) == 0
    profile = read_profile(tmp_path / "profile.json")
    assert [layer.name for layer in profile.layers][-3:] == ["model.norm", "prediction_0", "head"]
    by_name = {layer.name: layer for layer in profile.layers}
    block, prediction = by_name[f"model.layers.{BLOCKS - 1}"], by_name["prediction_0"]
    more = 4 * (2 * WIDTH * WIDTH + 3 * WIDTH + WORDS * WIDTH)
    assert prediction.parameter_bytes == (block.parameter_bytes or 0) + more
    assert (prediction.forward_seconds or 0) > (block.forward_seconds or 1)
    capsys.readouterr()
    given = ["--profile", str(tmp_path / "profile.json"), "--devices", "2", "--minibatch", "8"]
    assert cli._run(["lint", "Et|tmL", *given]) == 0
    printed = capsys.readouterr()
    assert "prediction_0: for multi-token prediction (num_nextn_predict_layers)" in printed.err
    assert "neither plan counts it" not in printed.out
    assert cli._run(["lint", "1,1", *given]) == 0
    assert "the layout does not say where, so the last stage has it" in " ".join(capsys.readouterr().out.split())


def test_our_engine_trains_the_model_of_transformers(tmp_path: Path) -> None:
    config(1).save_pretrained(tmp_path)
    made, _ = hugging_face.model(str(tmp_path))
    assert isinstance(made, transformers.LlamaForCausalLM)
    run = tmp_path / "run.yaml"
    arguments = f"{{path: {tmp_path}, predicts: true}}"
    run.write_text(
        "workload: varuna_capslog.model.model_workload:workload\n"
        f"model: {{factory: '{hugging_face.FACTORY}', arguments: {arguments}}}\n"
        "train: {minibatch_size: 4, microbatch_size: 1}\n"
    )
    with pytest.raises(CapslogError, match="adds layers for multi-token prediction, which capslog plan counts"):
        check_names(load_config(run))


def test_a_model_below_adapters_has_no_such_layers(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    config(1).save_pretrained(tmp_path)
    assert not isinstance(hugging_face.model(str(tmp_path), predicts=True, lora=4)[0], PredictingModel)


def test_layers_of_a_kind_of_their_own_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    without = transformers.LlamaForCausalLM(config(0))
    assert with_predictions(without) is without
    streams = transformers.LlamaForCausalLM(config(3))
    streams.config.hc_mult = 4
    with caplog.at_level(logging.WARNING):
        assert with_predictions(streams) is streams
    assert "the 3 layers for multi-token prediction of LlamaForCausalLM are left out" in caplog.text
    assert with_predictions(nn.Identity()).__class__ is nn.Identity
