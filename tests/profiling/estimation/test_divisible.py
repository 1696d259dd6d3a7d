"""What cards can divide of a layer, against the modules of transformers' own classes."""

import pytest
import torch

import varuna_capslog as capslog
from varuna_capslog.model.prediction import with_predictions

transformers = pytest.importorskip("transformers")

TOKENS, HIDDEN = 32, 64
SIZES = {"hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 4, "vocab_size": 128, "head_dim": 16, "use_cache": False, "dtype": torch.bfloat16}
EXPERTS = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
ROUTED = {"moe_intermediate_size": 48, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}


class Model(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.model = transformers.AutoModelForCausalLM.from_config(config)

    def forward(self, tokens):
        return self.model(tokens).logits


def layers_of(config):
    """(module of each decoder block, its parts)"""
    model = Model(config)
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    profile = capslog.estimate(model, tokens, device="cuda:h100-80gb")
    blocks = [layer.divisible for layer in profile.layers if ".layers." in layer.name]
    return list(model.model.model.layers), blocks, profile


def share(block, names):
    """Part of a block's parameters in the modules of these names."""
    sizes = {name: parameter.numel() for name, parameter in block.named_parameters()}
    return sum(size for name, size in sizes.items() if any(part in name for part in names)) / sum(sizes.values())


def test_a_dense_block():
    """Two divided pairs of matrices: what attention and MLP gather and what they sum is the hidden state."""
    modules, parts, profile = layers_of(transformers.LlamaConfig(**SIZES))
    assert parts[0].matrix_share == pytest.approx(share(modules[0], ["_proj"]))
    assert (parts[0].expert_share, parts[0].exchanged_bytes) == (0, 0)
    assert parts[0].gathered_bytes == parts[0].scattered_bytes == 2 * TOKENS * HIDDEN * 2
    assert parts[0].attended_bytes == 2 * TOKENS * 4 * 16 * 2  # before keys and values are repeated
    embedding, head = profile.layers[0].divisible, profile.layers[-1].divisible
    assert (embedding.matrix_share, embedding.scattered_bytes) == (1.0, TOKENS * HIDDEN * 2)
    assert head.matrix_share == pytest.approx(128 / 129)
    assert head.gathered_bytes == TOKENS * HIDDEN * 2


def test_a_block_of_experts():
    """The router and the norms of queries and keys, which go over each head, are whole on every card."""
    modules, parts, _ = layers_of(transformers.Qwen3MoeConfig(**SIZES, **EXPERTS))
    assert parts[1].matrix_share == pytest.approx(share(modules[1], ["_proj.weight"]))
    assert parts[1].expert_share == pytest.approx(share(modules[1], [".experts."]))
    assert parts[1].largest_expert_share == pytest.approx(share(modules[1], [".experts.gate_up_proj"]))
    assert parts[1].gathered_bytes == parts[1].scattered_bytes == TOKENS * HIDDEN * 2  # of attention
    assert parts[1].exchanged_bytes == 2 * TOKENS * HIDDEN * 2  # two experts for each token
    assert parts[1].expert_seconds > 0


def test_latent_attention():
    """The projections into latent vectors stay whole, since a norm over all of them follows, as in Megatron."""
    sizes = SIZES | {"num_key_value_heads": 8, "head_dim": 8}
    config = transformers.DeepseekV3Config(**sizes, **LATENT, **ROUTED, first_k_dense_replace=1)
    modules, parts, _ = layers_of(config)
    for module, part in zip(modules, parts, strict=True):
        divided = ["q_b_proj", "kv_b_proj", "o_proj", "mlp.gate_proj", "up_proj.weight", "down_proj.weight"]
        divided += ["shared_experts.gate_proj"]
        assert part.matrix_share == pytest.approx(share(module, divided))
        assert part.gathered_bytes == TOKENS * (24 + 32 + HIDDEN) * 2
    assert (parts[0].expert_share, parts[1].expert_share) == (0, pytest.approx(share(modules[1], [".experts."])))


def test_experts_that_are_no_bfloat16_weights():
    """transformers then compiles an operator of its own: experts were not divided, and their products cost nothing."""
    sizes = SIZES | {"num_key_value_heads": 8, "head_dim": 8, "dtype": torch.float32, "num_nextn_predict_layers": 1}
    config = transformers.DeepseekV3Config(**sizes, **LATENT, **ROUTED, first_k_dense_replace=1)
    model, tokens = transformers.AutoModelForCausalLM.from_config(config), torch.zeros(1, TOKENS, dtype=torch.int64)
    inputs = {"input_ids": tokens, "labels": tokens}
    layers = capslog.estimate(with_predictions(model), inputs, device="cuda:h100-80gb").layers
    block = next(layer.divisible for layer in layers if layer.name == "model.layers.1")
    assert block.expert_share == pytest.approx(share(model.model.layers[1], [".experts."]))
    _, parts, _ = layers_of(config)  # whose experts run as they are, by torch's operator
    assert block.expert_seconds > 0
    assert block.expert_seconds == pytest.approx(parts[1].expert_seconds)
