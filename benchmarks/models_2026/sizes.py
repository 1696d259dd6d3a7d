"""Published sizes of ten models, from which their config.json files are written; nothing is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_LLAMA = {"num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5}
_HYBRID = "M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-"
_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}

SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3-70B": (
        "Llama",
        {**_LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
        | {"max_position_embeddings": 8192},
    ),
    "Llama-3.1-405B": (
        "Llama",
        {**_LLAMA, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126}
        | {"num_attention_heads": 128, "max_position_embeddings": 131072},
    ),
    "DeepSeek-V3": ("DeepseekV3", {"max_position_embeddings": 163840}),  # the class has its sizes
    "Qwen3-235B-A22B": (
        "Qwen3Moe",
        {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94, "num_attention_heads": 64}
        | {"num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 1536, "norm_topk_prob": True}
        | {"max_position_embeddings": 40960},
    ),
    "Kimi-K2": (
        "DeepseekV3",
        {"vocab_size": 163840, "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384}
        | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827}
        | {"max_position_embeddings": 131072},
    ),
    "GLM-4.5": (
        "Glm4Moe",
        {"hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 92}
        | {"num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "n_routed_experts": 160}
        | {"first_k_dense_replace": 3, "use_qk_norm": True, "attention_bias": True, "max_position_embeddings": 131072},
    ),
    "GLM-4.5-Air": ("Glm4Moe", {"head_dim": 128, "attention_bias": True, "max_position_embeddings": 131072}),
    "MiniMax-M2.5": (
        "MiniMaxM2",
        {"hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62, "num_attention_heads": 48}
        | {"num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8}
        | {"vocab_size": 200064, "max_position_embeddings": 196608},
    ),
    "Nemotron-H-56B": (
        "NemotronH",
        {"hidden_size": 8192, "intermediate_size": 32768, "num_attention_heads": 64, "ssm_state_size": 256}
        | {"mamba_num_heads": 256, "layers_block_type": [_KINDS[kind] for kind in _HYBRID]}
        | {"max_position_embeddings": 8192},
    ),
    "Qwen3-Next-80B-A3B": ("Qwen3Next", {"intermediate_size": 5120, "max_position_embeddings": 262144}),
}
"""Model -> the class of its config in transformers, without `Config`, and the sizes that differ from the class's."""


def write_config(name: str, folder: Path) -> None:
    """Write the config.json of a model into a folder, with bfloat16 weights."""
    import transformers

    kind, sizes = SIZES[name]
    config = getattr(transformers, f"{kind}Config")(**sizes, dtype="bfloat16", architectures=[f"{kind}ForCausalLM"])
    config.save_pretrained(folder)
