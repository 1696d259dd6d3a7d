"""Fused kernels of recurrences: one operator of a graph, whatever the length; the module's own bits when it runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture import capture_layers
from varuna_capslog.model.capture.kernels import as_fused
from varuna_capslog.model.capture.text import from_text, to_text
from varuna_capslog.model.chain import Chain

transformers = pytest.importorskip("transformers")
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 16,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "use_cache": False,
}


def _linear_attention() -> nn.Module:
    own = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "num_experts": 2}
    own |= {"linear_value_head_dim": 8, "shared_expert_intermediate_size": 16, "num_hidden_layers": 2}
    kinds = ["linear_attention", "full_attention"]
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**_SIZES, **own, layer_types=kinds))


def _state_space() -> nn.Module:
    own = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "n_routed_experts": 2}
    own |= {"layers_block_type": ["mamba", "attention"], "chunk_size": 64}
    return transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**_SIZES, **own))


MODELS = {"linear attention": _linear_attention, "state space": _state_space}


@pytest.mark.parametrize("kind", MODELS)
def test_a_captured_recurrence_has_the_bits_of_the_module(kind: str) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]()
    tokens = torch.randint(0, 16, (2, 130))  # three chunks, the last one filled up
    captured = capture_layers(model, None, {"input_ids": tokens})
    chain = Chain(*from_text(*to_text(captured, model), model))
    gradients = []
    for run in (lambda: model(input_ids=tokens).logits, lambda: chain.run({"input_ids": tokens})["logits"]):
        model.zero_grad()
        logits = run()
        logits.square().mean().backward()
        gradients.append({name: part.grad for name, part in model.named_parameters() if part.grad is not None})
        gradients[-1]["logits"] = logits
    assert gradients[0].keys() == gradients[1].keys()
    assert [name for name in gradients[0] if not torch.equal(gradients[0][name], gradients[1][name])] == []


def test_a_graph_does_not_grow_with_the_sequence() -> None:
    model = _linear_attention()
    lengths = []
    for n in (64, 320):
        layers = capture_layers(model, None, {"input_ids": torch.zeros(1, n, dtype=torch.long)}, evaluates=False)[0]
        lengths.append([len(layer.module.graph.nodes) for layer in layers if isinstance(layer.module, fx.GraphModule)])
    assert lengths[0] == lengths[1]


def test_a_fused_kernel_keeps_and_computes_what_its_package_says() -> None:
    """By hand, of what `chunk_gated_delta_rule` of flash-linear-attention saves: normalised queries and keys with their
    norms, values, the decay summed in float32, beta, and a matrix of a chunk for each position and head.
    """
    tokens, key_heads, heads, keys, values = 256, 2, 4, 16, 32
    batch = 3
    sizes = {"query": (key_heads, keys), "key": (key_heads, keys), "value": (heads, values), "g": (heads,)}
    sizes["beta"] = (heads,)
    names = list(sizes)
    places: dict[str, Any] = {name: {"tensor": place} for place, name in enumerate(names)}
    call = {"args": [], "kwargs": places | {"use_qk_l2norm_in_kernel": True}}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[id(tensor.untyped_storage())] = tensor
        return tensor

    calls: list[Any] = []
    with FakeTensorMode(), as_fused(), _Record(calls), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        tensors = [torch.empty(batch, tokens, *sizes[name], dtype=torch.bfloat16, requires_grad=True) for name in names]
        result = torch.ops.capslog.kernel_call(tensors, f"{_MODELLING}:torch_chunk_gated_delta_rule", json.dumps(call))
        result.sum().backward()
    assert result.shape == (batch, tokens, heads, values)
    assert [tensor.grad.shape for tensor in tensors] == [tensor.shape for tensor in tensors]
    positions = batch * tokens
    of_heads = 2 * key_heads * (2 * keys + 4) + heads * (2 * values + 4 + 2 + 2 * 64)
    assert sum(tensor.numel() * tensor.itemsize for tensor in saved.values()) == positions * of_heads
    forward, backward = [flops for name, flops in calls if name.startswith("fused_scan")]
    by_hand = 64 * (3 * keys + 2 * values) + 3 * keys * values  # multiply-adds for a position and head
    assert forward == 2 * positions * heads * by_hand
    assert backward == 3 * forward


def test_a_kept_graph_calls_no_other_function() -> None:
    with pytest.raises(CapslogError, match="calls os:system, which"):
        torch.ops.capslog.kernel_call([torch.zeros(1)], "os:system", '{"args": ["true"], "kwargs": {}}')


_MODELLING = "transformers.models.qwen3_next.modeling_qwen3_next"


class _Record(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func.overloadpacket.__name__, args[-1] if args else None))
        return func(*args, **(kwargs or {}))
