"""Decoding on several ranks against transformers on one, in float64; and the bytes sent against the formulas."""

from __future__ import annotations

import pytest
import torch

from tests.decoding.worlds import on_ranks, small_model, some_prompts
from tests.sweeps import some
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.decoding.choice import HEADS, SEQUENCE, heads_bytes, phases, sequence_bytes
from varuna_capslog.decoding.decoder import ShardedDecoder, decode_greedily, shape_of

pytest.importorskip("transformers", minversion="5.0")

RAGGED = (1, 9, 4, 2, 5)
"""Tokens of the prompts. On 4 ranks and more some hold none of the first one's positions at first."""


def generated(model, prompts, new_tokens):
    """Tokens that transformers generates, with all requests in one batch, padded on the left."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.no_grad():
        made = model.generate(tokens, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
    return made[:, longest:].tolist()


def logits_of_one(model, prompt, following):
    """Logits, by transformers' own forward with a cache, of the prompt's last token and each token that follows it."""
    with torch.no_grad():
        made = model(torch.tensor([prompt]), use_cache=True)
        logits = [made.logits[0, -1]]
        cache = getattr(made, "cache", None) or made.past_key_values
        name = "cache" if hasattr(made, "cache") else "past_key_values"
        for token in following:
            made = model(torch.tensor([[token]]), **{name: cache}, use_cache=True)
            logits.append(made.logits[0, -1])
    return torch.stack(logits)


WAYS = [
    ("Llama", SEQUENCE, 4),
    ("Llama", HEADS, 2),
    ("GPT2", SEQUENCE, 2),
    ("GPT2", HEADS, 3),
    ("Qwen2", HEADS, 2),
]


@pytest.mark.parametrize(("family", "shard", "degree"), WAYS)
def test_logits_and_tokens_are_those_of_one_process(family, shard, degree):
    model, prompts = small_model(family), some_prompts(*RAGGED)
    following = some_prompts(4, 4, 4, 4, 4)
    expected = [logits_of_one(model, prompt, after) for prompt, after in zip(prompts, following, strict=True)]

    def decode(communicator):
        decoder = ShardedDecoder(model, communicator, shard)
        logits = [decoder.read(prompts, 5)]
        requests = decoder.cache.own
        for place in range(4):
            logits.append(decoder.step(torch.tensor([following[request][place] for request in requests])))
        return requests, torch.stack(logits, 1), decode_greedily(model, prompts, 5, communicator, shard).tokens

    answers = generated(model, prompts, 5)
    assert len(set(map(tuple, answers))) == len(prompts)
    homes = []
    for requests, logits, tokens in on_ranks(degree, decode):
        homes += requests
        assert tokens == answers
        for request, request_logits in zip(requests, logits, strict=True):
            scale = float(expected[request].abs().max())
            assert float((request_logits - expected[request]).abs().max()) <= 1e-12 * scale
    assert sorted(homes) == sorted(range(5) if shard == SEQUENCE else [*range(5)] * degree)


def test_one_request_on_four_ranks():
    """Three ranks decode nothing, and attend for the fourth."""
    model, prompts = small_model("Llama"), some_prompts(3)
    results = on_ranks(4, lambda ranks: decode_greedily(model, prompts, 9, ranks))
    assert [decoded.tokens for decoded in results] == [generated(model, prompts, 9)] * 4


@pytest.mark.parametrize(("shard", "degree"), [(SEQUENCE, 4), (HEADS, 3)])
def test_a_number_of_ranks_has_the_same_bits_every_time(shard, degree):
    model, prompts = small_model("GPT2").float(), some_prompts(*RAGGED)

    def logits(communicator):
        decoder = ShardedDecoder(model, communicator, shard)
        first = decoder.read(prompts, 3)
        return torch.stack([first, decoder.step(first.argmax(-1))])

    first_run, second_run = on_ranks(degree, logits), on_ranks(degree, logits)
    assert all(torch.equal(a, b) for a, b in zip(first_run, second_run, strict=True))
    assert shard == SEQUENCE or all(torch.equal(first_run[0], rank) for rank in first_run)


@pytest.mark.parametrize(
    ("family", "degree", "batch"), some([("Llama", 2, 5), ("GPT2", 3, 1), ("Llama", 2, 1), ("GPT2", 3, 5)], 2)
)
def test_bytes_on_the_wire_are_those_of_the_formulas(family, degree, batch):
    """Over 2 N tokens, since the rank that keeps the next token changes from token to token."""
    model, prompts = small_model(family), some_prompts(*(5, 2, 7, 1, 4)[:batch])
    shape, steps = shape_of(model), 2 * degree
    for shard, formula in ((SEQUENCE, sequence_bytes), (HEADS, heads_bytes)):
        results = on_ranks(degree, lambda ranks, shard=shard: decode_greedily(model, prompts, steps + 1, ranks, shard))
        sent = sum(decoded.sent_bytes["step"] for decoded in results) / degree / steps
        assert sent == pytest.approx(shape.layers * formula(shape, batch, degree), rel=1e-12)
        assert {decoded.steps for decoded in results} == {steps}


def test_shares_of_the_cache_stay_equal():
    """30 tokens of each request over 3 ranks: 10 on each, for tokens of the prompt and decoded tokens alike."""
    model, prompts = small_model("Llama"), some_prompts(2, 20, 11)
    for decoded in on_ranks(3, lambda ranks: decode_greedily(model, prompts, 10, ranks)):
        # 2 layers, keys and values, 3 requests, 2 heads of 8 numbers
        assert decoded.cache_bytes == 2 * 2 * 3 * 10 * 2 * 8 * 8


@pytest.mark.parametrize("shard", [SEQUENCE, HEADS])
def test_a_request_ends_with_the_models_end_token(shard):
    model, prompts = small_model("Llama"), some_prompts(3, 8)
    plain = generated(model, prompts, 8)
    model.generation_config.eos_token_id = [plain[0][2], plain[1][4]]
    results = on_ranks(2, lambda ranks: decode_greedily(model, prompts, 8, ranks, shard))
    expected = [
        row[: next(at for at, token in enumerate(row) if token in model.generation_config.eos_token_id) + 1]
        for row in plain
    ]
    assert [decoded.tokens for decoded in results] == [expected] * 2
    assert results[0].steps == max(map(len, expected)) - 1


def test_mistakes_are_told_in_one_sentence():
    model = small_model("Llama")

    def refused(prompts, degree=1, new_tokens=4, shard=SEQUENCE):
        with pytest.raises(CapslogError) as told:
            on_ranks(degree, lambda ranks: decode_greedily(model, prompts, new_tokens, ranks, shard))
        return str(told.value)

    assert refused([]) == "there is no prompt to decode; give at least one, a list of token numbers"
    assert refused([[1], []]).startswith("prompt 1 is empty; give it a token")
    assert refused([[1, 61]]) == "prompt 0 has token 61, but the model knows 0 to 60"
    assert refused([[1]], new_tokens=0) == "new_tokens is 0; it must be at least 1"
    assert refused([[1] * 125]).startswith("prompt 0 of 125 tokens and 4 new ones are more than the 128 positions")
    assert refused([[1]], shard="head") == "unknown shard 'head'; did you mean 'heads'?"
    assert refused([[1]], 3, shard=HEADS) == (
        "the degree 3 does not divide the 2 key-value heads; choose another number of ranks, or shard='sequence'"
    )


class Counted:
    """A communicator that counts exchanges."""

    def __init__(self, ranks):
        self.ranks, self.rank, self.world_size, self.exchanges = ranks, ranks.rank, ranks.world_size, 0

    def exchange(self, *arguments):
        self.exchanges += 1
        return self.ranks.exchange(*arguments)


@pytest.mark.parametrize("shard", [SEQUENCE, HEADS])
def test_a_token_takes_as_many_exchanges_as_are_reckoned(shard):
    """Each costs a latency. With heads sharding a rank once requested two empty ones per layer, for its own cache."""
    model, prompts = small_model("Llama"), some_prompts(2, 3)
    shape = shape_of(model)

    def exchanges(communicator):
        counted = Counted(communicator)
        decoder = ShardedDecoder(model, counted, shard)
        token = decoder.read(prompts, 2).argmax(-1)
        counted.exchanges = 0
        decoder.step(token)
        return counted.exchanges

    assert on_ranks(2, exchanges) == [shape.layers * len(phases(shape, 2, 2, shard))] * 2
