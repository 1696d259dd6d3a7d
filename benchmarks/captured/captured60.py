"""Compares one engine step of each of 60 drawn models of five libraries with the model's own step.

Each model is built twice with the same weights, in a separate process with a time limit. The first is captured by
`Chain.from_module` and trains one step of two microbatches in as many stages as it has layers, three at most; the
second trains the same step by plain autograd. Loss, gradients and buffers are compared bit by bit. A line of JSON is
written for each model when it ends; the table of README.md comes last.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from draw import read_drawn
from drawn_models import MODELS, REPLACED, Drawn
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.communicator import connect
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.capture.export import input_tensors, named_leaves
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.workload import Minibatch

MICROBATCHES = 2
STAGES = 3
SMALL = 1e-6
PRECISION = {"dtype": torch.float32}
"""Type of weights and images: float64 distinguishes rounding errors from a wrong step."""
Values = dict[str, Tensor]


class SameDraws(TorchDispatchMode):
    """Mode in which every random operator of torch starts from one seed: two programs that call the same operators draw
    the same numbers, independent of earlier draws.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.manual_seed(3)
        return func(*args, **(kwargs or {}))


def seed_all(seed: int) -> None:
    """Seed torch, `random` and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (libraries draw from it)


def new_model(drawn: Drawn) -> nn.Module:
    """Return the model, the same on every call. A parameter initialized to zeros would hide the gradients before it."""
    seed_all(0)
    model = drawn.build().to(PRECISION["dtype"]).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and not parameter.any():
                nn.init.normal_(parameter, std=0.05)
    return model


def make_inputs(drawn: Drawn, microbatch: int) -> dict[str, Any]:
    """Return the arguments of one microbatch."""
    seed_all(100 + microbatch)
    return pytree.tree_map_only(
        Tensor, lambda one: one.to(PRECISION["dtype"]) if one.is_floating_point() else one, drawn.inputs()
    )


def loss(outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
    """Return a weighted mean of every output; weights are random, since the mean square after a norm is constant."""
    parts = []
    for name in sorted(outputs):
        output = outputs[name]
        if output.is_floating_point() or output.is_complex():
            real = torch.view_as_real(output) if output.is_complex() else output
            generator = torch.Generator().manual_seed(real.numel())
            real = torch.where(real.isfinite(), real, 0.0)  # detectors return -inf for unused classes
            weights = torch.randn(real.shape, generator=generator).to(real.dtype)
            parts.append((real * weights).mean())
    return {"loss": torch.stack(parts).sum() / normalisers["microbatches"]}


def plain_step(
    model: nn.Module, drawn: Drawn, chain_inputs: Sequence[str], chain_outputs: Sequence[str]
) -> tuple[Values, Values, float]:
    """Train a step by plain autograd; return gradients and buffers by the model's own names, and the loss."""
    total = 0.0
    for index in range(MICROBATCHES):
        arguments = make_inputs(drawn, index)
        with SameDraws():
            result = model(**arguments)
            leaves = {key: leaf for key, leaf in named_leaves(result, chain_inputs) if isinstance(leaf, Tensor)}
            if not set(chain_outputs) <= leaves.keys():
                leaves = dict(zip(chain_outputs, leaves.values(), strict=True))
            part = loss({key: leaves[key] for key in chain_outputs}, None, {"microbatches": MICROBATCHES})["loss"]
            part.backward()
        total += float(part.detach())
    gradients = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
    dense = {key: gradient.to_dense() if gradient.is_sparse else gradient for key, gradient in gradients.items()}
    return dense, {key: buffer.detach().clone() for key, buffer in model.named_buffers()}, total


def tensors_of(chain: Chain, arguments: Mapping[str, Any]) -> Values:
    """Return the arguments as the chain's inputs."""
    tensors: Values = {}
    for key, value in arguments.items():
        tensors |= input_tensors(key, value)
    return tensors if set(chain.inputs) <= tensors.keys() else dict(zip(chain.inputs, tensors.values(), strict=True))


def cuts_of(layers: int) -> tuple[int, ...]:
    """Return the first layer of each stage."""
    stages = min(STAGES, layers)
    return tuple(number * layers // stages for number in range(stages))


def numbers(tensor: Tensor) -> np.ndarray:
    """Return a copy of the values for another process; bfloat16, which numpy lacks, becomes float32, which is exact."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()


def engine_step(rank: int, drawn: Drawn, port: int, results: Any) -> None:
    """Run one rank: put the capture's facts in `results`, then (gradients, buffers, loss), or an error's sentence."""
    try:
        torch.set_num_threads(1)
        model, started = new_model(drawn), time.monotonic()
        chain = Chain.from_module(model, None, make_inputs(drawn, 0))
        names = [layer.name for layer in chain.layers]
        seconds = time.monotonic() - started
        results.put((rank, "captured", (names, chain.inputs, chain.outputs, chain.kept_whole, seconds)))
        cuts = cuts_of(len(chain))
        if rank >= len(cuts):
            return
        communicator = connect(rank, len(cuts), "127.0.0.1", port, timeout_seconds=60.0)
        inputs = [tensors_of(chain, make_inputs(drawn, index)) for index in range(MICROBATCHES)]
        specs = [{key: TensorSpec.of(tensor) for key, tensor in values.items()} for values in inputs]
        batch = Minibatch(specs, [None] * MICROBATCHES, {"microbatches": float(MICROBATCHES)}, [[0], [1]])
        layout, options = Layout.pipelines(cuts, len(chain)), EngineOptions(MICROBATCHES, seed=1, clip_norm=0.1)
        engine = PipelineEngine(chain, loss, layout, options, communicator, torch.device("cpu"))
        gradients: dict[str, np.ndarray] = {}

        def keep() -> None:
            for key, parameter in engine.optimizer.parameters.items():
                if parameter.grad is not None:
                    gradients[key] = numbers(parameter.grad)

        with SameDraws():
            result = train_step(engine, 1, batch, inputs.__getitem__, before_commit=keep)
        layers = chain.layers[cuts[rank] : (*cuts[1:], len(chain))[rank]]
        buffers = {
            f"{layer.name}.{key}": numbers(tensor) for layer in layers for key, tensor in layer.module.named_buffers()
        }
        results.put((rank, "stepped", (gradients, buffers, float(result.parts["loss"]))))
        communicator.barrier()
        communicator.close()
    except BaseException as error:
        results.put((rank, "failed", describe(error)))


def describe(error: BaseException) -> dict[str, Any]:
    """Describe an error: its sentence, whether the project raised it, and where."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return {
        "refused": isinstance(error, CapslogError),
        "sentence": f"{type(error).__name__}: {' '.join(lines)}"[:1500],
        "traceback": "".join(traceback.format_exception(error))[-4000:],
    }


def differences(
    layers: Sequence[str],
    wanted: Values,
    actual: Mapping[str, np.ndarray],
    least: float,
    others: Mapping[str, Sequence[str]],
    start: Values | None = None,
) -> tuple[int, float, str]:
    """Return the number of tensors that differ in any bit, the largest relative difference, and its tensor.

    others: all names of a tensor with several names. start: values of tensors that are in no layer; else zeros.
    """
    differing, worst, place = 0, 0.0, ""
    for key, tensor in wanted.items():
        names = others.get(key, [key])
        addresses = [address for name in names for layer in layers if (address := f"{layer}.{name}") in actual]
        expected = numbers(tensor)
        computed = actual[addresses[0]] if addresses else numbers(start[key]) if start else np.zeros_like(expected)
        if computed.shape != expected.shape:
            return 1, float("inf"), f"{key}: shape {computed.shape} instead of {expected.shape}"
        if np.array_equal(computed, expected, equal_nan=expected.dtype.kind in "fc"):
            continue
        differing += 1
        gap = np.abs(computed.astype(np.complex128) - expected.astype(np.complex128)).max()
        error = float(gap) / max(float(np.abs(expected).max()), least, 1e-30)
        error = float("inf") if np.isnan(error) else error
        if error >= worst:
            worst, place = error, key + ("" if addresses else " (in no layer)")
    return differing, worst, place


def compare(drawn: Drawn, row: dict[str, Any]) -> None:
    """Fill the row of one model."""
    model, second = new_model(drawn), new_model(drawn)
    states = [dict(build.named_parameters()) | dict(build.named_buffers()) for build in (model, second)]
    if any(not torch.equal(tensor.detach(), states[1][key].detach()) for key, tensor in states[0].items()):
        row |= {"verdict": "library", "error": {"sentence": "two builds from one seed have different weights"}}
        return
    start = {key: buffer.detach().clone() for key, buffer in model.named_buffers()}
    row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    try:
        with torch.no_grad():
            second(**make_inputs(drawn, 0))
    except Exception as error:
        row |= {"verdict": "library", "error": describe(error)}
        return
    # fork before autograd has run in this process: its threads do not exist in a child
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [
        context.Process(target=engine_step, args=(rank, drawn, store.port, results), daemon=True)
        for rank in range(STAGES)
    ]
    for rank in ranks:
        rank.start()
    gradients: Values = {}
    buffers: Values = {}
    engine_gradients: dict[str, np.ndarray] = {}
    engine_buffers: dict[str, np.ndarray] = {}
    total, made, waited, layers = 0.0, 0.0, 2 * STAGES, [""]
    while waited:
        number, kind, value = results.get()
        waited -= 1
        if kind == "failed":
            row |= {"verdict": "refused" if value["refused"] else "crashed", "error": value}
            for rank in ranks:
                rank.kill()
            return
        if kind == "captured" and number == 0:
            layers, inputs, outputs, kept_whole, seconds = value
            stages = len(cuts_of(len(layers)))
            waited -= STAGES - stages
            row |= {"layers": len(layers), "whole": kept_whole, "stages": stages, "capture_seconds": round(seconds, 1)}
            gradients, buffers, total = plain_step(model, drawn, inputs, outputs)
        elif kind == "stepped":
            engine_gradients |= value[0]
            engine_buffers |= value[1]
            if number == row["stages"] - 1:
                made = value[2]
    others: dict[str, list[str]] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for key in [*gradients, *buffers]:
        same = next(tensor for name, tensor in named if name == key)
        others[key] = [name for name, tensor in named if tensor is same]
    largest = max((float(gradient.abs().max()) for gradient in gradients.values()), default=0.0)
    of_gradients = differences(layers, gradients, engine_gradients, 1e-3 * largest, others)
    changed = {key: buffer for key, buffer in buffers.items() if buffer.numel()}
    of_buffers = differences(layers, changed, engine_buffers, 0.0, others, start)
    of_loss = abs(made - total) / max(abs(total), 1e-30) if made != total else 0.0
    row |= {
        "gradients": len(gradients),
        "differing_gradients": of_gradients[0],
        "buffers": len(buffers),
        "differing_buffers": of_buffers[0],
        "largest": max(of_gradients[1], of_buffers[1]),
        "place": of_gradients[2] if of_gradients[1] >= of_buffers[1] else f"buffer {of_buffers[2]}",
        "loss": total,
        "loss_difference": of_loss,
    }
    worst = max(row["largest"], of_loss)
    row["verdict"] = "bitwise" if worst == 0 else "close" if worst <= SMALL else "differs"


def names_of(library: str) -> list[str]:
    """Return the 12 names of a library: the first of the shuffle, without the replaced ones."""
    return [name for name in read_drawn()[library] if name not in REPLACED.get(library, {})][:12]


def run_one(library: str, name: str, seconds: float, double: bool) -> dict[str, Any]:
    """Run a model in a separate process."""
    row: dict[str, Any] = {"library": library, "name": name}
    command = [sys.executable, __file__, "--child", f"{library}:{name}", *(["--double"] if double else [])]
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    try:
        out, err = process.communicate(timeout=seconds)
        lines = [line for line in out.splitlines() if line.startswith("{")]
        row |= json.loads(lines[-1]) if lines else {"verdict": "crashed", "error": {"sentence": err[-1500:]}}
    except subprocess.TimeoutExpired:
        row |= {"verdict": "time", "error": {"sentence": f"not done in {seconds:.0f} s"}}
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.communicate()
    row["seconds"] = round(time.monotonic() - started, 1)
    return row


def table_row(row: dict[str, Any]) -> str:
    """Return a line of the table."""
    as_python = len(row.get("whole", []))
    layers = f"{row['layers']}{f' ({as_python} as Python)' if as_python else ''}" if "layers" in row else ""
    if row["verdict"] in ("bitwise", "close", "differs"):
        words = {"bitwise": "equal bits", "close": "within 1e-6", "differs": "DIFFERS"}[row["verdict"]]
        largest = f"{max(row['largest'], row['loss_difference']):.1e}"
        if row["verdict"] != "bitwise":
            largest += f" | {row['place']}"
        if row.get("in_float64") is not None:
            largest += f"; {row['in_float64']:.1e}"
    else:
        words, largest = row["verdict"], re.sub(r"\s+", " ", row["error"]["sentence"])[:300]
    if "| " not in largest:
        largest += " | "
    size = f"{row['parameters']:,}" if "parameters" in row else ""
    return f"| {row['library']} | {row['name']} | {size} | {layers} | {row.get('stages', '')} | {words} | {largest} |"


def main() -> None:
    """Run the models and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="libraries, or names of models")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of each model")
    parser.add_argument("--results", type=Path, help="a file to which a line of JSON is added for each model")
    parser.add_argument("--double", action="store_true", help="in float64, where rounding is far below 1e-6")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        warnings.simplefilter("ignore")
        library, name = arguments.child.split(":", 1)
        PRECISION["dtype"] = torch.float64 if arguments.double else torch.float32
        row: dict[str, Any] = {}
        try:
            compare(MODELS[library](name), row)
        except Exception as error:
            row |= {"verdict": "crashed", "error": describe(error)}
        print(json.dumps(row), flush=True)
        os._exit(0)
    print("| library | model | parameters | layers | stages | step | largest difference | where, and in float64 |")
    print("|---|---|---|---|---|---|---|---|")
    counts: dict[str, int] = {}
    for library in read_drawn():
        for name in names_of(library):
            if arguments.only and not {library, name} & set(arguments.only):
                continue
            row = run_one(library, name, arguments.seconds, arguments.double)
            if row["verdict"] == "differs" and not arguments.double:
                again = run_one(library, name, arguments.seconds, True)
                row["in_float64"] = max(again["largest"], again["loss_difference"]) if "largest" in again else None
            counts[row["verdict"]] = counts.get(row["verdict"], 0) + 1
            print(table_row(row), flush=True)
            if arguments.results:
                with arguments.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    print("\n" + ", ".join(f"{verdict}: {count}" for verdict, count in sorted(counts.items())))
    if counts.keys() - {"bitwise", "close", "refused"}:
        sys.exit(1)


if __name__ == "__main__":
    main()
