"""Tensors that cross each cut, shared parameters, and chains that are refused."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from tests.engine import models
from tests.model import hostile
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.chain import Chain, Layer, TensorSpec


class Add(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def skip_chain() -> Chain:
    """Return a chain whose `early` is written by layer 0 and read by layer 3; `x` is rewritten on the way."""
    return Chain(
        [
            Layer("a", nn.Identity(), ("x",), ("early",)),
            Layer("b", nn.Identity(), ("early",), ("x",)),
            Layer("c", nn.Identity()),
            Layer("d", Add(), ("x", "early"), ("x",)),
        ]
    )


def test_a_tensor_crosses_every_cut_between_its_writer_and_its_last_reader() -> None:
    chain = skip_chain()
    assert [chain.crossing(cut) for cut in range(5)] == [("x",), ("early",), ("early", "x"), ("early", "x"), ("x",)]


def test_an_edge_leads_from_the_last_writer_of_a_name_to_its_reader() -> None:
    """Expected by hand: `x` is read by the layer that writes it anew, and the inputs come from no layer."""
    assert skip_chain().edges == ((0, 1), (0, 3), (1, 2), (2, 3))
    stem = ((0, 1), (1, 2), (2, 3), (3, 4))
    encoders = ((4, 5), (4, 6), (4, 7), (5, 6))
    decoders = ((6, 8), (6, 9), (6, 10), (7, 8), (8, 9), (9, 10))
    assert models.build_chain().edges == (*stem, *encoders, *decoders)


def test_the_graphs_for_engine_tests_have_the_branches_that_they_promise() -> None:
    edges = {name: graph.build_chain().edges for name, graph in models.GRAPHS.items()}
    # layer 7 is the join, and the last layer, which computes the loss
    assert edges["towers"] == ((0, 1), (1, 2), (2, 3), (3, 7), (4, 5), (4, 6), (5, 6), (6, 7))
    assert edges["inception"] == ((0, 1), (0, 2), (0, 4), (1, 5), (2, 3), (3, 5), (4, 5), (5, 6))
    encoder = ((0, 1), (0, 2), (0, 4), (0, 5), (0, 6), (1, 2), (2, 4), (2, 5), (2, 6))
    assert edges["translation"] == (*encoder, (3, 4), (4, 5), (5, 6), (6, 7))


@pytest.mark.parametrize("name", models.GRAPHS)
def test_every_parameter_of_a_graph_for_engine_tests_has_a_gradient(name: str) -> None:
    graph = models.GRAPHS[name]
    chain = graph.build_chain(dtype=torch.float64)
    minibatch, inputs = graph.make_minibatch(3, 1, torch.float64)
    assert len({tuple(spec.shape for spec in specs.values()) for specs in minibatch.inputs}) == 3
    assert models.plain_step(chain, minibatch, inputs, seed=7, step=1, loss=graph.loss)["loss"] > 0
    dead_ends = ("unread.", "side.", "gate.")
    for address, parameter in chain.named_parameters().items():
        if name == "dead ends" and address.startswith(dead_ends):
            assert parameter.grad is None, address
            continue
        assert parameter.grad is not None, address
        assert parameter.grad.abs().sum() > 1e-8, address


def test_a_value_is_a_name_and_its_writer_and_the_loss_is_the_last_reader() -> None:
    """Expected by hand: the `x` that layer b writes is another tensor than the input of that name."""
    chain = skip_chain()
    assert chain.reads == ((("x", -1),), (("early", 0),), (("x", 1),), (("x", 2), ("early", 0)), (("x", 3),))
    assert chain.readers == {("x", -1): (0,), ("early", 0): (1, 3), ("x", 1): (2,), ("x", 2): (3,), ("x", 3): (4,)}
    for cut in range(5):
        assert tuple(value.name for value in chain.values_at(cut)) == chain.crossing(cut)


def test_what_the_loss_reads_from_an_earlier_layer_is_an_edge_to_the_last_layer() -> None:
    layers = [Layer("a", nn.Identity(), ("x",), ("y",)), Layer("b", nn.Identity(), ("x",), ("x",))]
    assert Chain(layers, ("x",), ("x", "y")).edges == ((0, 1),)


def test_an_input_that_is_read_late_travels() -> None:
    chain = models.build_chain()
    assert all("sizes" in chain.crossing(cut) for cut in range(5))
    assert "sizes" not in chain.crossing(5)


def test_shared_parameters_are_found_by_identity() -> None:
    chain = models.build_chain()
    assert [shared.layers for shared in chain.shared] == [(8, 9, 10)] * 4
    assert chain.shared[0].name == "decoder.0.head.0.weight"
    assert chain.shared[0].num_bytes == 8 * 8 * 4
    assert "decoder.1.head.0.weight" not in chain.named_parameters()
    plain = sum(parameter.numel() for layer in chain.layers for parameter in layer.module.parameters())
    head = sum(shared.num_bytes // 4 for shared in chain.shared)
    assert sum(parameter.numel() for parameter in chain.named_parameters().values()) == plain - 2 * head


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "at least one layer"),
        ([Layer("a", nn.Identity()), Layer("a", nn.Identity())], "two layers are named 'a'"),
        ([Layer("a", nn.Identity(), ("z",))], r"layer 'a' reads 'z', which is neither an input nor written before it"),
        ([Layer("a", nn.Identity(), ("x",), ("y",))], None),
    ],
)
def test_impossible_chains_are_refused(layers: list[Layer], message: str | None) -> None:
    if message is None:
        Chain(layers, outputs=("y",))
        with pytest.raises(CapslogError, match="output 'z' is written by no layer"):
            Chain(layers, outputs=("z",))
    else:
        with pytest.raises(CapslogError, match=message):
            Chain(layers)


@pytest.mark.parametrize("cuts", [(), (1,), (0, 2, 2), (0, 4), (0, 3, 1)])
def test_cuts_that_do_not_split_the_chain_are_refused(cuts: tuple[int, ...]) -> None:
    with pytest.raises(CapslogError, match="do not split a chain of 4 layers"):
        skip_chain().check_cuts(cuts)


def test_a_layer_must_return_what_it_declares() -> None:
    with pytest.raises(CapslogError, match="returned 1 tensors but declares writes"):
        Chain([Layer("a", nn.Identity(), ("x",), ("x", "y"))]).run({"x": torch.ones(1)})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(2, 3, 4),
        torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.empty(2, 3).t(),
        torch.empty(3, 1, 2, dtype=torch.bool),
        torch.empty(()),
    ],
)
def test_a_spec_makes_a_tensor_of_the_same_layout(tensor: Tensor) -> None:
    spec = TensorSpec.of(tensor)
    made = spec.zeros()
    assert (made.shape, made.dtype, made.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
    assert spec.num_bytes == tensor.numel() * tensor.element_size()


def test_a_layout_with_gaps_is_described_as_contiguous() -> None:
    assert TensorSpec.of(torch.empty(4, 6)[:, ::2]).stride == (3, 1)
    assert TensorSpec.of(torch.empty(1, 6).expand(4, 6)).stride == (6, 1)


def test_what_is_released_keeps_its_shape_and_takes_no_memory() -> None:
    torch.manual_seed(0)
    tied, codes = nn.Linear(4, 4), torch.arange(3.0)
    plain = nn.Linear(4, 2)
    plain.register_buffer("codes", codes, persistent=False)
    chain = Chain([Layer("a", tied), Layer("b", plain), Layer("c", nn.Linear(2, 4)), Layer("d", tied)], ("x",), ("x",))
    names, shapes = list(chain.named_parameters()), [p.shape for p in chain.named_parameters().values()]
    references = [weakref.ref(p) for p in (tied.weight, plain.weight)]
    kept = chain.layers[2].module.weight
    chain.release([kept])
    assert [reference() for reference in references] == [None, None]
    assert list(chain.named_parameters()) == names
    assert [p.shape for p in chain.named_parameters().values()] == shapes
    assert [p.device.type for p in chain.named_parameters().values()].count("cpu") == 1
    assert chain.layers[2].module.weight is kept
    assert tied.weight is chain.layers[3].module.weight
    assert [shared.name for shared in chain.shared] == ["a.weight", "a.bias"]
    assert torch.equal(plain.codes, torch.arange(3.0))


def test_a_stage_gives_what_the_chain_gives_and_holds_no_tensor_behind_its_last_reader() -> None:
    alive: list[list[bool]] = []
    means: list[weakref.ref[Tensor]] = []

    class Half(nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            alive.append([reference() is not None for reference in means])
            mean = sum(tensors) / 2  # type: ignore[arg-type]
            means.append(weakref.ref(mean))
            return mean

    layers = [("a", ("x",)), ("b", ("a",)), ("c", ("a", "b")), ("d", ("c",))]
    chain = Chain([Layer(name, Half(), reads, (name,)) for name, reads in layers], ("x",), ("d",))
    x = torch.ones(3)
    values = {"x": x.clone()}
    crossed = chain.run_stage(0, 2, values)
    assert values == {}
    assert sorted(crossed) == ["a", "b"]
    assert torch.equal(chain.run_stage(2, 4, crossed)["d"], torch.full((3,), 0.1875))
    assert alive == [[], [True], [True, True], [False, False, True]]
    assert torch.equal(chain.run({"x": x})["d"], torch.full((3,), 0.1875))


def test_a_parameter_that_is_tied_after_the_capture_is_named() -> None:
    """Two stages kept one copy each, and the copies diverged."""
    model = hostile.Base()
    x = torch.randn(2, hostile.WIDTH)
    chain = Chain.from_module(model, None, (x,), evaluates=False, compares=False)
    chain.run({"x": x})
    model.blocks[3].weight = model.blocks[0].weight  # type: ignore[assignment, union-attr]
    with pytest.raises(CapslogError, match=r"'blocks\.0\.blocks\.0\.weight' of the model .* tied or untied"):
        chain.run({"x": x})
    assert len(Chain.from_module(model, None, (x,), evaluates=False, compares=False).shared) == 1
