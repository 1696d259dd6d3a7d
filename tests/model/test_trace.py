"""The trace equals the tensors of a real run, leaves the model unchanged, and tells similar layers apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.engine import models
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.chain import Chain, Layer, TensorSpec
from varuna_capslog.model.signature import layer_signature
from varuna_capslog.model.trace import ShapeTable, autocast_context


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_specs_are_those_of_a_real_run(precision: str) -> None:
    chain = models.build_chain()
    _, inputs = models.make_minibatch(2, 1)
    table = ShapeTable(chain, precision=precision)
    for values in inputs:
        specs = table.boundaries({name: TensorSpec.of(tensor) for name, tensor in values.items()})
        tensors = dict(values)
        for index, layer in enumerate(chain.layers):
            assert specs[index] == {name: TensorSpec.of(tensors[name]) for name in chain.crossing(index)}
            with autocast_context("cpu", precision):
                tensors.update(layer(tensors))
        assert specs[-1] == {"outputs": TensorSpec.of(tensors["outputs"])}


class Sampled(nn.Module):
    """Samples a map at learned places around given ones."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return nn.functional.grid_sample(x, places + self.shift, align_corners=False)


def test_values_at_places_of_a_map_are_known_without_their_decomposition() -> None:
    """The decomposition took a quarter of the trace of a deformable attention."""
    chain = Chain([Layer("a", Sampled(), ("x", "places"))], inputs=("x", "places"))
    images, places = torch.randn(2, 3, 5, 6).to(memory_format=torch.channels_last), torch.randn(2, 4, 7, 2)
    specs = ShapeTable(chain).boundaries({"x": TensorSpec.of(images), "places": TensorSpec.of(places)})
    assert specs[-1]["x"] == TensorSpec.of(chain.layers[0]({"x": images, "places": places})["x"])
    assert specs[-1]["x"].requires_grad


def test_a_frozen_prefix_wants_no_gradient() -> None:
    specs = ShapeTable(models.build_chain()).boundaries(
        {"x": TensorSpec((1, 3, 8, 8)), "sizes": TensorSpec((1, 2), torch.int64)}
    )
    assert [specs[cut]["x"].requires_grad for cut in (0, 1, 2)] == [False, False, True]
    assert not specs[5]["mask"].requires_grad


def test_values_that_the_loss_does_not_depend_on_want_no_gradient() -> None:
    names = [("x", "x"), ("x", "y"), ("y", "z"), ("x", "x")]
    chain = Chain([Layer(f"{at}", nn.Linear(4, 4), (read,), (write,)) for at, (read, write) in enumerate(names)])
    specs = ShapeTable(chain).boundaries({"x": TensorSpec((2, 4))})
    assert [{name: spec.requires_grad for name, spec in cut.items()} for cut in specs] == [
        {"x": False},
        {"x": True},
        {"x": True, "y": False},
        {"x": True},
        {"x": True},
    ]


def test_tracing_changes_nothing() -> None:
    chain = models.build_chain()
    before = [tensor.clone() for layer in chain.layers for tensor in layer.module.state_dict().values()]
    ShapeTable(chain).boundaries({"x": TensorSpec((1, 3, 8, 8)), "sizes": TensorSpec((1, 2), torch.int64)})
    after = [tensor for layer in chain.layers for tensor in layer.module.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(parameter.grad is None for parameter in chain.named_parameters().values())


def test_dilation_tells_layers_of_equal_shapes_apart() -> None:
    """Blocks with and without dilation have equal parameters and inputs; only the attribute differs."""
    plain, dilated = (Layer("a", nn.Conv2d(4, 4, 3, padding=2, dilation=d)) for d in (1, 2))
    assert layer_signature(plain) != layer_signature(dilated)
    assert layer_signature(plain) == layer_signature(Layer("b", nn.Conv2d(4, 4, 3, padding=2)))
    chain = Chain([plain, Layer("b", dilated.module)])
    specs = ShapeTable(chain).boundaries({"x": TensorSpec((1, 4, 8, 8))})
    assert [spec["x"].shape[-1] for spec in specs] == [8, 10, 10]


def test_channels_last_stays_on_the_wire() -> None:
    chain = Chain([Layer("a", nn.Conv2d(3, 4, 1)), Layer("b", nn.ReLU())])
    image = TensorSpec.of(torch.empty(2, 3, 5, 5).to(memory_format=torch.channels_last))
    real = chain.layers[0]({"x": image.zeros()})["x"]
    assert ShapeTable(chain).boundaries({"x": image})[1]["x"].stride == real.stride()


def test_a_layer_that_cannot_run_is_named_with_its_shapes() -> None:
    chain = Chain([Layer("first", nn.Identity()), Layer("second", nn.Linear(4, 4))])
    with pytest.raises(CapslogError, match=r"layer 'second' cannot run on x\[2, 3\]"):
        ShapeTable(chain).boundaries({"x": TensorSpec((2, 3))})


def test_unknown_precision_is_refused() -> None:
    with pytest.raises(CapslogError, match="precision='float8' is unknown"):
        autocast_context("cpu", "float8")


class Counting(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Counting.calls += 1
        return x * 2


def test_equal_layers_are_traced_once_and_known_sizes_not_at_all() -> None:
    chain = Chain([Layer(f"layer{i}", Counting()) for i in range(5)])
    table = ShapeTable(chain)
    for size in (4, 4, 6):
        table.boundaries({"x": TensorSpec((1, size))})
    assert Counting.calls == 2
