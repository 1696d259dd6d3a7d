"""`pipeline.parallel` beside other keys, and in the engine, which runs none of it."""

import dataclasses

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.parallel import Divisors
from varuna_capslog.config.reading import load_config
from varuna_capslog.engine.layout import layout_of
from varuna_capslog.plans.plan import Plan
from varuna_capslog.start.prepare import check_names

TINY = "configs/tiny.yaml"


def config_of(*overrides):
    return load_config(TINY, ["train.minibatch_size=16", "train.microbatch_size=2", *overrides])


def test_cards_with_samples_of_their_own_share_the_microbatches_of_a_step():
    assert config_of().num_microbatches == 8
    config = config_of("pipeline.parallel=tensor=2,data=4")
    assert (config.num_microbatches, config.pipeline.divisors) == (2, Divisors(tensor=2, data=4))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pipeline.parallel=data=3"], "no multiple of microbatches of 2 on each of data=3"),
        (["pipeline.parallel=tensor=2", "pipeline.replicas=2"], "replicas are pipelines of our engine"),
        (["pipeline.parallel=tensor=2", "pipeline.node_devices=3"], "does not divide the 4 cards of all stages"),
        (["pipeline.node_bandwidth=400GB/s"], "pipeline.parallel, which is not given"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(overrides, message):
    with pytest.raises(CapslogError, match=message):
        config_of("pipeline.devices=2", *overrides)


def test_the_engine_refuses_what_it_does_not_run():
    with pytest.raises(CapslogError, match=r"pipeline.parallel=tensor=2 divides stages in another system"):
        check_names(config_of("pipeline.parallel=tensor=2"))
    plan = Plan.of_cuts(11, [0, 5], parallel={"tensor": 2, "zero": 1})
    with pytest.raises(CapslogError, match=r"parallel is tensor=2,zero=1 in the plan"):
        layout_of(plan, config_of("pipeline.devices=2"))


def test_a_plan_file_keeps_its_divisors():
    plan = Plan.of_cuts(11, [0, 5], parallel=Divisors(tensor=2, zero=1))
    assert Plan.from_json(plan.to_json()) == plan
    assert "parallel" not in dataclasses.replace(plan, parallel=None).to_json()
