"""Run directories as a training leaves them, written file by file for the tests.

The numbers are made up but have the shapes of real ones: a wide backbone, a long tail of equal layers, a noisy falling
loss, a crash, and a resume that repeats steps.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from tests.planning import asking
from varuna_capslog.config.reading import Config, dump_config
from varuna_capslog.plans.plan import Plan, write_plan
from varuna_capslog.profiles.record import LayerProfile, Profile, write_profile
from varuna_capslog.schedules import RunShape

MIB = 2**20
START = 1_753_000_000.0
CLASSES = ["RBC", "WBC", "Platelets", "<b>odd & name</b>"]


def make_profile(num_layers: int, times: bool = True) -> Profile:
    """Return the profile of a backbone whose layers shrink, equal encoders and decoders, and a small head."""
    draw = random.Random(num_layers)
    layers = []
    for index in range(num_layers):
        share = index / max(1, num_layers - 1)
        kind = (
            "backbone.layer" if share < 0.5 else "encoder" if share < 0.75 else "decoder" if share < 0.98 else "heads"
        )
        isolated = (900 * math.exp(-3 * share) + 120 + 20 * draw.random()) * MIB
        added = isolated * (0.45 + 0.2 * draw.random()) if index != num_layers // 3 else -9 * MIB
        layers.append(
            LayerProfile(
                name=f"{kind}.{index}",
                isolated_bytes=int(isolated),
                added_bytes=int(added) if index else None,
                parameter_bytes=4 * (10_000 + 1_000 * index),
                forward_seconds=0.004 * (1.4 - share) if times else None,
                backward_seconds=0.009 * (1.4 - share) if times else None,
            )
        )
    conditions = {
        "device": "cpu",
        "dtype": "float32",
        "microbatch_size": 1,
        "image_size": [320, 256],
        "torch": "2.11.0",
    }
    return Profile(tuple(layers), model="detr-resnet18", source="measured", conditions=conditions)


def step_line(step: int, stages: int, predicted: list[int], loss: float, generation: int = 0) -> dict[str, Any]:
    """Return one line of metrics.jsonl, with peaks on step 2 and (higher ones) on step 42."""
    draw = random.Random(step)
    parts = {"loss_ce": 0.4 * loss, "loss_bbox": 0.35 * loss, "loss_giou": 0.25 * loss, "class_error": 90.0 * loss / 6}
    parts |= {f"{name}_{layer}": 1.1 * parts[name] for name in ("loss_ce", "loss_bbox") for layer in range(2)}
    line: dict[str, Any] = {
        "step": step,
        "epoch": step // 50,
        "loss": loss,
        "parts": parts,
        "lr": 1e-4 if step < 300 else 1e-5,
        "grad_norm": math.exp(draw.gauss(1.5, 0.7)),
        "step_seconds": 0.5 + 0.1 * draw.random(),
        "waited_seconds": 9.0 if step == 1 else 0.1,
        "samples_per_second": 14.0,
        "generation": generation,
        "world_size": stages,
    }
    if step in (2, 42):
        scale = 1.02 if step == 2 else 1.05
        line |= {"peak_bytes": [int(scale * peak) for peak in predicted], "peak_source": "allocator events"}
    return line


def loss_at(step: int) -> float:
    """Return the loss at a step."""
    return 0.8 + 5 * math.exp(-step / 90) + 0.25 * random.Random(7 * step).random()


def write_run(
    folder: Path,
    num_layers: int = 24,
    stages: int = 4,
    steps: int = 400,
    evaluations: int = 8,
    times: bool = True,
    capacity: int | list[int] | None = 4096 * MIB,
    schedule: str = "varuna",
    microbatches: int = 8,
) -> Plan:
    """Write a run directory with all its files and return its plan."""
    folder.mkdir(parents=True)
    config = Config(
        workload="detr_pipeline:workload",
        train={"minibatch_size": microbatches, "max_steps": steps},
        pipeline={"devices": stages, "schedule": schedule},
        device="cpu",
    )
    (folder / "config.yaml").write_text(dump_config(config))
    profile = make_profile(num_layers, times)
    write_profile(folder / "profile.json", profile)
    plan = asking.plan(
        profile,
        stages,
        planner="exact",
        capacity=capacity,
        run=RunShape(microbatches, microbatch_size=1),
    )
    if schedule != "varuna":
        plan = Plan.from_json(plan.to_json() | {"schedule": schedule})
    write_plan(folder / "plan-0.json", plan)
    predicted = list(plan.stage_bytes or [0] * stages)
    crash = steps // 2
    back = max(1, crash - 17)  # the resumed run repeats these steps
    lines = [json.dumps(step_line(step, stages, predicted, 100 + step)) for step in range(back + 1, crash + 1)]
    before = [json.dumps(step_line(step, stages, predicted, loss_at(step))) for step in range(1, back + 1)]
    after = [json.dumps(step_line(step, stages, predicted, loss_at(step))) for step in range(back + 1, steps + 1)]
    torn = '{"step": 999, "loss": 0.1, "par'
    (folder / "metrics.jsonl").write_text("\n".join([*before, *lines, torn, *after]) + "\n")

    scores = []
    for number in range(1, evaluations + 1):
        value = 0.5 * (1 - math.exp(-number / 3)) - (0.03 if number == evaluations else 0)
        values: dict[str, Any] = {
            "AP": value,
            "AP50": 1.5 * value,
            "AP75": 0.9 * value,
            "AP_small": None,
            "AR_1": 1.1 * value,
        }
        values["per_class"] = {name: None if i == 2 else value * (1 - 0.2 * i) for i, name in enumerate(CLASSES)}
        step = number * steps // evaluations
        scores.append(json.dumps({"step": step, "generation": 0, "time": START + step, "scores": values}))
    (folder / "evaluations.jsonl").write_text("\n".join(scores) + "\n")

    events: list[dict[str, Any]] = [{"kind": "start", "step": 0}]
    events += [{"kind": "checkpoint", "step": step, "seconds": 0.21} for step in range(back % 50, back + 1, 50)]
    events += [
        {"kind": "error", "step": crash, "rank": 1, "cause": "killed by SIGKILL"},
        {"kind": "resume", "step": back},
    ]
    events += [{"kind": "checkpoint", "step": step, "seconds": 0.2} for step in range(back + 50, steps, 50)]
    events += [{"kind": "stop", "step": steps}]
    rows = [json.dumps({"time": START + 3 * i, "generation": 0} | event) for i, event in enumerate(events)]
    (folder / "events.jsonl").write_text("\n".join(rows) + "\n")

    (folder / "predictions").mkdir()
    for number in range(3):
        picture = Image.new("RGB", (320, 240), (225, 218, 212))
        ImageDraw.Draw(picture).rectangle((40 + 30 * number, 50, 150, 160), outline=(42, 95, 143), width=3)
        picture.save(folder / "predictions" / f"sample-{number + 8}.png")
    return plan
