"""Compares training steps of layers as plain functions with those of autograd: bits, processor time and peak.

All runs take turns in one process of one thread and train the same model: forward, loss, backward, clipping and AdamW.
Prints the table of README.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "one_stage"))

from common import interleave, median_ratio, write_json
from functions import LayerFunctions, as_tuple, bound_code, compiled, interpreted, layer_functions, python_code
from one_stage import CLIP, DECAY, RATE, Case, Unsplit, make_case

from varuna_capslog.engine.layers import keep_layout
from varuna_capslog.engine.offload import laid_out
from varuna_capslog.engine.probe import PeakProbe
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.workload import Minibatch

KINDS: dict[str, dict[str, Any]] = {
    "python": {"pruned": False, "emit": python_code},
    "pruned python": {"pruned": True, "emit": python_code},
    "bound python": {"pruned": True, "emit": bound_code},
    "interpreter": {"pruned": True, "emit": interpreted},
    "compiled": {"pruned": True, "emit": compiled},
    "compiled, C++ wrapper": {"pruned": True, "emit": partial(compiled, cpp_wrapper=True)},
}


class Run(NamedTuple):
    """A model and a function that trains its next step and returns the loss."""

    model: Unsplit
    step: Callable[[], float]
    functions: list[LayerFunctions]
    seconds: float


def captured_case(name: str) -> Case:
    """Return chain, loss, minibatch and inputs of a model that the library captures: ConvNeXt or GPT-2."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    inputs: list[dict[str, Tensor]]
    model: nn.Module
    if name == "ConvNeXt":
        model = ConvNeXt([CNBlockConfig(32, 64, 2), CNBlockConfig(64, None, 4)], 0.0, num_classes=10)
        inputs = [{"x": torch.randn(2, 3, 64, 64, generator=generator)} for _ in range(4)]
    else:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(n_embd=128, n_layer=4, n_head=4, vocab_size=512, n_positions=64)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        config.use_cache = config.tie_word_embeddings = False
        model = GPT2LMHeadModel(config)
        inputs = [{"input_ids": torch.randint(512, (2, 64), generator=generator)} for _ in range(4)]
    chain = Chain.from_module(model.train(), None, inputs[0])
    specs = [{key: TensorSpec.of(tensor) for key, tensor in tensors.items()} for tensors in inputs]
    return chain, square_loss, Minibatch(specs, [None] * len(inputs), {"count": float(len(inputs))}), inputs


def square_loss(outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
    """Return the mean square of all outputs, as a share of the minibatch."""
    return {"loss": sum(output.square().mean() for output in outputs.values()) / normalisers["count"]}


CASES: dict[str, Callable[[str], Case]] = {
    "transformer, small": make_case,
    "transformer, medium": make_case,
    "detr": make_case,
    "ConvNeXt": captured_case,
    "GPT-2": captured_case,
}


def adamw(model: nn.Module) -> Callable[[], None]:
    """Return a function that clips the gradients, steps the optimizer and drops the gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=True)

    def finish() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return finish


def plain_run(case: Case, layouts: bool = False) -> Run:
    """Return the usual training loop. layouts: gradients between layers have the layout of their tensors, as they have
    in the engine, so that a step has the same bits with any cuts.
    """
    chain, loss, minibatch, inputs = case
    model = Unsplit(chain).train()
    finish = adamw(model)

    def forward(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for module, (reads, writes) in zip(model.layers, model.wiring, strict=True):
            outputs = as_tuple(module(*[tensors[name] for name in reads]))
            for output in outputs:
                if layouts and output.requires_grad:
                    keep_layout(output)
            tensors.update(zip(writes, outputs, strict=True))
        return {name: tensors[name] for name in model.outputs}

    def step() -> float:
        total = 0.0
        for tensors, targets in zip(inputs, minibatch.targets, strict=True):
            share = loss(forward(dict(tensors)), targets, minibatch.normalisers)["loss"]
            share.backward()
            total += share.item()
        finish()
        return total

    return Run(model, step, [], 0.0)


def made_functions(model: Unsplit, tensors: dict[str, Tensor], **how: Any) -> list[LayerFunctions]:
    """Return the functions of every layer for these inputs."""
    made = []
    for module, (reads, writes) in zip(model.layers, model.wiring, strict=True):
        inputs = [tensors[name] for name in reads]
        wanted = [tensor.requires_grad for tensor in inputs]
        made.append(layer_functions(module, [tensor.detach() for tensor in inputs], wanted, **how))
        tensors = tensors | dict(zip(writes, as_tuple(module(*inputs)), strict=True))
    return made


def functions_run(case: Case, **how: Any) -> Run:
    """Return the loop that calls functions of the layers; only the loss is differentiated by autograd."""
    chain, loss, minibatch, inputs = case
    model = Unsplit(chain).train()
    finish = adamw(model)
    began = time.process_time()
    made = made_functions(model, inputs[0], **how)
    seconds = time.process_time() - began
    layers = list(zip(made, model.wiring, strict=True))

    def forward(tensors: dict[str, Tensor]) -> list[tuple[Any, list[str]]]:
        kept = []
        for functions, (reads, writes) in layers:
            outputs, saved = functions.forward([tensors[name] for name in reads])
            tensors.update(zip(writes, outputs, strict=True))
            kept.append((saved, [name for name, want in zip(reads, functions.wanted, strict=True) if want]))
        return kept

    def backward(kept: list[tuple[Any, list[str]]], gradients: dict[str, Tensor], differentiable: set[str]) -> None:
        for functions, (_, writes) in reversed(layers):
            saved, reads = kept.pop()
            for name, stride in zip(
                [name for name in writes if name in differentiable], functions.strides, strict=True
            ):
                saved.append(laid_out(gradients.pop(name), stride))
            parameters = functions.parameters
            sums = [parameter.grad for parameter in parameters if parameter.grad is not None]
            results = functions.backward(saved, sums if len(sums) == len(parameters) else [])
            if len(sums) < len(parameters):  # the first microbatch; another layer may have used a shared parameter
                for parameter, gradient in zip(parameters, results, strict=False):
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            inputs = results[len(results) - len(reads) :]
            for name, gradient in zip(reads, inputs, strict=True):
                if gradient is not None:
                    gradients[name] = gradients[name] + gradient if name in gradients else gradient

    def step() -> float:
        total = 0.0
        for arguments, targets in zip(inputs, minibatch.targets, strict=True):
            tensors = dict(arguments)
            with torch.no_grad():
                kept = forward(tensors)
            leaves = {name: tensors[name].detach().requires_grad_() for name in model.outputs}
            del tensors
            share = loss(leaves, targets, minibatch.normalisers)["loss"]
            share.backward()
            total += share.item()
            gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
            del leaves, share
            with torch.no_grad():
                backward(kept, gradients, differentiable)
        finish()
        return total

    differentiable = differentiable_names(model, inputs[0])
    return Run(model, step, made, seconds)


def differentiable_names(model: Unsplit, tensors: dict[str, Tensor]) -> set[str]:
    """Return the names of the tensors between layers that autograd would give a gradient."""
    names = set[str]()
    for module, (reads, writes) in zip(model.layers, model.wiring, strict=True):
        written = dict(zip(writes, as_tuple(module(*[tensors[name] for name in reads])), strict=True))
        names |= {name for name, tensor in written.items() if tensor.requires_grad}
        tensors = tensors | written
    return names


def peak_bytes(run: Run) -> int:
    """Return the most bytes live at once in a step, weights, gradients and moments left out."""
    with PeakProbe(torch.device("cpu")) as probe:
        run.step()
    return probe.peak_bytes


def measure(name: str, rounds: int, kinds: list[str]) -> dict[str, Any]:
    """Return processor seconds by run, equal parameters after the steps, peaks, and seconds that tracing took."""
    runs = {"plain loop": plain_run(CASES[name](name)), "with layouts": plain_run(CASES[name](name), layouts=True)}
    runs |= {kind: functions_run(CASES[name](name), **KINDS[kind]) for kind in kinds}
    steps: dict[str, Callable[[], object]] = {kind: run.step for kind, run in runs.items()}
    times = interleave(steps, rounds)
    expected = list(runs["with layouts"].model.parameters())
    return {
        "times": {kind: [worked for _, worked in pairs] for kind, pairs in times.items()},
        "equal": {
            kind: sum(map(torch.equal, expected, run.model.parameters())) / len(expected) for kind, run in runs.items()
        },
        "peaks": {kind: peak_bytes(run) for kind, run in runs.items()},
        "traced": {kind: run.seconds for kind, run in runs.items()},
        "calls": {kind: sum(made.calls for made in run.functions) for kind, run in runs.items()},
    }


def main() -> None:
    """Measure the requested cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS)[:4], choices=list(KINDS))
    parser.add_argument("--rounds", type=int, default=40, help="steps of each run")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | run | calls | processor ms | by the plain loop (quartiles) | equal | peak MB | tracing s |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for name in arguments.cases:
        row = measure(name, arguments.rounds, arguments.kinds)
        for kind, seconds in row["times"].items():
            middle, low, high = median_ratio(seconds, row["times"]["plain loop"])
            print(
                f"| {name} | {kind} | {row['calls'][kind] or '-'} | {1e3 * statistics.median(seconds):.1f} | "
                f"{middle:.3f} ({low:.3f}-{high:.3f}) | {row['equal'][kind]:.0%} | {row['peaks'][kind] / 1e6:.2f} | "
                f"{row['traced'][kind]:.1f} |",
                flush=True,
            )
        rows.append({"model": name, **row})
    write_json(arguments.output, {"rows": rows})


if __name__ == "__main__":
    main()
