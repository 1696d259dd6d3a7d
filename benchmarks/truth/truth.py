"""Compares predicted peaks with the CPU allocator's: single stages, and whole runs of several ranks. Prints tables."""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from common import plan, trained_peaks, write_json

from varuna_capslog.config.reading import Config, dump_config, section
from varuna_capslog.engine.recipe import Recipe
from varuna_capslog.memory.costs import Headroom
from varuna_capslog.model.workload import load_workload
from varuna_capslog.profiles.record import Observation
from varuna_capslog.profiling.conditions import shapes_of
from varuna_capslog.profiling.estimate import StageEstimator, estimate_config
from varuna_capslog.profiling.estimation.headroom import state_headroom
from varuna_capslog.profiling.launches import LaunchTimes, devices_of, free_bytes, in_one_launch
from varuna_capslog.profiling.rehearsal import rehearse
from varuna_capslog.profiling.trim import RunConditions, TrimmedRun
from varuna_capslog.profiling.worker import Workers
from varuna_capslog.schedules import RunShape

MIB = 1 << 20
HEADROOM = {name: state_headroom("cpu", "gloo", [])[name] for name in ("fixed_bytes", "fragmentation")}
DETR = {"encoder_layers": 2, "decoder_layers": 2, "queries": 20, "num_classes": 10, "dropout": 0.1}


def detr(side: tuple[int, int], microbatch: int = 1, **model: Any) -> dict[str, Any]:
    """Return a config of DETR on digits that are all resized to one size."""
    return {
        "workload": "detr_pipeline:workload",
        "model": DETR | model,
        "data": {
            "digits": {"train_images": 24, "val_images": 2, "canvas": [64, 64]},
            "augment": {"scales": [side[0]], "max_size": None, "crop": 0.0, "val_scale": side[0]},
        },
        "train": {"minibatch_size": 6 * microbatch, "microbatch_size": microbatch},
        "profile": {"image_size": list(side)},
    }


def other(
    name: str, microbatch: int, precision: str = "float32", types: Mapping[str, str] | None = None, **model: Any
) -> dict[str, Any]:
    """Return a config of another model. types: of weights and moments, if they are not float32."""
    train = {"minibatch_size": 6 * microbatch, "microbatch_size": microbatch, "precision": precision}
    return {"workload": f"models:{name}", "model": model, "train": train | dict(types or {})}


MODELS: dict[str, dict[str, Any]] = {
    "DETR R18 layer3, GroupNorm, 160x160": detr(
        (160, 160),
        2,
        backbone="resnet18",
        last_layer="layer3",
        norm="group",
        freeze="none",
        hidden_dim=64,
        attention_heads=4,
        feedforward=256,
    ),
    "DETR R50, frozen BN, 256x256": detr((256, 256), 1, backbone="resnet50", attention="sdpa"),
    "DETR R50-DC5, eager attention, 256x256": detr(
        (256, 256), 1, backbone="resnet50", dilation=True, attention="eager"
    ),
    "DETR R18, split by heads, 160x160": detr((160, 160), 2, backbone="resnet18", attention="eager")
    | {"splits": {"*coder.*": "tensor-4"}, "numerics": "close"},
    "DETR R18, split by rows, 160x160": detr((160, 160), 2, backbone="resnet18", attention="eager")
    | {"splits": {"encoder.*": "sequence-2"}, "numerics": "close"},
    "DETR R18, split by keys, 160x160": detr((160, 160), 2, backbone="resnet18", attention="eager")
    | {"splits": {"decoder.*": "sequence-3"}, "numerics": "close"},
    "transformer, 4 blocks, d=256, T=128": other("transformer", 4),
    "ResNet-18, BatchNorm trained, 96x96": other("resnet", 4),
    "decoder-only, bfloat16, checkpointed": other("decoder", 4, "bfloat16", length=256),
    "transformer in float16": other("transformer", 1, "float16", blocks=3, length=64),
    "transformer in float16, weights too": other(
        "transformer", 1, "float16", {"weights": "float16", "moments": "bfloat16"}, blocks=3, length=64
    ),
}


@dataclass(frozen=True)
class Trial:
    """Measured and predicted peak: predicted by the estimator, or for a stage of a run by the planner's memory model
    and by the rehearsal of the plan.
    """

    model: str
    what: str
    measured: int
    estimated: int
    modelled: int | None = None

    def row(self) -> str:
        """Return a line of the table; errors are above 0 if more was predicted than measured."""
        model = (
            "" if self.modelled is None else f" {self.modelled / MIB:.2f} | {self.modelled / self.measured - 1:+.2%} |"
        )
        return (
            f"| {self.model} | {self.what} | {self.measured / MIB:.2f} | {self.estimated / MIB:.2f} | "
            f"{self.estimated / self.measured - 1:+.2%} |{model}"
        )


def summary(errors: Sequence[float]) -> str:
    """Return median and worst absolute error, and the lowest error, as text."""
    sizes = sorted(map(abs, errors))
    return (
        f"{len(errors)} stages: median error {statistics.median(sizes):.3%}, worst {sizes[-1]:.2%}, "
        f"lowest {min(errors):+.2%}"
    )


def false_fits(predicted: Sequence[int], measured: Sequence[int], headroom: Headroom) -> tuple[int, int, int]:
    """Try capacities of 0.9 to 1.1 times the measured peak; count them, false "fits" and false "does not fit"."""
    trials = [
        (headroom.device(guess) <= part * real / 100, real <= part * real / 100)
        for guess, real in zip(predicted, measured, strict=True)
        for part in range(90, 111)
    ]
    return (
        len(trials),
        sum(promised and not holds for promised, holds in trials),
        sum(holds and not promised for promised, holds in trials),
    )


def config_of(name: str, run_dir: Path | None = None, **pipeline: Any) -> Config:
    return config_with(MODELS[name], run_dir, **pipeline)


def config_with(values: Mapping[str, Any], run_dir: Path | None = None, device: str = "cpu", **pipeline: Any) -> Config:
    """Return the config of a model with the keys of `MODELS`."""
    settings = dict(values) | {"device": device, "pipeline": pipeline, "run_dir": str(run_dir or "unused")}
    settings["train"] = settings["train"] | {"max_steps": 4, "evaluate_every": None}
    return section(Config, settings, "")


def types_of(config: Config) -> dict[str, Any]:
    """Return the conditions that a run's types determine."""
    train = config.train
    return {"precision": train.precision, "weights": train.weights, "recipe": Recipe.of_config(train)}


# -- single stages


def stages_of(name: str, length: int) -> list[tuple[int, int]]:
    """Return the first, a middle and the last layer as stages, and longer ranges."""
    third = length // 3
    picked = [(0, 1), (0, third), (third, third + 1), (third, 2 * third), (2 * third, length - 1), (length - 1, length)]
    return sorted({(first, end) for first, end in picked if end > first})


def single_stages(name: str, device: str = "cpu", gpu: str = "") -> Iterator[Trial]:
    config = config_of(name)
    workload = load_workload(config)
    size = config.train.microbatch_size
    estimator = StageEstimator(workload, RunConditions(device, size, gpu=gpu, **types_of(config)))
    names = [layer.name for layer in estimator.chain.layers]
    stages = stages_of(name, len(names))
    real = measured(config, estimator, stages)
    for first, end in stages:
        label = names[first] if end == first + 1 else f"{names[first]} .. {names[end - 1]}"
        yield Trial(name, label, real[first, end].peak_bytes, estimator.stage(first, end).peak_bytes)


def measured(
    config: Config, estimator: StageEstimator, stages: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], Observation]:
    """Measure the same stages by real runs, one after the other."""
    workload, size = estimator.workload, config.train.microbatch_size
    device = estimator.conditions.device
    conditions = RunConditions(device, size, shapes_of(workload.profile_inputs(size)), **types_of(config))
    targets, normalisers = workload.profile_targets(size)
    waiting = []
    for first, end in stages:
        loss = (targets, normalisers) if end == len(estimator.chain) else (None, {})
        specs = tuple(estimator.specs[first : end + 1])
        waiting.append((TrimmedRun(first, end, len(estimator.chain), specs, *loss), 0))
    names = [layer.name for layer in estimator.chain.layers]
    source = functools.partial(load_workload, config)
    workers = Workers(source, devices_of(device, 1), 1, (), conditions, free_bytes, names)
    with workers.group(1) as group:
        observations = in_one_launch(waiting, group, workers, LaunchTimes(), lambda *_: None)
    return {(first, end): result for (first, end, _), result in observations.items()}


# -- whole runs


RUNS: list[tuple[str, list[float], dict[str, Any]]] = [
    ("DETR R18", [0.0, 0.5], {}),
    ("DETR R18", [0.0, 0.3, 0.7], {"schedule": "1f1b", "recompute": False}),
    ("DETR R50, frozen", [0.0, 0.4, 0.7], {}),
    ("DETR R50, frozen", [0.0, 0.6], {"schedule": "1f1b", "recompute": False}),
    ("DETR R50-DC5", [0.0, 0.3, 0.6, 0.8], {}),
    ("transformer", [0.0, 0.5], {}),
    ("transformer", [0.0, 0.34, 0.67], {"schedule": "1f1b", "recompute": False}),
    ("transformer", [0.0, 0.34, 0.67], {"schedule": "gpipe", "recompute": False}),
    ("ResNet-18", [0.0, 0.4, 0.8], {}),
    ("ResNet-18", [0.0, 0.4, 0.8], {"schedule": "1f1b", "recompute": False}),
    ("ResNet-18", [0.0, 0.5], {"schedule": "gpipe", "recompute": True}),
    ("decoder-only", [0.0, 0.34, 0.67], {}),
    ("split by heads", [0.0, 0.3, 0.55, 0.8], {"schedule": "1f1b", "recompute": False}),
    ("split by heads", [0.0, 0.5], {"schedule": "varuna"}),
    ("split by rows", [0.0, 0.58, 0.72], {"schedule": "1f1b", "recompute": False}),
    ("split by keys", [0.0, 0.4, 0.55, 0.8], {"schedule": "1f1b", "recompute": False}),
    ("decoder-only", [0.0, 0.5], {"schedule": "1f1b", "recompute": False}),
    ("transformer in float16", [0.0, 0.5], {}),
    ("float16, weights too", [0.0, 0.5], {}),
    ("float16, weights too", [0.0, 0.34, 0.67], {"schedule": "1f1b", "recompute": False}),
]
"""Model (by a part of its name), its cuts (as shares of its length), and the options of the run."""


def whole_run(wanted: str, places: Sequence[float], options: Mapping[str, Any]) -> Iterator[Trial]:
    """Train through the command line; the run's metrics hold the peak of every stage in the second step."""
    name, options = next(name for name in MODELS if wanted in name), {"schedule": "varuna"} | dict(options)
    with tempfile.TemporaryDirectory(prefix="truth-") as folder:
        config = config_of(name, Path(folder) / "run", devices=len(places), **options)
        profile = estimate_config(config)
        cuts = [int(place * profile.num_layers) for place in places]
        pipeline = config.pipeline
        planned = plan(
            profile,
            len(cuts),
            run=RunShape.of_config(config),
            cuts=cuts,
        )
        assert planned.stage_bytes is not None, planned.notes
        estimator = StageEstimator(
            load_workload(config),
            RunConditions("cpu", config.train.microbatch_size, recompute=pipeline.recompute, **types_of(config)),
        )
        rehearsed = rehearse(estimator, cuts, pipeline.schedule, config.num_microbatches)
        config = config_of(name, Path(folder) / "run", devices=len(places), cuts=cuts, **options)
        peaks = trained(config, Path(folder))
    how = f"{len(cuts)} ranks, {pipeline.schedule}{', recomputation' if pipeline.recompute else ''}"
    ends = [*cuts[1:], profile.num_layers]
    for stage, (measured, exact, modelled) in enumerate(zip(peaks, rehearsed, planned.stage_bytes, strict=True)):
        yield Trial(name, f"{how}: layers {cuts[stage]}-{ends[stage] - 1}", measured, exact, modelled)


def trained(config: Config, folder: Path) -> list[int]:
    (folder / "config.yaml").write_text(dump_config(config))
    script_folder = Path(__file__).parent
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{script_folder}:{script_folder.parents[1]}",
        "XDG_CACHE_HOME": str(folder),
    }
    return trained_peaks(folder / "config.yaml", Path(config.run_dir), environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="models whose name contains this text")
    parser.add_argument("--json", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    stages, runs = [], []
    out("| model | stage | measured MiB | estimated MiB | error |\n|---|---|---|---|---|")
    for name in MODELS:
        if arguments.only in name:
            for trial in single_stages(name):
                out(trial.row())
                stages.append(trial)
    out("\n| model | stage | measured MiB | rehearsed MiB | error | memory model MiB | error |")
    out("|---|---|---|---|---|---|---|")
    for wanted, places, options in RUNS:
        if arguments.only in wanted or wanted in arguments.only:
            for trial in whole_run(wanted, places, options):
                out(trial.row())
                runs.append(trial)
    out("")
    results = {
        "single stages, estimated": (stages, [trial.estimated for trial in stages]),
        "whole runs, rehearsed": (runs, [trial.estimated for trial in runs]),
        "whole runs, memory model": (runs, [trial.modelled or 0 for trial in runs]),
    }
    summaries = {}
    for prediction, (trials, predicted) in results.items():
        measured = [trial.measured for trial in trials]
        errors = [guess / real - 1 for guess, real in zip(predicted, measured, strict=True)]
        count, fits, misfits = false_fits(predicted, measured, Headroom(**HEADROOM))
        summaries[prediction] = {
            "errors": errors,
            "capacity_trials": count,
            "false_fits": fits,
            "false_misfits": misfits,
        }
        out(f"{prediction}: {summary(errors)}; {count} capacities: {fits} false fits, {misfits} fits refused")
    write_json(
        arguments.json, {"stages": [asdict(t) for t in stages], "runs": [asdict(t) for t in runs], "told": summaries}
    )


def out(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
