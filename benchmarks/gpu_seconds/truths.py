"""Published seconds of steps and layers, each with the work that the library counts for the same step or layer."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from layers import Block, Head, Size, layer_step, unfilled
from torch import nn
from torch.nn import functional as F
from tracing import Cache, Trace, count, trace

from varuna_capslog.base.gpus import GPUS
from varuna_capslog.profiling.estimation.operators import Work
from varuna_capslog.profiling.estimation.rates import Speed

__all__ = [
    "Row",
    "hf_rows",
    "huggingface",
    "image_step",
    "layer_rows",
    "llama_row",
    "speed_of_card",
    "text_trace",
    "timm_rows",
    "truth",
]


@dataclass(frozen=True)
class Row:
    """Measured seconds of a step, layer or operator, and its work by class.

    Attributes:
        group: source of the measurement.
        family: rows of a family are left out of a fit together; every family has the same weight.
        card: key of `base.gpus`.
        host: seconds that the host needed to launch it, where measured.
        fits: whether constants may be fitted to it.
    """

    group: str
    name: str
    family: str
    card: str
    seconds: float
    work: Work
    host: float = 0.0
    fits: bool = True


def truth(name: str) -> list[dict[str, Any]]:
    """Return the rows of a file of published measurements in the folder that CAPSLOG_DATA names."""
    folder = os.environ.get("CAPSLOG_DATA")
    if folder is None:
        raise SystemExit("set CAPSLOG_DATA to the folder that holds gpu-truth (see README.md)")
    rows: list[dict[str, Any]] = json.loads((Path(folder) / "gpu-truth" / f"{name}.json").read_text())["rows"]
    return rows


def speed_of_card(card: str) -> Speed:
    return Speed.of_gpu(card, GPUS[card])


# -- timm


def image_step(batch: int, side: int, amp: bool, channels_last: bool, momentum: bool) -> Callable[[nn.Module], None]:
    """Return a step of a classifier: forward, cross entropy, backward.

    Args:
        amp: run forward in autocast.
        momentum: end with SGD with Nesterov's momentum, parameter by parameter.
    """

    def step(model: nn.Module) -> None:
        x, wanted = torch.empty(batch, 3, side, side), torch.empty(batch, dtype=torch.long)
        if channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            scores = model(x)
            scores = scores[0] if isinstance(scores, tuple) else scores
        F.cross_entropy(scores, wanted).backward()
        if momentum:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=False)
            for parameter in model.parameters():
                optimizer.state[parameter]["momentum_buffer"] = torch.empty_like(parameter)
            optimizer.step()

    return step


def timm_rows(cache: Cache, model: dict[str, Any], layouts: Sequence[str]) -> Iterator[Row]:
    """Yield steps of one model on an RTX 3090 in float16 autocast; none where timm no longer has it or where its
    parameter count has changed.
    """
    try:
        import timm
        from timm.layers import set_fused_attn
    except ImportError:
        raise SystemExit("the rows of timm need timm: pip install timm") from None
    set_fused_attn(False)
    name = model["model"]
    for layout in layouts:
        printed = model.get(layout)
        if not printed or not printed.get("step_ms") or not timm.is_model(name):
            continue

        def make(layout: str = layout) -> nn.Module:
            made = timm.create_model(name, num_classes=1000).train()
            millions = sum(parameter.numel() for parameter in made.parameters()) / 1e6
            if abs(millions - model["params_m"]) > 0.011:
                raise ValueError(f"has {millions:.2f} million parameters now, {model['params_m']} when measured")
            return made.to(memory_format=torch.channels_last) if layout == "nhwc" else made

        step = image_step(printed["batch"], model["img"], True, layout == "nhwc", True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                traced = cache.of(f"timm {name} {layout}", lambda make=make, step=step: trace(make, step, "rtx3090"))
        except Exception as error:
            print(f"left out: {name} {layout}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        work = count(speed_of_card("rtx3090"), traced, torch.float16)
        yield Row(f"timm {layout}", name, model["family"], "rtx3090", printed["step_ms"] / 1e3, work)


# -- layers of Sailor

_CARDS = {"A100-40": "a100-40gb", "GH-96": "gh200-96gb", "Titan-RTX": "titan-rtx"}
_SIZES = {
    "OPT-350": Size(1024, 16, 4096, 50257),
    "OPT-30": Size(7168, 56, 28672, 50257),
    "GPT-Neo-2.7": Size(2560, 20, 10240, 50257),
    "LLAMA-3-8": Size(4096, 32, 16384, 50257, llama=True),
}


def layer_rows(cache: Cache) -> Iterator[Row]:
    """Forward and backward of blocks and heads with their loss, in float32 or TF32."""
    for row in truth("sailor-layers-fit"):
        named = row["kind"] == "layer seconds" and row["layer"] in ("block", "head and loss")
        if not named or row["backward_s"] is None or row["gpu"] not in _CARDS:
            continue
        if row["tp"] > 1 and not (row["model"] == "LLAMA-3-8" and row["gpu"] == "A100-40"):
            continue
        card, size = _CARDS[row["gpu"]], _SIZES[row["model"]].shard(row["tp"])
        tokens = (row["seq"], row["mbs"])

        def made(row: dict[str, Any] = row, size: Size = size, tokens: tuple[int, int] = tokens) -> Trace:
            kind = Block if row["layer"] == "block" else Head
            return trace(
                lambda: unfilled(lambda: kind(size)), lambda layer: layer_step(layer, size, *tokens), "a100-80gb"
            )

        key = f"{row['model']} {row['layer']} tp{row['tp']} {row['mbs']}"
        traced = cache.of(f"layer {key}", made)
        work = count(speed_of_card(card), traced, tf32=row["matmul"].startswith("tf32"))
        yield Row("layers", f"{key}|{row['gpu']}", row["model"], card, row["forward_s"] + row["backward_s"], work)


# -- Hugging Face's tables, and Llama


def hf_rows(cache: Cache) -> Iterator[Row]:
    """Steps of a loop without an optimizer, weights in float16: Pythia-410M on a laptop's RTX 3080 Ti, BERT on an
    A100.
    """
    transformers = huggingface()
    for row in truth("hf-memory-fit"):
        if row["oom"]:
            continue
        is_bert = row["class"] == "BertLMHeadModel"
        card = "a100-80gb" if is_bert else "rtx3080ti-laptop"

        def make(row: dict[str, Any] = row, is_bert: bool = is_bert) -> nn.Module:
            config = transformers.BertConfig() if is_bert else transformers.GPTNeoXConfig(
                vocab_size=50304, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
                intermediate_size=4096, rotary_pct=0.25, max_position_embeddings=2048,
            )  # fmt: skip
            config._attn_implementation = row["attention"]
            model = unfilled(lambda: getattr(transformers, row["class"])(config))
            for parameter in model.parameters():  # buffers stay in float32
                parameter.data = parameter.data.to(torch.bfloat16)
            return model

        def step(model: nn.Module, row: dict[str, Any] = row) -> None:
            model(torch.empty(row["batch"], row["seq"], dtype=torch.long)).logits.sum().backward()

        name = f"{'bert' if is_bert else 'pythia'} {row['attention']} {row['batch']} x {row['seq']}"
        traced = cache.of(f"hf {name}", lambda make=make, step=step, card=card: text_trace(make, step, card))
        work = count(speed_of_card(card), traced, torch.float16)
        yield Row("hf", name, name.split()[0], card, row["step_s"], work, fits=False)


def llama_row(cache: Cache) -> Row:
    """Llama-3.1-8B as torchtitan prints it: 2 x 8,192 tokens of a card, eager, 5,762 tokens a second; weights in
    bfloat16 as FSDP gathers them. Its messages and its selective recomputation are not counted.
    """
    card, works = "h100-96gb", []
    for blocks in (1, 2):

        def make(blocks: int = blocks) -> nn.Module:
            transformers = huggingface()
            config = transformers.LlamaConfig(
                hidden_size=4096, intermediate_size=14336, num_hidden_layers=blocks, num_attention_heads=32,
                num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, use_cache=False,
            )  # fmt: skip
            config._attn_implementation = "sdpa"
            return unfilled(lambda: transformers.LlamaForCausalLM(config), torch.bfloat16)

        def step(model: nn.Module) -> None:
            ids = torch.empty(2, 8192, dtype=torch.long)
            model(input_ids=ids, labels=ids).loss.backward()

        traced = cache.of(f"llama with blocks {blocks}", lambda make=make: text_trace(make, step, card))
        works.append(count(speed_of_card(card), traced))
    with_one, with_two = works
    work = {kind: with_one.get(kind, 0.0) + 31 * (with_two[kind] - with_one.get(kind, 0.0)) for kind in with_two}
    return Row("llama", "Llama-3.1-8B", "llama", card, 2 * 8192 / 5762, work, fits=False)


def huggingface() -> Any:
    """Import and return transformers, with only errors logged."""
    try:
        import transformers
    except ImportError:
        raise SystemExit("the models of Hugging Face need transformers: pip install transformers") from None
    transformers.logging.set_verbosity_error()
    return transformers


def text_trace(make: Callable[[], nn.Module], step: Callable[[nn.Module], object], gpu: str) -> Trace:
    """Trace a model of transformers, which would take fake tensors for an export and build other masks."""
    from transformers import masking_utils

    before = masking_utils.is_tracing
    masking_utils.is_tracing = lambda *_: False
    try:
        return trace(make, step, gpu)
    finally:
        masking_utils.is_tracing = before
