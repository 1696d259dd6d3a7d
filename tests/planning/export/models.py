"""Captured models, and chains written by hand, whose plans are exported."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.detr.tiny import tiny_chain
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.names import ModelNames, names_of
from varuna_capslog.plans.plan import Plan

BLOCKS = 4


class Rotary(nn.Module):
    """Computed once, read by every block, without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.arange(float(x.shape[1])).sin().unsqueeze(-1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        x = x + self.attention(x) * rotary
        return x + self.mlp(x)


class Decoder(nn.Module):
    """Decoder whose parts may all be missing, as in a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.rotary_emb = nn.Embedding(11, 4), Rotary()
        self.layers, self.norm = nn.ModuleList(Block() for _ in range(BLOCKS)), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed_tokens is None else self.embed_tokens(x)
        rotary = self.rotary_emb(x)
        for layer in self.layers.children():
            x = layer(x, rotary.abs())  # an operation of the decoder itself
        return x if self.norm is None else self.norm(x)


class CausalLM(nn.Module):
    """Language model with the module names of a Hugging Face decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.lm_head = Decoder(), nn.Linear(4, 11)

    def forward(self, x: Tensor) -> Tensor:
        x = self.model(x)
        return x if self.lm_head is None else self.lm_head(x)


class Titan(nn.Module):
    """Language model with torchtitan's module names, one level deep."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings, self.rotary_emb = nn.Embedding(11, 4), Rotary()
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.lm_head = nn.LayerNorm(4), nn.Linear(4, 11)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.tok_embeddings is None else self.tok_embeddings(x)
        rotary = self.rotary_emb(x)
        for layer in self.layers:
            x = layer(x, rotary)
        x = x if self.norm is None else self.norm(x)
        return x if self.lm_head is None else self.lm_head(x)


@functools.cache
def made(name: str) -> tuple[nn.Module, dict[str, Tensor], Chain]:
    """Return a model, its inputs, and its captured chain: one layer before the blocks, four blocks, one behind."""
    torch.manual_seed(0)
    tokens = torch.arange(6).reshape(1, 6)
    if name in ("decoder", "titan"):
        model, inputs = CausalLM() if name == "decoder" else Titan(), {"x": tokens}
    else:
        transformers = pytest.importorskip("transformers")
        if name == "gpt2":
            config = transformers.GPT2Config(
                n_embd=8, n_layer=BLOCKS, n_head=2, vocab_size=11, n_positions=6, use_cache=False, bos_token_id=0,
                eos_token_id=0, tie_word_embeddings=False,
            )  # fmt: skip
            model, inputs = transformers.GPT2LMHeadModel(config), {"input_ids": tokens}
        else:
            config = transformers.ViTConfig(
                hidden_size=8, num_hidden_layers=BLOCKS, num_attention_heads=2, intermediate_size=8, image_size=8,
                patch_size=4,
            )  # fmt: skip
            model, inputs = transformers.ViTForImageClassification(config), {"pixel_values": torch.randn(1, 3, 8, 8)}
    chain = Chain.from_module(model, None, inputs)
    assert len(chain) == BLOCKS + 2
    return model, inputs, chain


def names(name: str) -> ModelNames:
    """Return the names of a captured model; "tied gpt2" shares a parameter of embedding and output projection."""
    if name == "tied gpt2":
        return replace(names("gpt2"), shared=(("transformer.wte.weight", (0, BLOCKS + 1)),))
    return names_of(made(name)[2])


@functools.cache
def detr_names() -> ModelNames:
    """Return the names of DETR, a chain written by hand."""
    return names_of(tiny_chain())


def named(*layers: str, **more: object) -> ModelNames:
    """Return the names of a chain of which only layer names are known, as in a profile."""
    return ModelNames(layers, **more)  # type: ignore[arg-type]


def plan_of(*cuts: int, layers: int = BLOCKS + 2) -> Plan:
    """Return a plan of one pipeline with a stage on each rank."""
    return Plan.of_cuts(layers, cuts, schedule="1f1b")


def stages_of_blocks(cuts: tuple[int, ...]) -> list[list[int]]:
    """stage -> its blocks, for a chain with one layer before the blocks and one behind."""
    return [
        [layer - 1 for layer in range(first, end) if 1 <= layer <= BLOCKS]
        for first, end in zip(cuts, (*cuts[1:], BLOCKS + 2), strict=True)
    ]
