"""Makes the config of a run from a config file, the defaults for own data, and the choices of a plan file or a planner.
Workers read the result, config.yaml in the run's folder.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varuna_capslog.base import units
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.units import format_bytes
from varuna_capslog.config.defaults import fill_own_train
from varuna_capslog.config.reading import load_config, section
from varuna_capslog.config.settings import Config
from varuna_capslog.planners import BUDGET
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.solve import solve
from varuna_capslog.planning.variant_search import VariantChoice, choose_variants
from varuna_capslog.planning.verdict import capacities_of_devices
from varuna_capslog.plans.parts import PlanRank
from varuna_capslog.plans.plan import Plan, read_plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.profiles.runs import alternatives_of, compile_seconds
from varuna_capslog.start.ordinary import with_defaults

if TYPE_CHECKING:
    from varuna_capslog.profiling.estimate import Memo

__all__ = [
    "OWN_DATA",
    "fill_defaults",
    "given_plan",
    "load_run_config",
    "may_choose",
    "naming_variants",
    "say_what_is_not_estimated",
    "with_checked_variants",
    "with_chosen_variants",
    "with_given_plan",
]

OWN_DATA = "varuna_capslog.own_data:workload"
"""The workload for the user's own model and data set."""


def load_run_config(
    path: Path | str, overrides: Sequence[str] = (), say: Callable[[str], object] = lambda line: None
) -> Config:
    """Return the config of a YAML file with `a.b=value` overrides, with the values of its plan file (`pipeline.plan`),
    and without variants that fail their check. Raises like `load_config`, `with_given_plan`, `with_checked_variants`.
    """
    config = load_config(path, overrides, lambda values: fill_defaults(values, say))
    return with_checked_variants(with_given_plan(config, say), say)


def fill_defaults(values: dict[str, Any], say: Callable[[str], object]) -> None:
    """Set the `train` keys that a config for own data leaves out (`config/defaults.fill_own_train`), and report them to
    `say` in one line. A run that continues from a checkpoint keeps the values of its config.yaml. Raises CapslogError
    where the data set of `data.dataset` or `data.val` cannot be opened.
    """
    if values.get("workload") != OWN_DATA:
        return
    resume, folder = str(values.get("resume", "auto")), Path(str(values.get("run_dir")))
    if resume not in ("auto", "never"):
        folder = Path(resume).parent.parent
    before = folder / "config.yaml"
    goes_on = resume != "never" and os.path.isfile(before)  # False, too, for an invalid path
    goes_on = goes_on and (any((folder / "checkpoints").glob("step-*")) or (folder / "held").exists())
    train_before = load_config(before).train.model_dump(mode="json") if goes_on else None
    line = fill_own_train(values, lambda split: _samples(values, split), train_before)
    if line is not None:
        say(line)


def _samples(values: Mapping[str, Any], split: str) -> int | None:
    from varuna_capslog.own_data.handed import DataSection
    from varuna_capslog.own_data.reading import SampleReader  # imports torch

    keys = section(DataSection, values.get("data") or {}, "data").model_dump(mode="json")
    dataset = SampleReader(keys, 0).dataset(split)
    return None if dataset is None else len(dataset)


def with_given_plan(config: Config, say: Callable[[str], object] = lambda line: None) -> Config:
    """Return the config with the values of its `pipeline.plan`; the same config where it names no plan.

    The plan replaces `pipeline.devices`, `replicas`, `schedule`, `recompute` and `stage_inputs`; `say` gets one line
    about the changes. The plan's grains are added to `profile.grains`. If the config has no `pipeline.capacity` and the
    plan has one for every rank, these become it, also for later plans. `train.accumulation_blocks: null` becomes the
    plan's number, or 1 if the plan leaves it open. The plan's variants become the config's.

    Raises:
        CapslogError: the file is no plan, the config's sizes or blocks differ from the plan's, or the run is elastic
            and the plan has capacities for some ranks only.
    """
    path = config.pipeline.plan
    if path is None:
        return config
    plan, values = read_plan(path), config.model_dump(mode="json")
    plan.check_trains(str(path))
    pipeline, train = values["pipeline"], values["train"]
    decided_keys: dict[str, Any] = {"devices": plan.num_ranks, "replicas": 1}
    limits = [rank.capacity_bytes for rank in plan.ranks]
    if pipeline["capacity"] is None and any(limits):
        if all(limits):
            decided_keys["capacity"] = [units.with_unit(limit) for limit in limits]
        elif config.elastic.enabled:
            raise CapslogError(
                f"{path}: ranks[{limits.index(None)}].capacity_bytes is not given, but that of other ranks is, and the "
                "later plans of an elastic run must know all of them; give every rank one, or set pipeline.capacity"
            )
    if plan.schedule is not None:
        decided_keys["schedule"] = plan.schedule
    if plan.recomputes is not None:
        kinds = {interval.kind for stage in plan.stages for interval in stage.memory or ()}
        decided_keys |= {
            "recompute": plan.recomputes,
            "stage_inputs": "host" if "recompute+offload" in kinds else "device",
        }
    blocks = plan.units.blocks
    if blocks is not None and train["accumulation_blocks"] not in (None, blocks):
        raise CapslogError(
            f"{path}: units.blocks is {blocks}, but train.accumulation_blocks={train['accumulation_blocks']}; make the "
            "two agree, or set train.accumulation_blocks to null"
        )
    sizes = {"per_step": config.num_microbatches, "samples": config.train.microbatch_size}
    for name, ours in sizes.items():
        plan_size = getattr(plan.units, name)
        if plan_size not in (None, ours):
            raise CapslogError(
                f"{path}: units.{name} is {plan_size}, but the config makes it {ours} (train.minibatch_size="
                f"{config.train.minibatch_size}, train.microbatch_size={config.train.microbatch_size}); sizes are "
                "constants of a run, so make the two agree"
            )
    changed = [f"{name}={value}" for name, value in decided_keys.items() if pipeline[name] != value]
    if changed:
        say(f"{path} decides: pipeline.{', pipeline.'.join(changed)}")
    if grains := {stage.grain for stage in plan.stages} - {1}:
        values["profile"]["grains"] = sorted({*config.profile.grains, *grains})
    values["pipeline"] = pipeline | decided_keys
    values["train"] = train | {"accumulation_blocks": blocks or train["accumulation_blocks"] or 1}
    values |= with_plan_variants(config, plan)
    decided = section(Config, values, "")
    decided._source = config.source
    return decided


def given_plan(config: Config) -> Plan | None:
    """Return the plan of `pipeline.plan` with `pipeline.capacity` as its capacities where set; None without a plan."""
    if config.pipeline.plan is None:
        return None
    plan, capacity = read_plan(config.pipeline.plan), config.pipeline.capacity
    if capacity is None:
        return plan
    limits = capacities_of_devices(capacity, plan.num_ranks) or []
    plan_ranks = plan.ranks or (PlanRank(),) * plan.num_ranks
    ranks = tuple(
        dataclasses.replace(rank, capacity_bytes=limit) for rank, limit in zip(plan_ranks, limits, strict=True)
    )
    return dataclasses.replace(plan, ranks=ranks)


# -- Variants that planner `budget` chooses if a config names none and allows results to differ. The returned config
# names them as if the user had, so that profile, plan, workers and later plans of an elastic run all use them.


def say_what_is_not_estimated(config: Config, say: Callable[[str], object]) -> None:
    """Warn where the config names variants without an estimate, which an estimated profile ignores."""
    unknown = _not_estimated(sorted(set(config.variants.values()))) if config.profile.source == "estimated" else ""
    if unknown:
        say(f"{unknown}, so the estimate is of these layers without it; profile.source=measured measures them")


def _not_estimated(names: Iterable[str]) -> str:
    from varuna_capslog.variants.registry import known_variants

    variants = known_variants()
    unknown = [name for name in names if name in variants and not variants[name].estimated]
    return f"no estimate knows what layers cost as {' or '.join(unknown)}" if unknown else ""


def may_choose(config: Config) -> bool:
    """True where the config leaves variants to planner budget: it allows some, and names no variant, cuts or plan."""
    pipeline = config.pipeline
    chooses = pipeline.planner == BUDGET and pipeline.cuts is None and pipeline.plan is None
    return chooses and not config.variants and config.numerics != "same"


def with_chosen_variants(
    config: Config, profile: Profile, memo: Memo | None, say: Callable[[str], object] = print
) -> Config:
    """Return the config with the variants of the fastest plan that fits; the same config where `may_choose` is False. A
    variant that fails its check (`profiling/variant_check`) is left out, and the search continues without it.

    Args:
        profile: of the config; a measured one has rows of variants.
        memo: cache of the estimated profile; None: the profile is measured.
        say: called with a sentence on the choice and its reason, or on why there is none.
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
        choice = _searched(decided, full)
        checks = check_variants(
            plain_chain(workload), choice.chosen, workload.profile_inputs(config.train.microbatch_size)
        )
        failed = [check for check in checks if check.fault]
        for check in failed:
            say(check.sentence())
            for layer in check.layers:
                refused.setdefault(layer, []).append(check.variant)
        if not failed:
            say(_sentence(config, full, choice))
            chosen = {f"#{layer}": name for layer, name in choice.chosen.items()}
            return config.model_copy(update={"variants": chosen})
        full = _without(full, refused)
    return config


def _estimated(config: Config, profile: Profile, memo: Memo, say: Callable[[str], object]) -> Profile:
    """Return the profile with rows of variants; the same profile where factories make the layers."""
    from varuna_capslog.profiling.estimate import StageEstimator
    from varuna_capslog.profiling.variant_check import allowed_variants, with_variant_rows

    estimator = StageEstimator.of_config(config, memo)
    if estimator.chain.factories is not None:
        return profile
    allowed = allowed_variants(config.numerics, config.profile.variants)
    if unknown := _not_estimated(variant.name for variant in allowed):
        say(f"{unknown}, so these ways are not weighed; set profile.source=measured")
    return with_variant_rows(profile, estimator, allowed)


def _without(profile: Profile, refused: Mapping[int, Sequence[str]]) -> Profile:
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


def _sentence(config: Config, profile: Profile, choice: VariantChoice) -> str:
    if not choice.chosen:
        return f"no variant of class {config.numerics} or stricter makes the plan better; the layers stay as configured"
    counts = Counter(choice.chosen.values())
    size = profile.num_layers
    variants = ", ".join(
        f"{name} for {count} of {size} layers ({_range(profile, choice, name)})" for name, count in counts.items()
    )
    how = "of all choices" if choice.every else f"of the {choice.weighed} choices that were weighed"
    return f"variants ({config.numerics}): {variants}; {_gain(choice)}; the best {how}{_compiling(profile, choice)}"


def _compiling(profile: Profile, choice: VariantChoice) -> str:
    spent = compile_seconds(profile, set(choice.chosen.values()))
    if not spent:
        return ""
    step, plain = choice.plan.step_seconds, choice.plain.step_seconds
    gains = (
        "" if step is None or plain is None or step >= plain else f", the gain of {spent / (plain - step):.0f} steps"
    )
    return f"; compiling took {spent:.0f} s while the layers were measured{gains}, and torch keeps the code on disk"


def _range(profile: Profile, choice: VariantChoice, name: str) -> str:
    layers = [profile.layers[layer].name for layer, variant in choice.chosen.items() if variant == name]
    return layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"


def _gain(choice: VariantChoice) -> str:
    plan, plain = choice.plan, choice.plain
    if plain.fits is False and plan.fits is not False:
        lacking_bytes = 0 if plain.shortfall is None else plain.shortfall.bytes
        return f"it fits, and without them the best plan lacks {format_bytes(lacking_bytes)}"
    if plan.fits is False:
        needs, before = (format_bytes(candidate.peak_bytes or 0) for candidate in (plan, plain))
        return f"the largest rank needs {needs} instead of {before}"
    return f"the step takes {plan.step_seconds:.4g} s instead of {plain.step_seconds:.4g} s"


# -- Checks the variants of a config once, where a run starts, so that all its ranks compute the layers alike; and
#    exchanges variants between config and plan.
#
# `load_run_config` and `api.training` call `with_checked_variants`. The workers read config.yaml in the run's folder,
# which holds the variants that have passed.


def with_checked_variants(config: Config, say: Callable[[str], object] = lambda line: None) -> Config:
    """Return the config without the variants of layers that fail their check; the same config where all pass.

    Args:
        say: called with a sentence before layers are compiled, and for each kind of layer whose variant fails, or was
            checked on smaller inputs.

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
    """Return the plan with the config's variants, if the config names layers by number, as after a planner's choice;
    the same plan if it is short, the config has patterns, or the run is elastic, whose config is for all plans.
    """
    numbers = [key.removeprefix("#") for key in config.variants]
    if plan.short or config.elastic.enabled or not all(number.isdigit() for number in numbers):
        return plan
    return dataclasses.replace(plan, variants=dict(zip(numbers, config.variants.values(), strict=True)))


def with_plan_variants(config: Config, plan: Plan) -> dict[str, Any]:
    """Return the config key `variants` of a plan that names variants, else {}. Raises CapslogError on a conflict."""
    wanted = {f"#{layer}": name for layer, name in plan.variants.items()}
    if not wanted or config.variants == wanted:
        return {}
    if config.variants:
        raise CapslogError(
            f"the plan names variants of its layers, and the config has variants={config.variants} too; leave the "
            "config's out, or plan again"
        )
    return {"variants": wanted}
