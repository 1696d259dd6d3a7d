"""Compares a DETR step on four pipeline ranks of one device with the same step in one process."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import run_ranks
from step_equality import CUTS, SIZES, differences, pipeline, unsplit

from varuna_capslog.schedules import RunShape

AIM = 1e-5
ROWS = {
    "cuda": {"DETR R50, 4 ranks": "loss and gradients within 1e-5"},
    "cpu": {"small DETR, 4 ranks": "loss and gradients within 1e-5"},
}


def measure(device: torch.device, tell: Any) -> None:
    """Write the largest differences."""
    # TF32 keeps 10 bits of a mantissa; NVIDIA's libraries read this variable, also in the ranks
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    model = "rn50_e6" if device.type == "cuda" else "tiny"
    (row,) = ROWS[device.type]
    with tempfile.TemporaryDirectory() as name:
        folder, cuts = Path(name), CUTS[model]
        unsplit_step = run_ranks(unsplit, 1, model, folder, device)[0]
        ranks = run_ranks(pipeline, len(cuts), model, folder, cuts, RunShape(len(SIZES[model])), device)
        error, worst, loss, count = differences(folder, unsplit_step, ranks)
    result = f"loss {loss:.1e}, gradients {error:.1e} over {count} parameters"
    tell(row, result, max(error, loss) <= AIM, loss_difference=loss, gradient_error=error, worst=worst, cuts=cuts)
