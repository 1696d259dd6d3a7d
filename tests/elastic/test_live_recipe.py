"""Real members with an average, groups of parameters and a falling rate: a crash and a morph change no bit of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.elastic.live import Cradle
from tests.elastic.scenarios import crash_then_join

RECIPE: dict[str, Any] = {
    "train": {
        "optimizer": "nadam",
        "weight_decay": 0.1,
        "parameter_groups": [{"vectors": True, "weight_decay": 0.0}, {"match": "queries.*", "lr_factor": 3.0}],
        "warmup_steps": 2,
        "lr_schedule": "cosine",
        "lr_decay_steps": 5,
        "lr_final_factor": 0.1,
        "ema": 0.9,
        "ema_warmup_steps": 4,
    }
}


def test_the_state_of_a_recipe_survives_a_crash_and_moves(cradle: Cradle, tmp_path: Path) -> None:
    """There is no checkpoint: who is left goes on with its copies."""
    alone = crash_then_join(cradle, tmp_path, **RECIPE)
    averages = [
        (moments["ema"], state["parameters"][name])
        for layer, state in alone.final.items()
        if layer != "step"
        for name, moments in state["optimizer"].items()
    ]
    assert averages
    assert not any(torch.equal(average, parameter) for average, parameter in averages)
