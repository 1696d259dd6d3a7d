"""Layers of factories: facts known of them before they are built, and the values that they get."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.engine import models
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.seeds import mix
from varuna_capslog.model.chain import Chain, LayerFactory, TensorSpec
from varuna_capslog.model.signature import layer_signature
from varuna_capslog.model.trace import ShapeTable
from varuna_capslog.model.workload import Workload


class Coded(nn.Module):
    """Draws parameters, a buffer that is no part of its state, and a plain tensor, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.register_buffer("codes", torch.randn(4), persistent=False)
        self.scale = nn.Parameter(torch.randn(4))
        self.offset = torch.randn(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x) * self.scale + self.codes + self.offset


def coded(count: int = 4, **options: Any) -> Chain:
    return Chain.from_factories([LayerFactory(f"layer.{k}", Coded) for k in range(count)], **options)


def built(seed: int, index: int) -> Coded:
    """Return the layer of another chain: built alone, with no draws between."""
    torch.manual_seed(mix(seed, index))
    return Coded()


def test_a_layer_has_its_values_whichever_layers_are_built_and_in_any_order() -> None:
    forwards, backwards, single = (coded(seed=5) for _ in range(3))
    forwards.fill()
    for index in (3, 1, 0, 2):
        backwards.fill([index])
    single.fill([2])
    assert [p.is_meta for p in single.named_parameters().values()] == [not 6 <= k < 9 for k in range(12)]
    x = torch.randn(2, 4)
    for index in range(4):
        expected = built(5, index)
        for chain in [forwards, backwards, *([single] if index == 2 else [])]:
            module = chain.layers[index].module
            assert torch.equal(module(x), expected(x))
            assert all(torch.equal(p, q) for p, q in zip(module.parameters(), expected.parameters(), strict=True))


def test_building_leaves_the_generator_as_it_was_and_goes_by_the_seed_that_torch_has() -> None:
    torch.manual_seed(11)
    torch.randn(3)
    before = torch.get_rng_state()
    chain = coded()
    chain.fill()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(chain.layers[1].module.scale, built(11, 1).scale)


def test_what_is_known_of_hollow_layers_is_what_is_known_of_built_ones() -> None:
    chain, ready = models.factory_chain(), models.factory_chain_by_hand()
    for when in ("hollow", "some", "all", "released"):
        tensors, expected = chain.named_tensors(), ready.named_tensors()
        assert [(n, t.shape, t.dtype, t.stride(), t.requires_grad) for n, t in tensors.items()] == [
            (n, t.shape, t.dtype, t.stride(), t.requires_grad) for n, t in expected.items()
        ], when
        assert chain.shared == ready.shared, when
        assert [layer_signature(layer) for layer in chain.layers] == [layer_signature(layer) for layer in ready.layers]
        inputs = models.make_minibatch(1, 1)[0].inputs[0]
        assert ShapeTable(chain).boundaries(inputs) == ShapeTable(ready).boundaries(inputs)
        if when == "hollow":
            assert all(parameter.is_meta for parameter in chain.named_parameters().values())
            chain.fill([1, 9])
        elif when == "some":
            chain.fill()
        elif when == "all":
            chain.release(())
            assert all(parameter.is_meta for parameter in chain.named_parameters().values())


def test_a_tied_parameter_has_one_value_in_any_process() -> None:
    expected = models.factory_chain_by_hand()
    for order in ([10], [9, 8], [8, 10, 9]):
        chain = models.factory_chain()
        chain.fill(order)
        heads = [chain.layers[index].module.head[0].weight for index in (8, 9, 10)]
        assert heads[0] is heads[1] is heads[2]
        assert torch.equal(heads[0], expected.layers[8].module.head[0].weight)
        assert torch.equal(chain.layers[10].module.head[2].bias, expected.layers[10].module.head[2].bias)
        cross = chain.layers[order[0]].module.cross.weight
        assert torch.equal(cross, expected.layers[order[0]].module.cross.weight)


def test_a_run_of_the_chain_is_that_of_one_built_by_hand_also_after_a_release() -> None:
    (_, inputs), expected = models.make_minibatch(1, 1), models.factory_chain_by_hand(dropout=0.0)
    chain = models.factory_chain(dropout=0.0)
    for _ in range(2):
        assert torch.equal(chain.run(inputs[0])["outputs"], expected.run(inputs[0])["outputs"])
        chain.release(())


def test_given_values_take_the_places_of_those_that_a_factory_gives() -> None:
    chain = coded(2, seed=0)
    chain.fill([0])
    values = {f"layer.{k}.{name}": torch.full((4,), 7.0 + k) for k in range(2) for name in ("scale", "codes")}
    chain.begin_with(values)
    chain.fill()
    for k in range(2):
        module = chain.layers[k].module
        assert [module.scale.tolist(), module.codes.tolist()] == [[7.0 + k] * 4] * 2
        assert torch.equal(module.line.weight, built(0, k).line.weight)


def test_a_new_module_is_the_factorys_and_leaves_the_chain_hollow() -> None:
    chain = coded(2, seed=0)
    first, second = chain.new_module(1), chain.new_module(1)
    assert torch.equal(first.codes, built(0, 1).codes)
    assert first.scale is not second.scale
    assert all(parameter.is_meta for parameter in chain.named_parameters().values())


def test_a_factory_that_needs_its_weights_is_known_and_built_all_the_same() -> None:
    def normed() -> nn.Module:
        return parametrizations.spectral_norm(nn.Linear(4, 4))

    chain = Chain.from_factories([LayerFactory("a", normed)], seed=1)
    assert all(parameter.is_meta for parameter in chain.named_parameters().values())
    assert not any(buffer.is_meta for buffer in chain.layers[0].module.buffers())
    chain.fill()
    torch.manual_seed(mix(1, 0))
    assert torch.equal(chain.layers[0].module.weight, normed().weight)


def test_what_factories_must_not_give() -> None:
    line = nn.Linear(4, 4)
    lines = [LayerFactory("a", lambda: nn.Sequential(line)), LayerFactory("b", lambda: nn.Linear(4, 4))]
    with pytest.raises(CapslogError, match="'a' and 'c' give out one parameter, 'weight' in the latter; let each make"):
        Chain.from_factories([*lines, LayerFactory("c", lambda: line)])
    with pytest.raises(CapslogError, match=r"factory of layer 'a' returned int; it must return an nn.Module"):
        Chain.from_factories([LayerFactory("a", lambda: 3)])
    with pytest.raises(CapslogError, match=r"tied: no layer has a parameter, or a module with some, at 'c.weight'"):
        Chain.from_factories(lines[1:], tied=[("b.weight", "c.weight")])
    frozen = LayerFactory("c", lambda: nn.Linear(4, 4).requires_grad_(False))
    with pytest.raises(CapslogError, match=r"tied: 'b.weight' has .*True.*, but 'c.weight' has .*False.*; tie what is"):
        Chain.from_factories([*lines[1:], frozen], tied=[("b.weight", "c.weight")])


def test_variants_are_refused_where_factories_build_the_layers() -> None:
    """The engine builds a layer when it needs it, and would build it without the variant."""

    class Made(Workload):
        variants = MappingProxyType({"*": "chunked"})

        def build_chain(self) -> Chain:
            return coded(2)

        def loss(self, outputs: Any, targets: Any, normalisers: Any) -> dict[str, Tensor]:
            raise NotImplementedError

        def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
            raise NotImplementedError

    with pytest.raises(CapslogError, match=r"the layers of 'model' are built by factories, which no variant can"):
        Made().chosen_chain()
