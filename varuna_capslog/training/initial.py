"""Weights to begin a run from (`init_from`): one of our checkpoints, or a file that the workload can read.

Only values are taken over; optimizer, step and data order start afresh. What was skipped is said, never hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.workload import Workload
from varuna_capslog.training.checkpoint import open_checkpoint

__all__ = ["initialise", "read_weights"]


def read_weights(path: Path, workload: Workload) -> tuple[dict[str, Tensor], list[str]]:
    """{address: tensor} of a checkpoint folder, a run folder (its newest checkpoint) or a foreign file; and what was
    skipped.

    Raises:
        CapslogError: no such file, or nothing that can be read.
    """
    if not path.exists():
        raise CapslogError(f"init_from={str(path)!r} does not exist; give a checkpoint folder or a weights file")
    if path.is_file():
        return workload.import_weights(path)
    folder = path
    if (path / "checkpoints").is_dir():
        steps = sorted((path / "checkpoints").glob("step-*"))
        if not steps:
            raise CapslogError(f"init_from={str(path)!r} is a run without a checkpoint; give another")
        folder = steps[-1]
    checkpoint = open_checkpoint(folder)
    weights: dict[str, Tensor] = {}
    for layer in checkpoint.manifest["layers"]:
        state = checkpoint.layer(layer)
        weights |= {f"{layer}.{name}": tensor for name, tensor in (state["parameters"] | state["buffers"]).items()}
    return weights, []


def initialise(chain: Chain, workload: Workload, path: Path, skip: Sequence[str]) -> list[str]:
    """Copies weights into a freshly built chain; returns one line per entry that was left out.

    Args:
        skip: texts; entries whose address contains one keep their fresh values.

    Raises:
        CapslogError: a shape that does not match and is not skipped, or a file that shares no name with the model.
    """
    weights, skipped = read_weights(path, workload)
    taken = 0
    for address, target in chain.named_tensors().items():
        value = weights.pop(address, None)
        if any(text in address for text in skip):
            skipped.append(f"{address}: skipped by init_skip")
            continue
        if value is None:
            skipped.append(f"{address}: not in {path}")
            continue
        if value.shape != target.shape:
            raise CapslogError(
                f"init_from={str(path)!r}: {address!r} has shape {list(value.shape)}, the model wants "
                f"{list(target.shape)}; add a part of its name to init_skip to begin it afresh"
            )
        with torch.no_grad():
            target.copy_(value)
        taken += 1
    if taken == 0:
        raise CapslogError(f"init_from={str(path)!r} shares no parameter name with the model; is it the right file?")
    return [*skipped, *(f"{address}: unknown to the model" for address in weights)]
