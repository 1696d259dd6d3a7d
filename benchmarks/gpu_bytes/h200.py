"""Compares predicted peaks with those of an H200's allocator, in plain loops over torchvision's models."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
import torchvision
from following import follow, summary
from torch import nn
from torch.nn import functional as F

from varuna_capslog.profiling.estimation.allocator import replay

__all__ = ["compare_peaks"]

MEASURED = Path(__file__).with_name("h200.json")
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 3


def compare_peaks(models: str = "") -> list[dict[str, Any]]:
    """Print a table, and return its rows.

    Args:
        models: substring of the names of the models to compare.
    """
    print("| model, 64 images of 224 | mode | predicted MB | measured MB | error |\n|---|---|---|---|---|")
    results = []
    for row in json.loads(MEASURED.read_text())["rows"]:
        if models not in row["model"]:
            continue
        predicted = replay(follow(functools.partial(_model, row), functools.partial(_train, row), "h200"))
        error = predicted.allocated_bytes / row["peak"] - 1
        numbers = f"{predicted.allocated_bytes / 1e6:.1f} | {row['peak'] / 1e6:.1f}"
        print(f"| {row['model']} | {row['mode']} | {numbers} | {error:+.3%} |", flush=True)
        results.append({**row, "predicted": predicted.allocated_bytes})
    print(summary([row["predicted"] / row["peak"] - 1 for row in results]))
    return results


def _lies_last(row: dict[str, Any]) -> bool:
    return str(row["mode"]).endswith("nhwc")


def _model(row: dict[str, Any]) -> nn.Module:
    model: nn.Module = getattr(torchvision.models, row["model"])(weights=None).train()
    return model.to(memory_format=torch.channels_last) if _lies_last(row) else model


def _train(row: dict[str, Any], model: nn.Module, followed: object) -> None:
    """Run forward and backward without an optimizer, as on the H200; images and their channels-last copy stay."""
    precision = PRECISIONS.get(row["mode"].split("-")[0])
    images = torch.empty(row["batch"], 3, row["size"], row["size"])
    targets = torch.zeros(row["batch"], dtype=torch.long)
    inputs = images.contiguous(memory_format=torch.channels_last) if _lies_last(row) else images
    for _ in range(STEPS):
        for parameter in model.parameters():
            parameter.grad = None
        with torch.autocast("cpu", precision or torch.bfloat16, enabled=precision is not None):
            outputs = model(inputs)
        F.cross_entropy(outputs, targets).backward()
