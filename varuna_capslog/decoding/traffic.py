"""Computes the bytes that ranks send while they decode: as the thesis prints them, corrected, and as we send them.

Source: chapter 4 of the thesis on "cache parallelism" (Sec. 4.4, the two formulas under "Communication"), a key-value
cache that is divided along the sequence, beside tensor parallelism, which divides it by heads. Its symbols: N ranks, B
requests, hidden size E, H heads. Every function gives the bytes that one rank sends for one token of every request and
one layer: the mean over the ranks, and over N tokens one after the other where the token's position matters.
"""

from __future__ import annotations

from dataclasses import dataclass

from varuna_capslog.base import fields

__all__ = [
    "HEADS",
    "SEQUENCE",
    "SHARDS",
    "TOKEN_BYTES",
    "DecoderShape",
    "described_sequence_bytes",
    "heads_bytes",
    "most_positions",
    "phases",
    "printed_heads_bytes",
    "printed_sequence_bytes",
    "refuse_heads",
    "sequence_bytes",
]

TOKEN_BYTES = 8
"""Bytes of a token's number, which ranks exchange where positions are divided."""
SEQUENCE, HEADS = "sequence", "heads"
SHARDS = (SEQUENCE, HEADS)
"""Ways to divide a key-value cache over ranks."""


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder that decide the cost of decoding.

    Attributes:
        layers: layers that attend.
        width: numbers of a hidden state (E).
        heads, kv_heads, head_dim: of queries (H), of keys and values, and numbers of each.
        inner: columns of the feed-forward.
        itemsize: bytes of one number in weights, caches and messages.
        divided: numbers in the matrices of all attention and feed-forward layers, which heads sharding divides.
        output: numbers in the matrix that makes the logits, which every rank has.
        rest: numbers in all other weights, which every rank has.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    itemsize: int
    divided: int = 0
    output: int = 0
    rest: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "head_dim", "inner", "itemsize"):
            fields.whole(getattr(self, name), name, 1)

    @property
    def queries(self) -> int:
        """Numbers in the queries of one token; E where heads and hidden state are equally wide."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Numbers in the keys of one token and layer, and in its values."""
        return self.kv_heads * self.head_dim

    @property
    def sum_itemsize(self) -> int:
        """Bytes of one log-sum-exp: float32 where numbers have fewer bits."""
        return max(4, self.itemsize)


def refuse_heads(shape: DecoderShape, degree: int) -> str | None:
    """Say why heads sharding cannot have this degree; None where it can."""
    sizes = {"heads": shape.heads, "key-value heads": shape.kv_heads, "columns of the feed-forward": shape.inner}
    for name, size in sizes.items():
        if size % degree:
            return f"the degree {degree} does not divide the {size} {name}"
    return None


def printed_sequence_bytes(shape: DecoderShape, batch: int, degree: int) -> float:
    """(N-1)/N 3BE + (N-1) B (E+2H) / 2, as printed: all-gather of q, k, v, all-to-all of (o, m, s)."""
    gathered = (degree - 1) * 3 * batch * shape.width / degree
    return (gathered + (degree - 1) * batch * (shape.width + 2 * shape.heads) / 2) * shape.itemsize


def printed_heads_bytes(shape: DecoderShape, batch: int, degree: int) -> float:
    """4 (N-1) B E, as printed: two all-reduces."""
    return 4 * (degree - 1) * batch * shape.width * shape.itemsize


def described_sequence_bytes(shape: DecoderShape, batch: int, degree: int) -> float:
    """(N-1)/N B (4E+2H): the thesis's description, corrected.

    The all-to-all sends an N-th of each rank's results to every other rank, so that "/ 2" must be "/ N". With fewer
    key-value heads, q, k and v together have Q + 2K numbers instead of 3E. m and s travel in the numbers' own type.
    """
    numbers = shape.queries + 2 * shape.keys + shape.queries + 2 * shape.heads
    return (degree - 1) * batch * numbers * shape.itemsize / degree


def heads_bytes(shape: DecoderShape, batch: int, degree: int) -> float:
    """4 (N-1)/N B E: two all-reduces, corrected, in which a rank sends 2 (N-1)/N of the numbers that are summed.

    A ring sends this much, and so does `decoder`, where every rank sums one slice and sends it to all others.
    """
    return 4 * (degree - 1) * batch * shape.width * shape.itemsize / degree


def sequence_bytes(shape: DecoderShape, batch: int, degree: int) -> float:
    """(N-1)/N B (2Q + 2K/N + H): q goes to all, the new k and v to the one rank that keeps them, (o, log-sum-exp) back.

    Q and K are the numbers in the queries and in the keys of one token: 2E + 2E/N + H where both are E. One
    log-sum-exp carries the same information as the maximum and the sum of the thesis.
    """
    numbers = 2 * shape.queries + 2 * shape.keys / degree
    return (degree - 1) * batch * (numbers * shape.itemsize + shape.heads * shape.sum_itemsize) / degree


def phases(shape: DecoderShape, batch: int, degree: int, shard: str) -> list[float]:
    """Return the bytes of each exchange of one layer, in order, on the rank that sends or receives most in it.

    Computed as the two above, but not the mean: where N does not divide the batch, some ranks have a request more.
    """
    if degree == 1:
        return []
    if shard == HEADS:
        slices = _shares(batch * shape.width, degree)
        # to the rank that sums it, and from there to all: each byte that one rank sends another receives
        most = max(max(sum(slices) - size, (degree - 1) * size) for size in slices)
        return [float(most * shape.itemsize)] * 4
    query, pair = shape.queries * shape.itemsize, 2 * shape.keys * shape.itemsize / degree
    result = query + shape.heads * shape.sum_itemsize
    out = back = 0.0
    for requests in _shares(batch, degree):
        others = batch - requests
        out = max(out, (degree - 1) * requests * (query + pair), others * (query + pair))
        back = max(back, others * result, (degree - 1) * requests * result)
    return [out, back]


def most_positions(batch: int, length: int, degree: int) -> int:
    """Return the positions of `batch` requests of `length` tokens on the rank that keeps most.

    Position p of request i is on rank (p + i) mod N, so that all shares differ by one position at most for each
    request, and hardly at all over many requests.
    """
    rounds, remainder = divmod(length, degree)
    # the remaining positions of request i are on the ranks (rounds * N + i) mod N and after it
    extra = [0] * degree
    for request in range(min(batch, degree)):
        times = len(range(request, batch, degree))
        for place in range(remainder):
            extra[(request + place) % degree] += times
    return batch * rounds + max(extra)


def _shares(count: int, degree: int) -> list[int]:
    """Return the shares of `count` things dealt to `degree` ranks, first ranks first."""
    return [count // degree + (rank < count % degree) for rank in range(degree)]
