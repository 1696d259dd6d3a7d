"""Decodes greedily on several ranks, each with a copy or a part of a transformers model that shares its weights."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError, needed
from varuna_capslog.decoding.cache import DealtCache, Wire
from varuna_capslog.decoding.choice import HEADS, SEQUENCE, SHARDS, DecoderShape, refuse_heads
from varuna_capslog.decoding.generation import Prompts, TokenChoice, check_prompts, generation_keys, unpadded
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.model.inference_model import layer_caches
from varuna_capslog.model.layer import TensorPiece
from varuna_capslog.training.layer_state import digest

__all__ = ["DecodedTokens", "ShardedDecoder", "decode_greedily", "rank_model", "shape_of"]


# -- A rank's copy of a transformers model for decoding: new modules with the same weights.
#
# The model's own forward runs. transformers lets a program register an attention function by name; ours calls, with
# queries, keys and values, the function that the caller passes as an argument of the forward. Where heads are divided,
# the copy has the rank's part of the matrices in attention and feed-forward. Two forms of models are known: Llama's
# (`self_attn.q_proj` ..., `mlp.gate_proj` ...) and GPT-2's (`attn.c_attn` ..., `mlp.c_fc` ...).


Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""(layer, q [B, H, S, D], k and v [B, K, S, D], scale) -> [B, H, S, D]."""

_NAME = "capslog_decoding"
_PLENTY = 1 << 40
"""Tokens, more than any attention window."""
_IGNORED_ARGUMENTS = ("position_ids", "cache_position", "use_cache", "is_causal", "output_attentions")
"""Further arguments of an attention function that do not change the attention of a causal decoder."""


@dataclass(frozen=True)
class _Matrix:
    """Matrix that sharding by heads divides. path: in a block. inputs: True: its inputs are divided, and the outputs of
    all ranks are summed. groups: number of equal matrices that it contains one after another, each of them divided.
    """

    path: str
    inputs: bool = False
    groups: int = 1


_FORMS = (
    (
        *(_Matrix(f"self_attn.{name}_proj") for name in "qkv"),
        _Matrix("self_attn.o_proj", inputs=True),
        *(_Matrix(f"mlp.{name}_proj") for name in ("gate", "up")),
        _Matrix("mlp.down_proj", inputs=True),
    ),
    (
        _Matrix("attn.c_attn", groups=3),
        _Matrix("attn.c_proj", inputs=True),
        _Matrix("mlp.c_fc"),
        _Matrix("mlp.c_proj", inputs=True),
    ),
)
"""Matrices in a block of Llama, and in a block of GPT-2."""


def shape_of(model: nn.Module) -> DecoderShape:
    """Return the sizes of a transformers model, which may be on the meta device. Raises CapslogError unless its
    attention depends only on keys and values of all earlier tokens, and its layers have Llama's or GPT-2's form.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "model_type"):
        raise CapslogError(
            f"a {type(model).__name__} is no model of transformers; decoding over ranks takes those of the form of "
            "Llama or GPT-2"
        )
    blocks = _blocks(model)
    if not blocks:
        _refuse(config, "its layers have neither the form of Llama's nor that of GPT-2's")
    if not getattr(model, "_supports_attention_backend", False):
        _refuse(config, "transformers does not let others attend for it")
    for key in ("attn_logit_softcapping", "kv_lora_rank", "add_cross_attention", "is_encoder_decoder"):
        if getattr(config, key, None):
            _refuse(config, f"its config says {key}={getattr(config, key)}")
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        _refuse(config, f"its position codes depend on the longest request (rope_type {kind})")
    output: Any = model.get_output_embeddings()  # type: ignore[operator]
    itemsize = output.weight.element_size()
    kept = set((layer_caches(model, _PLENTY) or {}).values())
    if len(kept) != 1 or min(kept) % (2 * _PLENTY * itemsize):
        _refuse(config, "some of its layers do not keep all tokens")
    (_, first), *_ = blocks
    inner = next(_sizes(part)[0] for spec, part in first if spec.path.startswith("mlp.") and not spec.inputs)
    heads, size = config.num_attention_heads, getattr(config, "head_dim", None)
    size = size or config.hidden_size // heads
    divided = sum(part.weight.numel() for _, parts in blocks for _, part in parts)
    return DecoderShape(
        layers=len(blocks),
        width=config.hidden_size,
        heads=heads,
        kv_heads=min(kept) // (2 * _PLENTY * itemsize) // size,
        head_dim=size,
        inner=inner,
        itemsize=itemsize,
        divided=divided,
        output=output.weight.numel(),
        rest=sum(parameter.numel() for parameter in model.parameters()) - divided - output.weight.numel(),
    )


def rank_model(model: nn.Module, shape: DecoderShape, wire: Wire, shard: str) -> nn.Module:
    """Return a rank's copy of the model, which attends by the argument `capslog_attend` of its forward. The model stays
    unchanged; the copy shares its parameters, except the divided ones.

    Raises:
        CapslogError: transformers is not installed; the degree does not divide heads or columns.
    """
    with needed("decoding over ranks"):
        from transformers import AttentionInterface
    refused = refuse_heads(shape, wire.degree) if shard == HEADS else None
    if refused is not None:
        raise CapslogError(f"{refused}; choose another number of ranks, or shard='sequence'")
    AttentionInterface.register(_NAME, _attend)
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    rank_copy: Any = copy.deepcopy(model, shared)
    rank_copy.config._attn_implementation = _NAME
    if shard == HEADS and wire.degree > 1:
        for block, parts in _blocks(rank_copy):
            for spec, matrix in parts:
                block.set_submodule(spec.path, _divided(spec, matrix, wire))
            attention: Any = getattr(block, "attn", None)
            if attention is not None:
                attention.split_size //= wire.degree
    return rank_copy.eval()


class _SummedOverRanks(nn.Module):
    """Linear layer whose inputs are divided: the outputs of all ranks are summed."""

    def __init__(self, part: nn.Linear, bias: Tensor | None, wire: Wire) -> None:
        super().__init__()
        self.part, self._bias, self._wire = part, bias, wire

    def forward(self, x: Tensor) -> Tensor:
        total = self._wire.sum(self.part(x))
        return total if self._bias is None else total + self._bias


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    capslog_attend: Attend,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention function that transformers calls; returns [B, S, H, D]."""
    unknown = [name for name, value in others.items() if value is not None and name not in _IGNORED_ARGUMENTS]
    if unknown:
        raise CapslogError(
            f"{type(module).__name__} attends with {', '.join(unknown)}, which decoding over ranks does not know; use "
            "transformers' generate"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    return capslog_attend(layer, query, key, value, scale).transpose(1, 2), None


def _blocks(model: nn.Module) -> list[tuple[nn.Module, list[tuple[_Matrix, Any]]]]:
    """Return every block of a known form, with its matrices."""
    blocks = []
    for module in model.modules():
        for form in _FORMS:
            parts = [(spec, _at(module, spec.path)) for spec in form]
            if all(part is not None for _, part in parts):
                blocks.append((module, parts))
    return blocks


def _at(module: nn.Module, path: str) -> nn.Module | None:
    part: Any = module
    for name in path.split("."):
        part = getattr(part, name, None)
    return part if getattr(getattr(part, "weight", None), "ndim", 0) == 2 else None


def _sizes(matrix: Any) -> tuple[int, int]:
    """Return (outputs, inputs) of an nn.Linear, or of transformers' Conv1D, whose weight is transposed."""
    rows, columns = matrix.weight.shape
    return (columns, rows) if hasattr(matrix, "nf") else (rows, columns)


def _divided(spec: _Matrix, matrix: Any, wire: Wire) -> nn.Module:
    size = _sizes(matrix)[1 if spec.inputs else 0]
    group, part = size // spec.groups, size // spec.groups // wire.degree
    firsts = [index * group + wire.rank * part for index in range(spec.groups)]
    ranges = tuple((first, first + part) for first in firsts)
    weight = matrix.weight.detach()
    weight = weight.t() if hasattr(matrix, "nf") else weight
    piece = TensorPiece("weight", size, int(spec.inputs), ranges).of(weight).contiguous()
    bias = None if matrix.bias is None else matrix.bias.detach()
    if spec.inputs:
        return _SummedOverRanks(_linear(piece, None), bias, wire)
    return _linear(piece, None if bias is None else TensorPiece("bias", size, 0, ranges).of(bias))


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def _refuse(config: Any, why: str) -> None:
    raise CapslogError(
        f"decoding a {config.model_type} over ranks is not known: {why}; use transformers' generate on one device"
    )


# -- Greedy decoding on several ranks
#
# "sequence": the cache is divided by positions (`cache`), every rank has all weights, request i is decoded on rank
# i mod N. "heads" (tensor parallelism): heads and columns are divided (`rank_model`); every rank decodes all requests
# with its part, and keeps its heads' keys and values. Prompts are read one by one, so that their lengths may differ.


@dataclass(frozen=True)
class DecodedTokens:
    """Decoded tokens, the same on every rank.

    Attributes:
        tokens: new tokens of each request, in the order of the prompts; the last token is the end-of-sequence token if
            the model produced one.
        sent_bytes: bytes that this rank sent: "check" for digests, "prompt" while prompts were read, "step" in all
            steps after the first token, "tokens" for the tokens themselves.
        cache_bytes: allocated on this rank for keys and values: every request has room for the longest prompt and all
            new tokens.
        steps: number of steps after the first token.
    """

    tokens: list[list[int]]
    sent_bytes: dict[str, int]
    cache_bytes: int
    steps: int


class ShardedDecoder:
    """Decoder of one rank for one batch of prompts.

    Args:
        model: of transformers, in the form of Llama or GPT-2; it stays unchanged.
        communicator: of all ranks that decode.
        shard: "sequence" or "heads".

    Raises:
        CapslogError: an unknown shard or form of model; a number of ranks that does not divide heads or columns.
    """

    def __init__(self, model: nn.Module, communicator: Communicator, shard: str = SEQUENCE) -> None:
        fields.refuse_unknown([shard], SHARDS, "shard")
        self.shape = shape_of(model)
        generation_keys(model)  # raises for unknown settings before any message
        settings = repr((shard, getattr(model, "generation_config", None)))
        self._digests = {"weights": digest(model.state_dict()), "shard or generation config": _hashed(settings)}
        weight = next(model.parameters())
        self._dtype, self._device = weight.dtype, weight.device
        self.wire = Wire(communicator, self._device)
        self._model: Any = rank_model(model, self.shape, self.wire, shard)
        self._dealt = shard == SEQUENCE
        parts = 1 if self._dealt else self.wire.degree
        self._cached = replace(self.shape, heads=self.shape.heads // parts, kv_heads=self.shape.kv_heads // parts)
        self.cache: DealtCache | None = None

    def read(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Tensor:
        """Read the prompts; return logits [own requests, vocabulary] for the first new token of this rank's requests.

        Raises:
            CapslogError: no prompt; a prompt without tokens, with unknown tokens, or too long; another rank has other
                prompts, weights or settings.
        """
        check_prompts(self._model, prompts, new_tokens)
        self._compare({**self._digests, "prompts or new_tokens": _hashed(repr((list(map(list, prompts)), new_tokens)))})
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
        """Decode one more token of every request. tokens: newest token of each of this rank's requests, [own requests].
        Returns the logits of their next tokens, [own requests, vocabulary].
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

    def _compare(self, digests: dict[str, bytes]) -> None:
        """Raise CapslogError where another rank has other digests: its results would belong to other answers."""
        self.wire.phase = "check"
        sent = torch.frombuffer(bytearray(b"".join(digests.values())), dtype=torch.uint8).to(self._device)
        received = self.wire.exchange(
            {peer: [sent] for peer in self.wire.peers}, {peer: [TensorSpec.of(sent)] for peer in self.wire.peers}
        )
        for rank, (theirs,) in received.items():
            for name, mine, other in zip(digests, sent.view(-1, 16), theirs.view(-1, 16), strict=True):
                if not torch.equal(mine, other):
                    raise CapslogError(
                        f"rank {rank} decodes with other {name} than rank {self.wire.rank}; give every rank the same "
                        "arguments, and load one checkpoint (or seed torch alike before the model is made)"
                    )

    @property
    def _vocabulary(self) -> int:
        return int(self._model.get_output_embeddings().weight.shape[0])

    def _run(self, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
        with torch.no_grad():
            made = self._model(
                input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=1, capslog_attend=attend
            )
        return made.logits[:, -1]


def decode_greedily(
    model: nn.Module,
    prompts: Prompts,
    new_tokens: int,
    communicator: Communicator,
    shard: str = SEQUENCE,
    attention_mask: Prompts | None = None,
) -> DecodedTokens:
    """Decode the most likely tokens one after another, as transformers' `generate(do_sample=False)` does for each
    request alone. Call it on every rank with equal arguments.

    Args:
        prompts: token numbers of each request; `generation.unpadded` removes padding.
        new_tokens: largest number of new tokens of each request.

    Raises:
        CapslogError: see `ShardedDecoder`, `ShardedDecoder.read` and `generation`.
        PeerLost: another rank does not answer.
    """
    decoder = ShardedDecoder(model, communicator, shard)
    requests = unpadded(model, prompts, attention_mask)
    logits, steps = decoder.read(requests, new_tokens), 0
    assert decoder.cache is not None
    choice = TokenChoice(model, [requests[request] for request in decoder.cache.own], new_tokens, logits.device)
    made: list[list[int]] = [[] for _ in requests]
    while True:
        tokens = choice.choose(logits)
        for request, token in zip(made, decoder.tokens_of_all(tokens).tolist(), strict=True):
            if not (request and request[-1] in choice.ends):
                request.append(token)
        if steps == new_tokens - 1 or all(request[-1] in choice.ends for request in made):
            break
        # ended requests are decoded further, and the tokens ignored, so that shares and messages keep their sizes
        logits, steps = decoder.step(tokens), steps + 1
    return DecodedTokens(made, dict(decoder.wire.sent_bytes), decoder.cache.held_bytes(), steps)


def _hashed(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
