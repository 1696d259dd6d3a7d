"""Asks two checkouts of the library the same questions, in turn, and compares every word and field of their answers.

Each question runs in a process of its own, with an empty cache, for either checkout. Seconds are of the processor,
from torch and transformers being imported to the answer. Small models also say what else would fit (`Fit.to_json`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sizes import SIZES, write_config

_TOKENS = {"vocab_size": 4096, "max_position_embeddings": 2048}
_WIDTH = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8}
_LLAMA = {**_TOKENS, **_WIDTH, "num_key_value_heads": 4, "num_hidden_layers": 8}
_EXPERTS = {"moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 64}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", _LLAMA),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", {**_LLAMA, **_EXPERTS}),
    "GPT-2": ("GPT2LMHeadModel", {"n_embd": 384, "n_layer": 8, "n_head": 6, "vocab_size": 4096}),
    "Mistral, window of 256": ("MistralForCausalLM", {**_LLAMA, "sliding_window": 256}),
    "Gemma 3": ("Gemma3ForCausalLM", {**_LLAMA, "head_dim": 64, "sliding_window": 128}),
    "ViT": (
        "ViTForImageClassification",
        {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6, "num_hidden_layers": 8},
    ),
}
"""Models of small widths: their class in transformers, and the sizes of its config."""
_LORA, _QLORA = {"model.arguments.lora": 8}, {"model.arguments.lora": 8, "model.arguments.base": "4bit"}
_SGD, _TWO = {"train.optimizer": "sgd"}, {"train.microbatch_size": 2, "train.minibatch_size": 8}

QUESTIONS: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {"devices": "2x t4"}),
    ("Llama", {"devices": 2, "capacity": "700MiB", "device": "cuda:rtx4090"}),
    ("Llama", {"devices": 2, "capacity": "300MiB", "device": "cuda:a100-40gb"}),
    ("Llama", {"devices": "t4, rtx4090"}),
    ("Llama", {"devices": 2, "capacity": "600MiB", "device": "cuda:t4", "settings": _LORA}),
    ("Llama", {"devices": 2, "capacity": "450MiB", "device": "cuda:rtx4090", "settings": _QLORA}),
    ("Llama", {"devices": 2, "capacity": "500MiB", "device": "cuda:a100-40gb", "settings": _SGD, "sequence": 512}),
    ("Qwen3-MoE", {"devices": "2x rtx4090"}),
    ("Qwen3-MoE", {"devices": 2, "capacity": "800MiB", "device": "cuda:t4"}),
    ("Qwen3-MoE", {"devices": 3, "capacity": "350MiB", "device": "cuda:a100-40gb"}),
    ("GPT-2", {"devices": "2x a100-40gb"}),
    ("GPT-2", {"devices": 2, "capacity": "500MiB", "device": "cuda:t4", "settings": _TWO}),
    ("GPT-2", {"devices": 2, "capacity": "250MiB", "device": "cuda:rtx4090"}),
    ("Mistral, window of 256", {"devices": 2, "capacity": "700MiB", "device": "cuda:rtx4090"}),
    ("Mistral, window of 256", {"devices": 2, "capacity": "350MiB", "device": "cuda:t4", "sequence": 512}),
    ("Gemma 3", {"devices": 2, "capacity": "800MiB", "device": "cuda:a100-40gb"}),
    ("Gemma 3", {"devices": 4, "capacity": "300MiB", "device": "cuda:t4"}),
    ("ViT", {"devices": 2, "capacity": "400MiB", "device": "cuda:rtx4090"}),
    ("ViT", {"devices": "2x t4"}),
    ("DiT", {"devices": 2, "capacity": "500MiB", "device": "cuda:a100-40gb"}),
    ("DiT", {"devices": 2, "capacity": "250MiB", "device": "cuda:t4"}),
    ("Llama-3-70B", {"devices": "8x h200"}),
    ("Llama-3-70B", {"devices": "8x a100-80gb"}),
]
_LARGE = ("Llama-3-70B", "Llama-3.1-405B", "DeepSeek-V3", "Qwen3-235B-A22B", "Kimi-K2")
PLANS = [(name, "h200") for name in (*_LARGE, "Nemotron-H-56B", "Qwen3-Next-80B-A3B")]
_UNEQUAL = ("search_seconds",)
"""Fields that no two answers share."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, help="checkout of the library to compare with")
    parser.add_argument("--only", nargs="*", default=[], help="models")
    parser.add_argument("--small", action="store_true", help="without models of published sizes")
    parser.add_argument("--plans", action="store_true", help="without questions to fits")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.row:
        sys.path.insert(0, str(flags.before))
        print(json.dumps(_answer(flags.row[0], json.loads(flags.row[1]))))
        return
    folders = [flags.before.resolve(), Path(__file__).resolve().parents[2]]
    plans = [(name, {"plan": kind}) for name, kind in PLANS]
    questions = plans if flags.plans else [*QUESTIONS, *plans]
    equal = asked = 0
    print("| model | question | fits | before | after | answers |\n|---|---|---|---|---|---|")
    for name, question in questions:
        if (flags.only and name not in flags.only) or (flags.small and name in SIZES):
            continue
        before, after = (_asked(folder, name, question) for folder in folders)
        asked, equal = asked + 1, equal + (before["answer"] == after["answer"])
        cells = [name, _shown(question), before["fits"], *(f"{row['seconds']:.1f}" for row in (before, after))]
        print("| " + " | ".join(map(str, [*cells, _compared(before["answer"], after["answer"])])) + " |", flush=True)
    print(f"\n{equal} of {asked} answers are equal.")


def _asked(folder: Path, name: str, question: dict[str, Any]) -> dict[str, Any]:
    """Return the row of one checkout, made in a process of its own."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "XDG_CACHE_HOME": cache, "PYTHONHASHSEED": "0"}
        command = [sys.executable, __file__, str(folder), "--row", name, json.dumps(question)]
        run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cache)
    if run.returncode:
        return {"fits": "-", "seconds": 0.0, "answer": {"error": run.stderr[-2000:]}}
    row: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return row


def _answer(name: str, question: dict[str, Any]) -> dict[str, Any]:
    for module in ("torch", "transformers"):
        importlib.import_module(module)
    import varuna_capslog

    begun, made = time.process_time(), Path("model")
    made.mkdir()
    if name in SIZES:
        write_config(name, made)
    if "plan" in question:
        content = _planned(made, question["plan"])
        return {"fits": content["fits"], "seconds": time.process_time() - begun, "answer": _lasting(content)}
    model, sample = _model(name, made)
    fit = varuna_capslog.fits(model, sample, **question)
    seconds, answer = time.process_time() - begun, {"text": str(fit), "plan": fit.plan.to_json()}
    if name not in SIZES:
        answer |= {"json": fit.to_json()}
        seconds = time.process_time() - begun
    return {"fits": fit.fits, "seconds": seconds, "answer": _lasting(answer)}


def _model(name: str, folder: Path) -> tuple[Any, Any]:
    """Return the model and its sample as `fits` takes them."""
    import torch
    import transformers

    if name == "DiT":
        from diffusers import DiTTransformer2DModel

        model = DiTTransformer2DModel(num_attention_heads=6, attention_head_dim=64, num_layers=8, sample_size=32)
        numbers = {"timestep": torch.ones(1, dtype=torch.long), "class_labels": torch.ones(1, dtype=torch.long)}
        return model, {"hidden_states": torch.zeros(1, 4, 32, 32), **numbers, "return_dict": False}
    if name in SIZES:
        return str(folder), None
    kind, sizes = SMALL[name]
    config = getattr(transformers, kind).config_class(**sizes, architectures=[kind])
    if kind == "ViTForImageClassification":
        with torch.device("meta"):
            model = getattr(transformers, kind)(config)
        return model.to_empty(device="cpu"), {"pixel_values": torch.zeros(1, 3, 224, 224)}
    config.save_pretrained(folder)
    return str(folder), None


def _planned(folder: Path, kind: str) -> dict[str, Any]:
    from varuna_capslog import cli

    arguments = ["plan", "--hf", str(folder), "--devices", "8", "--device", f"cuda:{kind}", "--sequence", "4096"]
    sys.argv = ["capslog", *arguments, "--model-arg", "dtype=bfloat16", "-o", "plan.json"]
    with contextlib.suppress(SystemExit):
        cli.main()
    content: dict[str, Any] = json.loads(Path("plan.json").read_text())
    return content


def _lasting(value: Any) -> Any:
    """Return an answer without `_UNEQUAL`."""
    if isinstance(value, dict):
        return {key: _lasting(part) for key, part in value.items() if key not in _UNEQUAL}
    return [_lasting(part) for part in value] if isinstance(value, list) else value


def _compared(before: Any, after: Any) -> str:
    """Return `equal`, or the first paths that differ."""
    paths = list(_different(before, after, ""))
    return "equal" if not paths else "differ in " + ", ".join(paths[:4])


def _different(before: Any, after: Any, path: str) -> Any:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in {**before, **after}:
            yield from _different(before.get(key), after.get(key), f"{path}.{key}".lstrip("."))
    elif before != after:
        yield path


def _shown(question: dict[str, Any]) -> str:
    if "plan" in question:
        return f"plan, 8 x {question['plan']}"
    parts = [str(question["devices"]), *(str(question[key]) for key in ("capacity", "device") if key in question)]
    settings = [f"{key.rpartition('.')[2]}={value}" for key, value in question.get("settings", {}).items()]
    return ", ".join([*parts, *(f"{question[key]} tokens" for key in ("sequence",) if key in question), *settings])


if __name__ == "__main__":
    main()
