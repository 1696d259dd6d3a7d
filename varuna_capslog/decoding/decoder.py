"""Decodes greedily on several ranks, each of which runs this with the same model and the same prompts.

`"sequence"`: the cache is divided by positions (`cache`), every rank has all weights, request i is decoded on rank
i mod N. `"heads"`: heads and columns are divided (`models`), every rank decodes all requests with its part of them and
keeps their keys and values (tensor parallelism). Prompts are read one by one, so that their lengths may differ.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.decoding.cache import DealtCache, Wire
from varuna_capslog.decoding.choice import SEQUENCE, SHARDS
from varuna_capslog.decoding.models import rank_model, shape_of
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.model.chain import TensorSpec

__all__ = ["DecodedTokens", "ShardedDecoder", "decode_greedily"]


@dataclass(frozen=True)
class DecodedTokens:
    """Tokens that the ranks have decoded, on every one of them.

    Attributes:
        tokens: new ones of each request, in the order of the prompts; the last is the end-of-sequence token where the
            model made one.
        sent_bytes: by this rank: `prompt` while prompts were read, `step` in all steps after the first token, `tokens`
            for the tokens themselves.
        cache_bytes: of this rank's keys and values.
        steps: after the first token.
    """

    tokens: list[list[int]]
    sent_bytes: dict[str, int]
    cache_bytes: int
    steps: int


class ShardedDecoder:
    """Decoder of one rank for one batch of prompts.

    Args:
        model: of transformers, of the form of Llama or GPT-2; it stays as it is.
        shard: `"sequence"` or `"heads"`.
        communicator: of all ranks that decode.

    Raises:
        CapslogError: an unknown shard; a model that is not known; a degree that does not divide heads or columns.
    """

    def __init__(self, model: nn.Module, communicator: Communicator, shard: str = SEQUENCE) -> None:
        fields.refuse_unknown([shard], SHARDS, "shard")
        self.shape = shape_of(model)
        weight = next(model.parameters())
        self._dtype, self._device = weight.dtype, weight.device
        self.wire = Wire(communicator, self._device)
        self._model: Any = rank_model(model, self.shape, self.wire, shard)
        self._dealt = shard == SEQUENCE
        parts = 1 if self._dealt else self.wire.degree
        self._cached = replace(self.shape, heads=self.shape.heads // parts, kv_heads=self.shape.kv_heads // parts)
        self.cache: DealtCache | None = None

    def read(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Tensor:
        """Read the prompts into the cache.

        Returns:
            Logits of each own request's first new token, [own requests, vocabulary].

        Raises:
            CapslogError: no prompt, or one without tokens, with tokens beyond the vocabulary, or too long.
        """
        self._check(prompts, new_tokens)
        room = max(map(len, prompts)) + new_tokens
        self.wire.phase = "prompt"
        self.cache = DealtCache(self._cached, self.wire, self._dealt, [len(prompt) for prompt in prompts], room)
        logits = []
        for request in self.cache.own:
            tokens = torch.tensor([list(prompts[request])], device=self._device)
            positions = torch.arange(tokens.shape[1], device=self._device)[None]
            logits.append(self._run(tokens, positions, functools.partial(self.cache.read_prompt, request)))
        self.cache.deal(self._dtype, self._device)
        return torch.cat(logits) if logits else torch.empty(0, self._vocabulary, dtype=self._dtype, device=self._device)

    def step(self, tokens: Tensor) -> Tensor:
        """Decode one token more for every request.

        Args:
            tokens: the last token of each own request, [own requests].

        Returns:
            Logits of the next token, [own requests, vocabulary].
        """
        assert self.cache is not None, "read prompts first"
        self.wire.phase = "step"
        if self.cache.own:
            lengths = [self.cache.lengths[request] for request in self.cache.own]
            positions = torch.tensor(lengths, device=self._device)[:, None]
            logits = self._run(tokens[:, None], positions, self.cache.attend)
        else:
            logits = torch.empty(0, self._vocabulary, dtype=self._dtype, device=self._device)
            for layer in range(self.shape.layers):
                self.cache.attend_for_others(layer, self._dtype, self._device)
        self.cache.advance()
        return logits

    def tokens_of_all(self, tokens: Tensor) -> Tensor:
        """Return the tokens of all requests. tokens: those of this rank's own requests, [own requests]."""
        assert self.cache is not None, "read prompts first"
        if not self._dealt or self.wire.degree == 1:
            return tokens
        self.wire.phase = "tokens"
        homed = {rank: len(self.cache.homed(rank)) for rank in self.wire.peers}
        received = self.wire.exchange(
            {rank: [tokens] for rank in homed},
            {rank: [TensorSpec((count,), tokens.dtype)] for rank, count in homed.items()},
        )
        all_tokens = tokens.new_empty(len(self.cache.lengths))
        all_tokens[self.wire.rank :: self.wire.degree] = tokens
        for rank, (theirs,) in received.items():
            all_tokens[rank :: self.wire.degree] = theirs
        return all_tokens

    @property
    def _vocabulary(self) -> int:
        return int(self._model.get_output_embeddings().weight.shape[0])

    def _run(self, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
        with torch.no_grad():
            made = self._model(
                input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=1, capslog_attend=attend
            )
        return made.logits[:, -1]

    def _check(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        fields.whole(new_tokens, "new_tokens", 1)
        if not prompts:
            raise CapslogError("there is no prompt to decode; give at least one, a list of token numbers")
        vocabulary = int(self._model.get_input_embeddings().weight.shape[0])
        most = getattr(self._model.config, "max_position_embeddings", None)
        for place, prompt in enumerate(prompts):
            if not len(prompt):
                raise CapslogError(f"prompt {place} is empty; give it a token, such as that of the beginning")
            wrong = next((token for token in prompt if not 0 <= token < vocabulary), None)
            if wrong is not None:
                raise CapslogError(f"prompt {place} has token {wrong}, but the model knows 0 to {vocabulary - 1}")
            if most is not None and len(prompt) + new_tokens > most:
                raise CapslogError(
                    f"prompt {place} of {len(prompt)} tokens and {new_tokens} new ones are more than the {most} "
                    "positions of the model; shorten one of them"
                )


def decode_greedily(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    communicator: Communicator,
    shard: str = SEQUENCE,
) -> DecodedTokens:
    """Decode the most likely tokens one after the other, as transformers' `generate(do_sample=False)` does.

    Called on every rank with equal arguments. Of the model's generation config only `eos_token_id` counts.

    Args:
        prompts: token numbers of each request.
        new_tokens: at most, of each request.

    Raises:
        CapslogError: see `ShardedDecoder` and `ShardedDecoder.read`.
        PeerLost: another rank does not answer.
    """
    decoder = ShardedDecoder(model, communicator, shard)
    ends = _end_tokens(model)
    made: list[list[int]] = [[] for _ in prompts]
    logits, steps = decoder.read(prompts, new_tokens), 0
    while True:
        tokens = logits.argmax(-1)
        for request, token in zip(made, decoder.tokens_of_all(tokens).tolist(), strict=True):
            if not (request and request[-1] in ends):
                request.append(token)
        if steps == new_tokens - 1 or all(request[-1] in ends for request in made):
            break
        # a request that has ended goes on unused, so that the ranks' shares and messages keep their sizes
        logits, steps = decoder.step(tokens), steps + 1
    assert decoder.cache is not None
    return DecodedTokens(made, dict(decoder.wire.sent_bytes), decoder.cache.held_bytes(), steps)


def _end_tokens(model: Any) -> set[int]:
    """Return the end tokens of the model's generation config; empty where it has none."""
    token_ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return set() if token_ids is None else {token_ids} if isinstance(token_ids, int) else set(token_ids)
