"""The table of planners: it generates the pages, suggests names, and refuses runs that a planner cannot plan."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import section
from varuna_capslog.config.settings import Config
from varuna_capslog.planners import BALANCED, JOINT, LAYERWISE, PLANNER_NAMES, WHOLE_RUN
from varuna_capslog.planning.registry import REGISTRY, planner_named

PAGE = Path(__file__).parents[2] / "docs" / "planners.md"


def test_every_planner_has_a_line_and_the_page_is_made_of_them() -> None:
    assert sorted(REGISTRY) == sorted([*PLANNER_NAMES, *BALANCED, *LAYERWISE, *WHOLE_RUN, JOINT])
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    cells = (
        (f"`{planner.name}`", planner.takes, planner.chooses, planner.good_for, planner.source)
        for planner in REGISTRY.values()
    )
    assert lines[: len(REGISTRY)] == [f"| {' | '.join(row)} |" for row in cells]


def test_a_help_text_needs_neither_numpy_nor_torch() -> None:
    code = (
        "import sys, varuna_capslog.planning.registry; print(sorted({'numpy', 'torch', 'pydantic'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"engine": "varuna", "planner": "vpipe"}, "engine=varuna: Varuna runs equal pipelines without memory"),
        ({"replicas": 2, "planner": "vpipe"}, "pipeline.replicas=2: it plans one pipeline"),
        ({"replicas": 2, "planner": "piper"}, "pipeline.replicas=2: it shares all devices out itself"),
        ({"stages_per_rank": 2, "planner": "dawnpiper"}, "pipeline.stages_per_rank=2: it plans one stage per rank"),
        ({"stages_per_rank": 2, "planner": "joint"}, "pipeline.stages_per_rank=2: it says itself how many stages"),
        ({"schedule": "1f1b-star", "planner": "capture"}, "schedule=1f1b-star: the limits of that schedule follow"),
        ({"speeds": [1.0, 0.5], "planner": "exact"}, "speeds=.1.0, 0.5.: it takes all devices to be as fast"),
        ({"elastic": {"enabled": True}, "planner": "gpipe"}, "elastic.enabled=true: it is not asked anew"),
        ({"memory": "gpipe", "planner": "madpipe"}, "memory is 'gpipe', but ranks of planner 'madpipe' may have"),
    ],
)
def test_what_a_planner_cannot_plan_is_refused_by_the_key_that_says_so(keys: dict[str, Any], sentence: str) -> None:
    sections = {name: keys.pop(name) for name in ("engine", "elastic") if name in keys}
    config = section(Config, {"workload": "a:b", "pipeline": keys, "train": {"accumulation_blocks": 2}, **sections}, "")
    with pytest.raises(CapslogError, match=sentence):
        planner_named(config.pipeline.planner).check(config)


def test_a_misspelt_name_is_suggested() -> None:
    with pytest.raises(CapslogError, match="unknown planner 'budgt'; did you mean 'budget'"):
        planner_named("budgt")
