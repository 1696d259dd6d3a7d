"""An observer sees the whole step and changes no bit of it; an engine's host tier is the one it was given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from tests.engine import cases, models
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.executor import Observer
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.offload import HostTier
from varuna_capslog.engine.pipeline import PipelineEngine, Ready
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.engine.stage import CallContext, Stage
from varuna_capslog.engine.step import train_step
from varuna_capslog.schedules.lower import Instruction

LAYOUT = Layout.pipelines((0, 7), 11, (0, 0))  # two stages on one rank: nobody else is needed


class Watcher(Observer):
    def __init__(self) -> None:
        self.instructions: list[tuple[int, str]] = []
        self.worked: list[str] = []
        self.open: list[str] = []

    def instruction(self, position: int, instruction: Instruction) -> None:
        assert not self.open  # it comes before the work
        self.instructions.append((position, str(instruction)))

    @contextlib.contextmanager
    def working(self, kind: str, stage: Stage, context: CallContext) -> Iterator[None]:
        self.open.append(kind)
        yield
        if kind != "B":
            stage.kept(context.index)  # the state that waits for the backward can be read
        self.open.pop()
        self.worked.append(f"{stage.index}{kind}{context.index}")


def _trained(observer: Observer | None = None, tier: HostTier | None = None) -> tuple[PipelineEngine, list[Tensor]]:
    alone = Communicator(0, 1, 0, 1)  # type: ignore[arg-type]
    options = EngineOptions(**(cases.SETTINGS | {"schedule": "gpipe"}))
    cpu, ready = torch.device("cpu"), Ready(tier=tier, device_type="cpu" if tier is None else "cuda")
    torch.manual_seed(0)
    engine = PipelineEngine(models.build_chain(), models.loss, LAYOUT, options, alone, cpu, ready, observer)
    for step in (1, 2):
        minibatch, inputs = models.make_minibatch(4, step)
        train_step(engine, step, minibatch, inputs.__getitem__)
    return engine, [p.detach() for layer in engine.layers for p in layer.parameters.values()]


def test_an_observer_sees_every_instruction_and_every_action_and_changes_nothing() -> None:
    watcher = Watcher()
    engine, watched = _trained(watcher)
    _, plain = _trained()
    assert all(torch.equal(a, b) for a, b in zip(watched, plain, strict=True))
    actions = [text for _, text in watcher.instructions]
    count = len(actions) // 2
    assert actions[:count] == actions[count:]
    assert [position for position, _ in watcher.instructions] == [*range(count)] * 2
    # the program's forwards, recomputations and backwards, in their order
    assert watcher.worked == [text for text in actions if text[1] in "FRB"]
    assert {text[1] for text in watcher.worked} == {"F", "R", "B"}
    minibatch, inputs = models.make_minibatch(4, 3)
    seen = len(watcher.instructions)
    engine.evaluate([minibatch], lambda way, microbatch: inputs[microbatch], lambda way, microbatch, outputs: None)
    assert len(watcher.instructions) == seen + 8  # two stages, four microbatches
    assert len(watcher.worked) == 2 * count  # an evaluation is no work of training


def test_inputs_wait_in_the_host_tier_that_the_engine_is_given() -> None:
    tier = HostTier(torch.device("cpu"))
    _, kept = _trained(tier=tier)
    _, plain = _trained()
    assert tier.peak_bytes > 0
    assert tier.bytes == 0
    assert all(torch.equal(a, b) for a, b in zip(kept, plain, strict=True))


def test_an_option_lets_a_step_with_dummy_values_pass() -> None:
    alone = Communicator(0, 1, 0, 1)  # type: ignore[arg-type]
    options = EngineOptions(**(cases.SETTINGS | {"refuses": False}))
    engine = PipelineEngine(models.build_chain(), models.loss, LAYOUT, options, alone, torch.device("cpu"))
    minibatch, inputs = models.make_minibatch(4, 1)
    minibatch.targets[1][0, 0, 0] = float("nan")
    result = train_step(engine, 1, minibatch, inputs.__getitem__)
    assert result.parts["loss"] != result.parts["loss"]
