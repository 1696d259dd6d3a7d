"""The real Varuna with the plugin computes what one process computes; and does not, once a repair is taken away."""

from __future__ import annotations

import pytest

from tests.engine.pool import WorkerPool
from tests.varuna_plugin.cases import Case, oracle, train, worst

CASES = {
    "two stages, the cut far in front": Case([0, 1]),
    "two stages, the cut far behind": Case([0, 5], clip=0.3),
    "frozen stage in front": Case([0, 1], {"frozen": True}),
    "two stages, two replicas": Case([0, 3], replicas=2, clip=0.3),
    "uneven last microbatch": Case([0, 3, 5], batch_size=7),
    "every microbatch of another size": Case([0, 2, 4], ragged=True),
    "a layer shared by three stages": Case([0, 4, 5], clip=0.3),
    "a layer shared by four stages": Case([0, 4, 5, 6], {"blocks": 4}),
    "dropout": Case([0, 2, 4], {"dropout": 0.3, "norm": False}),
    "work in place behind a cut": Case([0, 1, 4], {"inplace": True}),
    "adam, one sample at a time": Case([0, 1, 2, 4], chunk=1, optimizer="adam"),
    "varuna's own split, six pieces on four stages": Case(None, stages=4),
    "one stage": Case([0], clip=0.3),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_one_process(pool: WorkerPool, name: str) -> None:
    case = CASES[name]
    outcomes = pool.run(train, case.ranks, case)
    expected = oracle(case, cuts=[0, 1, 2, 3] if case.cuts is None else None)
    differences = worst(outcomes, expected)
    assert all(value <= 1e-5 for value in differences.values()), differences
    held = [set(outcome.held) for outcome in outcomes]
    assert set.union(*held) == set(expected.parameters)
    shared = {name for name in expected.parameters if ".project." in name}
    for stage in range(case.stages):
        for earlier in range(stage):
            assert held[stage] & held[earlier] <= shared, "a parameter lies on a stage that does not use it"


@pytest.mark.parametrize(
    ("name", "mutation", "kind"),
    [
        ("a layer shared by three stages", "ties", "gradient"),
        ("a layer shared by four stages", "norm", "norm"),
        ("two stages, two replicas", "replicas", "gradient"),
        ("two stages, the cut far in front", "statistics", "buffer"),
        ("work in place behind a cut", "in place", "gradient"),
        ("uneven last microbatch", "short", "loss"),
    ],
)
def test_without_the_repair_the_numbers_are_wrong(pool: WorkerPool, name: str, mutation: str, kind: str) -> None:
    case = Case(**{**vars(CASES[name]), "mutation": mutation})
    if mutation == "statistics":
        # two stages have no second forward on the last one: cut behind the normalisation
        case.cuts = [0, 2]
    differences = worst(pool.run(train, case.ranks, case), oracle(case))
    assert not differences[kind] <= 1e-3, differences
