"""The variants of a config, checked once where a run starts, so that all its ranks compute the layers alike; and the
variants that a plan names.

`start/given_plan` and `api.training` call this. The workers read the config.yaml of the run's folder, which holds the
variants that have passed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import section
from varuna_capslog.config.settings import Config
from varuna_capslog.plans.plan import Plan

__all__ = ["naming_variants", "with_checked_variants", "with_plan_variants"]


def with_checked_variants(config: Config, say: Callable[[str], object] = lambda line: None) -> Config:
    """Return the config without the variants of layers that fail their check; the same config where all pass.

    Args:
        say: told one sentence for each kind of layer whose variant fails, or was checked on smaller inputs; before
            that, that layers are compiled.

    Raises:
        CapslogError: an unknown variant, a pattern that matches nothing, a class that `numerics` does not allow.
    """
    if not config.variants:
        return config
    from varuna_capslog.model.workload import load_workload
    from varuna_capslog.profiling.variant_check import checked_choices

    if "compiled" in config.variants.values():
        say("layers are compiled to check them, which may take minutes the first time; torch keeps the code on disk")
    passed, checks = checked_choices(load_workload(config), config.train.microbatch_size)
    for check in checks:
        if check.fault or check.smaller:
            say(check.sentence())
    if passed == config.variants:
        return config
    decided = section(Config, config.model_dump(mode="json") | {"variants": passed}, "")
    decided._source, decided._given = config._source, config._given
    return decided


def naming_variants(config: Config, plan: Plan) -> Plan:
    """Return the plan with the variants of its layers, where the config names layers by their numbers, as it does when
    a planner has chosen. The same plan is returned where the config has patterns, and where later plans of the run
    leave the variants to the config.
    """
    numbers = [key.removeprefix("#") for key in config.variants]
    if plan.short or config.elastic.enabled or not all(number.isdigit() for number in numbers):
        return plan
    return dataclasses.replace(plan, variants=dict(zip(numbers, config.variants.values(), strict=True)))


def with_plan_variants(config: Config, plan: Plan) -> dict[str, Any]:
    """Return the key `variants` of the config that a given plan decides; empty where the plan names no variants.

    Raises CapslogError where the config has others.
    """
    wanted = {f"#{layer}": name for layer, name in plan.variants.items()}
    if not wanted or config.variants == wanted:
        return {}
    if config.variants:
        raise CapslogError(
            f"the plan names variants of its layers, and the config has variants={config.variants} too; leave the "
            "config's out, or plan again"
        )
    return {"variants": wanted}
