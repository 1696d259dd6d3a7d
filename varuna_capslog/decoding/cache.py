"""Key-value cache whose positions are distributed over ranks, and attention to it, merged from the ranks' results.

Position p of request i is on rank (p + i) mod N, so that the shares stay equal for answers of any length. Request i is
decoded on rank i mod N, its home. In every layer of a step the home ranks send their queries to all ranks, and new keys
and values to the ranks that keep them. Every rank attends to its positions, and returns outputs and log-sum-exps. This
is cache parallelism (thesis, Sec. 4.4), but k, v and s are sent only to ranks that need them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from varuna_capslog.decoding.choice import DecoderShape
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.variants.attention import merged

__all__ = ["DealtCache", "Wire", "attend_to_part"]


# -- Messages between ranks that decode together, and a count of their bytes, from the tensors and not by a formula.
#
# A sum adds the ranks' parts in rank order, so that it has the same bits in every run and on every rank.


_TAGS = 1 << 20


class Wire:
    """Exchange of tensors between ranks. device: of this rank's tensors. sent_bytes: by this rank, for each `phase`."""

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._communicator, self._device = communicator, device
        self.rank, self.degree = communicator.rank, communicator.world_size
        self.sent_bytes: Counter[str] = Counter()
        self.phase = ""
        self._exchanges = 0

    @property
    def peers(self) -> list[int]:
        """All other ranks."""
        return [rank for rank in range(self.degree) if rank != self.rank]

    def exchange(
        self, outgoing: Mapping[int, Sequence[Tensor]], wanted: Mapping[int, Sequence[TensorSpec]]
    ) -> dict[int, list[Tensor]]:
        """Send tensors to the ranks of `outgoing`; return those from the ranks of `wanted`. Skips empty messages."""
        if not outgoing and not wanted:
            return {}
        messages = {peer: _packed(tensors) for peer, tensors in outgoing.items()}
        sizes = {peer: sum(spec.num_bytes for spec in specs) for peer, specs in wanted.items()}
        self.sent_bytes[self.phase] += sum(message.nbytes for message in messages.values())
        self._exchanges += 1
        received = self._communicator.exchange(
            messages,
            {peer: TensorSpec((size,), torch.uint8) for peer, size in sizes.items()},
            self._exchanges % _TAGS,
            self._device,
        )
        return {peer: _unpacked(received[peer], specs) for peer, specs in wanted.items()}

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts, of one shape: each rank adds one slice and sends the sum to all ranks."""
        if self.degree == 1:
            return part
        slices = part.reshape(-1).tensor_split(self.degree)
        slice_spec = TensorSpec.of(slices[self.rank])
        parts = self.exchange(
            {peer: [slices[peer]] for peer in self.peers}, {peer: [slice_spec] for peer in self.peers}
        )
        parts[self.rank] = [slices[self.rank]]
        total = parts[0][0]
        for rank in range(1, self.degree):
            total = total + parts[rank][0]
        sums = self.exchange(
            {peer: [total] for peer in self.peers}, {peer: [TensorSpec.of(slices[peer])] for peer in self.peers}
        )
        sums[self.rank] = [total]
        return torch.cat([sums[rank][0] for rank in range(self.degree)]).view(part.shape)


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    if not tensors:
        return torch.empty(0, dtype=torch.uint8)
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])


def _unpacked(message: Tensor, specs: Sequence[TensorSpec]) -> list[Tensor]:
    parts = message.split([spec.num_bytes for spec in specs])
    # each copy is aligned for its dtype
    return [part.clone().view(spec.dtype).view(spec.shape) for part, spec in zip(parts, specs, strict=True)]


# -- Key-value cache whose positions are distributed over ranks


def attend_to_part(queries: Tensor, keys: Tensor, values: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Attend to a part of the positions. queries: [B, H, D], scaled; keys, values: [B, K, S, D], where K divides H;
    counts: [B], number of valid positions of each request, the first of S. Return outputs [B, H, D] and log-sum-exps
    [B, H] of the logits; 0 and -inf where a request has no position.
    """
    batch, heads, size = queries.shape
    grouped = queries.view(batch, keys.shape[1], -1, size)
    logits = (grouped @ keys.transpose(2, 3)).to(_wide(queries.dtype))
    hidden = torch.arange(keys.shape[2], device=keys.device) >= counts[:, None]
    logits = logits.masked_fill(hidden[:, None, None], -torch.inf)
    sums = logits.logsumexp(-1)
    empty = sums.isneginf()
    weights = (logits - sums.masked_fill(empty, 0)[..., None]).exp()
    return (weights.to(values.dtype) @ values).view(batch, heads, size), sums.view(batch, heads)


class DealtCache:
    """Share of one rank in the keys and values of all requests.

    Args:
        dealt: False (heads are divided): this rank is home to all requests and keeps all their positions.
        lengths: tokens of each request's prompt. room: most tokens of a request, prompt and answer.
    """

    def __init__(self, shape: DecoderShape, wire: Wire, dealt: bool, lengths: Sequence[int], room: int) -> None:
        self._shape, self._wire = shape, wire
        self._rank, self._degree = (wire.rank, wire.degree) if dealt else (0, 1)
        self.lengths = list(lengths)
        self._slots = max(-(-room // self._degree), 1)
        self._prompts: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def own(self) -> list[int]:
        """Requests that are decoded on this rank."""
        return self.homed(self._rank)

    def homed(self, rank: int) -> list[int]:
        """Return the requests that are decoded on a rank."""
        return list(range(rank, len(self.lengths), self._degree))

    def held_bytes(self) -> int:
        """Return the bytes of keys and values, filled or not."""
        return sum(part.nbytes for pair in self._layers.values() for part in pair)

    def read_prompt(self, request: int, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Run causal attention over the prompt of one request of this rank; keep its keys and values until `deal`.
        q: [1, H, S, D]; k, v: [1, K, S, D]. Returns [1, H, S, D].
        """
        self._prompts.setdefault(layer, {})[request] = k[0], v[0]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])

    def deal(self, dtype: torch.dtype, device: torch.device) -> None:
        """Send the positions of all prompts to the ranks that keep them, layer by layer."""
        kv, size, ranks = self._shape.kv_heads, self._shape.head_dim, range(self._degree)
        for layer in range(self._shape.layers):
            read = self._prompts.pop(layer, {})
            outgoing = {
                rank: [self._share(part, request, rank) for request in self.own for part in read[request]]
                for rank in ranks
            }
            wanted = {
                rank: [
                    TensorSpec((kv, self._count(request, self._rank), size), dtype)
                    for request in self.homed(rank)
                    for _ in ("keys", "values")
                ]
                for rank in ranks
            }
            keys = torch.zeros(len(self.lengths), kv, self._slots, size, dtype=dtype, device=device)
            values = torch.zeros_like(keys)
            for rank, parts in self._exchanged(outgoing, wanted).items():
                for request, key, value in zip(self.homed(rank), parts[::2], parts[1::2], strict=True):
                    keys[request, :, : key.shape[1]] = key
                    values[request, :, : value.shape[1]] = value
            self._layers[layer] = keys, values

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attend from the newest token of each of this rank's requests to all its positions.
        q: [own requests, H, 1, D]; k, v: [own requests, K, 1, D]. Returns [own requests, H, 1, D].
        """
        # queries are scaled before they are sent, since ranks without requests do not know the scale
        queries, news = self._send_queries(q[:, :, 0] * scale, k[:, :, 0], v[:, :, 0])
        keys, values = self._layers[layer]
        for requests, key, value in news:
            slots = [self.lengths[request] // self._degree for request in requests]
            keys[requests, :, slots], values[requests, :, slots] = key, value
        counts = [self._count(request, self._rank, 1) for request in range(len(self.lengths))]
        slots_used = max(counts)
        output, sums = attend_to_part(
            queries, keys[:, :, :slots_used], values[:, :, :slots_used], torch.tensor(counts, device=keys.device)
        )
        return self._merged(output, sums)[:, :, None]

    def attend_for_others(self, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        """Take part in the other ranks' `attend`, on a rank that is home to no request."""
        query = torch.empty(0, self._shape.heads, 1, self._shape.head_dim, dtype=dtype, device=device)
        key = torch.empty(0, self._shape.kv_heads, 1, self._shape.head_dim, dtype=dtype, device=device)
        self.attend(layer, query, key, key, 1.0)

    def advance(self) -> None:
        """Count one more token for every request."""
        self.lengths = [length + 1 for length in self.lengths]

    def _first(self, request: int, rank: int) -> int:
        """Return a request's first position on a rank; it has slot 0, and the position N later has the next slot."""
        return (rank - request) % self._degree

    def _share(self, part: Tensor, request: int, rank: int) -> Tensor:
        return part[:, self._first(request, rank) :: self._degree]

    def _count(self, request: int, rank: int, more: int = 0) -> int:
        """Return the number of a request's positions on a rank, if the request gets `more` tokens."""
        return len(range(self._first(request, rank), self.lengths[request] + more, self._degree))

    def _keeper(self, request: int) -> int:
        """Return the rank that keeps the next position of a request."""
        return (self.lengths[request] + request) % self._degree

    def _send_queries(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, list[tuple[list[int], Tensor, Tensor]]]:
        """Return all queries [B, H, D]; by rank, the requests, keys and values [requests, K, D] that are kept here."""
        outgoing, wanted, kept = {}, {}, {}
        for rank in range(self._degree):
            sent = [place for place, request in enumerate(self.own) if self._keeper(request) == rank]
            kept[rank] = [request for request in self.homed(rank) if self._keeper(request) == self._rank]
            pair = TensorSpec((len(kept[rank]), *k.shape[1:]), k.dtype)
            outgoing[rank] = [q, k[sent], v[sent]]
            wanted[rank] = [TensorSpec((len(self.homed(rank)), *q.shape[1:]), q.dtype), pair, pair]
        received = self._exchanged(outgoing, wanted)
        queries = q.new_empty(len(self.lengths), *q.shape[1:])
        for rank, (theirs, _, _) in received.items():
            queries[rank :: self._degree] = theirs
        return queries, [(kept[rank], keys, values) for rank, (_, keys, values) in received.items()]

    def _merged(self, output: Tensor, sums: Tensor) -> Tensor:
        """Exchange results; return attention to all positions for this rank's requests, merged in rank order."""
        outgoing = {rank: [part[rank :: self._degree] for part in (output, sums)] for rank in range(self._degree)}
        specs = [TensorSpec.of(part) for part in outgoing[self._rank]]
        received = self._exchanged(outgoing, dict.fromkeys(outgoing, specs))
        return merged(*zip(*(received[rank] for rank in range(self._degree)), strict=True))

    def _exchanged(
        self, outgoing: dict[int, list[Tensor]], wanted: dict[int, list[TensorSpec]]
    ) -> dict[int, list[Tensor]]:
        """Return the tensors that each rank has for this rank, by rank; this rank's own tensors are not sent."""
        kept = outgoing.pop(self._rank)
        del wanted[self._rank]
        return {**self._wire.exchange(outgoing, wanted), self._rank: kept}


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= 4 else torch.float32
