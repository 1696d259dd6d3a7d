"""Models whose Python does what no graph does, trained by the engine on two stages and by `fit`, beside plain torch.

Three steps of two microbatches each, with gradients, weights and buffers compared after every one. Plain torch draws
from the seeds that the engine defines for each layer; `fit` and plain torch draw from the same states. Where a change
by the user's loop is refused, the model is captured again, as the sentence says. Prints the table of README.md; exit
status 1 if a model trains as another one without a word, or fails with an error that is not the project's own.
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
from varuna_capslog.engine.learning_rate import LearningRate
from varuna_capslog.engine.options import EngineOptions
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.recipe import Recipe
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.model.workload import Minibatch
from varuna_capslog.profiling.estimation.hollow import SilentCommunicator

STEPS, MICROBATCHES, ROWS, SEED, RATE = 3, 2, 64, 7, 0.003
CPU = torch.device("cpu")
_CHANGED = "was changed after the model was captured"

Numbers = dict[str, np.ndarray]
"""What a step made: its loss, and gradients, weights and buffers by the model's own names."""


class Verdict(NamedTuple):
    """Of one model at one door."""

    word: str
    note: str

    def __str__(self) -> str:
        return f"{self.word}; {self.note}" if self.note else self.word


def make(name: str) -> models.Hostile:
    """The model in training mode, the same on every call."""
    models._table.cache_clear()
    torch.manual_seed(0)
    model = models.MODELS[name]()
    frozen = [part for part in model.modules() if not part.training]
    model.train()
    for part in frozen:
        part.training = False
    return model


def inputs_of(step: int) -> list[Tensor]:
    """The microbatches of a step."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(ROWS, models.WIDTH, generator=generator) for _ in range(MICROBATCHES)]


def loss(outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
    """The mean squares of all outputs, as a share of the minibatch."""
    return {"loss": torch.stack([one.square().mean() for one in outputs.values()]).sum() / normalisers["microbatches"]}


def loss_of(result: Any) -> Tensor:
    """The same of what the model itself returns."""
    return loss(dict(enumerate(pytree.tree_leaves(result))), None, {"microbatches": MICROBATCHES})["loss"]


def seed_all(seed: int) -> None:
    """Every generator that these models draw from."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 (users draw from it)


# -- the engine --------------------------------------------------------------------------------------------------------


def on_ranks(communicator: Communicator, names: list[str], folder: Path) -> dict[str, tuple[list[Any], str]]:
    """What this rank's stage made in each step, or the sentence that refused the model; and what is to be told."""
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
    whole = chain.kept_whole if chain is not None else []
    told = [f"{len(chain)} layers" if chain is not None else ""]
    told += [f"captured again as told: {again[0].partition(' of the model')[0]}"] if again else []
    told += [whole[0]] if whole else []
    return steps, "; ".join(told)


def _step(communicator: Communicator, chain: Chain, step: int, model: nn.Module, path: Path) -> dict[str, Any]:
    alone = len(chain) == 1
    found: dict[str, Any] = {"layers": [layer.name for layer in chain.layers]}
    if not (alone and communicator.rank):
        inputs = [{chain.inputs[0]: x} for x in inputs_of(step)]
        specs = [{name: TensorSpec.of(tensor) for name, tensor in one.items()} for one in inputs]
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
                        found[f"gradient of {key}"] = parameter.grad.numpy().copy()

        result = train_step(engine, step + 1, batch, lambda index: inputs[index], before_commit=keep)
        found["loss"] = np.array(result.parts["loss"])
        own = {key: one for layer in engine.layers for key, one in (layer.parameters | layer.buffers).items()}
        torch.save({key: one.detach().clone() for key, one in own.items()}, f"{path}-{step}-{communicator.rank}.pt")
    communicator.barrier()
    state = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for rank in range(1 if alone else communicator.world_size):
            for key, value in torch.load(f"{path}-{step}-{rank}.pt").items():
                if state[key] is not value:
                    state[key].copy_(value)
    communicator.barrier()
    return found | {f"value of {key}": one.detach().numpy().copy() for key, one in state.items()}


def plain_engine_steps(name: str, layers: list[list[str]]) -> list[Numbers]:
    """Plain torch, with the seeds that the engine defines where each layer of the capture begins."""
    model, handles = make(name), list[Any]()

    def run(step: int, microbatch: int, x: Tensor) -> Any:
        def begin(layer: int) -> Callable[..., None]:  # also where the model's own checkpoints run it again
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
    found = {f"gradient of {key}": one.grad.numpy().copy() for key, one in names.items() if one.grad is not None}
    torch.optim.SGD(module.parameters(), RATE).step()
    values = {f"value of {key}": one.numpy().copy() for key, one in module.state_dict().items()}
    return {"loss": np.array(total), **found, **values}


# -- fit ---------------------------------------------------------------------------------------------------------------


def fit_steps(name: str) -> tuple[list[Any], str]:
    """What the fitted module made in each step within the smallest budget, or the sentence that refused it."""
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
    """Plain torch in the same loop."""
    model = make(name)

    def run(step: int, microbatch: int, x: Tensor) -> Any:
        seed_all(100 * step + microbatch)
        return model(x)

    return [_plain_step(model, model, step, run) for step in range(STEPS)]


# -- verdicts ----------------------------------------------------------------------------------------------------------


def judge(found: list[Any], expected: list[Numbers], note: str) -> Verdict:
    """Right, refused, or SILENT."""
    worst, where = 0.0, ""
    for number, (ours, plain) in enumerate(zip(found, expected, strict=False)):
        if isinstance(ours, str):
            break
        difference, what = compare(ours, plain)
        if difference > worst:
            worst, where = difference, f"{what} in step {number + 1}"
    if worst > 1e-6:
        return Verdict("SILENT", f"{where} differs by {worst:.1e}; {note}")
    if isinstance(found[-1], str):
        word, _, rest = found[-1].partition(" ")
        return Verdict("TRACEBACK", rest) if word == "TRACEBACK" else Verdict("refused", found[-1])
    return Verdict("right", f"{worst:.1e}; {note}" if worst else note)


def compare(ours: Mapping[str, Any], plain: Numbers) -> tuple[float, str]:
    """The largest difference, as a part of the largest of its kind's or a thousandth of the model's, and of what."""
    worst, where = 0.0, ""
    gradients = [float(abs(one).max()) for key, one in plain.items() if key.startswith("gradient")]
    least = 1e-3 * max(gradients, default=0.0)
    keys = [key for key in ours.keys() | plain.keys() if key == "loss" or key.startswith(("gradient", "value"))]
    for key in sorted(keys):
        one, other = ours.get(key), plain.get(key)
        # a gradient of zeros trains as none does
        one, other = (np.zeros(1) if each is None else each for each in (one, other))
        size = max(float(abs(other).max()), least if key.startswith("gradient") else 1e-30)
        gap = float(abs(one.astype(np.float64) - other.astype(np.float64)).max()) / size
        if not np.isfinite(other).all():
            raise SystemExit(f"plain torch itself makes {key} infinite")
        if not gap <= worst:
            worst, where = gap if np.isfinite(gap) else float("inf"), key
    return worst, where


def main() -> None:
    """Runs the models and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(models.MODELS), choices=list(models.MODELS))
    parser.add_argument("--doors", nargs="*", default=["engine", "fit"], choices=["engine", "fit"])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    ranks: list[dict[str, Any]] = []
    if "engine" in asked.doors:
        with tempfile.TemporaryDirectory() as folder:
            ranks = run_ranks(on_ranks, 2, asked.models, Path(folder), timeout=60.0)
    counts: dict[str, int] = {}
    print("| model | engine, 2 stages | fit |")
    print("|---|---|---|")
    for name in asked.models:
        row = []
        if ranks:
            steps, note = ranks[0][name]
            merged = [
                ours if isinstance(ours, str) else theirs if isinstance(theirs, str) else {**theirs, **ours}
                for ours, theirs in zip(steps, ranks[1][name][0], strict=False)
            ]
            layers = [one["layers"] for one in merged if not isinstance(one, str)]
            row.append(judge(merged, plain_engine_steps(name, layers), note))
        if "fit" in asked.doors:
            found, note = fit_steps(name)
            row.append(judge(found, plain_fit_steps(name), note))
        print(f"| {name} | {' | '.join(map(str, row))} |", flush=True)
        word = next((one for one in ("SILENT", "TRACEBACK") if any(each.word == one for each in row)), "")
        word = word or ("right" if any(each.word == "right" for each in row) else "refused")
        counts[word] = counts.get(word, 0) + 1
    print(", ".join(f"{count} {word}" for word, count in sorted(counts.items())))
    if counts.keys() & {"SILENT", "TRACEBACK"}:
        sys.exit(1)


if __name__ == "__main__":
    main()
