"""`capslog plan --for inference`: where to cut a model that is served, and the options that do not go with it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.commands import shared
from varuna_capslog.commands.ordinary_model import keys_of
from varuna_capslog.commands.questions import question_of

if TYPE_CHECKING:
    from varuna_capslog.commands.plan import PlanFlags
    from varuna_capslog.config.settings import Config
    from varuna_capslog.plans.plan import Plan
    from varuna_capslog.profiles.record import Profile

__all__ = ["check_purpose", "plan_for_inference"]

_KEYS = ("pipeline.devices", "pipeline.capacity", "profile.device", "train.microbatch_size")
"""Keys that decide a plan for inference."""


def check_purpose(flags: PlanFlags) -> bool:
    """Return whether the plan is for inference.

    Raises:
        CapslogError: another purpose; flags of the other one.
    """
    from varuna_capslog.base import fields

    fields.refuse_unknown([flags.purpose], ("training", "inference"), "purpose of --for")
    if flags.purpose == "training":
        for name in ("batch", "dtype", "cache"):
            if getattr(flags, name) is not None:
                raise CapslogError(f"--{name} goes with --for inference")
        return False
    beside = {f"--{name}": getattr(flags, name) for name in ("profile", "memory", "minibatch", "numerics")}
    for name in [
        *(name for name, value in beside.items() if value),
        *sorted(set(keys_of(flags.overrides)) - set(_KEYS)),
    ]:
        raise CapslogError(f"{name} belongs to plans of training; leave it out with --for inference")
    if flags.planner not in (None, "exact"):
        raise CapslogError(f"--planner {flags.planner} plans for training; inference is planned by exact, leave it out")
    if flags.estimate is False:
        raise CapslogError("--for inference estimates, and never measures; leave --measure out")
    if flags.model is None:
        reason = "a CONFIG describes a training" if flags.config is not None else "no model is given"
        raise CapslogError(f"--for inference plans for a model of --model or --hf, but {reason}")
    return True


def plan_for_inference(flags: PlanFlags) -> tuple[Plan, Config, Profile]:
    """Return the plan with its config and profile; a line on standard error lists its assumptions."""
    from varuna_capslog.base import units
    from varuna_capslog.config.reading import section
    from varuna_capslog.model.inference_model import InferenceModel
    from varuna_capslog.model.model_workload import ModelSection
    from varuna_capslog.planning.problem import Problem
    from varuna_capslog.planning.solve import solve
    from varuna_capslog.profiling.inference import Served, estimate_inference

    batch = flags.batch or 1
    config = question_of(replace(flags, sequence=None), None, None)
    devices = config.pipeline.devices
    size = config.train.microbatch_size if "train.microbatch_size" in keys_of(flags.overrides) else batch
    if batch % size:
        raise CapslogError(f"train.microbatch_size={size} does not divide --batch {batch}; choose a size that does")
    settings = section(ModelSection, config.model, "model")
    if flags.folder is not None:
        serving_arguments = {"trains": False, "sequence": flags.sequence, "dtype": flags.dtype}
        settings = settings.model_copy(update={"arguments": settings.arguments | serving_arguments})
    device, _, kind = (config.profile.device or "cpu").partition(":")
    cache = None if flags.cache is None else units.parse_bytes(flags.cache, "--cache")
    model = InferenceModel(settings, size, flags.dtype, flags.sequence)
    profile = estimate_inference(model, Served(size, device, kind, cache))
    plan = solve(Problem.of_serving(profile, devices, batch, config.pipeline.capacity), "exact")
    shared.say(_assumptions(profile, batch, config.pipeline.capacity), err=True)
    return plan, config, profile


def _assumptions(profile: Profile, batch: int, capacity: int | list[int] | None) -> str:
    from varuna_capslog.base.units import format_bytes
    from varuna_capslog.profiles.conditions import CACHE_BYTES

    told = profile.conditions
    kind = f":{told['gpu']}" if "gpu" in told else ""
    caches = told[CACHE_BYTES]
    holding = sum(1 for size in caches if size)
    cached = f"{format_bytes(sum(caches))} of keys and values for each, in {holding} layers" if holding else "no caches"
    length = "" if told["sequence"] is None else f" of {told['sequence']} tokens"
    limit = "without a limit of memory" if capacity is None else "within its capacity"
    return (
        f"capslog: inference estimated for {told['device']}{kind}, {limit}: {told['dtype']}, {batch} sequence(s)"
        f"{length} together, {told['microbatch_size']} in a forward, {cached}"
    )
