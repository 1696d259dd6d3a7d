"""Compiled layers: the same bits under any cuts, replicas and memory intervals; and the refusals."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.engine.compare import differences, gradient_error, merged
from tests.engine.layouts import Cuts, layout_for
from tests.engine.pool import WorkerPool
from varuna_capslog.base.errors import CapslogError, PeerLost
from varuna_capslog.config.settings import Config
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layers import check_backend
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.chain import Chain, Layer, TensorSpec
from varuna_capslog.model.workload import Minibatch
from varuna_capslog.variants.wrapped import compiled

DIM, BLOCKS = 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.outer(F.gelu(self.inner(x))), 0.1, self.training)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def build() -> Chain:
    """A batch norm, then equal blocks."""
    torch.manual_seed(0)
    blocks = [Layer(f"block.{index}", Block()) for index in range(BLOCKS)]
    return Chain([Layer("norm", Normed()), *blocks], ("x",), ("x",), "blocks")


def loss(outputs: Any, targets: Any, normalisers: Any) -> dict[str, Tensor]:
    return {"loss": (outputs["x"] - targets).square().mean() / normalisers["microbatches"]}


def step(communicator: Communicator, layout: Cuts, options: dict[str, Any]) -> dict[str, Any]:
    """Make two steps; return the first one's gradients, the last one's state and the number of compiled graphs."""
    chain, options = build(), dict(options)
    if backend := options.pop("variant", None):
        for layer in chain.layers:
            compiled(layer.module, backend)
    settings = EngineOptions(4, num_blocks=2, seed=7, **options)
    placed = layout_for(layout, len(chain), settings.num_blocks)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    engine = PipelineEngine(chain, loss, placed, settings, communicator, torch.device("cpu"))
    generator, gradients = torch.Generator().manual_seed(1), dict[str, Tensor]()

    def keep() -> None:
        parameters = engine.optimizer.parameters.items()
        gradients.update({name: parameter.grad.clone() for name, parameter in parameters if parameter.grad is not None})

    parts = []
    for number in (1, 2):
        inputs = [{"x": torch.randn(3, DIM, generator=generator)} for _ in range(4)]
        targets = [torch.randn(3, DIM, generator=generator) for _ in range(4)]
        specs = [{"x": TensorSpec.of(values["x"])} for values in inputs]
        minibatch = Minibatch(specs, targets, {"microbatches": 4.0})
        done = train_step(engine, number, minibatch, inputs.__getitem__, before_commit=keep if number == 1 else None)
        parts.append(done.parts)
    state = {
        f"{layer.name}.{name}": p.detach().clone() for layer in engine.layers for name, p in layer.parameters.items()
    }
    buffers = {
        f"{layer.name}.{name}": value.clone() for layer in engine.layers for name, value in layer.buffers.items()
    }
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return {"parts": parts, "gradients": gradients, "state": state, "buffers": buffers, "graphs": graphs}


def sentence(communicator: Communicator, options: dict[str, Any]) -> str:
    """Return the refusal of two steps on a stage per rank; the backend `failing` compiles nothing on rank 1."""

    def failing(module: Any, inputs: Any) -> Any:
        if communicator.rank == 1:
            raise RuntimeError("no C++ compiler found")
        return torch._dynamo.lookup_backend("eager")(module, inputs)

    if "failing" not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(failing, name="failing")
    try:
        step(communicator, Cuts((0, 3), (0, 1)) if communicator.world_size == 2 else Cuts((0,), (0,)), options)
    except (CapslogError, PeerLost) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


@functools.cache
def alone(pool: WorkerPool, backend: str | None) -> dict[str, Any]:
    options = {"compile": backend, "schedule": "1f1b", "recompute": False}
    result: dict[str, Any] = pool.run(step, 1, Cuts((0,), (0,)), options)[0]
    return result


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (Cuts((0, 2, 4), (0, 1, 2)), {"schedule": "1f1b", "recompute": True, "compile": "aot_eager"}),
        (Cuts((0, 3), (0, 1), 2), {"schedule": "varuna", "compile": "aot_eager"}),
        (Cuts((0, 2, 4), (0, 1, 2)), {"schedule": "1f1b", "recompute": True, "variant": "aot_eager"}),
    ],
)
def test_bits_do_not_depend_on_the_plan(pool: WorkerPool, layout: Cuts, options: dict[str, Any]) -> None:
    """Nor on whether all layers are compiled or each has the variant that compiles it."""
    results = pool.run(step, layout.world_size, layout, options)
    single, plain = alone(pool, "aot_eager"), alone(pool, None)
    assert differences(results, single) == []
    error, worst = gradient_error(merged(results, "gradients"), plain["gradients"])
    assert error <= 1e-5, f"{worst}: {error:.2e}"
    # compiled ahead in a thread, and not again in the step
    assert [report["graphs"] for report in results] == [1] * len(results)
    assert plain["graphs"] == 0


def test_equal_blocks_share_a_graph_also_where_they_run_again(pool: WorkerPool) -> None:
    """torch compiles other code for a forward without a graph, whose bits may be others: there must be none. The first
    block's input has a gradient as the others' have, and the batch norm, whose statistics hooks collect, has no graph.
    """
    options = {"compile": "aot_eager", "schedule": "1f1b", "recompute": True}
    again = pool.run(step, 1, Cuts((0,), (0,)), options)[0]
    assert alone(pool, "aot_eager")["graphs"] == again["graphs"] == 1
    assert differences([again], alone(pool, "aot_eager")) == []


def test_a_layer_that_cannot_be_compiled_is_refused_on_all_ranks_before_the_step(pool: WorkerPool) -> None:
    first, last = pool.run(sentence, 2, {"compile": "failing", "schedule": "1f1b"})
    assert first.startswith("PeerLost: rank 0")
    assert "gave up because rank 1" in first
    assert last.startswith("CapslogError: layer 'block.2' cannot be compiled with train.compile='failing' (")
    assert "no C++ compiler found" in last


def test_what_needs_the_layers_own_operations_is_refused(pool: WorkerPool) -> None:
    (refusal,) = pool.run(sentence, 1, {"compile": "aot_eager", "schedule": "zb-h1"})
    assert "this plan splits its backwards" in refusal
    (refusal,) = pool.run(sentence, 1, {"variant": "aot_eager", "schedule": "zb-h1"})
    assert refusal.startswith("CapslogError: variant 'compiled' makes one operation of a layer, but this plan splits")


def test_an_unknown_backend_and_another_engine_are_refused() -> None:
    with pytest.raises(
        CapslogError, match=r"train.compile='inducto' is no backend of torch.compile here; known: .*induc"
    ):
        check_backend("inducto")
    with pytest.raises(ValueError, match="only our own engine compiles layers one by one"):
        Config.model_validate({"workload": "a:b", "engine": "varuna", "train": {"compile": "inductor"}})
    with pytest.raises(ValueError, match="variants has compiled but engine=varuna"):
        Config.model_validate({"workload": "a:b", "engine": "varuna", "variants": {"*": "compiled"}})
