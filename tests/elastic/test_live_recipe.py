"""Real members with an average, groups of parameters and a falling rate: a crash and a morph change no bit of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.elastic.live import Cradle, Live, check, config_of, describe, truth_of
from varuna_capslog.rig.faults import Fault

STEPS = 6
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
    """One of two is killed in step 3, so that the other goes on with its copies, since there is no checkpoint; a
    newcomer takes layers at step 5.
    """
    alone = truth_of(tmp_path / "alone", STEPS, **RECIPE)
    faults = [Fault("m1", "action 3", "kill", 3), Fault("m0", "compute", "wait", 5, "five")]
    live = Live(cradle, config_of(tmp_path / "run", 2, steps=STEPS, **RECIPE), faults=faults)
    live.when("five")
    live.until_asked(live.join())
    live.go("five")
    outcome = live.finish()
    assert outcome.status == {"m0": 0, "m1": -9, "m2": 0}, describe(outcome)
    assert outcome.kinds().count("morph") == 2, describe(outcome)
    check(outcome, alone, STEPS)
    averages = [
        (moments["ema"], state["parameters"][name])
        for layer, state in alone.final.items()
        if layer != "step"
        for name, moments in state["optimizer"].items()
    ]
    assert averages
    assert not any(torch.equal(average, parameter) for average, parameter in averages)
