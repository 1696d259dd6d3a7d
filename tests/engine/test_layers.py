"""Layers share an autograd graph only where nothing can tell; gradients inside it look as if they had crossed a cut."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine import cases, models
from tests.engine.compare import differences
from tests.engine.layouts import Cuts, layout_for, with_shares
from tests.engine.pool import WorkerPool
from tests.engine.test_step import CASES
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layers import keep_layout, take_layers
from varuna_capslog.engine.layout import Reach
from varuna_capslog.engine.optimizer import StageOptimizer
from varuna_capslog.engine.pipeline import PipelineEngine, Ready
from varuna_capslog.engine.recipe import EngineOptions, LossScale
from varuna_capslog.engine.stage import CallContext, SegmentState, Stage
from varuna_capslog.model.chain import Chain, Layer, TensorSpec, Value
from varuna_capslog.training.loop import verify_copies


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, *tensors: Tensor) -> Tensor:
        return torch.stack(tensors).sum(0) * self.weight


def graphs_kept(chain: Chain) -> tuple[int, Stage, CallContext]:
    """Return how many graphs one forward of the whole chain leaves, the stage and the context of the call."""
    device = torch.device("cpu")
    stage = Stage(0, chain, take_layers(chain, range(len(chain)), device), lambda out, *_: {"loss": out["x"].sum()})
    specs = {value: TensorSpec((3, 4), requires_grad=value.writer >= 0) for value in chain.readers}
    context = CallContext((0,), specs, Reach(chain, specs), [None], {}, (1, 1))
    stage.forward(context, {Value("x", -1): torch.ones(3, 4)}, whole=True)
    return len(stage._held[0].states[0].graphs), stage, context


def test_a_line_of_layers_is_one_graph() -> None:
    count, _, _ = graphs_kept(Chain([Layer(f"layer.{index}", Scale()) for index in range(4)]))
    assert count == 1


def test_a_tensor_that_passes_by_separates_the_graphs_and_gets_the_sum_of_its_gradients() -> None:
    torch.manual_seed(0)
    layers = [
        Layer("first", Scale(), ("x",), ("memory",)),
        Layer("second", Scale(), ("memory",), ("x",)),
        Layer("third", Scale(), ("x", "memory"), ("x",)),
        Layer("fourth", Scale()),
    ]
    chain = Chain(layers)
    chain.run({"x": torch.ones(3, 4)})["x"].sum().backward()
    expected = {name: parameter.grad for name, parameter in chain.named_parameters().items()}
    for parameter in chain.named_parameters().values():
        parameter.grad = None
    count, stage, context = graphs_kept(chain)
    assert count == 3
    stage.backward(context, {})
    for layer in stage.layers:
        torch.testing.assert_close(layer.parameters["weight"].grad, expected[f"{layer.name}.weight"])


def test_where_graphs_end_is_what_the_specs_of_the_call_say() -> None:
    """A value that a layer passes on wants a gradient in some calls only."""
    layers = [
        Layer("first", Scale(), ("x",), ("memory",)),
        Layer("second", Scale(), ("memory",), ("x",)),
        Layer("third", Scale(), ("x", "memory"), ("x",)),
    ]
    _, stage, context = graphs_kept(Chain(layers))
    (segment,) = stage.segments
    for wanted, count in ((True, 3), (False, 1), (True, 3)):
        specs = {
            value: TensorSpec((3, 4), requires_grad=value.writer >= 0 and (wanted or value.name != "memory"))
            for value in context.specs
        }
        state = SegmentState()
        values = {Value("x", -1): torch.ones(3, 4)}
        segment.run(dataclasses.replace(context, specs=specs), values, state, graph=True, record=False)
        assert len(state.graphs) == count


class Both(torch.autograd.Function):
    """Twice the same; its gradient is that of the second."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 1, x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Tensor | None:
        assert gradients[0] is None
        return gradients[1]


def test_a_gradient_takes_the_layout_of_its_tensor() -> None:
    """A permuted gradient would choose other kernels than the contiguous one that a cut delivers, and so other bits."""

    def layout_of_its_gradient(written: Tensor, before: Tensor, kept: bool) -> tuple[int, ...]:
        seen = []
        before.register_hook(lambda gradient: seen.append(gradient.stride()))
        if kept:
            keep_layout(written)
        (written.t() * torch.randn(4, 3)).sum().backward()
        return seen[0]

    leaf = torch.randn(3, 4, requires_grad=True)
    for kept, stride in ((True, (4, 1)), (False, (1, 3))):
        before = leaf * 1
        assert layout_of_its_gradient(before * 2, before, kept) == stride
        before = leaf * 1
        written = Both.apply(before)[1]
        assert layout_of_its_gradient(written, before, kept) == stride, "two outputs of one operation"
    plain_leaf = torch.randn(3, 4, requires_grad=True)
    keep_layout(plain_leaf)
    (plain_leaf.t() * torch.randn(4, 3)).sum().backward()
    assert plain_leaf.grad is not None
    assert plain_leaf.grad.stride() == (4, 1), "a layer may hand on a leaf"


def test_a_gradient_of_what_a_layer_expanded_is_contiguous() -> None:
    """A class token is one row for all pictures; its gradient has a row for each."""
    leaf = torch.randn(1, 4, requires_grad=True)
    written = (leaf * 1).expand(3, 4)
    keep_layout(written)
    (written.t() * torch.randn(4, 3)).sum().backward()
    assert leaf.grad is not None
    expanded = torch.randn(1, 4, requires_grad=True).expand(3, 4).detach().requires_grad_()
    keep_layout(expanded)
    (expanded.t() * torch.ones(4, 3)).sum().backward()
    assert torch.equal(expanded.grad if expanded.grad is not None else torch.empty(0), torch.ones(3, 4))


def test_a_layer_keeps_a_graph_only_where_it_is_asked_to() -> None:
    chain = Chain([Layer("only", Scale(), ("x",), ("x",))], inputs=("x",), outputs=("x",))
    (layer,) = take_layers(chain, [0], torch.device("cpu"))
    for graph in (True, False, True, False):  # the first forward looks at more than the later ones
        output = layer.forward({"x": torch.randn(3, 4)}, 0, 0, graph, record=False)["x"]
        assert output.requires_grad is graph


# -- weights of 16 bits, moments of 16 bits

STEPS = 4
ONE = Cuts((0,), (0,))
Types = dict[str, Any]
BFLOAT16 = {"precision": "bfloat16", "weights": "bfloat16"}
FLOAT16 = {"precision": "float16", "weights": "float16", "loss_scale": LossScale(8.0)}
ROUNDED = {"recipe": dataclasses.replace(cases.SETTINGS["recipe"], moments="bfloat16")}
PURE = {"precision": "bf16-weights"}
TYPES = pytest.mark.parametrize(
    "types",
    [BFLOAT16, FLOAT16, ROUNDED, BFLOAT16 | ROUNDED, PURE],
    ids=["bfloat16 weights", "float16 weights", "bfloat16 moments", "bfloat16 weights and moments", "all bfloat16"],
)


def by_hand(types: Types) -> dict[str, Any]:
    """Train the unsplit model in a plain loop for some steps: masters of float32, weights that are rounded anew before
    every step, gradients that are added in float32 in the order of the blocks, torch's AdamW over the masters, and its
    moments rounded behind every step. Where all is bfloat16 there are no masters, and sums are bfloat16 too.
    """
    graph, precision = models.LINE["line"], types.get("precision", "float32")
    kept = torch.bfloat16 if types is PURE else torch.float32
    chain, low = graph.build_chain(dtype=kept), getattr(torch, types.get("weights", "float32"))
    weights = chain.named_parameters()
    masters = {name: nn.Parameter(weight.detach().clone()) for name, weight in weights.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-3, weight_decay=1e-4, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=precision == "float16")
    parts = []
    for step in range(1, STEPS + 1):
        for name, weight in weights.items():
            weight.data = masters[name].detach().to(kept if ".norm." in name or types is PURE else low)
        blocks: list[dict[str, Tensor]] = [{}, {}]

        def add(index: int, sums: list[dict[str, Tensor]] = blocks) -> None:
            for name, weight in weights.items():
                assert weight.grad is not None
                assert weight.grad.dtype == weight.dtype
                total = sums[index // 2].get(name)
                sums[index // 2][name] = weight.grad.to(kept) if total is None else total + weight.grad.to(kept)
                weight.grad = None

        minibatch, inputs = graph.make_minibatch(4, step, kept)
        parts.append(models.plain_step(chain, minibatch, inputs, 7, step, graph.loss, precision, scaler, add))
        for name, master in masters.items():
            master.grad = (blocks[0][name] + blocks[1][name]) / scaler.get_scale()
        optimizer.step()
        for state in optimizer.state.values() if "recipe" in types else ():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].bfloat16().float()
    return {
        "parts": parts,
        "state": {name: master.detach() for name, master in masters.items()},
        "weights": {
            name: master.detach().to(kept if ".norm." in name or types is PURE else low)
            for name, master in masters.items()
        },
        "moments": {
            f"{name}.{key}": value.bfloat16() if "recipe" in types and key != "step" else value
            for name, master in masters.items()
            for key, value in optimizer.state[master].items()
        },
    }


def trained(pool: WorkerPool, types: Types, layout: Any, made: str = "line", **options: Any) -> list[dict[str, Any]]:
    settings = {"schedule": "1f1b", "recompute": False} | types | options
    dtype = torch.bfloat16 if types is PURE else torch.float32
    return pool.run(cases.train, layout.world_size, layout, settings, STEPS, dtype, None, None, made)


@TYPES
def test_masters_weights_and_moments_are_those_of_a_loop_by_hand(pool: WorkerPool, types: Types) -> None:
    expected, (result,) = by_hand(types), trained(pool, types, ONE)
    for ours, theirs in zip(result["parts"], expected["parts"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    for kind in ("state", "weights", "moments"):
        assert result[kind].keys() == expected[kind].keys()
        for name, tensor in expected[kind].items():
            assert result[kind][name].dtype == tensor.dtype, (kind, name)
            assert torch.equal(result[kind][name], tensor), (kind, name)


@functools.cache
def one_rank(pool: WorkerPool, number: int) -> dict[str, Any]:
    return trained(pool, (BFLOAT16 | ROUNDED, FLOAT16 | ROUNDED)[number], ONE, "build_chain")[0]


@pytest.mark.parametrize("number", [0, 1], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(
    "name", ["heads on three ranks", "backwards in halves, recomputed", "two replicas of two", "a replicated stage"]
)
def test_types_of_16_bits_do_not_depend_on_the_cuts(pool: WorkerPool, name: str, number: int) -> None:
    """A frozen layer, a batch norm, three uses of one head on one rank and on several, layers with several holders."""
    layout, schedule, recompute = CASES[name]
    types = (BFLOAT16 | ROUNDED, FLOAT16 | ROUNDED)[number]
    results = trained(pool, types, layout, "build_chain", schedule=schedule, recompute=recompute)
    expected = one_rank(pool, number)
    assert not differences(results, expected)
    low = getattr(torch, types["weights"])
    dtypes = {name: weight.dtype for name, weight in expected["weights"].items()}
    assert {name for name, dtype in dtypes.items() if dtype != low} == {n for n in dtypes if ".norm." in n}
    assert expected["state"]["stem.conv.weight"].dtype == low, "a frozen parameter has no master"
    assert expected["state"]["conv1.conv.weight"].dtype == torch.float32


def test_another_holder_updates_masters_for_all(pool: WorkerPool) -> None:
    """Averages are also tested: the weights in their place are rounded, too."""
    layout = with_shares(layout_for(Cuts((0, 7), (0, 1), 2), 11, 2), 3, apart=(8, 9, 10))
    assert any(stage.moments_elsewhere for stage in layout.stages)
    recipe = dataclasses.replace(ROUNDED["recipe"], ema=0.9)
    alone = trained(pool, BFLOAT16, ONE, "build_chain", recipe=recipe)[0]
    results = trained(pool, BFLOAT16, layout, "build_chain", recipe=recipe)
    assert not differences(results, alone)


def test_averages_are_evaluated_as_weights_of_16_bits() -> None:
    chain = models.build_chain()
    layers = take_layers(chain, range(11), torch.device("cpu"), "bfloat16", weights="bfloat16")
    optimizer = StageOptimizer(layers, dataclasses.replace(ROUNDED["recipe"], ema=0.5))
    for step in (1, 2):
        for parameter in optimizer.parameters.values():
            parameter.grad = torch.ones(parameter.shape) * step
        optimizer.step(step, 1.0)
    head = layers[8].parameters["head.0.weight"]
    assert head.data_ptr() == layers[9].parameters["head.0.weight"].data_ptr()
    before = head.detach().clone()
    average = optimizer.moments("decoder.0.head.0.weight")["ema"]
    assert average.dtype == torch.float32
    expected = average.to(torch.bfloat16)
    assert not torch.equal(expected, before)
    with optimizer.averaged():
        assert torch.equal(head, expected)
    assert torch.equal(head, before)


def masters_that_differ(communicator: Communicator) -> str:
    """Return the refusal where the masters of two replicas differ by less than their roundings show."""
    chain, options = models.build_chain(), EngineOptions(**(cases.SETTINGS | BFLOAT16))
    placed = layout_for(Cuts((0,), (0,), 2), len(chain), options.num_blocks)
    ready = Ready(cases.shapes_of(precision="bfloat16", weights="bfloat16"))
    engine = PipelineEngine(chain, models.loss, placed, options, communicator, torch.device("cpu"), ready)
    verify_copies(engine)
    low, master = (table["conv.weight"] for table in (engine.layers[1].parameters, engine.layers[1].masters))
    with torch.no_grad():
        master[0, 0, 0, 0] += communicator.rank * 1e-7
        assert torch.equal(low, master.bfloat16())
    try:
        verify_copies(engine)
    except CapslogError as error:
        return str(error)
    return "nothing"


def test_masters_of_several_holders_are_compared(pool: WorkerPool) -> None:
    for sentence in pool.run(masters_that_differ, 2):
        assert sentence.startswith("parameter 'conv1.conv.weight' differs between")


def _hooked(module: nn.Module) -> nn.Module:
    module.weight.register_hook(lambda gradient: gradient * 3)  # type: ignore[operator, union-attr]
    return module


def test_a_parameter_with_a_hook_that_several_layers_use_is_refused_by_name() -> None:
    """Each use has a leaf of its own, which had no hook: rows that were to stay as they are went on training."""
    first = _hooked(Scale())
    tied = Chain([Layer("a", first), Layer("b", nn.Sequential(first))])
    with pytest.raises(CapslogError, match=r"'a\.weight' is used by several layers and has a hook on its gradient"):
        take_layers(tied, [0, 1], torch.device("cpu"))


def test_a_parameter_with_a_hook_keeps_it_where_the_layer_is_made_anew() -> None:
    """A run that changes its plan makes layers anew; a leaf of 16 bits, which would have no hook, is refused."""
    chain = Chain([Layer("a", _hooked(Scale()))])
    first = take_layers(chain, [0], torch.device("cpu"))[0]
    again = take_layers(chain, [0], torch.device("cpu"), ready={})[0]
    assert again.parameters["weight"] is not first.parameters["weight"]
    gradients = []
    for layer in (first, again):
        layer.layer.run({"x": torch.ones(2, 4)})["x"].sum().backward()
        gradients.append(layer.parameters["weight"].grad)
    assert torch.equal(*gradients)  # type: ignore[arg-type]
    assert torch.equal(gradients[0], torch.full((4,), 6.0))  # type: ignore[arg-type]
    with pytest.raises(CapslogError, match=r"'weight' has a hook on its gradient, .* set train\.weights=float32"):
        take_layers(chain, [0], torch.device("cpu"), weights="bfloat16")
