"""Compares steps over gloo and over NCCL, or its stand-in on the CPU, and measures the wait for a silent peer."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from common import TransformerSize, run_ranks, token_loss, token_minibatch, transformer_chain

from tests.rig import nccl_failures
from varuna_capslog.base.errors import PeerLost
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.engine.step import train_step

STAND_IN = "tests.rig.nccl_failures:open_group"
SIZE = TransformerSize(blocks=4, dim=64, sequence=32, microbatch_size=2)
STEPS, WAIT, GRACE = 3, 3.0, 3.0
"""Steps; seconds that a rank waits for a message; seconds more until its error must be there."""
SAME, LOST = "3 steps as over gloo", "a silent peer is given up"
ROWS = {
    "cuda": {SAME: "losses within 1e-5", LOST: f"within {WAIT + GRACE:g} s"},
    "cpu": {f"stand-in: {SAME}": "same bits", f"stand-in: {LOST}": f"within {WAIT + GRACE:g} s"},
}


def measure(device: torch.device, tell: Any) -> None:
    """Write both rows."""
    same, lost = ROWS[device.type]
    transport, count = STAND_IN, 3
    if device.type == "cuda":
        transport, count = "nccl", min(4, len(tell.facts["gpus"]))
        if count < 2:
            why = "NCCL needs a GPU for every rank, and torch sees one here (CUDA_VISIBLE_DEVICES may hide others)"
            tell.not_run(same, why)
            tell.not_run(lost, why)
            return
    os.environ[nccl_failures.MANNERS] = "0,0,0"
    over = {name: run_ranks(train, count, name, device.type)[0] for name in ("gloo", transport)}
    apart = max(abs(a - b) / abs(b) for a, b in zip(over[transport], over["gloo"], strict=True))
    result = f"{count} ranks: losses differ by {apart:.1e}"
    tell(same, result, apart <= (1e-5 if device.type == "cuda" else 0.0), losses=over)
    waited = max(run_ranks(wait_in_vain, count, transport, device.type, timeout=WAIT)[1:])
    tell(lost, f"{waited:.2f} s at a limit of {WAIT:g} s", waited <= WAIT + GRACE, seconds=waited)


def _engine(communicator: Communicator, transport: str, kind: str) -> PipelineEngine:
    device = torch.device(kind, communicator.rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    chain, ranks = transformer_chain(SIZE), communicator.world_size
    cuts = [round(rank * len(chain) / ranks) for rank in range(ranks)]
    options = EngineOptions(SIZE.num_microbatches, transport=transport, clip_norm=0.1)
    return PipelineEngine(chain, token_loss, Layout.pipelines(cuts, len(chain)), options, communicator, device)


def train(communicator: Communicator, transport: str, kind: str) -> list[float]:
    """Return the losses of the steps."""
    engine = _engine(communicator, transport, kind)
    minibatch, tokens, _ = token_minibatch(SIZE)
    steps = range(1, STEPS + 1)
    return [train_step(engine, step, minibatch, lambda samples: {"x": tokens[samples]}).parts["loss"] for step in steps]


def wait_in_vain(communicator: Communicator, transport: str, kind: str) -> float:
    """Return the seconds until a rank gives up on a peer; rank 0 is silent once all have connected."""
    engine = _engine(communicator, transport, kind)
    minibatch, tokens, _ = token_minibatch(SIZE)
    communicator.barrier()
    began = time.monotonic()
    if communicator.rank == 0:
        time.sleep(WAIT + 2 * GRACE)
        communicator.abort()
        return 0.0
    try:
        train_step(engine, 1, minibatch, lambda samples: {"x": tokens[samples]})
        communicator.check_open("computing")
    except PeerLost:
        return time.monotonic() - began
    raise RuntimeError("the step ended, though rank 0 did nothing")
