"""Eight pipeline ranks on one GPU, as the paper's eight GPUs: measured peaks beside the predictions, and layer times.

Runs unattended (`python benchmarks/gpu/gpu.py -o result.json`), needs only torch, torchvision, numpy, scipy and PyYAML,
and rewrites its one JSON after every finished part, so that a run that is cut off leaves what it has. Tensors are
staged over gloo, which is why ranks may share a GPU. `--device cpu --image-size 64 64` tries the script anywhere.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import platform
import queue
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from detr_pipeline.chain import build_chain  # noqa: E402 (the script runs from a bare checkout)
from detr_pipeline.loss import set_loss  # noqa: E402
from varuna_capslog.engine.communicator import connect  # noqa: E402
from varuna_capslog.engine.layout import Layout  # noqa: E402
from varuna_capslog.engine.options import EngineOptions  # noqa: E402
from varuna_capslog.engine.pipeline import PipelineEngine  # noqa: E402
from varuna_capslog.engine.probe import PeakProbe, resident_tensors  # noqa: E402
from varuna_capslog.engine.step import train_step  # noqa: E402
from varuna_capslog.model.chain import Chain, TensorSpec  # noqa: E402
from varuna_capslog.model.signature import layer_signature  # noqa: E402
from varuna_capslog.model.trace import ShapeTable  # noqa: E402
from varuna_capslog.model.workload import DataSource, Minibatch, Workload  # noqa: E402
from varuna_capslog.planning.search import plan  # noqa: E402
from varuna_capslog.profiles.record import Profile  # noqa: E402
from varuna_capslog.profiling.estimate import estimate_workload  # noqa: E402
from varuna_capslog.profiling.skeleton import skeleton  # noqa: E402
from varuna_capslog.profiling.trim import MEASURED_RANK, RunConditions, TrimmedRun, measure_run, play_neighbours  # noqa: E402

CONFIGS = ("rn50_e6", "rn50_d_e6", "rn101_e6", "rn101_d_e6", "rn101_e12", "rn101_d_e12")
PLANNERS = ("varuna", "capslog", "exact")
RANKS = 8
MICROBATCHES = 4
BOXES = 8
CONTEXT_BYTES = 600 << 20  # of each process on the shared GPU, beside what the allocator reserves

MODEL_DEFAULTS: dict[str, Any] = {
    "backbone": "resnet50",
    "last_layer": "layer4",
    "dilation": False,
    "norm": "frozen",
    "freeze": "stem+layer1",
    "weights": None,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "hidden_dim": 256,
    "attention_heads": 8,
    "feedforward": 2048,
    "queries": 100,
    "dropout": 0.1,
    "attention": "sdpa",
    "cut_points": "all",
    "heads": "last",
    "num_classes": None,
    "auxiliary_loss": True,
    "cost_class": 1.0,
    "cost_boxes": 5.0,
    "cost_giou": 2.0,
    "loss_class": 1.0,
    "loss_boxes": 5.0,
    "loss_giou": 2.0,
    "no_object": 0.1,
}
"""`detr_pipeline.config.ModelConfig` without the config library; a test compares the two."""


def model_of(name: str) -> SimpleNamespace:
    """The `model` section of `configs/paper/<name>.yaml`, defaults filled in."""
    values = yaml.safe_load((ROOT / "configs" / "paper" / f"{name}.yaml").read_text())
    return SimpleNamespace(**(MODEL_DEFAULTS | values["model"]))


class PaperWorkload(Workload):
    """One paper configuration on random pictures of one size, eight boxes in each."""

    def __init__(self, name: str, image_size: Sequence[int]) -> None:
        self.name, self.model, self.image_size = name, model_of(name), tuple(image_size)

    def build_chain(self) -> Chain:
        return build_chain(self.model, self.model.num_classes)  # type: ignore[arg-type]

    def loss(self, outputs: Any, targets: Any, normalisers: Any, matches: Any = None) -> dict[str, Tensor]:
        return set_loss(outputs, targets, normalisers, self.model, matches)  # type: ignore[arg-type]

    def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
        return {
            "images": TensorSpec((microbatch_size, 3, *self.image_size)),
            "sizes": TensorSpec((microbatch_size, 2), torch.int64),
        }

    def profile_targets(self, microbatch_size: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
        target = {
            "labels": torch.arange(BOXES) % self.model.num_classes,
            "boxes": torch.linspace(0.2, 0.6, BOXES * 4).view(BOXES, 4),
        }
        normalisers = {"boxes": float(BOXES * microbatch_size), "queries": 100.0 * microbatch_size}
        return [dict(target, image_id=image) for image in range(microbatch_size)], normalisers

    def train_data(self) -> DataSource:
        raise NotImplementedError("this benchmark makes its own microbatches")


def main() -> int:
    """Runs every part that fits into the time; exit status 0 when all of them were measured."""
    given = arguments()
    began = time.monotonic()
    device = torch.device(given.device)
    result: dict[str, Any] = {
        "environment": environment(device),
        "conditions": {"image_size": given.image_size, "ranks": RANKS, "microbatches": MICROBATCHES},
        "configurations": {},
        "layers": {},
    }
    profiles: dict[str, Profile] = {}
    for name in given.configs:
        begun = time.process_time()
        workload = PaperWorkload(name, given.image_size)
        profiles[name] = estimate_workload(workload, RunConditions(device=given.device))
        entry = {"estimate_cpu_seconds": round(time.process_time() - begun, 2), "plans": {}}
        for planner in PLANNERS:
            found = plan(profiles[name], RANKS, planner=planner)
            entry["plans"][planner] = {
                "cuts": list(found.cuts),
                "predicted_bytes": list(found.stage_bytes or ()),
                "memory_model": found.memory_model,
            }
        result["configurations"][name] = entry
    write(given.output, result)

    complete = True
    known: dict[tuple[str, tuple[int, ...]], Any] = {}
    for name in given.configs:
        for planner, entry in result["configurations"][name]["plans"].items():
            key = (name, tuple(entry["cuts"]))
            if key not in known:
                left = given.seconds - (time.monotonic() - began)
                known[key] = measured_ranks(name, entry, given, left, result["environment"].get("free_bytes"))
                progress(f"{name} {planner}: {summary(known[key])}")
            entry |= known[key]
            complete &= "peak_bytes" in entry
            write(given.output, result)
    for name in given.configs:
        left = given.seconds - (time.monotonic() - began)
        result["layers"][name] = measured_layers(name, given, left)
        complete &= "skipped" not in result["layers"][name]
        progress(f"{name} layers: {result['layers'][name].get('skipped', 'measured')}")
        write(given.output, result)
    result["seconds"] = round(time.monotonic() - began, 1)
    write(given.output, result)
    return 0 if complete else 1


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("result.json"), help="file for the JSON")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--image-size", nargs=2, type=int, default=[1333, 1333], metavar=("H", "W"))
    parser.add_argument("--seconds", type=float, default=540.0, help="no new part is begun after so long")
    parser.add_argument("--patience", type=float, default=150.0, help="longest time for one part")
    return parser.parse_args()


def environment(device: torch.device) -> dict[str, Any]:
    """Device and versions, without making a CUDA context in this process."""
    found: dict[str, Any] = {
        "device": device.type,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    if device.type == "cuda":
        found |= run_ranks(1, functools.partial(_describe_gpu), 60.0)[0]
    return found


def _describe_gpu(rank: int, port: int) -> dict[str, Any]:
    free, total = torch.cuda.mem_get_info()
    return {"name": torch.cuda.get_device_name(), "free_bytes": free, "total_bytes": total}


# -- one training run of eight ranks


def measured_ranks(
    name: str, entry: dict[str, Any], given: argparse.Namespace, left: float, free: int | None
) -> dict[str, Any]:
    """Peaks of all ranks of one run, or why there are none.

    Args:
        left: seconds until the script should end.
        free: bytes of the one GPU, asked once: a process that asks takes seconds to begin. None: no GPU.
    """
    if left <= 0:
        return {"skipped": "the time was spent"}
    needed = sum(entry["predicted_bytes"]) + RANKS * CONTEXT_BYTES
    if free is not None and needed > free:
        return {"skipped": f"all ranks together need about {needed} bytes, {free} are free on the one GPU"}
    work = functools.partial(train_rank, name, tuple(given.image_size), given.device, entry["cuts"])
    try:
        rows = run_ranks(RANKS, work, min(given.patience, left))
    except RuntimeError as error:
        return {"skipped": str(error)}
    return {
        "peak_bytes": [row["allocated"] for row in rows],
        "reserved_bytes": [row["reserved"] for row in rows],
        "step_seconds": max(row["seconds"] for row in rows),
        "loss": rows[-1]["loss"],
    }


def train_rank(
    name: str, image_size: tuple[int, int], device_name: str, cuts: Sequence[int], rank: int, port: int
) -> dict[str, Any]:
    """One rank: a step that makes the optimizer's state, then a step whose peak counts."""
    torch.set_num_threads(1)
    device = torch.device(device_name, 0) if device_name == "cuda" else torch.device("cpu")
    workload = PaperWorkload(name, image_size)
    torch.manual_seed(0)
    chain = workload.build_chain()
    communicator = connect(rank, RANKS, "127.0.0.1", port, timeout_seconds=120.0)
    options = EngineOptions(num_microbatches=MICROBATCHES, clip_norm=0.1)
    layout = Layout.pipelines(cuts, len(chain))
    engine = PipelineEngine(chain, workload.loss, layout, options, communicator, device)
    del chain
    inputs = [_picture(workload, index) for index in range(MICROBATCHES)]
    targets, normalisers = workload.profile_targets(1)
    specs = [{key: TensorSpec.of(value) for key, value in values.items()} for values in inputs]
    total = {key: value * MICROBATCHES for key, value in normalisers.items()}
    minibatch = Minibatch(specs, [targets] * MICROBATCHES, total)
    train_step(engine, 1, minibatch, inputs.__getitem__)
    communicator.barrier()
    begun = time.perf_counter()
    with PeakProbe(device, resident_tensors(engine.layers, engine.optimizer)) as probe:
        outcome = train_step(engine, 2, minibatch, inputs.__getitem__)
    return {
        "allocated": probe.peak_bytes,
        "reserved": torch.cuda.max_memory_reserved() if device.type == "cuda" else None,
        "seconds": time.perf_counter() - begun,
        "loss": outcome.parts["loss"],
    }


def _picture(workload: PaperWorkload, index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    height, width = workload.image_size
    return {
        "images": torch.randn(1, 3, height, width, generator=generator),
        "sizes": torch.tensor([[height, width]]),
    }


# -- single layers


def measured_layers(name: str, given: argparse.Namespace, left: float) -> dict[str, Any]:
    """Seconds and bytes of every different layer of one configuration, from trimmed runs on the device."""
    if left <= 0:
        return {"skipped": "the time was spent"}
    work = functools.partial(layer_rank, name, tuple(given.image_size), given.device)
    try:
        return {"rows": run_ranks(2, work, min(given.patience, left))[MEASURED_RANK]}
    except RuntimeError as error:
        return {"skipped": str(error)}


def layer_rank(name: str, image_size: tuple[int, int], device_name: str, rank: int, port: int) -> list[dict[str, Any]]:
    """Measures, or plays the neighbours of, one layer after the other; equal layers once."""
    torch.set_num_threads(1)
    device = torch.device(device_name, 0) if device_name == "cuda" else torch.device("cpu")
    workload = PaperWorkload(name, image_size)
    chain = skeleton(workload)
    inputs = workload.profile_inputs(1)
    specs = ShapeTable(chain, device_name, "float32").boundaries(inputs)
    conditions = RunConditions(device_name, 1, {key: list(spec.shape) for key, spec in inputs.items()})
    communicator = connect(rank, 2, "127.0.0.1", port, timeout_seconds=120.0)
    targets, normalisers = workload.profile_targets(1)
    rows: dict[Any, dict[str, Any]] = {}
    for index, layer in enumerate(chain.layers):
        cuts = tuple(tuple(sorted(cut.items())) for cut in specs[index : index + 2])
        inner = 0 < index < len(chain) - 1
        key = (cuts, layer.reads, layer.writes, layer_signature(layer)) if inner else index
        if key in rows:
            rows[key]["layers"].append(layer.name)
            continue
        last = index + 1 == len(chain)
        loss = (targets, normalisers) if last else (None, {})
        run = TrimmedRun(index, index + 1, len(chain), tuple(specs[index : index + 2]), *loss)
        if rank != MEASURED_RANK:
            play_neighbours(chain, run, conditions, communicator)
            rows[key] = {"layers": [layer.name]}
            continue
        row = measure_run(chain, run, conditions, workload.loss, communicator, device)
        rows[key] = {
            "layers": [layer.name],
            "peak_bytes": row.peak_bytes,
            "static_bytes": row.static_bytes,
            "saved_bytes": row.saved_bytes,
            "forward_seconds": row.forward_seconds,
            "backward_seconds": row.backward_seconds,
        }
    return list(rows.values())


# -- processes


def run_ranks(count: int, work: Callable[[int, int], Any], patience: float) -> list[Any]:
    """What `work(rank, port)` returns in `count` processes, by rank.

    Raises:
        RuntimeError: a rank failed (its error is named) or they took longer than `patience` seconds; all are ended.
    """
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers = context.Queue()
    processes = [context.Process(target=_rank, args=(work, rank, store.port, answers)) for rank in range(count)]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    deadline = time.monotonic() + patience
    try:
        while len(found) < count:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{count} ranks took longer than {patience:.0f} s")
            try:
                rank, failed, value = answers.get(timeout=1.0)
            except queue.Empty:
                dead = [rank for rank, process in enumerate(processes) if process.exitcode and rank not in found]
                if dead:
                    raise RuntimeError(f"rank {dead[0]} ended with status {processes[dead[0]].exitcode}") from None
                continue
            if failed:
                raise RuntimeError(f"rank {rank}: {value}")
            found[rank] = value
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
    return [found[rank] for rank in range(count)]


def _rank(work: Callable[[int, int], Any], rank: int, port: int, answers: Any) -> None:
    try:
        answers.put((rank, False, work(rank, port)))
    except Exception as error:
        answers.put((rank, True, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"))
    time.sleep(600)  # ended by the parent: no rank leaves while another still needs its connection


def write(path: Path, result: dict[str, Any]) -> None:
    """Writes the JSON anew, never half."""
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.replace(path)


def progress(text: str) -> None:
    """A line for whoever watches."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def summary(row: dict[str, Any]) -> str:
    """One line of a run."""
    if "skipped" in row:
        return f"not run: {row['skipped']}"
    return f"peak {max(row['peak_bytes']) / 2**30:.2f} GiB, step {row['step_seconds']:.2f} s"


if __name__ == "__main__":
    sys.exit(main())
