"""Training on the real Varuna as the pool's workers run it, the same in one process, and the comparison of the two."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.varuna_plugin import models
from varuna_capslog.engine.communicator import Communicator


@dataclass
class Case:
    """Case of a run: the model's options, its cut list and its input."""

    cuts: list[int] | None
    model: dict[str, Any] = field(default_factory=dict)
    replicas: int = 1
    stages: int = 0
    batch_size: int = 8
    chunk: int = 2
    steps: int = 3
    clip: float | None = None
    ragged: bool = False
    mutation: str = ""
    optimizer: str = "sgd"
    rates: dict[int, float] = field(default_factory=dict)
    """Learning rates that hold from a step on, in the oracle."""

    def __post_init__(self) -> None:
        self.stages = self.stages or len(self.cuts or [0])

    @property
    def ranks(self) -> int:
        return self.stages * self.replicas

    def feed(self, step: int) -> list[list[dict[str, Any]]]:
        """Return the microbatches of each replica."""
        if self.ragged:
            count = self.batch_size // self.replicas // self.chunk
            return [
                [models.batch(self.chunk, 6 + 2 * i, 8 + 2 * step, 100 * step + 10 * r + i) for i in range(count)]
                for r in range(self.replicas)
            ]
        minibatch = models.batch(self.batch_size, 8 + 2 * step, 10, step)
        share = self.batch_size // self.replicas
        microbatches = []
        for first in range(0, self.batch_size, share):
            bounds = range(first, first + share, self.chunk)
            ends = [min(start + self.chunk, first + share) for start in bounds]
            microbatches.append([{k: v[a:b] for k, v in minibatch.items()} for a, b in zip(bounds, ends, strict=True)])
        return microbatches

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        # a large eps: a gradient of zero in theory is rounding noise in practice, which Adam would blow up
        return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


@dataclass
class Outcome:
    """Results of a run: per step loss, norm and gradients (after clipping); at the end parameters and buffers."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    evaluation: float = 0.0
    held: list[str] = field(default_factory=list)


def stage_map(stages: int, replicas: int) -> str:
    """Return Varuna's placement: replica r of stage s on rank s + stages * r."""
    return "".join(",".join(str(s + stages * r) for r in range(replicas)) + ";" for s in range(stages))


@contextlib.contextmanager
def patched(cuts: Any = None, **options: Any) -> Iterator[Any]:
    """Install and configure the plugin, and suppress Varuna's output."""
    import varuna_capslog.varuna_plugin as plugin

    with contextlib.redirect_stdout(io.StringIO()):
        plugin.install()
        try:
            plugin.configure(cuts=cuts, **({"timeout_seconds": 30.0} | options))
            import varuna

            yield varuna
        finally:
            plugin.uninstall()


def train(communicator: Communicator, case: Case) -> Outcome:
    """Train the case on Varuna as one rank."""
    from varuna_capslog.varuna_plugin import Microbatches

    with patched(case.cuts) as varuna, mutated(case.mutation):
        torch.manual_seed(0)
        model = models.Model(varuna.CutPoint, **case.model)
        mapping = stage_map(case.stages, case.replicas)
        trainer = varuna.Varuna(model, mapping, models.get_batch, case.batch_size, case.chunk, device="cpu")
        optimizer = case.make_optimizer(trainer.parameters())
        trainer.set_optimizer(optimizer)
        torch.manual_seed(50 + trainer.stage)
        outcome, microbatches = Outcome(), []
        for step in range(case.steps):
            microbatches = case.feed(step)[trainer.rank_within_stage]
            inputs = Microbatches(microbatches) if case.ragged else joined(microbatches)
            loss, _, norm = trainer.step(inputs, case.clip)
            outcome.losses.append(loss)
            outcome.norms.append(norm)
            outcome.gradients.append(_gradients(model))
            optimizer.step()
            trainer.zero_grad()
        trainer.eval()
        outcome.evaluation = trainer.evaluate(inputs)
        outcome.held = [name for name, _ in model.named_parameters()]
        outcome.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        outcome.buffers = {name: b.clone() for name, b in model.named_buffers()}
        return outcome


def joined(microbatches: list[dict[str, Any]]) -> dict[str, Any]:
    """Join microbatches to the minibatch that they were cut from."""
    return {
        "images": torch.cat([batch["images"] for batch in microbatches]),
        "targets": [target for batch in microbatches for target in batch["targets"]],
    }


def oracle(case: Case, cuts: list[int] | None = None) -> Outcome:
    """Train the whole model in one process, by microbatches. Each stage has its own stream of random numbers."""
    torch.manual_seed(0)
    model = models.Model(models.PlainCut, **case.model)
    optimizer = case.make_optimizer(model.parameters())
    first_pieces = cuts or case.cuts or [0]
    streams = [_Stream(first_pieces) for _ in range(case.replicas)]
    outcome, feed = Outcome(), []
    for step in range(case.steps):
        feed, total = case.feed(step), 0.0
        statistics = {name: b.clone() for name, b in model.named_buffers()}
        for replica, microbatches in enumerate(feed):
            for name, buffer in model.named_buffers():
                # every replica has running statistics of its own; replica 0's are compared
                buffer.copy_(statistics[name])
            samples = sum(len(batch["targets"]) for batch in microbatches) * case.replicas
            for batch in microbatches:
                with streams[replica].drawn():
                    loss = model(**batch) * len(batch["targets"]) / samples
                loss.backward()
                total += float(loss.detach())
            if replica == 0:
                after = {name: b.clone() for name, b in model.named_buffers()}
        for name, buffer in model.named_buffers():
            buffer.copy_(after[name])
        parameters = [p for p in model.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, case.clip or 1e9))
        outcome.losses.append(total)
        outcome.norms.append(min(norm, case.clip or 1e9))
        outcome.gradients.append(_gradients(model))
        optimizer.param_groups[0]["lr"] = case.rates.get(step, optimizer.param_groups[0]["lr"])
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        parts = [(len(batch["targets"]), float(model(**batch))) for replica in feed for batch in replica]
    outcome.evaluation = sum(size * loss for size, loss in parts) / sum(size for size, _ in parts)
    outcome.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    outcome.buffers = {name: b.clone() for name, b in model.named_buffers()}
    return outcome


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class _Stream:
    """Random numbers as the ranks of one pipeline draw them: one stream per stage, exchanged at active cuts."""

    def __init__(self, cuts: list[int]) -> None:
        self.cuts, self.piece = cuts, 0
        self.states = []
        for stage in range(len(cuts)):
            torch.manual_seed(50 + stage)
            self.states.append(torch.get_rng_state())

    @contextlib.contextmanager
    def drawn(self) -> Iterator[None]:
        self.piece, stage = 0, 0
        torch.set_rng_state(self.states[0])

        def cross() -> None:
            nonlocal stage
            self.piece += 1
            if self.piece in self.cuts:
                self.states[stage] = torch.get_rng_state()
                stage = self.cuts.index(self.piece)
                torch.set_rng_state(self.states[stage])

        models.PlainCut.on_cross = staticmethod(cross)
        try:
            yield
        finally:
            models.PlainCut.on_cross = None
            self.states[stage] = torch.get_rng_state()


def worst(outcomes: list[Outcome], expected: Outcome) -> dict[str, float]:
    """Return the largest differences over ranks and steps: loss, gradients, norm, parameters, buffers, evaluation."""
    differences = dict.fromkeys(("loss", "gradient", "norm", "parameter", "buffer", "evaluation"), 0.0)

    def note(kind: str, difference: float) -> None:
        # NaN is the worst of all
        differences[kind] = difference if difference != difference else max(differences[kind], difference)

    for outcome in outcomes:
        note("evaluation", abs(outcome.evaluation - expected.evaluation))
        for step, loss in enumerate(outcome.losses):
            note("loss", abs(loss - expected.losses[step]))
            note("norm", abs(outcome.norms[step] - expected.norms[step]))
            for name, gradient in outcome.gradients[step].items() if outcome.gradients else ():
                note("gradient", float((gradient - expected.gradients[step][name]).abs().max()))
        for kind, ours, theirs in (
            ("parameter", outcome.parameters, expected.parameters),
            ("buffer", outcome.buffers, expected.buffers),
        ):
            for name, tensor in ours.items():
                note(kind, float((tensor.double() - theirs[name].double()).abs().max()))
    return differences


# -- a wrong step each, as in unpatched Varuna


@contextlib.contextmanager
def mutated(name: str) -> Iterator[None]:
    """Remove one repair of the plugin."""
    if not name:
        yield
        return
    from varuna_capslog.varuna_plugin import executor, gradients, wire

    owner, attribute, broken = {
        "ties": (gradients, "_add_ties", lambda self: None),
        "replicas": (gradients, "_reduce", lambda parameters, group, factor: None),
        "statistics": (executor, "copied_buffers", lambda model: contextlib.nullcontext()),
        "in place": (wire.Bundle, "to", lambda self, device: wire.Bundle(self.tensors, host=self.host or self)),
        "short": (executor, "_divisor", lambda batches, inputs: float(len(batches))),
        "norm": (gradients, "_squared_norm", _norm_of_every_copy),
    }[name]
    before = getattr(owner, attribute)
    setattr(owner, attribute, broken)
    try:
        yield
    finally:
        setattr(owner, attribute, before)


def _norm_of_every_copy(self: Any) -> float:
    return sum(float(p.grad.square().sum()) for p in self.model.module.parameters() if p.grad is not None)
