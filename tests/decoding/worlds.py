"""Small models of transformers, and ranks that decode with them as threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from varuna_capslog.engine.communicator import Communicator, connect_group

VOCABULARY = 61


def small_model(family: str, **keys: Any) -> Any:
    """A model in float64 with random weights. Norms of Llama's compute in float32 in transformers: torch's do not."""
    import transformers

    torch.manual_seed(7)
    common = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    if family == "GPT2":
        sizes = {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 128, "n_inner": 96}
        model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **common, **keys}))
    else:
        sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 96}
        common |= {"num_key_value_heads": 2, "max_position_embeddings": 128}
        config = getattr(transformers, f"{family}Config")(**{**sizes, **common, **keys})
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    model = model.double().eval()
    for name, module in list(model.named_modules()):
        if type(module).__name__ in ("LlamaRMSNorm", "Qwen2RMSNorm"):
            norm = nn.RMSNorm(module.weight.shape[0], eps=module.variance_epsilon, dtype=torch.float64)
            norm.weight = module.weight
            model.set_submodule(name, norm)
    for name, parameter in model.named_parameters():  # an untrained model's are small or 0, and its tokens repeat
        if parameter.ndim > 1 or name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3 if parameter.ndim > 1 else 0.1)
    return model


def some_prompts(*lengths: int) -> list[list[int]]:
    drawn = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCABULARY, (length,), generator=drawn).tolist() for length in lengths]


def on_ranks(degree: int, work: Callable[[Communicator], Any], timeout_seconds: float = 60) -> list[Any]:
    """Run `work` on every rank, each in a thread, and return the results in rank order."""
    store = dist.HashStore()

    def rank_of(rank: int) -> Any:
        communicator = connect_group(store, "decoding", rank, degree, timeout_seconds)
        try:
            return work(communicator)
        except BaseException:
            communicator.abort()
            raise
        finally:
            communicator.close()

    with ThreadPoolExecutor(degree) as pool:
        return [future.result() for future in [pool.submit(rank_of, rank) for rank in range(degree)]]
