"""What happens before the first worker starts: profile the model, plan its cuts, lay out the run's folder.

`capslog` and `detr_pipeline.train` call it, on one process. It decides nothing about training and starts no worker of
the engine; a plan that does not fit ends here.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from varuna_capslog.base import fields, files
from varuna_capslog.base.errors import CapslogError, DoesNotFit
from varuna_capslog.base.units import format_bytes
from varuna_capslog.config.reading import Config, dump_config, load_workload
from varuna_capslog.memory import AUTO, MEMORY_MODELS
from varuna_capslog.memory.headroom import Headroom
from varuna_capslog.planners import PLANNER_NAMES
from varuna_capslog.planners import plan as search
from varuna_capslog.planners.seconds import Link
from varuna_capslog.plans.plan import Plan, Shortfall, Stage, read_plan, write_plan
from varuna_capslog.profiles.record import write_profile
from varuna_capslog.start.engines import ENGINES
from varuna_capslog.training.constants import check_folder

if TYPE_CHECKING:
    from varuna_capslog.profiles.record import Profile

__all__ = ["latest_plan", "plan_run", "prepare_run", "profile_run"]


def prepare_run(config: Config, show: bool = True) -> Plan:
    """Profiles and plans `config` and writes config.yaml, profile.json and plan-<generation>.json into its run_dir.

    A plan equal to the run's last one keeps its generation; another one gets the next number.

    Raises:
        DoesNotFit: no plan keeps every stage within its device; the smallest-peak plan is written all the same.
        CapslogError: the model, the profile or the plan is impossible, or the folder's checkpoints are of another run.
    """
    # Before the profile, which may take minutes.
    fields.refuse_unknown([config.pipeline.planner], PLANNER_NAMES, "planner")
    fields.refuse_unknown([config.pipeline.memory], [AUTO, *MEMORY_MODELS], "memory model")
    ENGINES[config.engine].check()
    profile = profile_run(config, show) if _needs_profile(config) else None
    plan = plan_run(config, profile)
    check_folder(config, plan.model)
    files.write_text(config.run_dir / "config.yaml", dump_config(config))
    if profile is not None:
        write_profile(config.run_dir / "profile.json", profile)
    last = latest_plan(config.run_dir)
    if last is None or not _same(last[1], plan):
        write_plan(_plan_path(config.run_dir, 0 if last is None else last[0] + 1), plan)
    if plan.fits is False:
        raise DoesNotFit("; ".join(plan.notes) or "no plan fits the given capacity; add devices or capacity")
    return plan


def profile_run(config: Config, show: bool = True) -> Profile:
    """The profile of the configured model: from the cache where it was made before, else by real runs, or estimated
    without a device where `profile.source` says so.

    Args:
        show: draw a progress bar.
    """
    if config.profile.source == "estimated":
        from varuna_capslog.profiling.estimate import estimate_config

        with _progress(show) as progress:
            return estimate_config(config, progress, use_cache=True)
    from varuna_capslog.profiling.measure import profile_config

    with _progress(show) as progress:
        return profile_config(config, workers=min(config.world_size, os.cpu_count() or 1), progress=progress)


def plan_run(config: Config, profile: Profile | None, link: Link | None = None) -> Plan:
    """The configured planner's plan for a profile, or the plan that `pipeline.cuts` gives.

    Without a profile (given cuts need none) nothing is predicted and the chain is built to check the cuts. `link` is
    for planners that need seconds.
    """
    pipeline = config.pipeline
    if profile is None or len(pipeline.cuts or ()) > pipeline.devices:
        return _given_cuts(config)
    find = functools.partial(
        search,
        profile,
        pipeline.devices,
        planner=pipeline.planner,
        memory=pipeline.memory,
        schedule=pipeline.schedule,
        num_microbatches=config.num_microbatches // pipeline.replicas,
        microbatch_size=config.train.microbatch_size,
        recompute=pipeline.recompute,
        stage_inputs=pipeline.stage_inputs,
        link=link,
        cuts=pipeline.cuts,
    )
    plan, snapshots = find(capacity=pipeline.capacity), [0] * pipeline.devices
    if config.elastic.enabled:
        from varuna_capslog.membership.forecast import with_reserves

        plan, snapshots = with_reserves(config, profile, plan, find)
    if plan.fits and pipeline.capacity is not None and profile.source == "estimated":
        return _confirmed(config, profile, plan, find, snapshots)
    return plan


def _confirmed(
    config: Config, profile: Profile, plan: Plan, find: Callable[..., Plan], snapshots: Sequence[int]
) -> Plan:
    """A plan that fits by its memory model, after a rehearsal of every rank's own program.

    snapshots: bytes that each stage keeps of itself beside it.

    What a schedule keeps in flight shares the memory of a CPU's stages, and no sum over layers knows all of it.
    """
    from varuna_capslog.profiling.rehearsal import rehearse_config

    peaks = rehearse_config(config, plan.cuts)
    headroom = Headroom.of(profile)
    capacities = plan.capacities_of(plan.placement())
    assert capacities is not None, "only a plan with a capacity is confirmed"
    needed = [headroom.reserved(peak + more) for peak, more in zip(peaks, snapshots, strict=True)]
    excess = [one - size for one, size in zip(needed, capacities, strict=True)]
    plan = dataclasses.replace(plan, stage_bytes=tuple(peaks), peak_bytes=max(peaks))
    worst = max(excess)
    if worst <= 0:
        return plan
    stage = excess.index(worst)
    lack = (
        f"does not fit: stage {stage} needs {format_bytes(capacities[stage] + worst)} of "
        f"{format_bytes(capacities[stage])} when its own program is rehearsed"
    )
    less = find(capacity=max(1, min(capacities) - worst)).shortfall
    devices = None if less is None else less.devices_that_fit
    return dataclasses.replace(plan, fits=False, shortfall=Shortfall(stage, worst, devices), notes=(*plan.notes, lack))


def latest_plan(run_dir: Path) -> tuple[int, Plan] | None:
    """Generation and plan of a run's newest plan file, or None where there is none yet."""
    generations = [
        int(number) for path in run_dir.glob("plan-*.json") if (number := path.stem.removeprefix("plan-")).isdigit()
    ]
    if not generations:
        return None
    return max(generations), read_plan(_plan_path(run_dir, max(generations)))


def _needs_profile(config: Config) -> bool:
    """Given cuts are run without a prediction, unless there is a capacity that they must keep to.

    Raises CapslogError where no memory model could tell whether they do.
    """
    pipeline = config.pipeline
    if pipeline.cuts is not None and len(pipeline.cuts) > pipeline.devices and pipeline.capacity is not None:
        raise CapslogError(
            f"pipeline.cuts gives {len(pipeline.cuts)} stages for pipeline.devices={pipeline.devices} and "
            "pipeline.capacity is set, but no memory model predicts several stages on one device; remove "
            "pipeline.capacity, or give one stage per device"
        )
    return pipeline.cuts is None or pipeline.capacity is not None


def _given_cuts(config: Config) -> Plan:
    cuts, devices = config.pipeline.cuts or [0], config.pipeline.devices
    chain = load_workload(config).build_chain()
    chain.check_cuts(cuts)
    ends = [*cuts[1:], len(chain)]
    several = None
    if len(cuts) > devices:  # stages go round the ranks, as in interleaved schedules
        several = tuple(
            Stage(0, ((first, end),), (number % devices,))
            for number, (first, end) in enumerate(zip(cuts, ends, strict=True))
        )
    return Plan(
        num_layers=len(chain),
        cuts=tuple(cuts),
        model=chain.name,
        schedule=config.pipeline.schedule,
        num_microbatches=config.num_microbatches // config.pipeline.replicas,
        microbatch_size=config.train.microbatch_size,
        placed=several,
    )


def _same(one: Plan, other: Plan) -> bool:
    ignored = ("search_seconds", "profile_digest")
    left, right = one.to_json(), other.to_json()
    return all(left[key] == right[key] for key in left.keys() | right.keys() if key not in ignored)


def _plan_path(run_dir: Path, generation: int) -> Path:
    return run_dir / f"plan-{generation}.json"


@contextmanager
def _progress(show: bool) -> Iterator[Callable[[int, int, str], None] | None]:
    """A bar fed by (runs done, runs in all, what runs now)."""
    if not show:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("profiling", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=f"profiling {what}")
