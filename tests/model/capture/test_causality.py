"""Masks that follow from sizes alone: causality instead of sequence x sequence, and heads in groups."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from varuna_capslog.model.capture import causality
from varuna_capslog.model.capture.export import export_model
from varuna_capslog.model.chain import Chain

N = 12
MASKS: dict[str, tuple[str, Callable[[], Tensor]]] = {
    "lower triangle": ("causal", lambda: torch.ones(N, N, dtype=torch.bool).tril()),
    "numbers": ("causal", lambda: torch.full((N, N), float("-inf")).triu(1)[None, None]),
    "positions": ("causal", lambda: torch.arange(N)[None, :] <= torch.arange(N)[:, None]),
    "packed": ("causal", lambda: _packed(torch.arange(N))),
    "all": ("full", lambda: torch.zeros(1, 1, N, N)),
    "window": ("other", lambda: torch.ones(N, N, dtype=torch.bool).tril().triu(-4)),
    "two sequences": ("other", lambda: _packed(torch.arange(N) % 6)),
    "without itself": ("other", lambda: torch.ones(N, N, dtype=torch.bool).tril(-1) | torch.eye(N)[0].bool()),
    "biased": ("other", lambda: -(torch.arange(N)[:, None] - torch.arange(N)[None, :]).abs().float()),
    "random": ("other", lambda: torch.rand(N, N) > 2.0),
}


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


@pytest.mark.parametrize("part", [1 << 24, 4], ids=["whole", "row by row"])
@pytest.mark.parametrize("name", MASKS)
def test_kind_of_a_mask_is_that_of_its_values(name: str, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causality, "_PART", part)
    kind, mask = MASKS[name]
    x = torch.randn(2, N, 4)
    model = Attention(mask)
    graph = export_model(model, (x,), {}).graph
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default)
    assert node.kwargs.get("is_causal", False) == (kind == "causal")
    has_mask = isinstance(node.kwargs.get("attn_mask", (*node.args, None, None)[3]), torch.fx.Node)
    assert has_mask == (kind == "other")
    if name == "random":
        return
    largest = max(one.meta["val"].numel() for one in graph.nodes if isinstance(one.meta.get("val"), Tensor))
    assert (largest < 2 * 4 * N * 4) or kind == "other"  # nothing of sequence x sequence is left
    torch.testing.assert_close(Chain.from_module(model, [], (x,)).run({"x": x})["output"], model(x))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_keeps_its_bits_and_sends_no_mask(dtype: torch.dtype) -> None:
    """Exported, transformers builds a mask of sequence x sequence and repeats keys and values; running, neither."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=16, num_hidden_layers=2, use_cache=False)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(dtype)
    tokens = torch.randint(0, 16, (2, N))
    chain = Chain.from_module(model, None, {"input_ids": tokens})
    specs = {name: tensor for cut in range(len(chain)) for name, tensor in _crossing(chain, cut, tokens).items()}
    assert all(tensor.numel() <= 2 * N * 32 and tensor.dtype == dtype for tensor in specs.values())
    gradients = []
    for run in (lambda: model(input_ids=tokens).logits, lambda: chain.run({"input_ids": tokens})["logits"]):
        model.zero_grad()
        run().float().square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        if dtype == torch.bfloat16:
            assert torch.equal(gradient, gradients[1][name])
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-5, atol=1e-6)


def _crossing(chain: Chain, cut: int, tokens: Tensor) -> dict[str, Tensor]:
    crossing = chain.run_stage(0, cut, {"input_ids": tokens}) if cut else {}
    return {name: tensor for name, tensor in crossing.items() if tensor is not tokens}
