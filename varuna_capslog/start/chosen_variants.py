"""The variants that planner `budget` chooses for a run whose config leaves them open and allows results to differ.

`prepare.profile_and_variants` calls this. The config that comes back names the variants, as if its user had: everything
behind it, such as profile, plan, workers and later plans of an elastic run, is of the layers in that way.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from varuna_capslog.base.units import format_bytes
from varuna_capslog.config.settings import Config
from varuna_capslog.planners import BUDGET
from varuna_capslog.planning.layerwise import budget_plan, check_memory, judged_whole, layerwise_plan
from varuna_capslog.planning.variant_search import VariantChoice, choose_variants
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.variants import alternatives_of
from varuna_capslog.schedules import RunShape
from varuna_capslog.start.default_planner import with_defaults
from varuna_capslog.start.layerwise_start import asks_layerwise, configured_link

if TYPE_CHECKING:
    from varuna_capslog.planners.seconds import Link
    from varuna_capslog.profiles.record import Profile
    from varuna_capslog.profiling.estimate import Memo

__all__ = ["may_choose", "with_chosen_variants"]


def may_choose(config: Config) -> bool:
    """Whether a planner is to choose variants, as far as the config says: it allows some, names none, and has no other
    planner than budget.
    """
    pipeline = config.pipeline
    return not config.variants and config.numerics != "same" and pipeline.planner == BUDGET and asks_layerwise(config)


def with_chosen_variants(
    config: Config, profile: Profile, memo: Memo | None, link: Link | None = None, say: Callable[[str], object] = print
) -> Config:
    """The config with the variants of the fastest plan that fits; the same config where it names some itself, allows
    none, or has another planner than budget.

    A variant that fails its check (`profiling/variant_check`) is left out, and the search goes on without it.

    Args:
        profile: of the config; a measured one has rows of variants.
        memo: of the estimate that the profile is; None: it is measured.
        say: told what is chosen and why, or why nothing can be.
    """
    if not may_choose(config):
        return config
    decided = with_defaults(config, profile)
    if not may_choose(decided):
        return config
    if not profile.timed:
        say("variants are chosen by seconds, and the profile has none; name them in the config")
        return config
    from varuna_capslog.model.workload import load_workload
    from varuna_capslog.profiling.variant_check import check_variants, plain_chain

    workload, refused = load_workload(config), dict[int, list[str]]()
    full = profile if memo is None else _estimated(config, profile, memo)
    while alternatives_of(full):
        found = _searched(decided, full, link)
        checks = check_variants(
            plain_chain(workload), found.chosen, workload.profile_inputs(config.train.microbatch_size)
        )
        failed = [one for one in checks if one.fault]
        for one in failed:
            say(one.sentence())
            for layer in one.layers:
                refused.setdefault(layer, []).append(one.variant)
        if not failed:
            say(_sentence(config, profile, found))
            chosen = {f"#{layer}": name for layer, name in found.chosen.items()}
            return config.model_copy(update={"variants": chosen})
        full = _without(full, refused)
    return config


def _estimated(config: Config, profile: Profile, memo: Memo) -> Profile:
    """The profile with rows of variants; without any where the layers are those of factories."""
    from varuna_capslog.profiling.estimate import StageEstimator
    from varuna_capslog.profiling.variant_rows import with_variant_rows

    estimator = StageEstimator.of_config(config, memo)
    return profile if estimator.chain.factories is not None else with_variant_rows(profile, estimator, config.numerics)


def _without(profile: Profile, refused: Mapping[int, Sequence[str]]) -> Profile:
    """The profile without the rows of refused variants."""

    def is_refused(first: int, variant: str | None) -> bool:
        names = [] if variant is None else variant.split(",")
        return any(name in refused.get(first + place, ()) for place, name in enumerate(names))

    rows = [row for row in profile.observations if not is_refused(row.layers[0], row.variant)]
    return dataclasses.replace(profile, observations=tuple(rows))


def _searched(config: Config, profile: Profile, link: Link | None) -> VariantChoice:
    pipeline, run = config.pipeline, RunShape.of_config(config).share(config.pipeline.replicas)

    alone = pipeline.replicas == 1 and not config.elastic.enabled
    limit, where = pipeline.search_seconds, configured_link(config, link)
    check_memory(BUDGET, pipeline.memory)

    def plan_of(one: Profile) -> Plan:
        if alone:
            found = budget_plan(one, pipeline.devices, pipeline.capacity, run, where, None, limit)
        else:
            found = layerwise_plan(one, pipeline.devices, BUDGET, pipeline.capacity, run, where, None, limit)
        return judged_whole(one, found, pipeline.devices, run)

    return choose_variants(profile, pipeline.devices, run.microbatches, plan_of)


def _sentence(config: Config, profile: Profile, found: VariantChoice) -> str:
    """What was chosen, its class, and what it gains."""
    if not found.chosen:
        return f"no variant of class {config.numerics} or stricter makes the plan better; the layers stay as configured"
    counts = Counter(found.chosen.values())
    size = profile.num_layers
    what = ", ".join(
        f"{name} for {count} of {size} layers ({_range(profile, found, name)})" for name, count in counts.items()
    )
    how = "of all choices" if found.every else f"of the {found.weighed} choices that were weighed"
    return f"variants ({config.numerics}): {what}; {_gain(found)}; the best {how}"


def _range(profile: Profile, found: VariantChoice, name: str) -> str:
    layers = [profile.layers[layer].name for layer, own in found.chosen.items() if own == name]
    return layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"


def _gain(found: VariantChoice) -> str:
    plan, plain = found.plan, found.plain
    if plain.fits is False and plan.fits is not False:
        lack = 0 if plain.shortfall is None else plain.shortfall.bytes
        return f"it fits, and without them the best plan lacks {format_bytes(lack)}"
    if plan.fits is False:
        needs, before = (format_bytes(one.peak_bytes or 0) for one in (plan, plain))
        return f"the largest rank needs {needs} instead of {before}"
    return f"the step takes {plan.step_seconds:.4g} s instead of {plain.step_seconds:.4g} s"
