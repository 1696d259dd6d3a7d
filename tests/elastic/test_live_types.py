"""Real members in float16 with master weights and rounded moments: a crash and a morph change no bit of the results of
one process, and the same steps are skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.elastic.live import Cradle
from tests.elastic.scenarios import crash_then_join
from varuna_capslog.base import files

FLOAT16: dict[str, Any] = {
    "train": {"precision": "float16", "weights": "float16", "moments": "bfloat16"},
    "data": {"far": 5, "even": [4, 6]},  # of one size, so that no member traces many
}


def told(run_dir: Path) -> dict[int, tuple[float, bool]]:
    """Return the loss scale of each step, and True if it was skipped."""
    return {row["step"]: (row["loss_scale"], row["skipped"]) for row in files.read_jsonl(run_dir / "metrics.jsonl")}


def test_the_loss_scale_masters_and_moments_survive_a_crash_and_move(cradle: Cradle, tmp_path: Path) -> None:
    """There is no checkpoint: the remaining member has them from its copies, the newcomer from the layers that it takes
    over.
    """
    alone = crash_then_join(cradle, tmp_path, **FLOAT16)
    expected = told(tmp_path / "alone")
    assert told(tmp_path / "run") == expected
    skipped = [step for step, (_, was_skipped) in expected.items() if was_skipped]
    assert {1, 2, 3} <= {*skipped}, "the first scales are too large for this model"
    assert set(range(6, 11)) & {*skipped}, "a step is skipped after the newcomer has come"
    assert len(skipped) < len(expected)
    layers = {name: state for name, state in alone.final.items() if name != "step"}
    assert {state["scaler"]["scale"] for state in layers.values()} == {65536.0 / 2 ** len(skipped)}
    assert layers["stem"]["parameters"]["conv.weight"].dtype == torch.float16
    assert layers["conv1"]["parameters"]["conv.weight"].dtype == torch.float32
    assert layers["conv1"]["optimizer"]["conv.weight"]["exp_avg"].dtype == torch.bfloat16
