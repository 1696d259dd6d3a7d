"""What is settled before the first worker starts: which plan a run's folder gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.start.test_given_plan import REPLICATED_MIDDLE, config_of
from varuna_capslog.plans.plan import latest_plan
from varuna_capslog.start.given_plan import with_given_plan
from varuna_capslog.start.prepare import prepare_run

SHORT: dict[str, Any] = {"format": "varuna-capslog/plan/2", "num_layers": 11, "cuts": [0, 5]}


def prepare(folder: Path, plan: dict[str, Any]) -> None:
    path = folder / "given.json"
    path.write_text(json.dumps(plan))
    prepare_run(with_given_plan(config_of(path, run_dir=str(folder / "run"))), show=False)


@pytest.mark.parametrize(("first", "second"), [(SHORT, REPLICATED_MIDDLE), (REPLICATED_MIDDLE, SHORT)])
def test_a_run_that_gets_a_plan_of_the_other_form_gets_a_new_plan_file(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    """The comparison with the run's last plan ended in a KeyError, since the two forms have different keys."""
    for number, plan in enumerate((first, first, second, second)):
        prepare(tmp_path, plan)
        found = latest_plan(tmp_path / "run")
        assert found is not None
        assert found[0] == number // 2
        assert found[1].short == ("cuts" in plan)
