"""Layers of captured models, split into parts, compute what the full layers compute; an unsupported operation is
named.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.torch_version import TorchVersion

from tests.model.splitting.test_torch_layers import compared
from tests.sweeps import crossed
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture import OneOf, Varying
from varuna_capslog.model.chain import Chain, Layer
from varuna_capslog.model.splitting.chains import split_chain
from varuna_capslog.variants.attention import AttentionCore
from varuna_capslog.variants.registry import known_variants

transformers = pytest.importorskip("transformers")

PARTS = ["layer.before", "layer.attention.0", "layer.attention.1", "layer.sum1"]
PARTS += ["layer.feed_forward.0", "layer.feed_forward.1", "layer.sum2"]
"""Of a layer that is normalised before."""


CUTS = {
    "gpt2": ["wte", "h.0", "ln_f"],
    "llama": ["embed_tokens", "layers.0", "norm"],
    "bert": ["embeddings", "encoder.layer.0"],
}


@functools.cache
def captured(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the last layer of a small model and its inputs, with padding; Llama has 8 key-value heads for 16."""
    sizes: dict[str, Any] = {"vocab_size": 16, "use_cache": False, "attn_implementation": "eager"}
    like = {"num_hidden_layers": 1, "num_attention_heads": 16, "hidden_size": 32, "intermediate_size": 16}
    torch.manual_seed(0)
    model: Any
    if kind == "gpt2":
        gpt2 = {"n_layer": 1, "n_embd": 32, "n_head": 8, "n_positions": 8, "bos_token_id": 0, "eos_token_id": 0}
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        model = transformers.GPT2Model(transformers.GPT2Config(**gpt2, **rates, **sizes))
    elif kind == "bert":
        rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        model = transformers.BertModel(transformers.BertConfig(**like, **rates, **sizes), add_pooling_layer=False)
    else:
        sizes["attn_implementation"] = "sdpa"  # eagerly, and in its norms, Llama computes in float32 on purpose
        model = transformers.LlamaModel(transformers.LlamaConfig(num_key_value_heads=8, **like, **sizes))
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(model.layers[0], name, nn.RMSNorm(32, 1e-6))
    ids, mask = torch.randint(0, 16, (2, 5)), (torch.arange(5) < torch.tensor([[5], [3]])).long()
    example = {"input_ids": ids, "attention_mask": mask}
    chain = Chain.from_module(model.double(), CUTS[kind], example)
    number = next(number for number, layer in enumerate(chain.layers) if layer.name == CUTS[kind][1])
    values: dict[str, Tensor] = dict(example)
    with torch.no_grad():
        for layer in chain.layers[:number]:
            values |= layer(values)
    read = [values[name] for name in chain.layers[number].reads]
    return chain.layers[number].module, {"x": read[0]} | {
        f"value_{index}": tensor for index, tensor in enumerate(read) if index
    }


def chain_of(module: nn.Module, reads: Iterable[str]) -> Chain:
    return Chain([Layer("layer", module, tuple(reads), ("out",))], tuple(reads), ("out",))


def skip_where_bert_is_refused(kind: str) -> None:
    if kind == "bert" and TorchVersion(torch.__version__) < "2.12":
        pytest.skip("the export of torch 2.11 writes numbers of an eager BERT in place, so that it is not split")


@pytest.mark.parametrize(("kind", "degree"), crossed(["gpt2", "llama", "bert"], [2, 4, 8]))
def test_layers_of_transformers_are_exact_in_float64(kind: str, degree: int) -> None:
    skip_where_bert_is_refused(kind)
    module, inputs = captured(kind)
    names = compared(copy.deepcopy(module), inputs, f"tensor-{degree}")
    if degree == 2:
        assert names == (PARTS if kind != "bert" else PARTS[1:])
    assert len(names) == 2 * degree + (3 if kind != "bert" else 2)


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_variants_find_the_attention_of_a_part(kind: str) -> None:
    skip_where_bert_is_refused(kind)
    module, inputs = captured(kind)
    chain = split_chain(chain_of(copy.deepcopy(module), inputs), {"layer": "tensor-2"}, "close")
    plain = chain.run(inputs)["out"]
    for layer in chain.layers:
        changed = known_variants()["sdpa"].rewrite(layer.module)
        assert changed == (1 if ".attention." in layer.name else None)
    assert sum(isinstance(part, AttentionCore) for layer in chain.layers for part in layer.module.modules()) == 2
    assert float((chain.run(inputs)["out"] - plain).detach().abs().max()) < 1e-12


def test_parts_refuse_sizes_that_were_not_captured() -> None:
    module, inputs = captured("gpt2")
    for layer in split_chain(chain_of(copy.deepcopy(module), inputs), {"layer": "tensor-2"}, "close").layers:
        if "x" in layer.reads:
            values = dict.fromkeys(layer.reads, inputs["x"][:1])
            with pytest.raises(
                CapslogError, match=r"layer 'h.0' was captured for .* of shape \[2, 5, 32\] but got \[1, 5"
            ):
                layer(values)


class Fused(nn.Module):
    """Queries, keys and values of one map, fewer keys than queries, numbers for each head, and gates.

    qkv: True if the three are a dimension of the map's result; else they are slices of it.
    """

    def __init__(self, qkv: bool) -> None:
        super().__init__()
        self.qkv, self.keys = qkv, 4 if qkv else 2
        self.into = nn.Linear(16, 16 + 2 * 4 * self.keys)
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("signs", torch.tensor([1.0, -1, 1, 1]).view(4, 1, 1), persistent=False)
        self.loud = nn.Parameter(torch.linspace(0.5, 2, 4).view(4, 1, 1))
        self.out, self.norm = nn.Linear(16, 16, bias=False), nn.LayerNorm(4)
        self.gates, self.down = nn.Linear(16, 24), nn.Linear(12, 16)

    def forward(self, x: Tensor, per_head: Tensor) -> Tensor:
        projected, keys = self.into(x), 4 * self.keys
        if self.qkv:
            q, k, v = projected.view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            parts = projected[..., :16], projected[..., 16 : 16 + keys], projected[..., 16 + keys :]
            q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in parts)
            k, v = (heads[:, :, None].expand(-1, -1, 2, -1, -1).reshape(q.shape) for heads in (k, v))
        q = torch.stack([self.norm(q)[..., :2], self.norm(q)[..., 2:]], -1).flatten(-2) * self.loud * self.signs
        logits = (self.scale * (q @ k.transpose(-1, -2)) + per_head).softmax(-1)
        attended = (logits @ v).transpose(1, 2).mT if self.qkv else (logits @ v).transpose(1, 2)
        x = x + self.out(attended.reshape(x.shape))  # with mT the shares of a row are not adjacent
        gate, up = self.gates(x).chunk(2, -1)
        return (x + self.down(F.silu(gate) * up)).transpose(0, 1)


def layer_of(model: nn.Module, *example: Any) -> nn.Module:
    (layer,) = Chain.from_module(model, ["into"], example).layers
    return layer.module


@pytest.mark.parametrize("qkv", [True, False])
def test_fused_maps_and_tensors_of_every_head_are_shared_out(qkv: bool) -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(2, 3, 16).double(), "memory": torch.randn(4, 3, 3).double()}
    compared(layer_of(Fused(qkv).double(), *inputs.values()), inputs)


def test_sizes_that_may_change_stay_open() -> None:
    """The numbers of rows are even; the layer was captured for 4."""
    model = Between(lambda x: x.view(*x.shape[:2], 2, 4).mT.reshape(x.shape) if x.shape[1] % 2 == 0 else x).double()
    module = layer_of(model, Varying(torch.randn(2, 4, 8).double(), [1]))
    assert module.guard.conditions  # type: ignore[union-attr]
    for rows in (2, 6):
        compared(copy.deepcopy(module), {"x": torch.randn(2, rows, 8).double()})


class Between(nn.Module):
    """A function between two linear maps."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.function(self.into(x)))


class Apart(Between):
    """Between with its own type for the function."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        with torch.autocast("cpu", enabled=False):
            x = self.function(x)
        return self.out(x)


class Whole(nn.Module):
    """A layer that calls a module, into which the split must follow."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.into = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.into(x)


def between(function: Callable[[Tensor], Tensor], kind: type[Between] = Between) -> Callable[[], nn.Module]:
    return lambda: layer_of(kind(function), torch.randn(2, 2, 8))


def inside(function: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        inner = Between(F.gelu)
        inner.function = functools.partial(function, inner)
        return layer_of(Whole(inner), torch.randn(2, 2, 8))

    return build


def tied() -> nn.Module:
    model = Between(F.gelu)
    model.out.weight = model.into.weight
    return layer_of(model, torch.randn(2, 2, 8))


def two_sizes() -> nn.Module:
    some = OneOf([(torch.randn(2, rows, 8),) for rows in (2, 3)])
    return Chain.from_module(Between(lambda x: x + torch.zeros(x.shape[1], 8)), ["into"], some).layers[-1].module


@pytest.mark.parametrize(
    ("build", "splits", "sentence"),
    [
        (
            between(lambda x: x.cumsum(1)),
            "tensor-2",
            r"'cumsum' .* what 'into' makes, but it is not known",
        ),
        (between(lambda x: x.softmax(-1)), "tensor-2", r"'softmax' .* works across them; leave the layer whole"),
        (between(lambda x: x.max(-1, keepdim=True)[0] + x), "tensor-2", r"operator 'max' .* works across them"),
        (between(lambda x: F.layer_norm(x, (8,))), "tensor-2", r"operator 'layer_norm' .* is not known"),
        (between(lambda x: x.view(2, 2, 2, 4).reshape(2, 2, 8)), "tensor-4", r"its 2 heads of 'into' cannot be shared"),
        (between(lambda x: torch.cat([x, x[:1]]).view(4, 12).reshape(6, 8)), "tensor-2", r"'view' .* which mixes them"),
        (between(lambda x: (x @ x.mT) @ x), "tensor-2", r"'matmul' .* its operands are shared out in different ways"),
        (between(lambda x: x.relu_()), "tensor-2", r"'relu_' .* works in place; make it work out of place"),
        (
            between(F.gelu),
            "tensor-3",
            r"its 8 columns of 'into' cannot be shared out equally .*; take a number",
        ),
        (between(F.gelu), "sequence-2", r"its positions cannot be shared out; take tensor-2 for it"),
        (
            inside(lambda module, x: x * 2 if module.training else x),
            "tensor-2",
            r"does something else in eval mode",
        ),
        (
            inside(lambda module, x: x / x.size(-1)),
            "tensor-2",
            r"'into.into' makes, but it reads the size of a share",
        ),
        (between(F.gelu, Apart), "tensor-2", r"it has a gradient mode or an autocast of its own"),
        (tied, "tensor-2", r"it uses 'out.weight' twice, and shares it out in two ways; leave the layer whole"),
        (two_sizes, "tensor-2", r"has a graph for each of several sizes; capture the model for one of them"),
    ],
)
def test_what_cannot_be_followed_is_named(build: Callable[[], nn.Module], splits: str, sentence: str) -> None:
    with pytest.raises(CapslogError, match=f"layer 'layer' cannot be split by {splits}: .*{sentence}"):
        split_chain(chain_of(build(), ["x"]), {"layer": splits}, "close")
