"""Turns the inputs of `plan`, `front`, `largest`, `compare` and `lint` into one config: options and KEY=VALUE, with a
CONFIG, a model or only a profile. The config and its profile determine the plan.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.gpus import NamedDevices, parse_devices
from varuna_capslog.commands import shared
from varuna_capslog.commands.help import BATCH, DEVICES, MODEL, SEARCH
from varuna_capslog.commands.shared import option
from varuna_capslog.planning.registry import REGISTRY

if TYPE_CHECKING:
    from varuna_capslog.config.parallel import Divisors
    from varuna_capslog.config.settings import Config
    from varuna_capslog.profiles.record import Profile
    from varuna_capslog.profiling.estimate import Memo

__all__ = [
    "ModelArguments",
    "ModelCutPoints",
    "ModelFlags",
    "ModelFolder",
    "ModelFunction",
    "ModelInputs",
    "PlannerFlags",
    "Profiles",
    "QuestionFlags",
    "announced",
    "config_of_keys",
    "config_of_model",
    "costs_of",
    "former_option",
    "keys_of",
    "overrides_of",
    "question_of",
    "read_profiles",
    "say_assumptions",
    "settled",
]


# -- The eight options that name a model and its costs, which all commands on a model share, and the config that
#    follows from them and from `key=value`.
#
# A model of `--model` is estimated, unless `--measure` asks for real runs; a CONFIG has its own `profile.source`. A
# line on standard error lists the assumptions.


_STEPS = 3
"""Steps of a measured run, warm-up included."""


ModelFunction = Annotated[
    str | None,
    option(
        "Function that returns the model, any nn.Module; needs no CONFIG.",
        False,
        metavar="PACKAGE.MODULE:FUNCTION",
        panel=MODEL,
    ),
]
ModelFolder = Annotated[
    Path | None,
    option(
        "Local folder of a Hugging Face model; config.json is enough. --model-arg changes its keys.",
        False,
        "--hf",
        metavar="FOLDER",
        panel=MODEL,
    ),
]
ModelArguments = Annotated[
    list[str] | None,
    option(
        "Argument of the function of --model, such as depth=12; may be repeated.",
        False,
        "--model-arg",
        metavar="NAME=VALUE",
        panel=MODEL,
    ),
]
ModelInputs = Annotated[
    list[str] | None,
    option(
        "Input of --model, batch first, such as x=float32[1,3,224,224]; may be repeated.",
        "the example inputs that the function returns",
        "--input",
        metavar="NAME=DTYPE[SIZE,...]",
        panel=MODEL,
    ),
]
ModelCutPoints = Annotated[
    str | None,
    option("Submodules of --model to cut before, such as layer2,layer3.", "every repeated block", panel=MODEL),
]


@dataclass(frozen=True)
class ModelFlags:
    """The model, and how its costs are estimated or measured."""

    config: shared.OptionalConfigFile = None
    overrides: shared.Overrides = None
    model: ModelFunction = None
    folder: ModelFolder = None
    arguments: ModelArguments = None
    inputs: ModelInputs = None
    cut_points: ModelCutPoints = None
    sequence: Annotated[
        int | None,
        option("Tokens of a sequence in the inputs of --hf.", "1024, or as many as it takes", min=1, panel=MODEL),
    ] = None
    device: Annotated[
        str | None,
        option(
            "Device that the costs are for: cpu, cuda, or cuda:KIND such as cuda:a100-80gb, whose memory is then the "
            "capacity.",
            "CONFIG's; with --model the GPU of this machine, or its cpu",
            panel=DEVICES,
        ),
    ] = None
    estimate: Annotated[
        bool | None,
        option(
            "Costs estimated without the device, in seconds; or measured by runs on this machine, in minutes.",
            "CONFIG's profile.source; with --model --estimate",
            "--estimate/--measure",
            panel=MODEL,
        ),
    ] = None


Flags = TypeVar("Flags", bound=ModelFlags)


def settled(flags: Flags) -> Flags:
    """Return the flags with a --model that makes the model of --hf, and with a first word KEY=VALUE among the overrides
    instead of in CONFIG. Raises CapslogError: more than one of CONFIG, --model and --hf is given.
    """
    config, overrides = shared.words_of(flags.config, flags.overrides)
    flags = replace(flags, config=config, overrides=overrides)
    sources = {"a CONFIG": flags.config, "--model": flags.model, "--hf": flags.folder}
    if len(names := [name for name, source in sources.items() if source is not None]) > 1:
        raise CapslogError(f"both {' and '.join(names)} are given; name the model in one way")
    if flags.folder is None:
        return flags
    from varuna_capslog.model.hugging_face import FACTORY

    return replace(flags, model=FACTORY)


def keys_of(overrides: Sequence[str] | None) -> dict[str, Any]:
    """Return the keys and values of texts KEY=VALUE."""
    from varuna_capslog.config.reading import parse_override

    return dict(map(parse_override, overrides or ()))


def overrides_of(flags: ModelFlags) -> list[str]:
    """Return the overrides that the flags make in a CONFIG. Raises CapslogError: a flag that belongs to --model."""
    if flags.inputs or flags.cut_points or flags.arguments:
        raise CapslogError(
            "--input and --cut-points describe the model of --model, --model-arg goes to its function; in a CONFIG set "
            "keys under model"
        )
    if flags.sequence is not None:
        raise CapslogError("--sequence is for the inputs that --hf makes itself; in a CONFIG set model.inputs")
    changes = [] if flags.estimate is None else [f"profile.source={'estimated' if flags.estimate else 'measured'}"]
    return changes + ([] if flags.device is None else [f"profile.device={flags.device}"])


def config_of_model(flags: ModelFlags, settings: Mapping[str, Any], minibatch: int | None = None) -> Config:
    """Return the config that follows from the flags.

    Args:
        settings: keys of the config and their values, `pipeline.devices` among them; flags take precedence.
        minibatch: samples of a step; None: as in `start/ordinary.ordinary_config`.

    Raises:
        CapslogError: a flag that cannot be read, or a value that `ModelSection` refuses.
    """
    from varuna_capslog.config.reading import assignments
    from varuna_capslog.start.ordinary import OrdinaryModel, folder_keys, ordinary_config

    keys = dict(settings)
    device, source = keys.pop("profile.device", None), keys.pop("profile.source", "estimated")
    device = flags.device or device
    measured = source == "measured" if flags.estimate is None else not flags.estimate
    pipeline = {key: keys.pop(f"pipeline.{key}") for key in ("devices", "capacity") if f"pipeline.{key}" in keys}
    names = None if flags.cut_points is None else [name.strip() for name in flags.cut_points.split(",")]
    arguments = assignments(flags.arguments or [], "--model-arg")
    if flags.sequence is not None and (flags.folder is None or flags.inputs):
        raise CapslogError(
            "--sequence is for the inputs that --hf makes itself; give sizes with --input, or leave it out"
        )
    if flags.folder is not None:
        arguments, keys = folder_keys(str(flags.folder), arguments, keys)
        arguments |= {"sequence": flags.sequence, "example": not flags.inputs, "predicts": True}
        keys.setdefault("model.name", str(flags.folder))
    if measured and device is not None and device.startswith("cuda:"):
        raise CapslogError(f"--measure runs on the device that is here; --device {device} goes with --estimate")
    model = OrdinaryModel(flags.model, flags.inputs or [], names, arguments)
    return ordinary_config(model, pipeline, minibatch, device, measured, keys)


@contextmanager
def announced(config: Config | None) -> Iterator[None]:
    """Print a line on standard error: before the block, how long measuring a profile will take, or after the block, the
    assumptions of an estimate. None prints nothing.
    """
    if config is not None and config.profile.source == "measured":
        _announce_runs(config)
    yield
    if config is not None and config.profile.source == "estimated":
        say_assumptions(config)


def say_assumptions(config: Config) -> None:
    """Print the assumptions of an estimate, a line on standard error."""
    from varuna_capslog.base.gpus import gpu_of
    from varuna_capslog.base.units import format_bytes
    from varuna_capslog.planners import LAYERWISE
    from varuna_capslog.profiling.conditions import kind_here
    from varuna_capslog.start.ordinary import held_types, with_default_capacity

    device, train = config.profile.device or "cpu", config.train
    capacity = with_default_capacity(config).pipeline.capacity
    gpu = gpu_of(device)
    if gpu is not None:
        where = f"{device} with {format_bytes(gpu.memory_bytes)}"
    elif device == "cuda" and kind_here():
        where = f"cuda, by the GPU of this machine ({kind_here()})"
    elif device == "cuda":
        where = "cuda, with the seconds of an RTX A4000 (--device cuda:KIND takes those of another GPU)"
    else:
        where = "this machine's cpu at its speed of now, under its present load (--device cuda:KIND plans for GPUs)"
    limit = "without a limit of memory"
    if capacity is not None:
        limit = "within its memory" if gpu is None and config.pipeline.capacity is None else "within its capacity"
    optimizer = "AdamW" if train.optimizer == "adamw" else train.optimizer
    recomputed_where = "where memory asks for it" if config.pipeline.planner in LAYERWISE else "by every stage"
    shared.say(
        f"capslog: estimated for {where}, {limit}: {held_types(config)}, {optimizer}, "
        f"microbatches of {train.microbatch_size}, activations recomputed {recomputed_where}; "
        "--measure runs the layers here instead",
        err=True,
    )


def _announce_runs(config: Config) -> None:
    import torch

    from varuna_capslog import accelerator

    device = config.profile.device or "cpu"
    if device not in ("cpu", "cuda") or accelerator.why_unusable(device) is not None:
        return  # no estimate can say how long it takes, or nothing will be measured

    from varuna_capslog.profiling.estimate import estimate_config
    from varuna_capslog.profiling.trim import MICROBATCHES

    began = time.perf_counter()
    torch.set_num_threads(config.train.threads)  # like a worker, so that the speeds are equal
    quick = config.model_copy(update={"profile": config.profile.model_copy(update={"source": "estimated"})})
    rows = estimate_config(quick).observations
    busy = sum(2 * (row.forward_seconds or 0.0) + (row.backward_seconds or 0.0) for row in rows)
    workers = min(config.world_size, os.cpu_count() or 1)
    # 2: this process, and then its workers together, make and capture the model in about the time of the estimate
    seconds = 2 * (time.perf_counter() - began) + busy * MICROBATCHES * _STEPS / workers
    duration = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
    shared.say(
        f"capslog: measuring {len(rows)} runs of one and two layers on this machine's {device}, which "
        f"takes {duration} or more, and longer where other programs run; --estimate takes seconds",
        err=True,
    )


# -- Inputs of `plan`


Profiles = Annotated[
    list[Path] | None,
    option(
        "Profile to plan for; for planner joint one for each microbatch size to choose from.",
        False,
        "--profile",
        panel=MODEL,
    ),
]

_OF_A_MODEL = ("workload", "model", "data", "profile", "variants", "splits", "numerics", "device")
"""Sections and keys that are refused with only a profile, which has fixed them, or has no model for them."""


@dataclass(frozen=True)
class QuestionFlags(ModelFlags):
    """Devices and step to plan for."""

    devices: shared.Devices = None
    memory: Annotated[
        str | None,
        option(
            "Memory model: additive, composition, gpipe, 1f1b, varuna, ranks, or auto.",
            "pipeline.memory, or auto",
            panel=SEARCH,
        ),
    ] = None
    capacity: Annotated[
        str | None,
        option(
            "Memory of each device: 16GiB, or one size per device: 16GiB,16GiB,8GiB or 16GiB*2,8GiB.",
            "pipeline.capacity, or that of the kind of GPU, or no limit",
            panel=DEVICES,
        ),
    ] = None
    minibatch: Annotated[
        int | None,
        option(
            "Global batch size: samples of one optimizer step.",
            "CONFIG's; else 4 microbatches per device",
            min=1,
            panel=BATCH,
        ),
    ] = None
    parallel: Annotated[
        str | None,
        option(
            "How another system divides each stage, such as tensor=4,context=2,expert=8,data=2,zero=1; for planning "
            "and export, our engine runs none of it.",
            "pipeline.parallel, or a card for each stage",
            panel=DEVICES,
        ),
    ] = None
    as_json: shared.AsJson = False
    trust: shared.Trust = False


@dataclass(frozen=True)
class PlannerFlags(QuestionFlags):
    """Devices, step and planner."""

    planner: Annotated[
        str | None,
        option(
            f"Planner: {', '.join(REGISTRY)}. docs/planners.md describes them; capslog compare shows several.",
            "pipeline.planner, or budget where it can plan the run, else exact",
            metavar="NAME",
            panel=SEARCH,
        ),
    ] = None


def read_profiles(paths: list[Path] | None, flags: ModelFlags) -> list[Profile]:
    """Return the profiles of the files. Raises CapslogError where a model is given too, or where nothing is given."""
    from varuna_capslog.profiles.record import read_profile

    if paths and flags.model is not None:
        raise CapslogError("both --profile and --model (or --hf) are given, but a profile is of one model; choose one")
    if not paths and flags.config is None and flags.model is None:
        raise CapslogError(
            "nothing to plan for: give a CONFIG file, --profile FILE, --model package.module:function or --hf FOLDER"
        )
    return [read_profile(path) for path in paths or ()]


def named_devices(flags: QuestionFlags) -> NamedDevices | None:
    """Return the devices of --devices. Raises CapslogError for an option whose value follows from their kinds."""
    if flags.devices is None:
        return None
    devices, keys = parse_devices(flags.devices, "--devices"), keys_of(flags.overrides)
    options = {"--device": flags.device, "--capacity": flags.capacity}
    options |= {key: keys.get(key) for key in ("profile.device", "pipeline.capacity")}
    devices.refuse_beside(options, f"--devices {flags.devices}", f"--devices {devices.count}")
    return devices


def question_of(flags: QuestionFlags, planner: str | None, profile: Profile | None = None, **more: Any) -> Config:
    """Return the config to plan for.

    Args:
        profile: the costs, if known; without a CONFIG or a model, the config is made from the profile alone.
        more: further keys of the command itself, in the section `train` or `numerics`; None: not given.

    Raises:
        CapslogError: options or keys that contradict each other; no number of devices.
    """
    devices, keys = named_devices(flags), keys_of(flags.overrides)
    changes = {} if devices is None else {f"pipeline.{key}": value for key, value in devices.pipeline_keys.items()}
    if "pipeline.speeds" in keys:
        changes.pop("pipeline.speeds", None)
    options: dict[str, Any] = {"pipeline.planner": planner, "pipeline.memory": flags.memory}
    options |= {"pipeline.capacity": flags.capacity, "train.minibatch_size": flags.minibatch, **more}
    options |= {"pipeline.parallel": flags.parallel}
    changes |= {key: value for key, value in options.items() if value is not None}
    fastest = None if devices is None else devices.fastest
    if devices is not None and profile is not None:
        from varuna_capslog.start.ordinary import check_kinds

        check_kinds(devices, profile)
    elif fastest is not None:
        changes["profile.device"] = f"cuda:{fastest}"
    if flags.config is not None:
        texts = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changes.items()]
        return shared.load(
            flags.config, flags.overrides, *overrides_of(flags), *texts, *shared.SEARCHED, trust=flags.trust
        )
    if "pipeline.devices" not in keys | changes:
        source = "--profile without a CONFIG" if flags.model is None else "--model"
        raise CapslogError(f"{source} needs --devices N, the number of devices to plan for")
    if flags.model is not None:
        return config_of_model(flags, keys | changes)
    assert profile is not None, "given where neither a CONFIG nor a model is"
    if overrides_of(flags):
        raise CapslogError("--device, --estimate and --measure go with a CONFIG or --model; a profile is of one device")
    return config_of_keys(profile, keys | changes)


def config_of_keys(profile: Profile, keys: Mapping[str, Any]) -> Config:
    """Return the config of a profile alone; keys: of the config, `pipeline.devices` among them.

    Raises CapslogError for the keys in `_OF_A_MODEL`, and like `start/ordinary.config_of_profile`.
    """
    from varuna_capslog.start.ordinary import config_of_profile

    for key in keys:
        if key.partition(".")[0] in _OF_A_MODEL:
            raise CapslogError(f"{key} is of a model and its costs, which --profile has already; leave it out")
    settings = dict(keys)
    pipeline = {"devices": settings.pop("pipeline.devices")}
    return config_of_profile(profile, pipeline, settings.pop("train.minibatch_size", None), settings)


def costs_of(
    flags: QuestionFlags, config: Config, profile: Profile | None, choose: bool = True
) -> tuple[Config, Profile, Memo | None]:
    """Return the config with the defaults that follow from the profile, the profile (made here if None), and the memo
    of an estimate.

    choose: True lets a planner choose variants of layers, which the config then names.
    """
    from varuna_capslog.model.names import PREDICTION
    from varuna_capslog.planning.registry import planner_named
    from varuna_capslog.start.ordinary import with_defaults
    from varuna_capslog.start.prepare import divided_profile, estimate_memo, profile_and_variants, profile_run

    planner_named(config.pipeline.planner).check(config)  # before the profile, which may take minutes
    memo, show = estimate_memo(config), not flags.as_json
    if profile is None:
        with announced(None if flags.model is None else config):
            if choose:
                config, profile = profile_and_variants(config, show, memo, say=shared.tell)
            else:
                profile = profile_run(config, show, memo)
    if layers := [layer.name for layer in profile.layers if layer.name.startswith(PREDICTION)]:
        shared.tell(
            f"{', '.join(layers)}: for multi-token prediction (num_nextn_predict_layers), as Megatron trains it; our "
            "engine trains the model of transformers, which has none: --model-arg num_nextn_predict_layers=0 plans "
            "that"
        )
    if (divisors := config.pipeline.divisors) is not None:
        whole, profile = profile, divided_profile(config, profile)
        shared.tell(_cards(divisors, config.pipeline.devices, whole))
    return with_defaults(config, profile), profile, memo


def _cards(divisors: Divisors, stages: int, profile: Profile) -> str:
    """Return a sentence on the cards that a plan needs, and the rows that experts get. profile: before its division."""
    from varuna_capslog.base.units import format_bytes
    from varuna_capslog.profiles.divided import worst_routing
    from varuna_capslog.reports.markup import duration

    line = (
        f"{divisors.describe()} in another system: {divisors.cards} cards for each device of the pipeline, "
        f"{stages * divisors.cards} in all; bytes and seconds are of one card"
    )
    row_bytes, seconds = worst_routing(profile, divisors)
    if not row_bytes:
        return line
    return (
        f"{line}; experts of a card get 1/{divisors.expert} of the rows (the mean), at worst all: then a layer saves "
        f"{format_bytes(row_bytes)} more for each microbatch and takes {duration(seconds)} longer"
    )


# -- Options of earlier versions, which are refused with their new form.


_FORMER = {
    "--pareto": "is a command of its own: capslog front, with the arguments of capslog plan",
    "--maximize": "is a command of its own: capslog largest, with microbatch, minibatch or image-size among its words",
    "--joint": "is a planner: --planner joint",
    "--speeds": "is said by kinds, --devices '2x rtx4090, rtx3090', or by the key pipeline.speeds=[1,0.5]",
    "--blocks": "is the key train.accumulation_blocks=4",
    "--bandwidth": "is the key pipeline.bandwidth=10Gbit",
    "--latency": "is the key pipeline.latency=20us",
    "--host-bandwidth": "is the key pipeline.host_bandwidth=12GB/s",
    "--node-devices": "is the key pipeline.node_devices=4",
    "--search-seconds": "is the key pipeline.search_seconds=60",
    "--schedule": "is the key pipeline.schedule=1f1b",
    "--microbatches": "is the key train.minibatch_size, the samples of a step: microbatches times their size",
    "--microbatch": "is the key train.microbatch_size=4",
    "--recompute": "is the key pipeline.recompute=true",
    "--no-recompute": "is the key pipeline.recompute=false",
    "--stage-inputs": "is the key pipeline.stage_inputs=device",
}


def former_option(name: str) -> str | None:
    """Return a sentence that refuses an option of an earlier version and gives its new form; None for other options."""
    name = name.partition("=")[0]
    return f"{name} {_FORMER[name]}; it is no option any more" if name in _FORMER else None
