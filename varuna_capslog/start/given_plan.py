"""Config of a run: its file, the defaults of own data, and the decisions of the plan file that it may name. Workers
read the config.yaml of the run's folder, in which the plan has decided already.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from varuna_capslog.base import units
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.defaults import fill_own_train
from varuna_capslog.config.reading import load_config, section
from varuna_capslog.config.settings import Config
from varuna_capslog.planning.verdict import capacities_of_devices
from varuna_capslog.plans.parts import PlanRank
from varuna_capslog.plans.plan import Plan, read_plan
from varuna_capslog.start.chosen_variants import with_checked_variants, with_plan_variants

__all__ = ["OWN_DATA", "fill_defaults", "given_plan", "load_run_config", "with_given_plan"]

OWN_DATA = "varuna_capslog.own_data:workload"
"""The workload of a model and a data set of the user's."""


def load_run_config(
    path: Path | str, overrides: Sequence[str] = (), say: Callable[[str], object] = lambda line: None
) -> Config:
    """Return the config of a YAML file with `a.b=value` overrides, decided by its `pipeline.plan`, with its checked
    variants. Raises as `load_config` (ConfigError), `with_given_plan` and `with_checked_variants`.
    """
    config = load_config(path, overrides, lambda values: fill_defaults(values, say))
    return with_checked_variants(with_given_plan(config, say), say)


def fill_defaults(values: dict[str, Any], say: Callable[[str], object]) -> None:
    """Set the open values of a run on own data (`config/defaults.fill_own_train`), and report it to `say` in one line.
    A run that goes on from a checkpoint keeps the values of its config.yaml. Raises CapslogError where the data set of
    `data.dataset` or `data.val` cannot be opened.
    """
    if values.get("workload") != OWN_DATA:
        return
    resume, folder = str(values.get("resume", "auto")), Path(str(values.get("run_dir")))
    if resume not in ("auto", "never"):
        folder = Path(resume).parent.parent
    before = folder / "config.yaml"
    goes_on = resume != "never" and os.path.isfile(before)  # False, too, for an invalid path
    goes_on = goes_on and (any((folder / "checkpoints").glob("step-*")) or (folder / "held").exists())
    kept = load_config(before).train.model_dump(mode="json") if goes_on else None
    line = fill_own_train(values, lambda split: _samples(values, split), kept)
    if line is not None:
        say(line)


def _samples(values: Mapping[str, Any], split: str) -> int | None:
    from varuna_capslog.own_data.reading import SampleReader  # imports torch
    from varuna_capslog.own_data.section import DataSection

    keys = section(DataSection, values.get("data") or {}, "data").model_dump(mode="json")
    dataset = SampleReader(keys, 0).dataset(split)
    return None if dataset is None else len(dataset)


def with_given_plan(config: Config, say: Callable[[str], object] = lambda line: None) -> Config:
    """Return the config with all that its `pipeline.plan` decides; the same config where it names no plan.

    The plan replaces `pipeline.devices`, `replicas`, `schedule`, `recompute` and `stage_inputs`, and `say` is told so
    in one line. Its grains join `profile.grains`. Its capacities are those of its devices, also for later plans: they
    count where the config has no `pipeline.capacity`. `train.accumulation_blocks: null` becomes the plan's number, or 1
    where that is open, too. The plan's variants become the config's.

    Raises:
        CapslogError: the file is no plan, the config's sizes or blocks differ from the plan's, or the plan gives only
            some capacities to an elastic run.
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
