"""AP after half an hour of processor time from scratch: RT-DETR and DETR by `capslog train`, RT-DETR by the Trainer.

Each contender trains alone on one thread of one process until that process has used `--seconds` of processor time,
including building the model and decoding images, and is then scored by the same code on the same validation images.
Wall-clock time does not count, so that other programs on the machine cost no contender steps. Prints the table of
README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from common import write_json
from contenders import BATCH, CONFIGS, keys, make_trainer, model_outputs, score, settled

from detr_pipeline.rt_detr.task import RtDetrWorkload
from varuna_capslog.training.checkpoint import open_checkpoint
from varuna_capslog.training.stored_layers import load_chain

_OURS = {"rt-detr": "bccd_rt_detr", "detr": "bccd"}
NAMES = {
    "rt-detr": "RT-DETR, `capslog train`",
    "trainer": "RT-DETR, transformers' Trainer",
    "detr": "DETR, `capslog train`",
}


@dataclass(frozen=True)
class Limits:
    """End of a contender's training: a number of processor seconds, or a time of the monotonic clock."""

    seconds: float
    until: float

    def over(self, worked: float) -> bool:
        return worked >= self.seconds or time.monotonic() >= self.until


def _worked(pid: int) -> float:
    """Return the processor seconds of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ours(name: str, limits: Limits, size: tuple[int, int], decay_steps: int, run_dir: Path) -> dict[str, Any]:
    """Run `capslog train` until Ctrl-C at the limit, then score its checkpoints."""
    overrides = [
        *keys(_OURS[name], size, decay_steps, run_dir),
        "train.checkpoint_every=200",
        "train.checkpoint_keep=1000",
    ]
    command = [sys.executable, "-m", "varuna_capslog.cli", "train", str(CONFIGS / f"{_OURS[name]}.yaml"), *overrides]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    place, worked, worked_at = run_dir / "workers" / "0.json", 0.0, dict[Path, float]()
    while process.poll() is None:
        time.sleep(0.2)
        if place.is_file() and (run_dir / "metrics.jsonl").is_file():
            worked = _worked(json.loads(place.read_text())["pid"])
            for path in (run_dir / "checkpoints").glob("step-*"):
                worked_at.setdefault(path, worked)
            if limits.over(worked):
                process.send_signal(signal.SIGINT)
                break
    process.wait()
    for path in (run_dir / "checkpoints").glob("step-*"):
        worked_at.setdefault(path, worked)
    _, workload = settled(_OURS[name], overrides)
    chain = workload.build_chain()

    def outputs(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return chain.run(workload.inference_inputs(inputs))

    reached = []
    for path in sorted(worked_at):
        checkpoint = open_checkpoint(path)
        load_chain(checkpoint, chain)
        for layer in chain.layers:
            layer.module.eval()
        reached.append({"worked": worked_at[path], "steps": checkpoint.step, "scores": score(workload, outputs)})
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return {"reached": reached, "losses": [json.loads(line)["loss"] for line in lines]}


def trainer(limits: Limits, size: tuple[int, int], decay_steps: int, folder: Path) -> dict[str, Any]:
    """Run transformers' Trainer in this process; score the weights that were kept at intervals when it has ended."""
    from transformers import TrainerCallback

    begun = time.process_time()
    config, workload = settled("bccd_rt_detr", keys("bccd_rt_detr", size, decay_steps, folder))
    assert isinstance(workload, RtDetrWorkload)
    kept: list[tuple[float, int, dict[str, Tensor]]] = []

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            worked = time.process_time() - begun
            control.should_training_stop = limits.over(worked)
            if control.should_training_stop or state.global_step % 200 == 0:
                weights = {name: value.clone() for name, value in more["model"].state_dict().items()}
                kept.append((worked, state.global_step, weights))

    run = make_trainer(config, workload, folder, Stop())
    run.train()
    model, reached = run.model.eval(), []
    for worked, steps, weights in kept:
        model.load_state_dict(weights)
        reached.append({"worked": worked, "steps": steps, "scores": score(workload, model_outputs(workload, model))})
    return {"reached": reached, "losses": [entry["loss"] for entry in run.state.log_history if "loss" in entry]}


def show(results: dict[str, dict[str, Any]], every: int | None) -> None:
    """Print the table of README.md: the last step, and with `every` also the scores at every multiple of it."""
    columns = ["AP", "AP50", "AP75", "AR_100"]
    print(f"| | processor s | steps of {BATCH} | pictures per processor s | {' | '.join(columns)} | AP of each class |")
    print("|---" * 9 + "|")
    for name, result in results.items():
        *way, last = result["reached"]
        for point in [*(point for point in way if every and point["steps"] % every == 0), last]:
            each = ", ".join(f"{kind} {value:.3f}" for kind, value in point["scores"]["per_class"].items())
            scores = " | ".join(f"{point['scores'][column]:.3f}" for column in columns)
            rate = point["steps"] * BATCH / point["worked"]
            print(f"| {NAMES[name]} | {point['worked']:.0f} | {point['steps']} | {rate:.2f} | {scores} | {each} |")


def main() -> None:
    """Train one contender, or print the table of several results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=[*NAMES, "table"])
    parser.add_argument("results", nargs="*", type=Path, help="for the table: what --output wrote")
    parser.add_argument("--seconds", type=float, default=1800, help="of processor time")
    parser.add_argument("--minutes", type=float, default=24 * 60, help="of wall-clock time, at most")
    parser.add_argument("--every", type=int, help="for the table: also what was reached after every so many steps")
    parser.add_argument("--size", type=int, nargs=2, default=(160, 224), help="height and width of the pictures")
    parser.add_argument("--decay-steps", type=int, default=1500, help="where the cosine of the learning rate ends")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    arguments = parser.parse_args()
    if arguments.contender == "table":
        results: dict[str, dict[str, Any]] = {}
        for path in arguments.results:
            results |= {name: result for name, result in json.loads(path.read_text()).items() if name in NAMES}
        show(results, arguments.every)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    size: tuple[int, int] = tuple(arguments.size)
    with tempfile.TemporaryDirectory() as folder:
        limits = Limits(arguments.seconds, time.monotonic() + 60 * arguments.minutes)
        last = limits, size, arguments.decay_steps, Path(folder) / "run"
        name = arguments.contender
        result = trainer(*last) if name == "trainer" else ours(name, *last)
    show({name: result}, every=200)
    write_json(arguments.output, {name: result | {"size": size, "decay_steps": arguments.decay_steps}})


if __name__ == "__main__":
    main()
