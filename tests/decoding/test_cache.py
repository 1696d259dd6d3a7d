"""Attention in parts, merged, against attention to all positions at once, in float64."""

from __future__ import annotations

import pytest
import torch

from varuna_capslog.decoding.cache import attend_to_part
from varuna_capslog.variants.attention import merged


def whole(queries, keys, values, counts):
    """softmax(q k^T) v of each request by itself, with no part, mask or log-sum-exp."""
    outputs = []
    for q, k, v, count in zip(queries, keys, values, counts, strict=True):
        group = q.shape[0] // k.shape[0]
        rows = []
        for head, row in enumerate(q):
            logits = k[head // group, :count] @ row
            weights = (logits - logits.max()).exp()
            rows.append((weights / weights.sum()) @ v[head // group, :count])
        outputs.append(torch.stack(rows))
    return torch.stack(outputs)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [1.0, 1e4], ids=["small logits", "logits of 1e4"])
def test_parts_are_the_whole(parts, size):
    """Requests of 1 to 11 positions in up to 7 parts: some parts have no position of a request, one has none at all."""
    draw = torch.Generator().manual_seed(parts)
    counts = torch.tensor([1, 4, 11, 6])
    q = torch.randn(4, 6, 8, generator=draw, dtype=torch.float64) * size
    k, v = (torch.randn(4, 2, 11, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    logits = torch.einsum("bhd,bksd->bhks", q, k)
    assert size == 1 or logits.abs().max() > 1e4
    outputs, sums = [], []
    for part in range(parts):
        part_counts = torch.tensor([len(range(part, int(count), parts)) for count in counts])
        output, log_sums = attend_to_part(q, k[:, :, part::parts], v[:, :, part::parts], part_counts)
        assert bool(((log_sums == -torch.inf) == (part_counts == 0)[:, None]).all())
        outputs.append(output)
        sums.append(log_sums)
    nothing = attend_to_part(q, k[:, :, :0], v[:, :, :0], torch.zeros(4, dtype=torch.int64))
    together = merged([nothing[0], *outputs], [nothing[1], *sums])
    # a logit of 1e4 has an error of 1e-12 itself
    torch.testing.assert_close(together, whole(q, k, v, counts), rtol=0, atol=1e-12 * max(1, size / 1e3))


def test_positions_beyond_the_count_do_not_matter():
    q = torch.randn(2, 2, 4, dtype=torch.float64)
    k, v = (torch.randn(2, 2, 5, 4, dtype=torch.float64) for _ in range(2))
    counts = torch.tensor([3, 5])
    plain = attend_to_part(q, k, v, counts)
    k[0, :, 3:], v[0, :, 3:] = 1e3, 1e3
    changed = attend_to_part(q, k, v, counts)
    assert torch.equal(plain[0], changed[0])
    assert torch.equal(plain[1], changed[1])


def test_log_sums_of_16_bit_numbers_are_float32():
    q, k = torch.randn(1, 2, 4, dtype=torch.bfloat16), torch.randn(1, 2, 3, 4, dtype=torch.bfloat16)
    output, sums = attend_to_part(q, k, k, torch.tensor([3]))
    assert (output.dtype, sums.dtype) == (torch.bfloat16, torch.float32)
    assert merged([output, output], [sums, sums]).dtype == torch.bfloat16
