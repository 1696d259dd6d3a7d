"""The variants that planner `budget` chooses for a run whose config leaves them open and allows results to differ.

`prepare.profile_and_variants` calls this. The config that comes back names the variants, as if its user had: everything
behind it, such as profile, plan, workers and later plans of an elastic run, is of the layers in that way.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from varuna_capslog.base.units import format_bytes
from varuna_capslog.config.settings import Config
from varuna_capslog.planners import BUDGET
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.solve import solve
from varuna_capslog.planning.variant_search import VariantChoice, choose_variants
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.variants import alternatives_of, compile_seconds
from varuna_capslog.start.default_planner import with_defaults

if TYPE_CHECKING:
    from varuna_capslog.profiles.record import Profile
    from varuna_capslog.profiling.estimate import Memo

__all__ = ["may_choose", "say_what_is_not_estimated", "with_chosen_variants"]


def say_what_is_not_estimated(config: Config, say: Callable[[str], object]) -> None:
    """Of a config whose profile is estimated: that some of its own variants count as the layers without them."""
    unknown = _not_estimated(sorted(set(config.variants.values()))) if config.profile.source == "estimated" else ""
    if unknown:
        say(f"{unknown}, so the estimate is of these layers without it; profile.source=measured measures them")


def _not_estimated(names: Iterable[str]) -> str:
    from varuna_capslog.variants.registry import known_variants

    known = known_variants()
    unknown = [name for name in names if name in known and not known[name].estimated]
    return f"no estimate knows what layers cost as {' or '.join(unknown)}" if unknown else ""


def may_choose(config: Config) -> bool:
    """Whether a planner is to choose variants, as far as the config says: it allows some, names none, and has no other
    planner than budget.
    """
    pipeline = config.pipeline
    chooses = pipeline.planner == BUDGET and pipeline.cuts is None and pipeline.plan is None
    return chooses and not config.variants and config.numerics != "same"


def with_chosen_variants(
    config: Config, profile: Profile, memo: Memo | None, say: Callable[[str], object] = print
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
    full = profile if memo is None else _estimated(config, profile, memo, say)
    while alternatives_of(full):
        found = _searched(decided, full)
        checks = check_variants(
            plain_chain(workload), found.chosen, workload.profile_inputs(config.train.microbatch_size)
        )
        failed = [one for one in checks if one.fault]
        for one in failed:
            say(one.sentence())
            for layer in one.layers:
                refused.setdefault(layer, []).append(one.variant)
        if not failed:
            say(_sentence(config, full, found))
            chosen = {f"#{layer}": name for layer, name in found.chosen.items()}
            return config.model_copy(update={"variants": chosen})
        full = _without(full, refused)
    return config


def _estimated(config: Config, profile: Profile, memo: Memo, say: Callable[[str], object]) -> Profile:
    """The profile with rows of variants; without any where the layers are those of factories."""
    from varuna_capslog.profiling.estimate import StageEstimator
    from varuna_capslog.profiling.variant_rows import allowed_variants, with_variant_rows

    estimator = StageEstimator.of_config(config, memo)
    if estimator.chain.factories is not None:
        return profile
    allowed = allowed_variants(config.numerics, config.profile.variants)
    if unknown := _not_estimated(one.name for one in allowed):
        say(f"{unknown}, so these ways are not weighed; set profile.source=measured")
    return with_variant_rows(profile, estimator, allowed)


def _without(profile: Profile, refused: Mapping[int, Sequence[str]]) -> Profile:
    """The profile without the rows of refused variants."""

    def is_refused(first: int, variant: str | None) -> bool:
        names = [] if variant is None else variant.split(",")
        return any(name in refused.get(first + place, ()) for place, name in enumerate(names))

    rows = [row for row in profile.observations if not is_refused(row.layers[0], row.variant)]
    return dataclasses.replace(profile, observations=tuple(rows))


def _searched(config: Config, profile: Profile) -> VariantChoice:
    problem = Problem.of_config(config, profile)

    def plan_of(changed: Profile) -> Plan:
        return solve(dataclasses.replace(problem, profile=changed), BUDGET, weighs_others=False)

    return choose_variants(profile, problem.width, problem.share.microbatches, plan_of)


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
    return f"variants ({config.numerics}): {what}; {_gain(found)}; the best {how}{_compiling(profile, found)}"


def _compiling(profile: Profile, found: VariantChoice) -> str:
    """What compiling costs, where a chosen variant compiles."""
    spent = compile_seconds(profile, set(found.chosen.values()))
    if not spent:
        return ""
    step, plain = found.plan.step_seconds, found.plain.step_seconds
    gains = (
        "" if step is None or plain is None or step >= plain else f", the gain of {spent / (plain - step):.0f} steps"
    )
    return f"; compiling took {spent:.0f} s while the layers were measured{gains}, and torch keeps the code on disk"


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
