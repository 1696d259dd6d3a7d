"""`capslog plan --for inference`: where to cut a model that is served; its flags, and what does not go with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from varuna_capslog.base.errors import CapslogError, DoesNotFit
from varuna_capslog.commands import shared
from varuna_capslog.commands.ordinary_model import config_of_model
from varuna_capslog.commands.shared import option

if TYPE_CHECKING:
    from varuna_capslog.commands.plan import PlanFlags
    from varuna_capslog.profiles.record import Profile

__all__ = ["InferenceFlags", "check_purpose", "plan_for_inference"]

_PURPOSES = ("training", "inference")
_OF_TRAINING = {
    "profile": "--profile",
    "memory": "--memory",
    "minibatch": "--minibatch",
    "bandwidth": "--bandwidth",
    "host_bandwidth": "--host-bandwidth",
    "pareto": "--pareto",
    "joint": "--joint",
    "speeds": "--speeds",
    "blocks": "--blocks",
    "maximize": "--maximize",
}


@dataclass(frozen=True)
class InferenceFlags:
    """What `plan` takes for models that are served."""

    purpose: Annotated[
        str,
        option(
            "What the plan is for: training, or inference, of --model or --hf.", "training", "--for", metavar="PURPOSE"
        ),
    ] = "training"
    batch: Annotated[int | None, option("Inference: sequences that are served together.", "1", min=1)] = None
    microbatch: Annotated[
        int | None, option("Inference: sequences of one forward, which divide the batch.", "all", min=1)
    ] = None
    dtype: Annotated[
        str | None,
        option("Inference: of weights and caches: float32, bfloat16 or float16.", "the model's own"),
    ] = None
    cache: Annotated[
        str | None,
        option(
            "Inference: what every layer that attends caches for one token, such as 4KiB; a Hugging Face model says it "
            "itself.",
            "nothing",
        ),
    ] = None


def check_purpose(given: PlanFlags) -> bool:
    """Whether the plan is for inference.

    Raises:
        CapslogError: another purpose; flags of the other one.
    """
    from varuna_capslog.base import fields

    fields.refuse_unknown([given.purpose], _PURPOSES, "purpose of --for")
    if given.purpose == "training":
        for name in ("batch", "microbatch", "dtype", "cache"):
            if getattr(given, name) is not None:
                raise CapslogError(f"--{name} goes with --for inference")
        return False
    for name, flag in _OF_TRAINING.items():
        if getattr(given, name):
            raise CapslogError(f"{flag} belongs to plans of training; leave it out with --for inference")
    if given.planner not in (None, "exact"):
        raise CapslogError(f"--planner {given.planner} plans for training; inference is planned by exact, leave it out")
    if given.estimate is False:
        raise CapslogError("--for inference estimates, and never measures; leave --measure out")
    if given.model is None:
        what = "a CONFIG describes a training" if given.config is not None else "no model is given"
        raise CapslogError(f"--for inference plans for a model of --model or --hf, but {what}")
    if given.devices is None:
        raise CapslogError("--for inference needs --devices N, the number of devices to plan for")
    return True


def plan_for_inference(given: PlanFlags) -> None:
    """Prints and writes the plan; one line on standard error says what it assumes. Exit status 3 when nothing fits."""
    from varuna_capslog.base import units
    from varuna_capslog.config.reading import section
    from varuna_capslog.model.inference_model import InferenceModel
    from varuna_capslog.model.model_workload import ModelSection
    from varuna_capslog.planning.inference import plan_inference
    from varuna_capslog.plans.plan import write_plan
    from varuna_capslog.profiling.inference import Served, estimate_inference

    assert given.devices is not None
    batch = given.batch or 1
    size = given.microbatch or batch
    if batch % size:
        raise CapslogError(f"--microbatch {size} does not divide --batch {batch}; choose a size that does")
    pipeline: dict[str, Any] = {"devices": given.devices}
    pipeline |= {} if given.capacity is None else {"capacity": given.capacity}
    config = config_of_model(replace(given, sequence=None), pipeline)
    settings = section(ModelSection, config.model, "model")
    if given.folder is not None:
        own = {"trains": False, "sequence": given.sequence, "dtype": given.dtype}
        settings = settings.model_copy(update={"arguments": settings.arguments | own})
    device, _, kind = (config.profile.device or "cpu").partition(":")
    cache = None if given.cache is None else units.parse_bytes(given.cache, "--cache")
    model = InferenceModel(settings, size, given.dtype, given.sequence)
    profile = estimate_inference(model, Served(size, device, kind, cache))
    found = plan_inference(profile, given.devices, batch, config.pipeline.capacity)
    if given.output is not None:
        write_plan(given.output, found)
    if given.as_json:
        shared.print_json(found.to_json())
    else:
        shared.print_plan(found, profile)
    shared.say(_assumptions(profile, batch, config.pipeline.capacity), err=True)
    if found.fits is False:
        raise DoesNotFit("; ".join(found.notes))
    for note in found.notes:
        shared.say(f"note: {note}", err=True)


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
