"""Prepares a run before its first worker starts: profiles the model, plans its cuts, writes the run's folder. A plan
that does not fit is refused here.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from varuna_capslog.base import fields, files
from varuna_capslog.base.clock import wall_seconds
from varuna_capslog.base.errors import CapslogError, DoesNotFit, RunFinding, findings_of, settle
from varuna_capslog.base.processes import collecting_rarely
from varuna_capslog.base.supervisor import usable
from varuna_capslog.base.units import format_bytes
from varuna_capslog.config.reading import Config, dump_config, load_config
from varuna_capslog.elastic.network import check_gloo_interfaces
from varuna_capslog.memory import AUTO, MEMORY_MODELS
from varuna_capslog.memory.inference import is_for_inference
from varuna_capslog.planners import BUDGET, JOINT
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.registry import planner_named
from varuna_capslog.planning.solve import solve
from varuna_capslog.plans.parts import PlanRank, Units, grains_of, scheduled
from varuna_capslog.plans.plan import Plan, latest_plan, plan_path, read_plan, stages_of_pipelines, write_plan
from varuna_capslog.plans.rules import check_actions
from varuna_capslog.profiles.divided import PARALLEL, Network, divided
from varuna_capslog.profiles.record import Profile, write_profile
from varuna_capslog.profiles.runs import under
from varuna_capslog.schedules import RunShape
from varuna_capslog.start import ENGINES
from varuna_capslog.start.choices import (
    given_plan,
    may_choose,
    naming_variants,
    say_what_is_not_estimated,
    with_chosen_variants,
)
from varuna_capslog.start.named_code import mark_run
from varuna_capslog.start.ordinary import WITHOUT_MODEL, with_choices_of, with_defaults
from varuna_capslog.training.manifest import check_folder, check_samples

if TYPE_CHECKING:
    from varuna_capslog.model.chain import Chain
    from varuna_capslog.model.workload import Workload
    from varuna_capslog.profiling.estimate import Memo

__all__ = [
    "check_names",
    "check_optimizer",
    "data_findings",
    "disk_findings",
    "divided_profile",
    "estimate_memo",
    "plan_run",
    "prepare_run",
    "profile_and_variants",
    "profile_degrees",
    "profile_run",
    "settled_plan",
]


# -- Checks of a config before the profile: names, the optimizer, data and weights.
#
# `prepare_run` and `readiness` call these functions, so `capslog train` and `capslog check` report the same faults.


def check_names(config: Config) -> None:
    """Refuse unknown planners, memory models, engines and interfaces, and keys of planning alone; needs no torch."""
    check_gloo_interfaces(os.environ)
    if (divisors := config.pipeline.divisors) is not None:
        raise CapslogError(
            f"pipeline.parallel={divisors.describe()} divides stages in another system, and our engine runs a stage on "
            "one device; leave it out to train, or use it with capslog plan and export the plan"
        )
    if isinstance(arguments := config.model.get("arguments"), dict) and arguments.get("predicts"):
        raise CapslogError(
            "model.arguments.predicts adds layers for multi-token prediction, which capslog plan counts and our engine "
            "does not train; leave it out"
        )
    planner_named(config.pipeline.planner)
    fields.refuse_unknown([config.pipeline.memory], [AUTO, *MEMORY_MODELS], "memory model")
    ENGINES[config.engine].check()


def check_optimizer(config: Config) -> None:
    """Raise CapslogError where the config's optimizer cannot step a part of the parameters without the others."""
    from varuna_capslog.engine.recipe import Recipe  # imports torch, which planning from a profile does without

    Recipe.of_config(config.train).check_optimizer()


def data_findings(config: Config, workload: Workload) -> list[RunFinding]:
    """Return findings about data and weights: notes, and problems that would stop the run or spoil its training."""

    def enough() -> None:
        facts = workload.data_facts()
        if "number of samples" in facts:
            check_samples(facts["number of samples"], config.train.minibatch_size)

    return list(findings_of(enough, workload.check))


def disk_findings(config: Config, checkpoint_bytes: int | None) -> Iterator[RunFinding]:
    """Check that the run's folder is writable, with room for all checkpoints to be kept (each `checkpoint_bytes`)."""
    wanted = config.run_dir.absolute()
    folder = next(path for path in (wanted, *wanted.parents) if os.path.lexists(path))
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "cannot be written" if folder.is_dir() else "is no folder"
        raise CapslogError(f"run_dir={config.run_dir}: {folder} {why}; choose another run_dir")
    if checkpoint_bytes is None:
        return
    with usable(folder):
        free = shutil.disk_usage(folder).free
        before = sum(file.stat().st_size for file in (wanted / "checkpoints").glob("step-*/*"))
    count, size = _kept_checkpoints(config), format_bytes(checkpoint_bytes)
    if checkpoint_bytes * count - before > free:
        raise CapslogError(
            f"run_dir={config.run_dir} is to hold {count} checkpoint(s) of about {size}, but only {format_bytes(free)} "
            "are free there; free space, choose another run_dir, or set train.checkpoint_keep lower"
        )
    yield RunFinding(
        f"{count} checkpoint(s) of about {size} are there at once, and {format_bytes(free)} are free", "fact"
    )


def _kept_checkpoints(config: Config) -> int:
    """Return the largest number of checkpoints on disk at once: the newest, the best, and the one being written."""
    train = config.train
    most_kept = train.checkpoint_keep + 1 + (train.evaluate_every is not None)
    if train.max_steps is None or train.evaluate_every:
        return most_kept
    return min(most_kept, 1 if train.checkpoint_every is None else 1 + (train.max_steps - 1) // train.checkpoint_every)


# -- Prepares a run before its first worker starts


_WITHOUT_TIME = (
    "planned for the smallest peak by planner exact, since the profile has not the seconds and runs of its layers; "
    "profile again with capslog profile for the shortest step that fits"
)


def prepare_run(config: Config, show: bool = True) -> Plan:
    """Profile and plan `config`, and write config.yaml, profile.json and plan-<generation>.json into its run_dir.

    A plan equal to the run's last keeps its generation; another gets the next number.

    Raises:
        DoesNotFit: no plan keeps every stage within its device; the smallest-peak plan is written all the same.
        CapslogError: the model, the profile or the plan is impossible, or the folder's checkpoints are of another run.
    """
    from varuna_capslog.model.workload import load_workload

    begun = wall_seconds()
    # These checks precede the profile, which may take minutes.
    check_names(config)
    check_optimizer(config)
    workload = load_workload(config)
    notes = settle(data_findings(config, workload))
    facts = workload.data_facts()
    workload.hand_over()
    config, profile, plan = settled_plan(config, show, notes.append)
    named_plan = given_plan(config)
    if named_plan is not None and profile is not None:
        _check_digest(named_plan, profile, config)
    about = _checkpoint_bytes(profile)
    # notes only: the disk may be cleared while the run trains, and a full disk costs the run no step
    notes += [finding.text for finding in findings_of(lambda: disk_findings(config, about)) if finding.kind != "fact"]
    why = "; ".join(plan.notes)
    plan = dataclasses.replace(plan, notes=(*plan.notes, *notes))
    check_folder(config, plan.model, grains_of(plan.stages), facts)
    # each plan of an elastic run may have another schedule
    settled = config if config.elastic.enabled else with_choices_of(config, plan)
    files.write_text(config.run_dir / "config.yaml", dump_config(settled))
    mark_run(config.run_dir)
    if profile is not None:
        write_profile(config.run_dir / "profile.json", profile)
    last = latest_plan(config.run_dir)
    if last is None or not _same(last[1], plan):
        write_plan(plan_path(config.run_dir, 0 if last is None else last[0] + 1), plan)
    if plan.fits is False:
        raise DoesNotFit(why or "no plan fits the given capacity; add devices or capacity")
    files.append_jsonl(config.run_dir / "events.jsonl", {"kind": "launch", "time": begun})
    return plan


def _checkpoint_bytes(profile: Profile | None) -> int | None:
    """Return the approximate bytes of a checkpoint; None without a profile that has them."""
    if profile is None:
        return None
    from varuna_capslog.membership.placing import state_bytes  # imports modules that only elastic runs need

    layer_bytes = state_bytes(profile)
    return None if layer_bytes is None else sum(layer_bytes[0])


def settled_plan(config: Config, show: bool, say: Callable[[str], object]) -> tuple[Config, Profile | None, Plan]:
    """Return the config with the planner's choices, its profile (None where none is needed), and the judged plan with
    which the run begins. Writes nothing into the run's folder. say: called with a sentence on each choice and its gain.
    """
    config = _with_kept_blocks(config)
    named_plan, memo, profile = _checked_plan(config), estimate_memo(config), None
    if needs_profile(config, named_plan):
        config, profile = profile_and_variants(config, show, memo, say=say)
    config = with_defaults(config, profile)
    plan = naming_variants(config, _plan(config, profile, named_plan, memo))
    if profile is not None:
        plan = _with_norms_named(config, plan, lambda: _profiled_chain(config, memo))
    if config.train.blocks_are_open and not plan.short and plan.units.blocks not in (None, config.num_blocks):
        say(f"{plan.units.blocks} accumulation blocks are chosen, a constant of the run (train.accumulation_blocks)")
    return config, profile, plan


def _kept_config(config: Config) -> Config | None:
    """Return the earlier config of the run that this config continues; None where it begins anew."""
    before = config.run_dir / "config.yaml"
    if config.resume == "never" or not before.exists():
        return None
    trained = any((config.run_dir / "checkpoints").glob("step-*")) or (config.run_dir / "held").exists()
    return load_config(before) if trained else None


def _with_kept_blocks(config: Config) -> Config:
    """Return the config with the accumulation blocks of the run that it continues; the same config for a new run."""
    kept = _kept_config(config) if config.train.blocks_are_open else None
    if kept is None or kept.num_microbatches != config.num_microbatches:
        return config
    return config.model_copy(update={"train": config.train.with_blocks(kept.num_blocks)})


def estimate_memo(config: Config) -> Memo | None:
    """Return the cache that an estimated profile and its plan's rehearsal share; None where the profile is measured."""
    if config.profile.source != "estimated":
        return None
    from varuna_capslog.profiling.estimate import Memo

    return Memo()


@collecting_rarely()
def profile_run(config: Config, show: bool = True, memo: Memo | None = None, variants: str | None = None) -> Profile:
    """Return the profile of the configured model: from the cache, by real runs, or estimated without a device where
    `profile.source` says so.

    Args:
        show: draw a progress bar. memo: from `estimate_memo`; pass it to `plan_run`, too.
        variants: for a measured profile; see `profiling/measure.profile_config`.
    """
    if config.profile.source == "estimated":
        from varuna_capslog.profiling.estimate import estimate_config

        with _progress(show) as progress:
            return estimate_config(config, progress, memo, use_cache=True)
    from varuna_capslog.profiling.measure import profile_config

    with _progress(show) as progress:
        workers = min(config.world_size, os.cpu_count() or 1)
        return profile_config(config, workers=workers, progress=progress, variants=variants)


def profile_degrees(config: Config, profile: Profile, degrees: Sequence[int], show: bool = True) -> Profile:
    """Return the profile with runs on these numbers of devices (`degrees`); see `profiling/degrees.with_degrees`."""
    from varuna_capslog.profiling.degrees import with_degrees

    with _progress(show) as progress:
        return with_degrees(config, profile, degrees, progress)


def profile_and_variants(
    config: Config,
    show: bool,
    memo: Memo | None,
    say: Callable[[str], object] = lambda line: None,
) -> tuple[Config, Profile]:
    """Return the config and its profile (`profile_run`); where a planner chooses variants, the config names them.

    A run that continues from a checkpoint keeps its variants. say: called with a sentence on each choice and its gain.
    """
    kept = _kept_config(config)
    if kept is not None and kept.numerics == config.numerics and not config.variants:
        config = config.model_copy(update={"variants": kept.variants})
        return config, profile_run(config, show, memo)
    say_what_is_not_estimated(config, say)
    measured = config.numerics if memo is None and may_choose(config) else None
    profile = profile_run(config, show, memo, measured)
    chosen = with_chosen_variants(config, profile, memo, say)
    if chosen.variants != config.variants:
        return chosen, profile_run(chosen, show, memo)
    return config, profile if measured is None else under(profile, {})


def divided_profile(config: Config, profile: Profile) -> Profile:
    """Return the profile of one card of each stage, where `pipeline.parallel` divides stages; else the same profile.
    Raises CapslogError for a profile that is measured, for inference, or divided in another way.
    """
    pipeline, divisors = config.pipeline, config.pipeline.divisors
    divided_by = profile.conditions.get(PARALLEL)
    if divisors is None or divided_by == vars(divisors):
        return profile
    if divided_by is not None or is_for_inference(profile):
        state = "for inference" if divided_by is None else f"divided already, by {divided_by}"
        raise CapslogError(f"pipeline.parallel divides profiles of training, but the profile is {state}; leave it out")
    return divided(profile, divisors, Network(pipeline.bandwidth, pipeline.node_bandwidth, pipeline.node_devices))


@collecting_rarely()
def plan_run(
    config: Config,
    profile: Profile | None,
    memo: Memo | None = None,
    named_plan: Plan | None = None,
    longest: float | None = None,
) -> Plan:
    """Return the plan of a config: its planner's, or the given cuts or plan, judged by the profile. Without a profile
    (given cuts need none) nothing is predicted, and the model's chain is made to check the cuts. memo: cache of an
    estimated profile. named_plan: judged in place of the config's plan. longest: see `Problem`; with it, a plan is not
    rehearsed, even if the verdict of the fold is not certain (`planning/verdict.is_certain`).
    """
    profile = None if profile is None else divided_profile(config, profile)
    settled = with_defaults(config, profile)
    plan = naming_variants(settled, _plan(settled, profile, named_plan or _checked_plan(settled), memo, longest))
    if memo is not None and profile is not None:  # without a memo, there may be no model
        plan = _with_norms_named(settled, plan, lambda: _profiled_chain(settled, memo))
    pipeline = settled.pipeline
    lacks_time = pipeline.planner_is_default and pipeline.planner != settled.default_planner
    if lacks_time and profile is not None and not is_for_inference(profile):
        plan = dataclasses.replace(plan, notes=(*plan.notes, _WITHOUT_TIME))
    return plan


def _plan(
    config: Config,
    profile: Profile | None,
    named_plan: Plan | None,
    memo: Memo | None = None,
    longest: float | None = None,
) -> Plan:
    """Plan like `plan_run`. named_plan: the plan that `pipeline.plan` names, read and checked."""
    if profile is None:
        chain = functools.cache(lambda: _chain(config))
        plan = named_plan or _of_cuts(config, chain())
        return _with_norms_named(config, plan, chain)
    problem = dataclasses.replace(Problem.of_config(config, profile, named_plan), longest=longest)
    protection = None
    if config.elastic.enabled:
        from varuna_capslog.membership.placing import RunProtection

        if config.elastic.rebalance and not profile.timed:
            profile.column("forward_seconds")  # raises an error that names the layer
            profile.column("backward_seconds")
        protection = RunProtection(config, profile)
        problem = dataclasses.replace(problem, beside=protection.beside)

    def rehearsal(plan: Plan) -> Sequence[int]:
        from varuna_capslog.profiling.rehearsal import rehearse_config, rehearse_plan

        chosen = with_choices_of(config, plan)
        if plan.short:
            return rehearse_config(chosen, plan.cut_list, memo=memo)
        return rehearse_plan(chosen, plan, memo=memo)

    divisors = config.pipeline.divisors  # a rehearsal runs undivided stages
    confirm = None if config.workload == WITHOUT_MODEL or divisors is not None or longest is not None else rehearsal
    plan = solve(problem, config.pipeline.planner, confirm, protection)
    plan = plan if divisors is None else dataclasses.replace(plan, parallel=divisors)
    if named_plan is not None and named_plan.short:
        return plan if plan.fits is False else dataclasses.replace(named_plan, notes=plan.notes)
    return plan


def _with_norms_named(config: Config, plan: Plan, chain_of: Callable[[], Chain]) -> Plan:
    """Return the plan with a note where batch norms train on microbatches of one sample. A plan that does not fit stays
    as it is: its notes say only what is missing. chain_of: makes the chain, where it is needed.
    """
    trains = plan.purpose == "training" and plan.fits is not False and config.workload != WITHOUT_MODEL
    if config.train.microbatch_size > 1 or not trains:
        return plan
    from varuna_capslog.model.layer import warning_of_one_sample

    modules = (
        (".".join(filter(None, (layer.name, name))), part)
        for layer in chain_of().layers
        for name, part in layer.module.named_modules()
    )
    remedy = "take microbatches of 2 samples or more"
    note = warning_of_one_sample(modules, "a microbatch (train.microbatch_size=1)", remedy)
    return plan if note is None else dataclasses.replace(plan, notes=(*plan.notes, note))


def _profiled_chain(config: Config, memo: Memo | None) -> Chain:
    """Return the chain of a profile made in this process, without memory for weights; an estimate's is in `memo`."""
    if memo is not None:
        from varuna_capslog.profiling.estimate import StageEstimator

        return StageEstimator.of_config(config, memo).chain
    import torch

    from varuna_capslog.model.workload import load_workload
    from varuna_capslog.profiling.trim import skeleton

    with torch.random.fork_rng(devices=[]):
        return skeleton(load_workload(config))


def needs_profile(config: Config, named_plan: Plan | None) -> bool:
    """True where the run needs a profile: given cuts and plans need none unless they must keep to a capacity."""
    pipeline = config.pipeline
    if named_plan is not None:
        limited = any(rank.capacity_bytes is not None for rank in named_plan.ranks)
        limited |= pipeline.host_capacity is not None and any(stage.offloads for stage in named_plan.stages)
        return limited or (config.elastic.enabled and pipeline.planner in ("throughput", BUDGET, JOINT))
    needs_bytes = pipeline.capacity is not None or pipeline.zero == 1
    return pipeline.cuts is None or needs_bytes or RunShape.of_config(config).limits_by_plan


def _checked_plan(config: Config) -> Plan | None:
    """Return the plan that `pipeline.plan` names; None where it names none. Raises CapslogError for a plan of another
    model or for other ranks, for a plan that the engine cannot run, and where the planner contradicts other keys of the
    config.
    """
    planner_named(config.pipeline.planner).check(config)
    plan = given_plan(config)
    if plan is None:
        return None

    from varuna_capslog.engine.grains import check_grains, check_joined
    from varuna_capslog.engine.layout import layout_of
    from varuna_capslog.engine.parts import check_parts
    from varuna_capslog.engine.replicated import check_shared_updates
    from varuna_capslog.model.workload import load_workload

    workload = load_workload(config)
    chain, where = workload.chosen_chain(), f"pipeline.plan={config.pipeline.plan}"
    if plan.num_layers != len(chain):
        raise CapslogError(
            f"{where}: the plan is for {plan.num_layers} layers, the model has {len(chain)}: plan again with this "
            f"config{_without_predictions(config)}"
        )
    if plan.num_ranks != config.world_size:
        raise CapslogError(
            f"{where}: the plan is for {plan.num_ranks} ranks, the config has {config.world_size} (pipeline.devices x "
            "pipeline.replicas); load it with start.choices.load_run_config, which takes them from the plan"
        )
    if config.engine == "varuna":
        from varuna_capslog.varuna_plugin.options import cuts_of

        cuts_of(plan)
    if config.elastic.enabled and (grains := grains_of(plan.stages)):
        raise CapslogError(
            f"{where}: a stage has grain {max(grains)}, but after a membership change the planner chooses stages that "
            "take one microbatch per call, which gives other bits; set elastic.enabled=false, or choose grain 1"
        )
    for number, stage in enumerate(plan.stages if config.elastic.enabled else ()):
        if stage.moments_elsewhere:
            raise CapslogError(
                f"{where}: stages[{number}].moments leaves those of layer {min(stage.moments_elsewhere)} to another "
                'replica, but a member of an elastic run that is lost would take them along; leave "replica" out, or '
                "set elastic.enabled=false"
            )
    fields.within(where, lambda: plan.check_graph(chain.edges))
    layout = fields.within(where, lambda: layout_of(plan, config))
    fields.within(where, lambda: check_grains(chain, layout))
    if grains_of(layout.stages):
        inputs = workload.profile_inputs(config.train.microbatch_size)
        fields.within(where, lambda: check_joined(chain, layout, inputs))
    fields.within(where, lambda: check_shared_updates(chain, layout))
    fields.within(where, lambda: check_parts(chain, layout))
    run, graph, actions = RunShape.of_config(config), layout.graph(config.num_microbatches, chain.edges), plan.actions
    if actions is None:  # refuses limits that the schedule cannot keep
        fields.within(where, lambda: scheduled(run.schedule, layout.stages, graph, run))
    else:
        fields.within(f"{where}: actions", lambda: check_actions(actions, graph, layout.stages))
    return plan


def _without_predictions(config: Config) -> str:
    """Return a clause on the further layers that a plan of a Hugging Face model may have; "" for other models."""
    from varuna_capslog.model.hugging_face import FACTORY

    if config.model.get("factory") != FACTORY:
        return ""
    return (
        ", or with --model-arg num_nextn_predict_layers=0 where it counts layers for multi-token prediction, which our "
        "engine does not train"
    )


def _check_digest(plan: Plan, profile: Profile, config: Config) -> None:
    """Refuse a given plan with `fits: true` by another profile than this run's; other plans are judged by this profile.
    A run that already had a plan of that other profile continues, since each measurement of a model gives another
    profile.
    """
    if not plan.fits or plan.profile_digest in (None, profile.digest):
        return
    if plan.profile_digest not in {read_plan(path).profile_digest for path in config.run_dir.glob("plan-*.json")}:
        raise CapslogError(
            f"pipeline.plan={config.pipeline.plan}: fits is true by the profile {plan.profile_digest}, but the profile "
            f"of this run is {profile.digest}; plan again with this config, or set fits to null in the file, so that "
            "this profile judges the plan"
        )


def _chain(config: Config) -> Chain:
    from varuna_capslog.model.workload import load_workload  # imports torch, which planning from a profile does without

    return load_workload(config).chosen_chain()


def _of_cuts(config: Config, chain: Chain) -> Plan:
    """Return the plan of the config's cuts without predictions; more stages than devices are placed round-robin."""
    pipeline, train, devices = config.pipeline, config.train, config.pipeline.devices
    cuts = pipeline.cuts or [0]
    chain.check_cuts(cuts)
    if len(cuts) <= devices:
        return Plan.of_cuts(
            len(chain),
            cuts,
            model=chain.name,
            schedule=pipeline.schedule,
            num_microbatches=config.num_microbatches // pipeline.replicas,
            microbatch_size=train.microbatch_size,
        )
    placement = [number % devices for number in range(len(cuts))]
    return Plan(
        len(chain),
        stages_of_pipelines(len(chain), cuts, pipeline.replicas, config.num_blocks, placement),
        Units(config.num_microbatches, train.microbatch_size, config.num_blocks),
        pipeline.schedule,
        ranks=(PlanRank(),) * config.world_size,
        model=chain.name,
    )


def _same(old: Plan, new: Plan) -> bool:
    # these values differ whenever the model is profiled again
    ignored = ("search_seconds", "profile_digest", "stage_seconds", "step_seconds", "bound_seconds")
    old_fields, new_fields = old.to_json(), new.to_json()
    return all(
        old_fields.get(key) == new_fields.get(key)
        for key in old_fields.keys() | new_fields.keys()
        if key not in ignored
    )


@contextmanager
def _progress(show: bool) -> Iterator[Callable[[int, int, str], None] | None]:
    """Yield a function that updates a progress bar: (runs done, total runs, name of the run); None if not `show`."""
    if not show:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("profiling", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=f"profiling {what}")
