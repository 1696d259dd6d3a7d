"""The shape that is read from a model, the layers of a rank's copy, and the models that are refused."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from tests.decoding.worlds import VOCABULARY, on_ranks, small_model
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.decoding.cache import Wire
from varuna_capslog.decoding.choice import HEADS, SEQUENCE, DecoderShape
from varuna_capslog.decoding.decoder import rank_model, shape_of

transformers = pytest.importorskip("transformers", minversion="5.0")


def test_sizes_of_both_forms():
    llama, gpt2 = small_model("Llama"), small_model("GPT2")
    # 2 layers of q 48x48, k and v 16x48, o 48x48, three matrices of 96x48; embedding and output 61x48, 5 norms of 48
    divided = 2 * (2 * 48 * 48 + 2 * 16 * 48 + 3 * 96 * 48)
    assert shape_of(llama) == DecoderShape(2, 48, 6, 2, 8, 96, 8, divided, 61 * 48, 61 * 48 + 5 * 48)
    # tied: the output's matrix is the embedding; 128 positions, 5 norms with weights and biases, biases of the matrices
    divided = 2 * (4 * 48 * 48 + 2 * 96 * 48)
    undivided = 128 * 48 + 5 * 2 * 48 + 2 * (4 * 48 + 96 + 48)
    assert shape_of(gpt2) == DecoderShape(2, 48, 6, 6, 8, 96, 8, divided, 61 * 48, undivided)


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Qwen2"])
def test_a_copy_holds_its_part_and_the_model_stays(family):
    model = small_model(family)
    shape, before = shape_of(model), {name: value.clone() for name, value in model.state_dict().items()}

    def numbers(communicator):
        wire = Wire(communicator, torch.device("cpu"))
        made = rank_model(model, shape, wire, HEADS)
        weights = [parameter for parameter in made.parameters() if parameter.ndim == 2]
        same = rank_model(model, shape, wire, SEQUENCE)
        assert all(
            parameter is original for parameter, original in zip(same.parameters(), model.parameters(), strict=True)
        )
        return sum(parameter.numel() for parameter in weights)

    total = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 2)
    assert on_ranks(2, numbers) == [total - shape.divided // 2] * 2
    assert model.config._attn_implementation == "sdpa"
    assert {name: value.data_ptr() for name, value in model.state_dict().items()}.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("family", "keys", "why"),
    [
        (
            "Mixtral",
            {},
            "a mixtral over ranks is not known: its layers have neither the form of Llama's nor that of GPT",
        ),
        ("Phi3", {}, "a phi3 over ranks is not known: its layers have neither"),
        (
            "Mistral",
            {"sliding_window": 16},
            "a mistral over ranks is not known: some of its layers do not keep all tok",
        ),
        ("Gemma2", {"head_dim": 8}, "its config says attn_logit_softcapping=50.0; use transformers' generate"),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            r"its position codes depend on the longest request \(rope_type dynamic\)",
        ),
        ("GPT2", {"add_cross_attention": True}, "its config says add_cross_attention=True"),
    ],
)
def test_other_attention_is_refused(family, keys, why):
    with pytest.raises(CapslogError, match=why):
        shape_of(small_model(family, **keys))


def test_other_modules_are_refused():
    with pytest.raises(CapslogError, match="a Linear is no model of transformers"):
        shape_of(nn.Linear(2, 2))


def test_without_transformers(monkeypatch):
    model = small_model("Llama")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        CapslogError, match=r"decoding over ranks needs the module 'transformers'.*'varuna-capslog\[hf\]'"
    ):
        on_ranks(1, lambda communicator: rank_model(model, shape_of(model), Wire(communicator, None), SEQUENCE))


def test_what_attention_is_told_besides_is_refused():
    """A model whose attention has a bias or sinks hands them over by name; leaving them out would not be noticed."""
    model = small_model("Llama")

    def run(communicator):
        made = rank_model(model, shape_of(model), Wire(communicator, torch.device("cpu")), SEQUENCE)
        tokens = torch.arange(4)[None] % VOCABULARY
        return made(input_ids=tokens, use_cache=False, capslog_attend=None, s_aux=torch.ones(6))

    with pytest.raises(
        CapslogError, match="LlamaAttention attends with s_aux, which decoding over ranks does not know"
    ):
        on_ranks(1, run)
