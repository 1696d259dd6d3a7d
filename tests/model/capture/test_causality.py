"""Masks that follow from sizes alone: causality or a window instead of sequence x sequence, and heads in groups."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from tests.sweeps import crossed
from varuna_capslog.model.capture import causality
from varuna_capslog.model.capture.band import attend_in_band
from varuna_capslog.model.capture.export import export_model
from varuna_capslog.model.chain import Chain

N = 12
MASKS: dict[str, tuple[str, Callable[[], Tensor]]] = {
    "lower triangle": ("causal", lambda: torch.ones(N, N, dtype=torch.bool).tril()),
    "numbers": ("causal", lambda: torch.full((N, N), float("-inf")).triu(1)[None, None]),
    "positions": ("causal", lambda: torch.arange(N)[None, :] <= torch.arange(N)[:, None]),
    "packed": ("causal", lambda: _packed(torch.arange(N))),
    "all": ("full", lambda: torch.zeros(1, 1, N, N)),
    "window": ("window", lambda: torch.ones(N, N, dtype=torch.bool).tril().triu(-4)),
    "window both ways": ("window", lambda: (torch.arange(N)[None, :] - torch.arange(N)[:, None]).abs() <= 3),
    "window of numbers": ("window", lambda: torch.full((N, N), float("-inf")).triu(1) + _far_before(2)),
    "window of other numbers": ("other", lambda: torch.full((N, N), -1.0).triu(1) + _far_before(2)),
    "window with a gap": ("other", lambda: torch.ones(N, N).bool().tril().triu(-4) & (torch.arange(N) != 7)),
    "two sequences": ("other", lambda: _packed(torch.arange(N) % 6)),
    "without itself": ("other", lambda: torch.ones(N, N, dtype=torch.bool).tril(-1) | torch.eye(N)[0].bool()),
    "biased": ("other", lambda: -(torch.arange(N)[:, None] - torch.arange(N)[None, :]).abs().float()),
    "random": ("other", lambda: torch.rand(N, N) > 2.0),
}


def _far_before(window: int) -> Tensor:
    return torch.full((N, N), float("-inf")).tril(-window)


def _packed(positions: Tensor) -> Tensor:
    sequence = (torch.diff(positions, prepend=positions[:1] - 1) != 1).cumsum(-1)
    return (sequence[:, None] == sequence[None, :]) & (torch.arange(N)[None, :] <= torch.arange(N)[:, None])


class Attention(nn.Module):
    def __init__(self, mask: Callable[[], Tensor], heads: int = 2) -> None:
        super().__init__()
        self.mask, self.heads = mask, heads
        self.inner = nn.Linear(4, 4 + 2 * heads)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, 1)).transpose(1, 2) for part in self.inner(x).split([4, *2 * (self.heads,)], -1)
        )
        repeats = 4 // self.heads
        k, v = (
            part[:, :, None].expand(-1, -1, repeats, -1, -1).reshape(x.shape[0], 4, x.shape[1], 1) for part in (k, v)
        )
        return scaled_dot_product_attention(q, k, v, attn_mask=self.mask()) + x.mean(-1)[:, None, :, None]


@pytest.mark.parametrize(("name", "part"), crossed(list(MASKS), [1 << 24, 4]))
def test_kind_of_a_mask_is_that_of_its_values(name: str, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causality, "_PART", part)
    kind, mask = MASKS[name]
    x = torch.randn(2, N, 4)
    model = Attention(mask)
    graph = export_model(model, (x,), {}).graph
    target = attend_in_band if kind == "window" else torch.ops.aten.scaled_dot_product_attention.default
    (node,) = graph.find_nodes(op="call_function", target=target)
    assert node.kwargs.get("is_causal", False) == (kind == "causal")
    has_mask = isinstance(node.kwargs.get("attn_mask", (*node.args, None)[3]), torch.fx.Node)
    assert has_mask == (kind == "other")
    if name == "random":
        return
    largest = max(one.meta["val"].numel() for one in graph.nodes if isinstance(one.meta.get("val"), Tensor))
    assert (largest < 2 * 4 * N * 4) or kind == "other"  # nothing of sequence x sequence is left
    torch.testing.assert_close(Chain.from_module(model, [], (x,)).run({"x": x})["output"], model(x))


def test_of_a_large_mask_as_many_rows_are_looked_at_whatever_its_size() -> None:
    """9,600 tokens of 4 sequences took minutes: every row was computed by itself."""
    for tokens in (9600, 131_072):
        ranges = list(causality._rows(tokens, 4 * tokens * tokens))
        assert len(ranges) < 300
        assert (tokens - 1, tokens) in ranges
        assert len({first % 8 for first, _ in ranges}) == 8, "a mask that repeats every 8 rows is seen as it is"


@pytest.mark.parametrize("changes", ["buffer", "input"])
def test_a_mask_that_may_change_stays(changes: str) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("lower", torch.ones(N, N, dtype=torch.bool).tril())

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return scaled_dot_product_attention(x, x, x, attn_mask=self.lower if changes == "buffer" else mask)

    mask = torch.ones(N, N, dtype=torch.bool).tril()
    graph = export_model(Masked(), (torch.randn(1, 1, N, 4), mask), {}).graph
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default)
    assert isinstance(node.args[3] if len(node.args) > 3 else node.kwargs["attn_mask"], torch.fx.Node)


@pytest.mark.parametrize(("dtype", "window"), crossed([torch.float32, torch.bfloat16], [None, 5]))
def test_a_decoder_keeps_its_bits_and_sends_no_mask(dtype: torch.dtype, window: int | None) -> None:
    """Exported, transformers builds a mask of sequence x sequence and repeats keys and values; running, neither, or the
    former for a window: there bits are equal in every type.
    """
    model, tokens = _decoder(N, window), torch.randint(0, 16, (2, N))
    model.to(dtype)
    chain = Chain.from_module(model, None, {"input_ids": tokens})
    specs = {name: tensor for cut in range(len(chain)) for name, tensor in _crossing(chain, cut, tokens).items()}
    assert all(tensor.numel() <= 2 * N * 32 and tensor.dtype == dtype for tensor in specs.values())
    gradients = []
    for run in (lambda: model(input_ids=tokens).logits, lambda: chain.run({"input_ids": tokens})["logits"]):
        model.zero_grad()
        run().float().square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        if dtype == torch.bfloat16 or window is not None:
            assert torch.equal(gradient, gradients[1][name])
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-5, atol=1e-6)


def test_masks_of_plain_softmax_are_made_where_they_are_read() -> None:
    """Here two kinds of layers read two masks, to which they add products of queries and keys."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "vocab_size": 16, "num_hidden_layers": 3}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, sliding_window=5, use_cache=False))
    tokens = torch.randint(0, 16, (2, N))
    chain = Chain.from_module(model, None, {"input_ids": tokens})
    for cut in range(1, len(chain)):
        assert all(tensor.shape[-2:] != (N, N) for tensor in _crossing(chain, cut, tokens).values())
    assert torch.equal(chain.run({"input_ids": tokens})["logits"], model(input_ids=tokens).logits)


@pytest.mark.parametrize("precision", ["as it is", "autocast"])
def test_what_a_window_saves_grows_linearly(precision: str) -> None:
    """The oracle is what autograd saves, which also hooks around the chain see: the module's grows with the square."""
    saved = []
    for n in (40, 80, 120):
        model, chain, tokens = _of_windows(n)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            runs = (lambda: model(input_ids=tokens)), (lambda: chain.run({"input_ids": tokens}))  # noqa: B023
            saved.append([_saved(run) for run in runs])
    bend = [first - 2 * second + third for first, second, third in zip(*saved, strict=True)]
    assert bend[0] >= 2 * 40 * 40  # of bool, or more
    assert bend[1] == 0


@functools.cache
def _of_windows(n: int) -> tuple[nn.Module, Chain, Tensor]:
    model, tokens = _decoder(n, 16), torch.randint(0, 16, (1, n))
    return model, Chain.from_module(model, None, {"input_ids": tokens}, evaluates=False), tokens


def _saved(run: Callable[[], object]) -> int:
    """Return the bytes of the tensors that autograd saves, each storage once."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(storage.nbytes() for storage in storages.values())


def _decoder(n: int, window: int | None) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 16, "num_hidden_layers": 2, "max_position_embeddings": n}
    torch.manual_seed(0)
    if window is None:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, use_cache=False))
    return transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, sliding_window=window, use_cache=False))


def _crossing(chain: Chain, cut: int, tokens: Tensor) -> dict[str, Tensor]:
    crossing = chain.run_stage(0, cut, {"input_ids": tokens}) if cut else {}
    return {name: tensor for name, tensor in crossing.items() if tensor is not tokens}
