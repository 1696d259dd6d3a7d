"""A small Hugging Face Llama with its own loss, built from a config without any download:

capslog plan --model examples.llama:model --devices 4 \
    --input "input_ids=int64[2,64]:512" --input "labels=int64[2,64]:512"
"""

from __future__ import annotations

from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["model"]


def model(layers: int = 8, hidden: int = 128) -> nn.Module:
    """`use_cache=False` since a training step returns no key-value cache."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)
