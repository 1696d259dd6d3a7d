"""Rows of published layouts that are asked, and the models that they are of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_PROXY = {"num_hidden_layers": 14, "vocab_size": 258560, "n_routed_experts": 64}
_SUPER = (
    "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"  # layers in their order
)
_KINDS = {"M": "linear_attention", "*": "full_attention", "E": "moe"}


@dataclass(frozen=True)
class Model:
    """Model of a layout.

    sizes_of: name in `models_2026/sizes.py`; or kind: class of its config in transformers without `Config`, keys: that
    differ from the class's, architecture: class of the model.
    predictions: layers for multi-token prediction. tokens: of a sequence. samples: sequences of a microbatch.
    """

    sizes_of: str | None = None
    kind: str | None = None
    architecture: str = ""
    keys: dict[str, Any] = field(default_factory=dict)
    predictions: int = 0
    tokens: int = 4096
    samples: int = 1


@dataclass(frozen=True)
class Row:
    """Published layout of the study. parallel: how its stages are divided over cards, as for `--parallel`."""

    number: str
    model: str
    ranks: int
    layout: str
    parallel: str = ""


def _ends(first: int | None, last: int | None) -> str:
    pairs = (("first", first), ("last", last))
    return ", ".join(f"decoder_{place}_pipeline_num_layers: {count}" for place, count in pairs if count)


MODELS: dict[str, Model] = {
    "GPT of 12 layers": Model(
        kind="GPT2",
        architecture="GPT2LMHeadModel",
        keys={"n_layer": 12, "n_embd": 512, "n_head": 8, "vocab_size": 50304, "tie_word_embeddings": False},
        tokens=1024,
        samples=4,
    ),
    "Llama-3-70B": Model("Llama-3-70B"),
    "Qwen3-235B": Model("Qwen3-235B-A22B"),
    "MiniMax-M2.5": Model("MiniMax-M2.5"),
    "GLM-4.5": Model("GLM-4.5"),
    "GLM-4.5 with m": Model("GLM-4.5", predictions=1),
    "GLM-4.5-Air": Model("GLM-4.5-Air"),
    "GLM-4.5-Air with m": Model("GLM-4.5-Air", predictions=1),
    "DeepSeek-V3": Model("DeepSeek-V3"),
    "DeepSeek-V3 with m": Model("DeepSeek-V3", predictions=1),
    "DeepSeek-V3 proxy with m": Model(
        kind="DeepseekV3", architecture="DeepseekV3ForCausalLM", keys=_PROXY, predictions=1
    ),
    "GLM-5": Model(kind="GlmMoeDsa", architecture="GlmMoeDsaForCausalLM"),
    "Nemotron-3-Super": Model(
        kind="NemotronH",
        architecture="NemotronHForCausalLM",
        keys={
            "layers_block_type": [_KINDS[letter] for letter in _SUPER],
            "num_key_value_heads": 2,
            "n_routed_experts": 512,
            "num_experts_per_tok": 22,
            "moe_latent_size": 1024,
            "moe_intermediate_size": 2688,
            "moe_shared_expert_intermediate_size": 5376,
            "routed_scaling_factor": 5.0,
            "max_position_embeddings": 262144,
        },
    ),
    "DeepSeek-V4-Flash": Model(kind="DeepseekV4", architecture="DeepseekV4ForCausalLM", tokens=1024),
}

_EIGHT = "expert=8,data=8,zero=1"
"""Where no division of a model of experts is printed: its experts over the eight cards of a node."""

ROWS = (
    Row("1", "Llama-3-70B", 8, "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL", "tensor=4,data=2,zero=1"),
    Row("3", "DeepSeek-V3 with m", 4, "Et*4|(tttt|)*14tmL", _EIGHT),
    Row("7", "DeepSeek-V3", 12, _ends(None, 6), "tensor=8,expert=8"),
    Row("9", "DeepSeek-V4-Flash", 4, "Et*11|t*11|t*11|t*10L", "context=2,expert=8,data=8,zero=1"),
    Row("9", "DeepSeek-V4-Flash", 8, "6,6,6,5,5,5,5,5", "context=2,expert=8,data=8,zero=1"),
    Row("13", "GLM-5", 4, _ends(None, 18), _EIGHT),
    Row("13", "GLM-4.5", 8, _ends(None, 8), _EIGHT),
    Row("13", "GLM-4.5", 8, _ends(10, 10), _EIGHT),
    Row("13", "GLM-4.5 with m", 8, _ends(None, 8), _EIGHT),
    Row("13", "GLM-4.5 with m", 8, _ends(10, 10), _EIGHT),
    Row("13", "GLM-4.5-Air", 4, _ends(11, 11), _EIGHT),
    Row("13", "GLM-4.5-Air with m", 4, _ends(11, 11), _EIGHT),
    Row("17", "Qwen3-235B", 4, "23,24,24,23", _EIGHT),
    Row("17", "Qwen3-235B", 4, _ends(None, 22), _EIGHT),
    Row("17", "Qwen3-235B", 8, _ends(11, 11), _EIGHT),
    Row("17", "Qwen3-235B", 16, _ends(5, 5), "tensor=2,context=8,expert=8"),
    Row("19", "MiniMax-M2.5", 4, "decoder_pipeline_manual_split_list: [7, 8, 8, 8, 8, 8, 8, 7]", _EIGHT),
    Row("21", "Nemotron-3-Super", 8, "12,12,12,12,12,12,12,4", "context=2"),
    Row("21", "Nemotron-3-Super", 2, "44,44", "expert=32,data=32,zero=1"),
    Row("35", "DeepSeek-V3 proxy with m", 4, "Et*2|(tt|)*5t|tmL", "tensor=2,expert=16,data=8,zero=1"),
    Row("35", "DeepSeek-V3 proxy with m", 2, "Et*7|t*7mL", "tensor=2,expert=8,data=8,zero=1"),
    Row("37", "GPT of 12 layers", 4, _ends(2, 2)),
)
