"""Predicts the peaks of `hf-memory-fit.json`, each row's loop on fake tensors, with the rows' version of transformers.

`gpu_bytes.py hf` makes that environment and runs this file in it. Every line of the output is a row as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import transformers
from following import follow
from torch import nn

from varuna_capslog.profiling.estimation.allocator import replay

PYTHIA: dict[str, Any] = {
    "vocab_size": 50304,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "rotary_pct": 0.25,
    "max_position_embeddings": 2048,
}
"""Pythia-410M; BERT-base has the defaults."""
STEPS = 3
"""The outputs of one step live into the next forward, so the second step has the peak."""


def model_of(row: dict[str, Any]) -> nn.Module:
    """Return the row's model in float16; buffers stay float32, as the script casts parameters only."""
    settings = {"attn_implementation": row["attention"]}
    if "pythia" in row["model"]:
        config = transformers.GPTNeoXConfig(**PYTHIA, **settings)
    else:
        config = transformers.BertConfig(**settings)
    model: nn.Module = getattr(transformers, row["class"])(config).train()
    for parameter in model.parameters():
        parameter.data = parameter.data.half()
    return model


def peak_bytes(row: dict[str, Any]) -> int:
    """Return the peak that `max_memory_allocated` would report."""

    def loop(model: nn.Module, followed: object) -> None:
        tokens = torch.zeros(row["batch"], row["seq"], dtype=torch.long)
        for _ in range(STEPS):
            model.zero_grad()
            outputs = model(tokens)
            (outputs.logits if hasattr(outputs, "logits") else outputs[0]).sum().backward()

    gpu = "rtx3080ti-laptop" if "3080" in row["gpu"] else "a100-80gb"
    return replay(follow(lambda: model_of(row), loop, gpu, keeps_cublaslt=False)).allocated_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="hf-memory-fit.json")
    transformers.logging.set_verbosity_error()
    for row in json.loads(parser.parse_args().file.read_text())["rows"]:
        if row["oom"] or row["peak_mb_1e6"] is not None:
            named = {key: row[key] for key in ("model", "gpu", "attention", "batch", "seq", "peak_mb_1e6", "oom")}
            print(json.dumps({**named, "predicted": peak_bytes(row)}), flush=True)


if __name__ == "__main__":
    main()
