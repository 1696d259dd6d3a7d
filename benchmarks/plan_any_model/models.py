"""The models of `plan_any_model.py`, each from its library's own code and configuration, without a download."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["bert_large", "convnext_b", "gpt2_medium", "llama_70b", "rt_detr", "swin_b", "t5_large", "vit_l"]


def convnext_b() -> nn.Module:
    """88.6 million parameters."""
    import torchvision

    return torchvision.models.convnext_base()


def swin_b() -> nn.Module:
    """87.8 million parameters."""
    import torchvision

    return torchvision.models.swin_b()


def vit_l() -> nn.Module:
    """304 million parameters."""
    import torchvision

    return torchvision.models.vit_l_16()


def bert_large() -> nn.Module:
    """335 million parameters, with the head for masked tokens."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    )


def gpt2_medium() -> nn.Module:
    """355 million parameters, embedding and head tied."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=1024, n_layer=24, n_head=16, use_cache=False))


def llama_70b(layers: int = 80) -> nn.Module:
    """The configuration of Llama 3 70B, built on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def t5_large() -> nn.Module:
    """738 million parameters: 24 encoder and 24 decoder blocks, one embedding used by both and by the head."""
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(  # type: ignore[call-arg]
            d_model=1024,
            d_ff=4096,
            num_layers=24,
            num_heads=16,
            use_cache=False,
            decoder_start_token_id=0,
        )
    )


def rt_detr() -> nn.Module:
    """43 million parameters: RT-DETR with a ResNet-50, without its loss, which matches boxes on the host."""
    from transformers import RTDetrConfig, RTDetrForObjectDetection

    return RTDetrForObjectDetection(RTDetrConfig())
