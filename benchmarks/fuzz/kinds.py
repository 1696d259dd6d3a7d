"""The kinds of files that the fuzz damages: valid originals, and what the product does with each file it accepts.

The originals are those of a real run of two steps: its plan and profile, more plans of its profile, its config,
checkpoint and lines, and an annotation file with pictures. `use` does what a user would do next; where it ends in
another error than the project's own, or gives another answer than the file says, the fuzz counts a defect.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image

from varuna_capslog import cli
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import dump_config, load_config
from varuna_capslog.elastic.member.holdings import recover
from varuna_capslog.membership.generation import Generation, Stamp
from varuna_capslog.planning.export import TARGETS
from varuna_capslog.plans.plan import read_plan, write_plan
from varuna_capslog.profiles.record import read_profile, write_profile
from varuna_capslog.reports.page import write_report
from varuna_capslog.training.checkpoint import best_checkpoint, latest_checkpoint

__all__ = ["KINDS", "Damage", "Defect", "Kind", "train_original"]

Damage = Callable[[bytes, str], bytes]
"""Gives the content of a file, of a form that `mutations.damaged` names, another one."""

Record = TypeVar("Record")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Defect(Exception):
    """A file that was accepted is used wrongly, or a sentence is not fit for a terminal."""


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    share: number of cases of this kind among 100.
    prepare: given the original run's folder, the folder of a case, the dice and the damage, writes the damaged file
        there.
    use: given the folder of a case, reads the file and does what a user does with it. Raises CapslogError where the
        file is refused.
    """

    share: int
    prepare: Callable[[Path, Path, random.Random, Damage], None]
    use: Callable[[Path], None]


def train_original(folder: Path) -> Path:
    """Trains two steps of a small detector and returns the run's folder; plans and annotations lie beside it."""
    config = Path(__file__).parents[2] / "configs" / "tiny.yaml"
    run = folder / "run"
    _command("train", str(config), "train.max_steps=2", "pipeline.devices=2", f"run_dir={run}")
    profile = str(run / "profile.json")
    plans = folder / "plans"
    plans.mkdir()
    for name, options in {
        "exact": ("--planner", "exact"),
        "budget": ("--planner", "budget", "--capacity", "64MiB"),
        "gpipe": ("--planner", "gpipe"),
        "pipedream": ("--planner", "pipedream"),
    }.items():
        _command("plan", "--profile", profile, "--devices", "2", *options, "-o", str(plans / f"{name}.json"))
    interleaved = ("pipeline.schedule=interleaved", "pipeline.stages_per_rank=2")
    _command("plan", str(config), "pipeline.devices=2", *interleaved, "-o", str(plans / "interleaved.json"))
    shutil.copy(run / "plan-0.json", plans / "run.json")
    _write_pictures(folder / "pictures")
    shutil.copytree(run / "checkpoints", folder / "checkpoints")
    shutil.rmtree(run / "checkpoints")  # a report of a run with checkpoints draws samples, which takes a process
    return run


def _command(*arguments: str) -> str:
    """Run a command in this process and return its output. Raises CapslogError where it refuses."""
    screen, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(errors), contextlib.suppress(SystemExit):
        cli.main(arguments)
    sentence = errors.getvalue()
    if "this is a defect" in sentence or "Traceback" in sentence:
        raise Defect(f"capslog {arguments[0]}: {sentence.strip()[-300:]}")
    if control := _CONTROL.search(screen.getvalue() + sentence):
        raise Defect(f"capslog {arguments[0]} writes {control.group()!r} to the terminal")
    if sentence.startswith("capslog: ") and not screen.getvalue():
        raise CapslogError(sentence.removeprefix("capslog: ").strip())
    return screen.getvalue()


def _prepare_plan(original: Path, folder: Path, dice: random.Random, damage: Damage) -> None:
    source = dice.choice(sorted((original.parent / "plans").iterdir()))
    (folder / "plan.json").write_bytes(damage(source.read_bytes(), "json"))
    shutil.copy(original / "profile.json", folder)
    (folder / "form").write_text(dice.choice(sorted(TARGETS)))


def _use_plan(folder: Path) -> None:
    path, profile = folder / "plan.json", str(folder / "profile.json")
    _read_again(path, read_plan, write_plan)
    _try("simulate", "--profile", profile, "--plan", str(path))
    _try("export", str(path), "--profile", profile, "--to", (folder / "form").read_text())


def _read_again(path: Path, read: Callable[[Path], Record], write: Callable[[Path, Record], None]) -> None:
    """Read a file. Raises Defect where the record changes once it is written and read again."""
    record, again = read(path), path.with_name("again.json")
    write(again, record)
    if read(again) != record:
        raise Defect(f"the {path.stem} that was read is another one when it is written and read again")


def _try(*arguments: str) -> None:
    """Runs a command, which may refuse."""
    with contextlib.suppress(CapslogError):
        _command(*arguments)


def _prepare_profile(original: Path, folder: Path, dice: random.Random, damage: Damage) -> None:
    (folder / "profile.json").write_bytes(damage((original / "profile.json").read_bytes(), "json"))
    shutil.copy(original / "plan-0.json", folder / "plan.json")
    (folder / "planner").write_text(dice.choice(("exact", "throughput", "gpipe", "budget", "varuna", "capslog")))


def _use_profile(folder: Path) -> None:
    path = folder / "profile.json"
    _read_again(path, read_profile, write_profile)
    _try("plan", "--profile", str(path), "--devices", "2", "--planner", (folder / "planner").read_text())
    _try("simulate", "--profile", str(path), "--plan", str(folder / "plan.json"))


def _prepare_config(original: Path, folder: Path, dice: random.Random, damage: Damage) -> None:
    configs = [original / "config.yaml", *sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))]
    (folder / "config.yaml").write_bytes(damage(dice.choice(configs).read_bytes(), "yaml"))
    (folder / "override").write_bytes(damage(b"", "override"))


def _use_config(folder: Path) -> None:
    override = (folder / "override").read_text()
    config = load_config(folder / "config.yaml", [override] if override else [])
    text = dump_config(config)
    (folder / "again.yaml").write_text(text)
    if dump_config(load_config(folder / "again.yaml")) != text:
        raise Defect("the config that was read is another one when it is written and read again")


def _write_pictures(folder: Path) -> None:
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (4, 48, 64, 3), dtype=np.uint8)
    for number, picture in enumerate(pixels):
        Image.fromarray(picture).save(folder / f"{number}.png")
    annotations = [
        {
            "id": number,
            "image_id": number % 4,
            "category_id": 1 + number % 2,
            "bbox": [4.0, 5.0, 20.0, 10.0 + number],
            "area": 200.0,
            "iscrowd": int(number == 5),
        }
        for number in range(8)
    ]
    images = [{"id": number, "file_name": f"{number}.png", "width": 64, "height": 48} for number in range(4)]
    categories = [{"id": 1, "name": "red"}, {"id": 2, "name": "blue", "supercategory": "colour"}]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "annotations.json").write_text(json.dumps(content))


def _prepare_coco(original: Path, folder: Path, dice: random.Random, damage: Damage) -> None:
    pictures = original.parent / "pictures"
    content = damage((pictures / "annotations.json").read_bytes(), "json")
    (folder / "annotations.json").write_bytes(content)
    (folder / "pictures").symlink_to(pictures)
    (folder / "labels").write_text(dice.choice(("contiguous", "original")))


def _use_coco(folder: Path) -> None:
    from detr_pipeline.data import CocoSource, DataConfig, class_names, image_sizes, largest_padded_size
    from detr_pipeline.evaluation import coco_statistics

    file = folder / "annotations.json"
    config = DataConfig.model_validate(
        {
            "train_json": file,
            "train_images": folder / "pictures",
            "val_json": file,
            "val_images": folder / "pictures",
            "labels": (folder / "labels").read_text(),
        }
    )
    class_names(config)
    image_sizes(config, "train")
    largest_padded_size(config)
    for split in ("train", "val"):
        source = CocoSource(config, split, 0, 10)
        boxes = source.index.ground_truth()["annotations"]
        coco_statistics(source.index, [{**box, "score": 0.5} for box in boxes if not box["iscrowd"]])
        samples = range(min(2, len(source)))
        if samples:
            source.load(source.minibatch([samples], 0), 0)


def _prepare_checkpoint(original: Path, folder: Path, dice: random.Random, damage: Damage) -> None:
    run = folder / "run"
    for entry in original.iterdir():
        if entry.is_file() and not entry.name.endswith(".jsonl"):
            (run / entry.name).parent.mkdir(exist_ok=True)
            shutil.copy(entry, run / entry.name)
    shutil.copytree(original.parent / "checkpoints", run / "checkpoints", copy_function=_linked)
    checkpoints = run / "checkpoints"
    choice = dice.random()
    newest = max(checkpoints.glob("step-*"))
    older = checkpoints / "step-00000001"
    shutil.copytree(newest, older, copy_function=_linked)
    manifest = json.loads((newest / "manifest.json").read_text())
    (older / "manifest.json").unlink()
    (older / "manifest.json").write_text(json.dumps({**manifest, "step": 1}))
    if choice < 0.65:
        _replace(newest / "manifest.json", "json", damage)
    elif choice < 0.75:
        _replace(checkpoints / "best.json", "json", damage)
    else:
        path = dice.choice(sorted(newest.glob("*.pt")))
        _replace(path, "bytes", damage)
        if dice.random() < 0.5:  # damaged deliberately: the manifest's entry of the file is updated, too
            from varuna_capslog.training.checkpoint import entry_of

            (layer,) = [name for name, entry in manifest["layers"].items() if entry["file"] == path.name]
            manifest["layers"][layer].update(entry_of(path))
            (newest / "manifest.json").unlink()
            (newest / "manifest.json").write_text(json.dumps(manifest))


def _linked(source: str, target: str) -> str:
    """Hard-link a file instead of copying it, to save space: files are replaced here, never written in place."""
    Path(target).hardlink_to(source)
    return target


def _replace(path: Path, form: str, damage: Damage) -> None:
    content = damage(path.read_bytes(), form)
    path.unlink()
    path.write_bytes(content)


def _use_checkpoint(folder: Path) -> None:
    from varuna_capslog.model.workload import load_workload
    from varuna_capslog.training.stored_layers import load_chain

    run = folder / "run"
    checkpoint, _ = latest_checkpoint(run / "checkpoints")
    if checkpoint is None:
        raise Defect("the older checkpoint is whole and is not used")
    config = load_config(run / "config.yaml")
    chain = load_workload(config).build_chain()
    with contextlib.suppress(CapslogError):
        load_chain(checkpoint, chain)
    load_chain(best_checkpoint(run / "checkpoints"), chain)


def _prepare_held(original: Path, folder: Path, dice: random.Random, damage: Damage) -> None:
    step = max((original.parent / "checkpoints").glob("step-*"))
    held = folder / "held"
    manifest = json.loads((step / "manifest.json").read_text())
    place = held / "00000004-000001"
    place.mkdir(parents=True)
    for entry in manifest["layers"].values():
        (place / entry["file"]).hardlink_to(step / entry["file"])
        (place / f"{entry['file']}.json").write_text(json.dumps(entry))
    record = Generation(2, ("a", "b"), lineage=((2, Stamp(4, 1)),), checkpoint=Stamp(2, 1)).to_json()
    extra = {key: value for key, value in manifest.items() if key not in ("format", "step", "time")}
    extra["layers"] = list(manifest["layers"])
    (held / "record-000002.json").write_text(json.dumps({"record": record, "manifest": extra}))
    choice = dice.random()
    if choice < 0.6:
        _replace(held / "record-000002.json", "json", damage)
    elif choice < 0.9:
        _replace(dice.choice(sorted(place.glob("*.json"))), "json", damage)
    else:
        name = dice.choice(("x-y", "-", "3-1-1", "00000004-", "9" * 30 + "-1", "4-1\x1b[2J", "00000004--1", "4-٣"))
        place.rename(held / name)


def _use_held(folder: Path) -> None:
    recover(folder)
    latest_checkpoint(folder / "checkpoints")


def _prepare_lines(original: Path, folder: Path, dice: random.Random, damage: Damage) -> None:
    run = folder / "run"
    shutil.copytree(original, run, ignore=shutil.ignore_patterns("workers", "tensorboard"))
    name = dice.choice(("metrics.jsonl", "events.jsonl", "evaluations.jsonl"))
    _replace(run / name, "jsonl", damage)


def _use_lines(folder: Path) -> None:
    page = write_report(folder / "run").read_text(encoding="utf-8").partition("<script>")[0]  # before plotly.js
    if control := _CONTROL.search(page):
        raise Defect(f"the report holds {control.group()!r}")


KINDS = {
    "plan": Kind(25, _prepare_plan, _use_plan),
    "profile": Kind(18, _prepare_profile, _use_profile),
    "config": Kind(20, _prepare_config, _use_config),
    "coco": Kind(17, _prepare_coco, _use_coco),
    "checkpoint": Kind(8, _prepare_checkpoint, _use_checkpoint),
    "held": Kind(8, _prepare_held, _use_held),
    "lines": Kind(4, _prepare_lines, _use_lines),
}
