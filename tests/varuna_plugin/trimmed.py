"""Jobs of the workers in the tests of trimming: training with dummy stages, and the tensors that cross their cuts."""

from __future__ import annotations

from typing import Any

import torch

from tests.varuna_plugin import cases, models
from varuna_capslog.engine.communicator import Communicator


def crossing(communicator: Communicator, case: cases.Case, interest: list[int] | None) -> dict[str, Any]:
    """Train as one rank; return the specs that it received per microbatch, its parameters' sizes and its gradients."""
    from varuna_capslog.varuna_plugin import Microbatches, wire

    seen: dict[str, dict[int, Any]] = {"activations": {}, "gradients": {}}
    original = wire.Expected.take

    def take(expected: Any, microbatch: int, timeout: Any) -> Any:
        bundle, gradients = original(expected, microbatch, timeout), expected._gradients
        seen["gradients" if gradients else "activations"][microbatch] = [
            # a real gradient's strides are its kernel's; a dummy's are the activation's
            None if t is None else (tuple(t.shape), t.dtype, None if gradients else t.stride())
            for t in bundle.tensors
        ]
        return bundle

    with cases.patched(case.cuts, stages_of_interest=interest) as varuna:
        torch.manual_seed(0)
        model = models.Model(varuna.CutPoint, **case.model)
        mapping = cases.stage_map(case.stages, case.replicas)
        trainer = varuna.Varuna(model, mapping, models.get_batch, case.batch_size, case.chunk, device="cpu")
        optimizer = case.make_optimizer(trainer.parameters())
        trainer.set_optimizer(optimizer)
        wire.Expected.take = take
        try:
            for step in range(case.steps):
                microbatches = case.feed(step)[trainer.rank_within_stage]
                loss, _, _ = trainer.step(Microbatches(microbatches))
                grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
                optimizer.step()
                trainer.zero_grad()
        finally:
            wire.Expected.take = original
        held = {name: p.numel() for name, p in model.named_parameters()}
        try:
            trainer.checkpoint("/nowhere")
            refused = ""
        except ValueError as error:
            refused = str(error)
    return {"stage": trainer.stage, "seen": seen, "held": held, "gradients": grads, "loss": loss, "refused": refused}
