"""Chunked attention compared with eager attention: outputs, gradients, dropout, and tensors saved for the backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from varuna_capslog.variants.attention import (
    AttentionCore,
    ChunkedAttention,
    EagerAttention,
    SdpaAttention,
    SdpaEfficientAttention,
    SdpaFlashAttention,
    SdpaMathAttention,
    SplitKeysAttention,
    merged,
    put_in,
)


def inputs(queries: int, keys: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, queries, 4), (2, 3, keys, 4), (2, 3, keys, 5)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def padding_of(keys: int) -> Tensor:
    return torch.arange(keys) >= torch.tensor([[keys], [1]])


def results(core: AttentionCore, qkv: list[Tensor], padding: Tensor | None) -> list[Tensor]:
    out = core(*qkv, padding)
    upper = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad(out, qkv, upper)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("size", [1, 3, 7, 20])
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (7, 4), (1, 9)])
def test_chunks_are_exact_in_float64(queries: int, keys: int, size: int, padded: bool) -> None:
    padding = padding_of(keys) if padded else None
    eager = results(EagerAttention(), inputs(queries, keys), padding)
    chunked = results(ChunkedAttention(queries=size), inputs(queries, keys), padding)
    for ours, expected in zip(chunked, eager, strict=True):
        assert (ours - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 20])
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (7, 4), (1, 9)])
def test_chunks_of_keys_are_merged_exactly(queries: int, keys: int, size: int, padded: bool) -> None:
    """In the second sample padding hides all keys but the first, so whole chunks of keys are hidden."""
    padding = padding_of(keys) if padded else None
    eager = results(EagerAttention(), inputs(queries, keys), padding)
    split = results(SplitKeysAttention(queries=3, keys=size), inputs(queries, keys), padding)
    for ours, expected in zip(split, eager, strict=True):
        assert (ours - expected).abs().max() <= 1e-12


def test_keys_that_are_hidden_before_the_first_that_is_seen_count_nothing() -> None:
    hidden = torch.arange(9)[None] < torch.tensor([[5], [0]])
    eager, split = (
        results(core, inputs(4, 9), hidden) for core in (EagerAttention(), SplitKeysAttention(queries=2, keys=2))
    )
    for ours, expected in zip(split, eager, strict=True):
        assert (ours - expected).abs().max() <= 1e-12


CORES = [EagerAttention(), SdpaAttention(), ChunkedAttention(queries=2), SplitKeysAttention(queries=3, keys=2)]
BLOCKS = [3, 0, 2, 4]
SHOWN = torch.tensor([[9], [2]])
"""Number of visible keys of each sample; of the second sample only the first block is visible."""


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize(("queries", "loud", "most"), [(5, 1.0, 1e-12), (0, 1.0, 1e-12), (5, 1e4, 1e-8)])
def test_blocks_of_keys_are_merged_exactly(core: AttentionCore, queries: int, loud: float, most: float) -> None:
    """Empty and hidden blocks add nothing. For gradients of logits of 1e4 see `test_large_scores_are_exact_too`."""
    padding = torch.arange(9) >= SHOWN

    def results_of(way: Any) -> list[Tensor]:
        q, k, v = inputs(queries, 9)
        leaves = [(q.detach() * loud).requires_grad_(), k, v]
        out = way(*leaves)
        return [out, *torch.autograd.grad(out, leaves, torch.linspace(-1, 1, out.numel(), dtype=q.dtype).view_as(out))]

    def in_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        blocks = zip(k.split(BLOCKS, 2), v.split(BLOCKS, 2), padding.split(BLOCKS, 1), strict=True)
        block_results = [core.of_block(q, *block) for block in blocks]
        assert all(seen[1].max() == -float("inf") for _, seen in block_results[1:] if queries)
        assert all(not out[1].any() for out, _ in block_results[1:])
        return merged(*zip(*block_results, strict=True))

    eager = results_of(lambda q, k, v: EagerAttention()(q, k, v, padding))
    for ours, expected in zip(results_of(in_blocks), eager, strict=True):
        assert torch.isfinite(ours).all()
        torch.testing.assert_close(ours, expected, atol=most, rtol=1e-12)


@pytest.mark.parametrize("core", [EagerAttention(0.4), SdpaAttention(0.4), ChunkedAttention(0.4, 2, 2)])
def test_the_log_sum_exp_of_a_block_has_a_gradient(core: AttentionCore) -> None:
    def seeded(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        return core.of_block(*qkv, torch.arange(4) >= torch.tensor([[4], [3]]))

    qkv = inputs(5, 4)
    assert torch.autograd.gradcheck(seeded, qkv)
    q, k, _ = qkv
    logits = (q @ k.transpose(2, 3) / 2).masked_fill(torch.arange(4) >= torch.tensor([4, 3]).view(2, 1, 1, 1), -1e300)
    torch.testing.assert_close(seeded(*qkv)[1], logits.logsumexp(-1), atol=1e-12, rtol=1e-12)


def test_one_map_of_an_eager_block_is_kept() -> None:
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: sizes.append(tensor.numel()) or tensor, lambda tensor: tensor
    ):
        EagerAttention().of_block(*inputs(64, 64), padding_of(64))
    maps = [size for size in sizes if size >= 2 * 3 * 64 * 64]
    assert len(maps) == 2  # one tensor; the softmax and the product each save a reference to it


@pytest.mark.parametrize(
    ("core", "most"), [(ChunkedAttention(queries=4), 1e-12), (SplitKeysAttention(queries=4, keys=2), 1e-8)]
)
def test_large_scores_are_exact_too(core: AttentionCore, most: float) -> None:
    """With split keys the tolerance is 1e-8: gradients are multiplied by queries of 1e4, exact to 1e-12 of these."""
    q, k, v = (tensor.detach() for tensor in inputs(6, 6))
    qkv = [(q * 1e4).requires_grad_(), k.requires_grad_(), v.requires_grad_()]
    for ours, expected in zip(results(core, qkv, None), results(EagerAttention(), qkv, None), strict=True):
        torch.testing.assert_close(ours, expected, atol=most, rtol=1e-12)


def test_logits_get_what_is_added_in_every_shape_and_one_that_takes_a_gradient_is_refused() -> None:
    for shape in ((2, 1, 7, 9), (1, 1, 7, 9), (1, 3, 1, 9), (2, 3, 7, 1)):
        bias, all_results = torch.randn(shape, dtype=torch.float64), []
        for core in (EagerAttention(), SdpaAttention(), ChunkedAttention(queries=2), SplitKeysAttention(0.0, 2, 4)):
            qkv = inputs(7, 9)
            out = core.attend(*qkv, bias, 0.3)
            all_results.append([out, *torch.autograd.grad(out.square().sum(), qkv)])
        for core_results in all_results[1:]:
            for ours, expected in zip(core_results, all_results[0], strict=True):
                assert (ours - expected).abs().max() <= 1e-12
    with pytest.raises(RuntimeError, match="no gradient of what is added to the logits"):
        ChunkedAttention().attend(*inputs(7, 9), torch.zeros(1, 1, 7, 9, requires_grad=True), 1.0)


@pytest.mark.parametrize("keys", [None, 3])
def test_the_backward_drops_the_entries_that_the_forward_dropped(keys: int | None) -> None:
    core = ChunkedAttention(0.4, queries=2, keys=keys)

    def seeded(*qkv: Tensor) -> Tensor:
        torch.manual_seed(3)
        return core(*qkv, padding_of(4))

    assert torch.autograd.gradcheck(seeded, inputs(5, 4))
    torch.manual_seed(7)
    before = torch.rand(1)
    torch.manual_seed(7)
    out = seeded(*inputs(5, 4)).sum()
    torch.manual_seed(7)
    out.backward()  # draws the same dropout entries again and restores the random state
    assert torch.equal(torch.rand(1), before)


def test_dropout_keeps_the_mean_and_ends_in_evaluation() -> None:
    q, k, v = (tensor.detach().float()[:1].expand(3000, -1, -1, -1) for tensor in inputs(5, 4))
    core = ChunkedAttention(0.5, queries=2)
    expected = EagerAttention().eval()(q[:1], k[:1], v[:1])
    torch.manual_seed(0)
    noisy = core(q, k, v)
    assert noisy.std(0).min() > 0.01
    torch.testing.assert_close(noisy.mean(0), expected[0], atol=0.1, rtol=0)
    torch.testing.assert_close(core.eval()(q[:1], k[:1], v[:1]), expected)


@pytest.mark.parametrize(("core", "kept"), [(EagerAttention(), True), (ChunkedAttention(queries=8), False)])
def test_no_map_is_kept_for_the_backward(core: AttentionCore, kept: bool) -> None:
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    qkv = inputs(64, 64)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        core(*qkv)
    assert (max(sizes) >= 2 * 3 * 64 * 64) == kept


class _Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operator returns."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.found = max(self.found, tensor.numel())
        return result


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_forward_and_backward_compute_one_chunk_at_a_time(rate: float) -> None:
    with _Largest() as largest:
        results(ChunkedAttention(rate, queries=8), inputs(64, 64), padding_of(64))
    assert largest.found == 2 * 3 * 8 * 64


def test_halves_are_as_near_as_the_eager_way() -> None:
    exact = results(EagerAttention(), inputs(9, 9), None)
    for core in (EagerAttention(), ChunkedAttention(queries=4)):
        rounded = results(core, inputs(9, 9, torch.bfloat16), None)
        for ours, expected in zip(rounded, exact, strict=True):
            torch.testing.assert_close(ours.double(), expected, atol=0.05, rtol=0.05)


def test_a_replaced_core_keeps_rate_and_mode() -> None:
    layer = nn.Sequential(nn.Linear(2, 2), nn.Sequential(EagerAttention(0.25), SdpaAttention(0.5))).eval()
    assert put_in(layer, ChunkedAttention) == 2
    assert [(type(core), core.rate, core.training) for core in layer[1]] == [  # type: ignore[union-attr]
        (ChunkedAttention, 0.25, False),
        (ChunkedAttention, 0.5, False),
    ]
    assert put_in(layer, ChunkedAttention) == 0
    assert put_in(nn.Linear(2, 2), ChunkedAttention) is None


def test_each_kind_of_sdpa_has_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash, memory-efficient and math kernels; every kind may fall back to math."""
    real, allowed, seen = F.scaled_dot_product_attention, torch.backends.cuda, list[tuple[bool, bool, bool]]()

    def noting(*arguments: Tensor, **keywords: Any) -> Tensor:
        seen.append((allowed.flash_sdp_enabled(), allowed.mem_efficient_sdp_enabled(), allowed.math_sdp_enabled()))
        return real(*arguments, **keywords)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    for kind in (SdpaMathAttention, SdpaEfficientAttention, SdpaFlashAttention, SdpaAttention):
        torch.testing.assert_close(kind()(*inputs(4, 9)), EagerAttention()(*inputs(4, 9)), atol=1e-12, rtol=1e-12)
    assert seen == [(False, False, True), (False, True, True), (True, False, True), (True, True, True)]
