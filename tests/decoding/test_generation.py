"""Prompts with padding, and every key of the generation config, against transformers' `generate` of each request."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.decoding.test_decoder import generated
from tests.decoding.worlds import VOCABULARY, on_ranks, small_model, some_prompts
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.decoding.choice import HEADS, SEQUENCE
from varuna_capslog.decoding.decoder import decode_greedily
from varuna_capslog.decoding.generation import generation_keys, unpadded

pytest.importorskip("transformers", minversion="5.0")

NEW = 7
PROMPTS = [*some_prompts(1, 6), [5, 9, 5, 9, 5]]
ODD = list(range(1, VOCABULARY, 2))
HONOURED = [
    {"repetition_penalty": 3.0},
    {"encoder_repetition_penalty": 50.0},
    {"no_repeat_ngram_size": 1},
    {"repetition_penalty": 0.02, "encoder_no_repeat_ngram_size": 1},
    {"bad_words_ids": [[token] for token in ODD]},
    {"sequence_bias": [[[token], 9.0] for token in ODD]},
    {"suppress_tokens": ODD},
    {"begin_suppress_tokens": ODD},
    {"eos_token_id": ODD, "min_length": 8},
    {"eos_token_id": ODD, "min_length": 9, "min_new_tokens": 4},
    {"eos_token_id": 59, "exponential_decay_length_penalty": (1, 5.0)},
    {"eos_token_id": ODD, "bad_words_ids": [[token] for token in range(1, VOCABULARY)]},
    {"forced_bos_token_id": 3},
    {"forced_eos_token_id": 0},
]
IDLE = {"remove_invalid_values": True, "renormalize_logits": True, "do_sample": True, "temperature": 0.3, "top_k": 3}


@pytest.fixture
def model():
    return small_model("Llama", num_hidden_layers=1)


def alone(model, prompts):
    """What `generate` makes of each request by itself, up to the end token."""
    ends = model.generation_config.eos_token_id or []
    ends = [ends] if isinstance(ends, int) else ends
    answers = []
    for prompt in prompts:
        (row,) = generated(model, [prompt], NEW)
        last = next((place for place, token in enumerate(row) if token in ends), NEW - 1)
        answers.append(row[: last + 1])
    return answers


def decoded(model, degree=1, shard=SEQUENCE, prompts=PROMPTS, **keys):
    (tokens, *others) = [
        answer.tokens
        for answer in on_ranks(degree, lambda ranks: decode_greedily(model, prompts, NEW, ranks, shard, **keys))
    ]
    assert others == [tokens] * (degree - 1)
    return tokens


@pytest.mark.parametrize("keys", HONOURED, ids=lambda keys: "-".join(keys))
def test_a_key_of_the_generation_config_counts(model, keys):
    """Only `eos_token_id` did: a repetition penalty or suppressed tokens were left out without a word."""
    first, *others = list(keys.items())[::-1]
    model.generation_config.update(**dict(others))
    plain = alone(model, PROMPTS)
    model.generation_config.update(**dict([first]))
    answers = alone(model, PROMPTS)
    assert answers != plain
    assert decoded(model) == answers


@pytest.mark.parametrize("shard", [SEQUENCE, HEADS])
def test_keys_count_together_on_two_ranks(model, shard):
    keys = {"repetition_penalty": 1.7, "suppress_tokens": ODD[:9], "min_new_tokens": 3, "no_repeat_ngram_size": 2}
    model.generation_config.update(eos_token_id=ODD[9:20], **keys, **IDLE)
    assert decoded(model, 2, shard) == alone(model, PROMPTS)


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        ("num_beams", 4),
        ("num_return_sequences", 2),
        ("guidance_scale", 1.5),
        ("penalty_alpha", 0.6),
        ("stop_strings", ["."]),
        ("max_time", 1.0),
        ("prompt_lookup_num_tokens", 3),
        ("watermarking_config", {"bias": 2.0}),
        ("cache_implementation", "quantized"),
    ],
)
def test_a_key_that_would_change_tokens_is_refused_by_name(model, key, setting):
    setattr(model.generation_config, key, setting)
    with pytest.raises(
        CapslogError, match=f"generation config says {key}=.*does not know; set model.generation_config.{key} = "
    ):
        generation_keys(model)


def test_a_setting_that_transformers_refuses_is_named(model):
    model.generation_config.repetition_penalty = 2
    with pytest.raises(
        CapslogError, match="says repetition_penalty=2, which transformers refuses: `penalty` has to be a"
    ):
        decoded(model)


def test_padding_is_left_out_as_generate_leaves_it_out(model):
    longest = max(map(len, PROMPTS))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    expected = generated(model, PROMPTS, NEW)
    assert decoded(model, 2, prompts=tokens) == expected
    assert decoded(model, prompts=tokens.tolist()) == expected
    padded_by_7 = torch.where(tokens == 0, 7, tokens)
    assert decoded(model, prompts=padded_by_7, attention_mask=tokens != 0) == expected
    model.generation_config.eos_token_id = 0  # a padding token that ends answers may also be meant
    assert unpadded(model, [[0, 4]]) == [[0, 4]]


@pytest.mark.parametrize(
    ("prompts", "mask", "message"),
    [
        (torch.tensor([1, 2]), None, r"prompts is a tensor of int64 \[2\]; give whole numbers \[requests, tokens\]"),
        (torch.ones(1, 2), None, r"prompts is a tensor of float32 \[1, 2\]"),
        ({"input_ids": [[1]]}, None, "prompts is a dict; give its input_ids, and its attention_mask by that name"),
        ([1, 2], None, "prompts has 1 for a request; give a list of token numbers for each"),
        ([[1, 2]], [[1]], "attention_mask has not the form of prompts; give a 1 or a 0 for every token"),
    ],
)
def test_prompts_of_another_form(model, prompts, mask, message):
    with pytest.raises(CapslogError, match=message):
        unpadded(model, prompts, mask)


@pytest.mark.parametrize(
    ("weight", "prompt", "shard", "message"),
    [
        (
            0.5,
            1,
            SEQUENCE,
            "rank . decodes with other weights than rank .; give every rank the same arguments, and load",
        ),
        (0, 2, SEQUENCE, "rank . decodes with other prompts or new_tokens than"),
        (0, 1, HEADS, "rank . decodes with other shard or generation config than"),
    ],
)
def test_ranks_that_differ_are_named(model, weight, prompt, shard, message):
    """They exchanged parts of different sums before, and every rank answered without a word."""

    models = [model, copy.deepcopy(model)]
    with torch.no_grad():
        next(models[1].parameters())[3, 5] += weight

    def decode(ranks):
        prompts, of_rank = ([[prompt]], shard) if ranks.rank else ([[1]], SEQUENCE)
        return decode_greedily(models[ranks.rank], prompts, 3, ranks, of_rank)

    with pytest.raises(CapslogError, match=message):
        on_ranks(2, decode)
