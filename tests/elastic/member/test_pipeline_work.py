"""Members hold the layers that they own or copy, and no others: values that are gone come back where they are needed.

That the chain of a member has no values while it trains is looked at in `tests.elastic.checked`, in all live tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.elastic import scenarios
from tests.elastic.live import Cradle, Live, Truth, check, config_of, describe, truth_of
from varuna_capslog.rig.faults import Fault

FACTORIES = {"chain": "factory_chain"}


@pytest.fixture(scope="module")
def truth_of_factories(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """Of a chain that one process builds layer by layer."""
    torch.set_num_threads(1)
    return truth_of(tmp_path_factory.mktemp("truth"), model={"chain": "factory_chain_by_hand"})


def test_a_run_that_has_lost_all_begins_anew_with_weights_that_were_freed(
    cradle: Cradle, truth: Truth, tmp_path: Path
) -> None:
    assert scenarios.kill_several_at_once(1, "m1", "m2", "m3")(cradle, truth, tmp_path) is not None


def test_so_does_a_run_of_factories(cradle: Cradle, truth_of_factories: Truth, tmp_path: Path) -> None:
    scenario = scenarios.kill_several_at_once(1, "m1", "m2", "m3", model=FACTORIES)
    assert scenario(cradle, truth_of_factories, tmp_path) is not None


def test_layers_of_factories_move_to_a_member_that_joins_and_from_one_that_leaves(
    cradle: Cradle, truth_of_factories: Truth, tmp_path: Path
) -> None:
    faults = [Fault("m0", "compute", "wait", 4, "four"), Fault("m1", "compute", "wait", 8, "eight")]
    live = Live(cradle, config_of(tmp_path, 2, model=FACTORIES), faults=faults)
    live.when("four")
    live.until_asked(live.join())
    live.go("four")
    live.when("eight")
    live.leave("m0")
    live.until(lambda: live.heard("notice"), "the notice")
    live.go("eight")
    outcome = live.finish()
    assert outcome.status == {"m0": 0, "m1": 0, "m2": 0}, describe(outcome)
    assert outcome.kinds().count("morph") == 2, describe(outcome)
    assert len(outcome.rows) == 12
    check(outcome, truth_of_factories)
