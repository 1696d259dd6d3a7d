"""`capslog export`: writes a plan or a run's weights in the form of another system."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.commands import shared
from varuna_capslog.commands.help import MODEL, OUTPUT
from varuna_capslog.commands.questions import (
    ModelArguments,
    ModelCutPoints,
    ModelFlags,
    ModelFolder,
    ModelFunction,
    ModelInputs,
    config_of_model,
    overrides_of,
    settled,
)
from varuna_capslog.commands.shared import option

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config
    from varuna_capslog.model.names import ModelNames
    from varuna_capslog.profiles.record import Profile

__all__ = ["export"]


@dataclass(frozen=True)
class ExportFlags:
    """The command line of `export`."""

    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file, or a run's folder.", show_default=False)]
    to: Annotated[
        str,
        option(
            "Form: megatron, primus, verl, slime, torchtitan, automodel, deepspeed, diffusion-pipe, device-map, vllm, "
            "vllm-ascend or sglang for the stages; torch-csv for the order of work, for torch.distributed.pipelining.",
            "torch-csv",
            panel=OUTPUT,
        ),
    ] = "torch-csv"
    output: Annotated[Path | None, shared.output_option("File to write.", "standard output")] = None
    profile: Annotated[
        Path | None,
        option("Profile with the names of the layers and what they read.", "the run's, or none", panel=MODEL),
    ] = None
    config: Annotated[
        Path | None,
        option("Config of the plan's model, for the names of its modules.", "the run's, or none", panel=MODEL),
    ] = None
    model: ModelFunction = None
    folder: ModelFolder = None
    arguments: ModelArguments = None
    inputs: ModelInputs = None
    cut_points: ModelCutPoints = None
    block_names: Annotated[
        str | None,
        option("Name of the repeated blocks, such as 'transformer.h.*'.", "from the names of the layers", panel=MODEL),
    ] = None
    recompute: Annotated[
        bool | None,
        option(
            "Activation checkpointing for stages whose memory the plan leaves open.",
            True,
            "--recompute/--no-recompute",
            panel=MODEL,
        ),
    ] = None
    weights: Annotated[
        Path | None,
        option("File for the weights of the run's best checkpoint, instead of the plan.", "the plan", panel=OUTPUT),
    ] = None
    form: Annotated[
        str,
        option(
            "Format of the weights: safetensors, torch, detr (the original DETR's file), hf (a folder that "
            "transformers reads), dcp (a folder of torch.distributed.checkpoint) or onnx (the whole model).",
            True,
            "--format",
            panel=OUTPUT,
        ),
    ] = "safetensors"
    trust: shared.Trust = False
    k: Annotated[int | None, option("Microbatches of a group of schedule kfkb.", "the run's, or 2", panel=MODEL)] = None


@shared.options_of(ExportFlags)
def export(flags: ExportFlags) -> None:
    """Write a plan, or a run's weights, in the form of another system. What that form cannot express is a warning."""
    from varuna_capslog.base import fields, files
    from varuna_capslog.planning.export import TARGETS, Request, export_text, notes
    from varuna_capslog.plans.plan import latest_plan, read_plan
    from varuna_capslog.profiles.record import read_profile
    from varuna_capslog.schedules import RunShape

    if flags.weights is not None:
        _write_weights(flags.plan, flags.weights, flags.form, flags.trust)
        return
    fields.refuse_unknown([flags.to], list(TARGETS), "form")
    run_config = shared.run_config(flags.plan) if flags.plan.is_dir() else None
    model = _model(flags)
    config = run_config or model
    run = RunShape(recompute=False) if config is None else RunShape.of_config(config)
    path = flags.profile
    if flags.plan.is_dir():
        newest = latest_plan(flags.plan)
        if newest is None:
            raise CapslogError(
                f"{flags.plan} holds no plan-<generation>.json; give a plan file, or the folder of a run"
            )
        plan = newest[1]
        if path is None and (flags.plan / "profile.json").is_file():
            path = flags.plan / "profile.json"
    else:
        plan = read_plan(flags.plan)
    changes: dict[str, Any] = {"recompute": flags.recompute, "k": flags.k}
    run = dataclasses.replace(run, **{name: value for name, value in changes.items() if value is not None})
    profile = None if path is None else read_profile(path)
    edges = None if profile is None or plan.routes == "relay" else profile.known_edges
    names = _names(TARGETS[flags.to].needs, profile, model, run_config, flags.trust)
    request = Request(plan, run, edges, names, flags.block_names)
    text = export_text(flags.to, request)
    if flags.output is None:
        typer.echo(text, nl=False)
    else:
        files.write_text(flags.output, text)
        shared.say(f"written to {flags.output}")
    for note in notes(flags.to, request):
        shared.say(f"note: {note}", err=True)


def _write_weights(run_dir: Path, path: Path, form: str, trust: bool) -> None:
    """Write the weights of a run's best checkpoint. Raises CapslogError where `run_dir` is no run or has none."""
    from varuna_capslog.base import fields
    from varuna_capslog.model.workload import load_workload
    from varuna_capslog.training.checkpoint import best_checkpoint
    from varuna_capslog.training.stored_layers import FORMS, load_chain, write_weights

    fields.refuse_unknown([form], list(FORMS), "form of weights")
    if not run_dir.is_dir():
        raise CapslogError(f"--weights takes them from a run's folder, but {run_dir} is none; give the folder of a run")
    config = shared.trusted_config(run_dir, trust)
    workload = load_workload(config)
    checkpoint = best_checkpoint(config.run_dir / "checkpoints")
    chain = workload.build_chain()
    load_chain(checkpoint, chain)
    write_weights(workload, chain, path, form)
    shared.say(f"weights of step {checkpoint.step} written to {path}")


def _model(flags: ExportFlags) -> Config | None:
    """Return the config of the model that --model or --config gives; None without either."""
    if flags.config is not None and (flags.model is not None or flags.folder is not None):
        model_option = "--model" if flags.model is not None else "--hf"
        raise CapslogError(f"both --config and {model_option} are given; name the model in one way")
    model_flags = settled(
        ModelFlags(
            model=flags.model,
            folder=flags.folder,
            arguments=flags.arguments,
            inputs=flags.inputs,
            cut_points=flags.cut_points,
            device="cpu",
        )
    )
    if model_flags.model is not None:
        return config_of_model(model_flags, {"pipeline.devices": 1})
    overrides_of(model_flags)
    return None if flags.config is None else shared.load(flags.config, None, trust=flags.trust)


def _names(
    needs: str, profile: Profile | None, model: Config | None, run_config: Config | None, trust: bool
) -> ModelNames | None:
    """Return the names of the layers: from the given model, from the profile, or from the run's own model.

    A profile has no names of modules, so the model is made for them, but a run's own model never for comments alone.
    """
    from varuna_capslog.planning.export import names_in

    if profile is not None and (needs in ("", "comments") or (needs == "layers" and model is None)):
        return names_in(profile)
    config = model or (None if needs == "comments" else run_config)
    if config is None:
        return None if profile is None else names_in(profile)
    if not needs:
        return None
    from varuna_capslog.model.model_workload import ModelWorkload
    from varuna_capslog.model.names import names_of
    from varuna_capslog.model.workload import load_workload  # imports torch, which the other forms do without
    from varuna_capslog.start.named_code import check_run

    if config is run_config:
        check_run(config.run_dir, config, trust)
    workload = load_workload(config)
    names = names_of(workload.build_chain())
    if not isinstance(workload, ModelWorkload):  # the inputs of other workloads depend on their data
        return names
    specs = workload.profile_inputs(config.train.microbatch_size).values()
    return dataclasses.replace(names, tokens=any(not spec.dtype.is_floating_point for spec in specs))
