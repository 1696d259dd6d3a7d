"""A small GPT-2 whose embedding and output projection are one tied parameter, used by the first and the last layer:

capslog plan --model examples.gpt2:model --devices 2

The factory returns example inputs too, so no --input is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

__all__ = ["model"]


def model(layers: int = 4) -> tuple[nn.Module, dict[str, Tensor]]:
    """Labels are inputs: the model then returns its loss, and the whole step is in the chain."""
    config = GPT2Config(
        vocab_size=512,
        n_positions=64,
        n_embd=64,
        n_layer=layers,
        n_head=4,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    tokens = torch.arange(64).repeat(1, 1) * 7 % 512
    return GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}
