"""The eight options that name a model and its costs, which all commands on a model share, and the config that follows
from them and from `key=value`.

A model of `--model` is estimated, unless `--measure` asks for real runs; a CONFIG has its own `profile.source`. A line
on standard error lists the assumptions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.commands import shared
from varuna_capslog.commands.shared import option

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config

__all__ = [
    "ModelArguments",
    "ModelCutPoints",
    "ModelFlags",
    "ModelFolder",
    "ModelFunction",
    "ModelInputs",
    "announced",
    "config_of_model",
    "keys_of",
    "overrides_of",
    "say_assumptions",
    "settled",
]

_STEPS = 3
"""Of a measured run, with its warm-up."""


ModelFunction = Annotated[
    str | None,
    option(
        "The ordinary module that this function returns; needs no CONFIG.", False, metavar="PACKAGE.MODULE:FUNCTION"
    ),
]
ModelFolder = Annotated[
    Path | None,
    option(
        "The Hugging Face model of this local folder, of which config.json is enough; its keys are changed with "
        "--model-arg.",
        False,
        "--hf",
        metavar="FOLDER",
    ),
]
ModelArguments = Annotated[
    list[str] | None,
    option(
        "One argument of the function of --model, such as depth=12; may be repeated.",
        False,
        "--model-arg",
        metavar="NAME=VALUE",
    ),
]
ModelInputs = Annotated[
    list[str] | None,
    option(
        "One input of --model, batch first, such as x=float32[1,3,224,224]; may be repeated.",
        "the example inputs that the function returns",
        "--input",
        metavar="NAME=DTYPE[SIZE,...]",
    ),
]
ModelCutPoints = Annotated[
    str | None, option("Submodules of --model to cut before, such as layer2,layer3.", "every repeated block")
]


@dataclass(frozen=True)
class ModelFlags:
    """The model, and how its costs are found."""

    config: shared.OptionalConfigFile = None
    overrides: shared.Overrides = None
    model: ModelFunction = None
    folder: ModelFolder = None
    arguments: ModelArguments = None
    inputs: ModelInputs = None
    cut_points: ModelCutPoints = None
    sequence: Annotated[
        int | None,
        option("Tokens of a sequence in the inputs of --hf.", "1024, or as many as it takes", min=1),
    ] = None
    device: Annotated[
        str | None,
        option(
            "Device that the costs are for: cpu, cuda, or cuda:KIND, such as cuda:a100-80gb (an unknown kind names the "
            "nearest). A kind's memory is the capacity, where none is given.",
            "CONFIG's; with --model the GPU of this machine, or its cpu",
        ),
    ] = None
    estimate: Annotated[
        bool | None,
        option(
            "Estimate the costs without the device and without any run, in seconds; or measure them with real runs on "
            "this machine, in minutes.",
            "CONFIG's profile.source; with --model --estimate",
            "--estimate/--measure",
        ),
    ] = None


Flags = TypeVar("Flags", bound=ModelFlags)


def settled(flags: Flags) -> Flags:
    """Return the flags with --hf replaced by the --model that builds it, and with a first word KEY=VALUE not taken for
    a CONFIG.

    Raises:
        CapslogError: --model or a CONFIG is given beside --hf, or both of them.
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
    """Return the overrides that the flags make in a CONFIG.

    Raises:
        CapslogError: a flag that belongs to --model.
    """
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
        settings: keys of the config and their values, `pipeline.devices` among them; the flags count before them.
        minibatch: samples of a step; None: as `start/ordinary.ordinary_config`.

    Raises:
        CapslogError: a flag that cannot be read, or a value that `ModelSection` refuses.
    """
    from varuna_capslog.config.reading import assignments
    from varuna_capslog.start.ordinary import OrdinaryModel, ordinary_config

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
        folder_arguments = {"path": str(flags.folder), "sequence": flags.sequence, "example": not flags.inputs}
        arguments = {"dtype": "float32", **arguments, **folder_arguments}
        keys.setdefault("model.name", str(flags.folder))
    if measured and device is not None and device.startswith("cuda:"):
        raise CapslogError(f"--measure runs on the device that is here; --device {device} goes with --estimate")
    model = OrdinaryModel(flags.model, flags.inputs or [], names, arguments)
    return ordinary_config(model, pipeline, minibatch, device, measured, keys)


@contextmanager
def announced(config: Config | None) -> Iterator[None]:
    """Print a line on standard error: before the block, how long measuring a profile will take, or after it, the
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

    device, train = config.profile.device or "cpu", config.train
    capacity = config.pipeline.capacity
    gpu = gpu_of(device)
    if gpu is not None:
        where = f"{device} with {format_bytes(gpu.memory_bytes)}"
    elif device == "cuda" and kind_here():
        where = f"cuda, by the GPU of this machine ({kind_here()})"
    elif device == "cuda":
        where = "cuda, with the seconds of an RTX A4000 (--device cuda:KIND takes those of another GPU)"
    else:
        where = "this machine's cpu (--device cuda:KIND plans for GPUs)"
    limit = "without a limit of memory" if capacity is None else "within its capacity"
    again = "where memory asks for it" if config.pipeline.planner in LAYERWISE else "by every stage"
    shared.say(
        f"capslog: estimated for {where}, {limit}: {train.types}, AdamW, microbatches of {train.microbatch_size}, "
        f"activations recomputed {again}; --measure runs the layers here instead",
        err=True,
    )


def _announce_runs(config: Config) -> None:
    import torch

    from varuna_capslog import accelerator

    device = config.profile.device or "cpu"
    if device not in ("cpu", "cuda") or accelerator.why_unusable(device) is not None:
        return  # no estimate says how long it takes, or nothing will be measured

    from varuna_capslog.profiling.estimate import estimate_config
    from varuna_capslog.profiling.trim import MICROBATCHES

    began = time.perf_counter()
    torch.set_num_threads(config.train.threads)  # as a worker has, for the speed of this machine
    quick = config.model_copy(update={"profile": config.profile.model_copy(update={"source": "estimated"})})
    rows = estimate_config(quick).observations
    busy = sum(2 * (row.forward_seconds or 0.0) + (row.backward_seconds or 0.0) for row in rows)
    workers = min(config.world_size, os.cpu_count() or 1)
    # to build and capture the model takes this process, and then its workers together, about as long as the estimate
    seconds = 2 * (time.perf_counter() - began) + busy * MICROBATCHES * _STEPS / workers
    duration = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
    shared.say(
        f"capslog: measuring {len(rows)} runs of one and two layers on this machine's {device}, which "
        f"takes {duration} or more, and longer where other programs run; --estimate takes seconds",
        err=True,
    )
