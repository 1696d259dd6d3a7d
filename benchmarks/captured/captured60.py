"""One engine step of each of 60 drawn models of five libraries, beside the model's own step.

Each model is built twice with the same weights, in a process of its own with a time limit. One is captured by
`Chain.from_module` and makes one step of two microbatches in as many stages as it has layers, three at most; the other
makes the same step by plain autograd. Loss, gradients and buffers are compared to the last bit. A line of JSON is
written for each model as it ends; the table of README.md comes last.
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
from varuna_capslog.engine.options import EngineOptions
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.capture.leaves import input_tensors, named_leaves
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.workload import Minibatch

MICROBATCHES = 2
STAGES = 3
SMALL = 1e-6
PRECISION = {"dtype": torch.float32}
"""Of weights and pictures: float64 tells rounding from another step."""
Values = dict[str, Tensor]


class SameDraws(TorchDispatchMode):
    """While it is open, every random operator of torch begins from one seed: two programs that call the same operators
    draw the same numbers, whatever each has drawn before.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.manual_seed(3)
        return func(*args, **(kwargs or {}))


def seed_all(seed: int) -> None:
    """Seeds torch, `random` and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (libraries draw from it)


def new_model(drawn: Drawn) -> nn.Module:
    """The model, the same on every call. A parameter that begins as zeros would hide gradients behind it."""
    seed_all(0)
    model = drawn.build().to(PRECISION["dtype"]).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and not parameter.any():
                nn.init.normal_(parameter, std=0.05)
    return model


def make_inputs(drawn: Drawn, microbatch: int) -> dict[str, Any]:
    """The arguments of one microbatch."""
    seed_all(100 + microbatch)
    return pytree.tree_map_only(
        Tensor, lambda one: one.to(PRECISION["dtype"]) if one.is_floating_point() else one, drawn.inputs()
    )


def loss(outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
    """A weighted mean of every output; the weights are random, for what follows a norm has always one mean square."""
    parts = []
    for name in sorted(outputs):
        output = outputs[name]
        if output.is_floating_point() or output.is_complex():
            real = torch.view_as_real(output) if output.is_complex() else output
            generator = torch.Generator().manual_seed(real.numel())
            real = torch.where(real.isfinite(), real, 0.0)  # detectors give classes that are not asked for -inf
            weights = torch.randn(real.shape, generator=generator).to(real.dtype)
            parts.append((real * weights).mean())
    return {"loss": torch.stack(parts).sum() / normalisers["microbatches"]}


def plain_step(
    model: nn.Module, drawn: Drawn, chain_inputs: Sequence[str], chain_outputs: Sequence[str]
) -> tuple[Values, Values, float]:
    """Gradients and buffers by the model's own names, and the loss, of plain autograd."""
    total = 0.0
    for index in range(MICROBATCHES):
        arguments = make_inputs(drawn, index)
        with SameDraws():
            result = model(**arguments)
            leaves = {key: leaf for key, leaf in named_leaves(result, chain_inputs) if isinstance(leaf, Tensor)}
            if not set(chain_outputs) <= leaves.keys():
                leaves = dict(zip(chain_outputs, leaves.values(), strict=True))
            one = loss({key: leaves[key] for key in chain_outputs}, None, {"microbatches": MICROBATCHES})["loss"]
            one.backward()
        total += float(one.detach())
    gradients = {key: one.grad for key, one in model.named_parameters() if one.grad is not None}
    dense = {key: one.to_dense() if one.is_sparse else one for key, one in gradients.items()}
    return dense, {key: one.detach().clone() for key, one in model.named_buffers()}, total


def tensors_of(chain: Chain, arguments: Mapping[str, Any]) -> Values:
    """The arguments as the chain's inputs."""
    found: Values = {}
    for key, value in arguments.items():
        found |= input_tensors(key, value)
    return found if set(chain.inputs) <= found.keys() else dict(zip(chain.inputs, found.values(), strict=True))


def cuts_of(layers: int) -> tuple[int, ...]:
    """Where the stages begin."""
    stages = min(STAGES, layers)
    return tuple(number * layers // stages for number in range(stages))


def numbers(tensor: Tensor) -> np.ndarray:
    """A copy of its values, for another process; numpy knows no bfloat16, whose values float32 has exactly."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()


def engine_step(rank: int, drawn: Drawn, port: int, results: Any) -> None:
    """One rank's part: puts what was captured, then (gradients, buffers, loss), or an error's sentence."""
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
        own = chain.layers[cuts[rank] : (*cuts[1:], len(chain))[rank]]
        buffers = {f"{one.name}.{key}": numbers(tensor) for one in own for key, tensor in one.module.named_buffers()}
        results.put((rank, "stepped", (gradients, buffers, float(result.parts["loss"]))))
        communicator.barrier()
        communicator.close()
    except BaseException as error:
        results.put((rank, "failed", describe(error)))


def describe(error: BaseException) -> dict[str, Any]:
    """An error: its sentence, whether the project raised it, and where."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return {
        "refused": isinstance(error, CapslogError),
        "sentence": f"{type(error).__name__}: {' '.join(lines)}"[:1500],
        "traceback": "".join(traceback.format_exception(error))[-4000:],
    }


def differences(
    layers: Sequence[str],
    wanted: Values,
    found: Mapping[str, np.ndarray],
    least: float,
    others: Mapping[str, Sequence[str]],
    start: Values | None = None,
) -> tuple[int, float, str]:
    """How many tensors differ in any bit, the largest relative difference, and where.

    others: all names of a tensor that the model has under several. start: what a tensor of no layer still is; else 0.
    """
    differing, worst, place = 0, 0.0, ""
    for key, tensor in wanted.items():
        names = others.get(key, [key])
        addresses = [address for one in names for layer in layers if (address := f"{layer}.{one}") in found]
        expected = numbers(tensor)
        own = found[addresses[0]] if addresses else numbers(start[key]) if start else np.zeros_like(expected)
        if own.shape != expected.shape:
            return 1, float("inf"), f"{key}: shape {own.shape} instead of {expected.shape}"
        if np.array_equal(own, expected, equal_nan=expected.dtype.kind in "fc"):
            continue
        differing += 1
        gap = np.abs(own.astype(np.complex128) - expected.astype(np.complex128)).max()
        error = float(gap) / max(float(np.abs(expected).max()), least, 1e-30)
        error = float("inf") if np.isnan(error) else error
        if error >= worst:
            worst, place = error, key + ("" if addresses else " (in no layer)")
    return differing, worst, place


def compare(drawn: Drawn, row: dict[str, Any]) -> None:
    """Fills the row of one model."""
    model, other = new_model(drawn), new_model(drawn)
    states = [dict(one.named_parameters()) | dict(one.named_buffers()) for one in (model, other)]
    if any(not torch.equal(one.detach(), states[1][key].detach()) for key, one in states[0].items()):
        row |= {"verdict": "library", "error": {"sentence": "two builds from one seed have different weights"}}
        return
    start = {key: one.detach().clone() for key, one in model.named_buffers()}
    row["parameters"] = sum(one.numel() for one in model.parameters())
    try:
        with torch.no_grad():
            other(**make_inputs(drawn, 0))
    except Exception as error:
        row |= {"verdict": "library", "error": describe(error)}
        return
    # forked before autograd has run here: it has threads, which do not live in a child
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
    found_gradients: dict[str, np.ndarray] = {}
    found_buffers: dict[str, np.ndarray] = {}
    total, made, waited, layers = 0.0, 0.0, 2 * STAGES, [""]
    while waited:
        number, what, value = results.get()
        waited -= 1
        if what == "failed":
            row |= {"verdict": "refused" if value["refused"] else "crashed", "error": value}
            for rank in ranks:
                rank.kill()
            return
        if what == "captured" and number == 0:
            layers, inputs, outputs, whole, seconds = value
            stages = len(cuts_of(len(layers)))
            waited -= STAGES - stages
            row |= {"layers": len(layers), "whole": whole, "stages": stages, "capture_seconds": round(seconds, 1)}
            gradients, buffers, total = plain_step(model, drawn, inputs, outputs)
        elif what == "stepped":
            found_gradients |= value[0]
            found_buffers |= value[1]
            if number == row["stages"] - 1:
                made = value[2]
    others: dict[str, list[str]] = {}
    known = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for key in [*gradients, *buffers]:
        same = next(one for name, one in known if name == key)
        others[key] = [name for name, one in known if one is same]
    largest = max((float(one.abs().max()) for one in gradients.values()), default=0.0)
    of_gradients = differences(layers, gradients, found_gradients, 1e-3 * largest, others)
    changed = {key: one for key, one in buffers.items() if one.numel()}
    of_buffers = differences(layers, changed, found_buffers, 0.0, others, start)
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
    """The 12 names of a library: the first of the shuffle, without those that are replaced."""
    return [name for name in read_drawn()[library] if name not in REPLACED.get(library, {})][:12]


def run_one(library: str, name: str, seconds: float, double: bool) -> dict[str, Any]:
    """A model in a process of its own."""
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
    """A line of the table."""
    whole = len(row.get("whole", []))
    layers = f"{row['layers']}{f' ({whole} as Python)' if whole else ''}" if "layers" in row else ""
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
    """Runs the models and prints the table."""
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
