"""Trains models whose Python no graph can express, by the engine on two stages and by `fit`; compares with plain torch.

Three steps of two microbatches each, with gradients, weights and buffers compared after every step. Plain torch draws
from the seeds that the engine defines for each layer; `fit` and plain torch draw from the same states. If a change
by the user's loop is refused, the model is captured again, as the error advises. Prints the table of README.md; exit
status 1 if a model silently trains differently, or fails with an error that is not the project's own.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import models
from common import run_ranks

from varuna_capslog import CapslogError, Chain, fit
from varuna_capslog.base.errors import DoesNotFit
from varuna_capslog.base.seeds import mix
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.recipe import EngineOptions, LearningRate, Recipe
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.model.workload import Minibatch
from varuna_capslog.profiling.estimation.hollow import SilentCommunicator

STEPS, MICROBATCHES, ROWS, SEED, RATE = 3, 2, 64, 7, 0.003
CPU = torch.device("cpu")
_CHANGED = "was changed after the model was captured"

Numbers = dict[str, np.ndarray]
"""Results of a step: its loss, and gradients, weights and buffers by the model's own names."""


class Verdict(NamedTuple):
    """Verdict on one model in the engine or in `fit`."""

    word: str
    note: str

    def __str__(self) -> str:
        return f"{self.word}; {self.note}" if self.note else self.word


def make(name: str) -> models.Hostile:
    """Return the model in training mode, the same on every call."""
    models._table.cache_clear()
    torch.manual_seed(0)
    model = models.MODELS[name]()
    frozen = [part for part in model.modules() if not part.training]
    model.train()
    for part in frozen:
        part.training = False
    return model


def inputs_of(step: int) -> list[Tensor]:
    """Return the microbatches of a step."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(ROWS, models.WIDTH, generator=generator) for _ in range(MICROBATCHES)]


def loss(outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
    """Return the sum of the mean squares of all outputs, as a share of the minibatch."""
    return {
        "loss": torch.stack([output.square().mean() for output in outputs.values()]).sum() / normalisers["microbatches"]
    }


def loss_of(result: Any) -> Tensor:
    """Return the same loss of the model's own result."""
    return loss(dict(enumerate(pytree.tree_leaves(result))), None, {"microbatches": MICROBATCHES})["loss"]


def seed_all(seed: int) -> None:
    """Seed every generator that these models draw from."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 (users draw from it)


# -- the engine --------------------------------------------------------------------------------------------------------


def on_ranks(communicator: Communicator, names: list[str], folder: Path) -> dict[str, tuple[list[Any], str]]:
    """Return by model this rank's values of each step, or the error that refused the model; and a note."""
    return {name: _train(communicator, name, folder) for name in names}


def _train(communicator: Communicator, name: str, folder: Path) -> tuple[list[Any], str]:
    model, steps, again = make(name), [], []
    chain: Chain | None = None
    for step in range(STEPS):
        if step:
            model.between(step)
        try:
            try:
                if chain is not None:
                    chain.check_unchanged()
            except CapslogError as error:
                again.append(str(error))
                chain = None
            if chain is None:
                chain = Chain.from_module(model, None, (inputs_of(0)[0],))
            steps.append(_step(communicator, chain, step, model, folder / name))
        except CapslogError as error:
            steps.append(str(error))
            break
        except Exception as error:
            steps.append(f"TRACEBACK {type(error).__name__}: {str(error)[:300]}")
            break
    kept_whole = chain.kept_whole if chain is not None else []
    notes = [f"{len(chain)} layers" if chain is not None else ""]
    notes += [f"captured again as told: {again[0].partition(' of the model')[0]}"] if again else []
    notes += [kept_whole[0]] if kept_whole else []
    return steps, "; ".join(notes)


def _step(communicator: Communicator, chain: Chain, step: int, model: nn.Module, path: Path) -> dict[str, Any]:
    alone = len(chain) == 1
    values: dict[str, Any] = {"layers": [layer.name for layer in chain.layers]}
    if not (alone and communicator.rank):
        inputs = [{chain.inputs[0]: x} for x in inputs_of(step)]
        specs = [{name: TensorSpec.of(tensor) for name, tensor in tensors.items()} for tensors in inputs]
        batch = Minibatch(specs, [None] * MICROBATCHES, {"microbatches": float(MICROBATCHES)}, [[0], [1]])
        recipe = Recipe(LearningRate(RATE), "sgd", weight_decay=0.0)
        options = EngineOptions(MICROBATCHES, seed=SEED, clip_norm=0.0, recipe=recipe)
        layout = Layout.pipelines((0,) if alone else (0, len(chain) // 2), len(chain))
        ranks = SilentCommunicator(0, 1, False) if alone else communicator
        engine = PipelineEngine(chain, loss, layout, options, ranks, CPU)

        def keep() -> None:
            for layer in engine.layers:
                for key in layer.parameters:
                    parameter = engine.optimizer.parameters.get(layer.address(key))
                    if parameter is not None and parameter.grad is not None:
                        values[f"gradient of {key}"] = parameter.grad.numpy().copy()

        result = train_step(engine, step + 1, batch, lambda index: inputs[index], before_commit=keep)
        values["loss"] = np.array(result.parts["loss"])
        trained = {key: tensor for layer in engine.layers for key, tensor in (layer.parameters | layer.buffers).items()}
        torch.save(
            {key: tensor.detach().clone() for key, tensor in trained.items()}, f"{path}-{step}-{communicator.rank}.pt"
        )
    communicator.barrier()
    state = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for rank in range(1 if alone else communicator.world_size):
            for key, value in torch.load(f"{path}-{step}-{rank}.pt").items():
                if state[key] is not value:
                    state[key].copy_(value)
    communicator.barrier()
    return values | {f"value of {key}": tensor.detach().numpy().copy() for key, tensor in state.items()}


def plain_engine_steps(name: str, layers: list[list[str]]) -> list[Numbers]:
    """Train by plain torch, with the seeds that the engine defines at the start of each layer of the capture."""
    model, handles = make(name), list[Any]()

    def run(step: int, microbatch: int, x: Tensor) -> Any:
        def begin(layer: int) -> Callable[..., None]:  # also when the model's own checkpoints recompute the layer
            return lambda module, given: seed_all(mix(SEED, step + 1, microbatch, layer))

        while handles:
            handles.pop().remove()
        modules = dict(model.named_modules())
        for number, layer in enumerate(layers[step]):
            if number and layer in modules:
                handles.append(modules[layer].register_forward_pre_hook(begin(number)))
        seed_all(mix(SEED, step + 1, microbatch, 0))
        return model(x)

    return [_plain_step(model, model, step, run) for step in range(len(layers))]


def _plain_step(model: models.Hostile, module: nn.Module, step: int, run: Callable[[int, int, Tensor], Any]) -> Numbers:
    if step:
        model.between(step)
    module.zero_grad()
    total = 0.0
    for microbatch, x in enumerate(inputs_of(step)):
        part = loss_of(run(step, microbatch, x))
        part.backward()
        total += part.item()
    names = dict(module.named_parameters(remove_duplicate=False))
    gradients = {
        f"gradient of {key}": parameter.grad.numpy().copy()
        for key, parameter in names.items()
        if parameter.grad is not None
    }
    torch.optim.SGD(module.parameters(), RATE).step()
    values = {f"value of {key}": tensor.numpy().copy() for key, tensor in module.state_dict().items()}
    return {"loss": np.array(total), **gradients, **values}


# -- fit ---------------------------------------------------------------------------------------------------------------


def fit_steps(name: str) -> tuple[list[Any], str]:
    """Return the fitted module's values of each step within the smallest budget, or the error that refused it."""
    steps: list[Any] = []
    try:
        try:
            budget: int = 10
            fitted = fit(make(name), (inputs_of(0)[0],), budget, loss=loss_of, moments=0)
        except DoesNotFit as error:
            budget = int(str(error).partition("smallest budget that does is ")[2].partition(" ")[0])
            model = make(name)
            fitted = fit(model, (inputs_of(0)[0],), budget, loss=loss_of, moments=0)

        def run(step: int, microbatch: int, x: Tensor) -> Any:
            seed_all(100 * step + microbatch)
            return fitted(x)

        for step in range(STEPS):
            steps.append(_plain_step(model, fitted, step, run))
    except CapslogError as error:
        return [*steps, str(error)], ""
    except Exception as error:
        return [*steps, f"TRACEBACK {type(error).__name__}: {str(error)[:300]}"], ""
    ranges = len(fitted.fits[0].intervals)
    return steps, f"{ranges} ranges run again" if ranges else "runs itself"


def plain_fit_steps(name: str) -> list[Numbers]:
    """Train by plain torch in the same loop."""
    model = make(name)

    def run(step: int, microbatch: int, x: Tensor) -> Any:
        seed_all(100 * step + microbatch)
        return model(x)

    return [_plain_step(model, model, step, run) for step in range(STEPS)]


# -- verdicts ----------------------------------------------------------------------------------------------------------


def judge(steps: list[Any], expected: list[Numbers], note: str) -> Verdict:
    """Return the verdict: right, refused, TRACEBACK or SILENT."""
    worst, where = 0.0, ""
    for number, (ours, plain) in enumerate(zip(steps, expected, strict=False)):
        if isinstance(ours, str):
            break
        difference, key = compare(ours, plain)
        if difference > worst:
            worst, where = difference, f"{key} in step {number + 1}"
    if worst > 1e-6:
        return Verdict("SILENT", f"{where} differs by {worst:.1e}; {note}")
    if isinstance(steps[-1], str):
        word, _, message = steps[-1].partition(" ")
        return Verdict("TRACEBACK", message) if word == "TRACEBACK" else Verdict("refused", steps[-1])
    return Verdict("right", f"{worst:.1e}; {note}" if worst else note)


def compare(ours: Mapping[str, Any], plain: Numbers) -> tuple[float, str]:
    """Return the largest relative difference and its key.

    A difference is divided by the tensor's largest element; for gradients by at least a thousandth of the model's
    largest gradient.
    """
    worst, where = 0.0, ""
    gradients = [float(abs(gradient).max()) for key, gradient in plain.items() if key.startswith("gradient")]
    least = 1e-3 * max(gradients, default=0.0)
    keys = [key for key in ours.keys() | plain.keys() if key == "loss" or key.startswith(("gradient", "value"))]
    for key in sorted(keys):
        actual, expected = ours.get(key), plain.get(key)
        # a gradient of zeros trains like no gradient
        actual, expected = (np.zeros(1) if array is None else array for array in (actual, expected))
        size = max(float(abs(expected).max()), least if key.startswith("gradient") else 1e-30)
        gap = float(abs(actual.astype(np.float64) - expected.astype(np.float64)).max()) / size
        if not np.isfinite(expected).all():
            raise SystemExit(f"plain torch itself makes {key} infinite")
        if not gap <= worst:
            worst, where = gap if np.isfinite(gap) else float("inf"), key
    return worst, where


def main() -> None:
    """Run the models and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(models.MODELS), choices=list(models.MODELS))
    parser.add_argument("--doors", nargs="*", default=["engine", "fit"], choices=["engine", "fit"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    ranks: list[dict[str, Any]] = []
    if "engine" in args.doors:
        with tempfile.TemporaryDirectory() as folder:
            ranks = run_ranks(on_ranks, 2, args.models, Path(folder), timeout=60.0)
    counts: dict[str, int] = {}
    print("| model | engine, 2 stages | fit |")
    print("|---|---|---|")
    for name in args.models:
        row = []
        if ranks:
            steps, note = ranks[0][name]
            merged = [
                ours if isinstance(ours, str) else theirs if isinstance(theirs, str) else {**theirs, **ours}
                for ours, theirs in zip(steps, ranks[1][name][0], strict=False)
            ]
            layers = [step["layers"] for step in merged if not isinstance(step, str)]
            row.append(judge(merged, plain_engine_steps(name, layers), note))
        if "fit" in args.doors:
            fitted_steps, note = fit_steps(name)
            row.append(judge(fitted_steps, plain_fit_steps(name), note))
        print(f"| {name} | {' | '.join(map(str, row))} |", flush=True)
        word = next(
            (outcome for outcome in ("SILENT", "TRACEBACK") if any(verdict.word == outcome for verdict in row)), ""
        )
        word = word or ("right" if any(verdict.word == "right" for verdict in row) else "refused")
        counts[word] = counts.get(word, 0) + 1
    print(", ".join(f"{count} {word}" for word, count in sorted(counts.items())))
    if counts.keys() & {"SILENT", "TRACEBACK"}:
        sys.exit(1)


if __name__ == "__main__":
    main()
