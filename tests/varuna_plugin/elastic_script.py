"""A user's script whose training on Varuna survives changes of its workers; run by the tests of morphing, and by hand:

python -m tests.varuna_plugin.elastic_script RUN_DIR --workers 4 --steps 40
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import varuna
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # workers run this file by its path

from tests.varuna_plugin import models
from varuna_capslog.config.settings import Elastic
from varuna_capslog.varuna_plugin import run_elastic

BATCH, CHUNK = 7, 2

parser = argparse.ArgumentParser()
parser.add_argument("run_dir")
parser.add_argument("--workers", type=int, default=4)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--model", default="single", choices=["single", "shared"])
parser.add_argument("--clip", type=float)
parser.add_argument("--checkpoint-every", type=int)
parser.add_argument("--pause", type=float, default=0.0, help="seconds in each get_batch")
parser.add_argument("--nan-at", type=int, default=0, help="a step whose inputs are not finite")
parser.add_argument("--die", default="::", help="place:step:member; open:n:member is its n-th")
place, _, rest = parser.parse_args().die.partition(":")
options = parser.parse_args()
fatal_step, _, victim = rest.partition(":")
state = {"step": 0, "groups": 0}


def here(where: str) -> None:
    """Kill this process if `--die` names this member, place and step."""
    mine = os.environ.get("CAPSLOG_MEMBER") == victim
    if where == place and mine and str(state["groups" if where == "open" else "step"]) == fatal_step:
        os.kill(os.getpid(), signal.SIGKILL)


def build_model() -> nn.Module:
    # one block: nothing is shared; three: a layer of three pieces
    model = models.Model(varuna.CutPoint, dropout=0.1, blocks=1 if options.model == "single" else 3)
    if place in ("forward", "backward"):
        model.stem.register_forward_pre_hook(lambda module, inputs: here("forward"))
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: here("backward"))
    return model


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def schedule(optimizer: torch.optim.Optimizer, step: int) -> None:
    here("optimizer")
    for group in optimizer.param_groups:
        group["lr"] = 0.01 / (1 + step // 5)


def get_batch(step: int) -> dict[str, Any]:
    state["step"] = step
    time.sleep(options.pause)
    batch = models.batch(BATCH, 8 + 2 * (step % 3), 10, step)
    if step == options.nan_at:
        batch["images"].fill_(float("nan"))
    return batch


def break_things() -> None:
    """Faults inside the plugin's own work."""
    from varuna_capslog.varuna_plugin import checkpoint, elastic_work

    real, part = checkpoint.write_synced, elastic_work.VarunaPart

    def write(path: Path, content: Any) -> Any:
        here("checkpoint")
        return real(path, content)

    class Part(part):  # type: ignore[misc, valid-type]
        def join(self, *arguments: Any) -> None:
            state["groups"] += 1
            here("open")
            super().join(*arguments)

    checkpoint.write_synced = write
    elastic_work.VarunaPart = Part  # type: ignore[misc]


def main() -> None:
    if place in ("checkpoint", "open") and "CAPSLOG_MEMBER" in os.environ:
        break_things()
    end = run_elastic(
        build_model,
        build_optimizer,
        get_batch,
        steps=options.steps,
        batch_size=BATCH,
        chunk_size=CHUNK,
        run_dir=options.run_dir,
        workers=options.workers,
        clip_grad_max_norm=options.clip,
        schedule=schedule,
        checkpoint_every=options.checkpoint_every,
        timeout_seconds=20.0,
        elastic=Elastic(enabled=True, patience_seconds=0.3),
    )
    if not end.worker:
        sys.stderr.write(f"ended, stopped={end.stopped}\n")


if __name__ == "__main__":
    main()
