"""`engine: varuna` as the pool's workers run it: one DETR step, and whole short runs."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.engine import detr
from tests.engine.layouts import Cuts, layout_for
from varuna_capslog.config.settings import Config
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.interface import EngineParts
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.engine.step import train_step
from varuna_capslog.training.loop import verify_copies


def detr_step(communicator: Communicator, name: str, layout: Cuts) -> dict[str, Any]:
    """Train one DETR step on Varuna, as `tests.engine.detr.step` does on our engine."""
    import varuna_capslog.varuna_plugin as plugin
    from varuna_capslog.varuna_plugin.engine import VarunaEngine

    workload, chain = detr.build(name)
    options = EngineOptions(num_microbatches=4, num_blocks=2, seed=7, clip_norm=0.1)
    batch, inputs = detr.minibatch(name)
    try:
        engine = VarunaEngine(
            EngineParts(
                chain,
                workload.loss,
                layout_for(layout, len(chain), options.num_blocks),
                options,
                communicator,
                torch.device("cpu"),
                lambda: (inputs[1], batch.targets[1], batch.normalisers),
                30.0,
            )
        )
        gradients: dict[str, Tensor] = {}

        def keep() -> None:
            parameters = engine.optimizer.parameters
            gradients.update({name: p.grad.clone() for name, p in parameters.items() if p.grad is not None})

        result = train_step(engine, 1, batch, inputs.__getitem__, before_commit=keep)
        verify_copies(engine)
        return {"loss": result.parts["loss"], "gradients": gradients, "norm": result.grad_norm}
    finally:
        plugin.uninstall()


def run(communicator: Communicator, values: dict[str, Any], cuts: list[int]) -> dict[str, Any]:
    """Run the tiny workload up to `train.max_steps`, from the checkpoint in its folder if there is one."""
    import varuna_capslog.varuna_plugin as plugin
    from tests.engine.workload import TinyWorkload
    from varuna_capslog.base import files
    from varuna_capslog.plans.plan import Plan
    from varuna_capslog.start import ENGINES
    from varuna_capslog.training.run import Run

    config = Config.model_validate(values)
    plan = Plan.of_cuts(11, cuts)
    with contextlib.redirect_stdout(io.StringIO()):
        work = Run(config, plan, TinyWorkload(config), communicator, torch.device("cpu"), engines=ENGINES)
        try:
            work.resume()
            first = work.loop.step + 1
            end = work.train()
        finally:
            work.loop.close()
            plugin.uninstall()
    communicator.barrier()
    lines = files.read_jsonl(Path(config.run_dir) / "metrics.jsonl")
    return {"first": first, "losses": [line["loss"] for line in lines], "scores": dict(end.scores or {})}
