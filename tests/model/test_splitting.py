"""Layers split into parts: they compute what the full layer computes, and hold each of its elements once."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.detr.tiny import tiny_chain
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.chain import Chain, Layer
from varuna_capslog.model.factories import LayerFactory
from varuna_capslog.model.layer import TensorPiece, parts_from_json, put_together, split_table, weights_of_parts
from varuna_capslog.model.splitting.chains import split_chain
from varuna_capslog.model.splitting.splitter import Splitter
from varuna_capslog.model.splitting.torch_layers import linear_rows

TENSOR = {"encoder.*": "tensor-4", "decoder.*": "tensor-2"}


@functools.cache
def _transformer(changes: tuple[tuple[str, Any], ...]) -> Chain:
    chain = tiny_chain(**dict(changes))
    first = next(index for index, layer in enumerate(chain.layers) if layer.name == "encoder.0")
    return Chain(chain.layers[first:], ("memory", "valid"), chain.outputs)


def built(splits: Mapping[str, str], loud: float = 1.0, **changes: Any) -> Chain:
    """Return the transformer of a DETR in float64. loud: factor of the weights of queries and keys; logits grow by its
    square.
    """
    chain = copy.deepcopy(_transformer(tuple(sorted(changes.items()))))
    for layer in chain.layers:
        layer.module.double()
        for name, parameter in layer.module.named_parameters():
            if "in_proj_weight" in name:
                with torch.no_grad():
                    parameter[: 2 * parameter.shape[1]] *= loud
    return split_chain(chain, splits, "close") if splits else chain


def whole(chain: Chain, tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return tensors of a chain's layers by their addresses in the unsplit layers."""
    table, addressed = split_table(chain.layers), {}
    for layer in chain.layers:
        if layer.part is None:
            addressed |= {f"{layer.name}.{name}": tensor for name, tensor in tensors[layer.name].items()}
    for name, rows in table.items():
        parts = [(pieces, tensors[part]) for part, pieces in parts_from_json(rows).items()]
        addressed |= {f"{name}.{tensor_name}": tensor for tensor_name, tensor in put_together(parts).items()}
    return addressed


def results(chain: Chain) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return outputs, and gradients by their addresses in the unsplit layers."""
    generator = torch.Generator().manual_seed(1)
    memory = torch.randn(2, 5, 7, 32, generator=generator, dtype=torch.float64)
    outputs = chain.run({"memory": memory, "valid": torch.tensor([[5, 4], [3, 7]])})
    sum((out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum() for out in outputs.values()).backward()  # type: ignore[union-attr]
    gradients = {
        layer.name: {
            name: parameter.grad for name, parameter in layer.module.named_parameters() if parameter.grad is not None
        }
        for layer in chain.layers
    }
    return outputs, whole(chain, gradients)


@functools.cache
def expected(loud: float, heads: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return results(built({}, loud, heads=heads, attention="eager"))


@pytest.fixture(autouse=True)
def _double() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("splits", "changes"),
    [
        (TENSOR, {}),
        (TENSOR, {"heads": "every_decoder"}),
        ({"encoder.*": "sequence-2"}, {"attention": "sdpa"}),
        ({"encoder.0": "sequence-3", "encoder.1": "tensor-2"}, {}),
        ({"encoder.*": "sequence-8"}, {}),  # of 5 rows: three parts have none; the last rows of an image are padding
        (TENSOR, {"loud": 100.0}),
        ({"encoder.*": "sequence-2"}, {"loud": 100.0}),  # logits of 1e4
        ({"encoder.*": "sequence-3", "decoder.*": "sequence-3"}, {}),
        ({"decoder.*": "sequence-8"}, {"heads": "every_decoder"}),  # of 5 rows; the last ones of an image are padding
        ({"decoder.*": "sequence-2"}, {"attention": "sdpa"}),
        ({"*": "sequence-3"}, {"loud": 100.0}),
    ],
)
def test_parts_compute_what_the_whole_layer_computes(splits: dict[str, str], changes: dict[str, Any]) -> None:
    options: dict[str, Any] = {"heads": "last", "attention": "eager", "loud": 1.0} | changes
    outputs, gradients = results(built(splits, **options))
    plain, their_gradients = expected(options["loud"], options["heads"])
    assert max(float((outputs[name] - plain[name]).detach().abs().max()) for name in plain) < 1e-12
    assert gradients.keys() == their_gradients.keys()
    # if keys are split, a nearly vanished gradient is as exact as 1e-12 of the logits
    bound = 1e-12 * options["loud"] ** (1 if splits is TENSOR else 2)
    for name, gradient in their_gradients.items():
        scale = max(float(gradient.abs().max()), 1e-3)
        assert float((gradients[name] - gradient).abs().max()) / scale < bound, name


@pytest.mark.parametrize("splits", [TENSOR, {"encoder.*": "sequence-2"}])
def test_parts_begin_with_the_weights_of_the_whole_layer(splits: dict[str, str]) -> None:
    chain, plain = built(splits, heads="every_decoder"), built({}, heads="every_decoder")
    held = {layer.name: dict(layer.module.named_parameters()) for layer in chain.layers}
    addressed, expected_tensors = whole(chain, held), plain.named_parameters()
    assert addressed.keys() >= expected_tensors.keys()
    assert all(torch.equal(addressed[name], expected_tensors[name]) for name in expected_tensors)
    counts = [sum(parameter.numel() for parameter in model.named_parameters().values()) for model in (chain, plain)]
    assert counts[0] == counts[1]
    split_tensors = weights_of_parts({name: tensor.detach() for name, tensor in expected_tensors.items()}, chain.layers)
    assert all(torch.equal(split_tensors[name], tensor) for name, tensor in chain.named_parameters().items())


def test_a_piece_takes_and_puts_its_elements_of_any_dimension() -> None:
    tensor = torch.arange(24.0).view(2, 12)
    piece = TensorPiece("weight", 12, 1, ((2, 4), (8, 11)))
    assert TensorPiece.from_json(piece.to_json()) == piece
    part = piece.of(tensor)
    assert part.tolist() == tensor[:, [2, 3, 8, 9, 10]].tolist()
    target = torch.zeros(2, 12)
    piece.put(part, target)
    assert torch.equal(target, tensor * (target != 0))
    assert (target != 0).sum() == 10
    assert piece.put(part, None).shape == (2, 12)


class _Own(nn.Linear):
    """A user's layer; `wrong` names the mistake in its split."""

    wrong = ""

    def split(self, into: Splitter) -> None:
        for part in range(1 if self.wrong == "half" else into.degree):
            share = linear_rows(into, self, part)
            if self.wrong == "foreign":
                share.weight = nn.Parameter(share.weight.detach().clone())
            into.add(str(part), share, into.reads, [into.value(str(part))])


def own(wrong: str = "") -> Chain:
    layer = _Own(4, 4)
    layer.wrong = wrong
    return Chain([Layer("first", nn.Linear(4, 4)), Layer("own", layer), Layer("last", nn.Linear(4, 4))])


def tied() -> Chain:
    chain = own()
    chain.layers[2].module.weight = chain.layers[1].module.weight
    return chain


@pytest.mark.parametrize(
    ("chain", "splits", "numerics", "sentence"),
    [
        (own, {"own": "tensor"}, "close", r"splits\['own'\] is 'tensor'; write tensor-N or sequence-N"),
        (own, {"own": "tensor-1"}, "close", r"is 'tensor-1'; .* at least 2"),
        (own, {"own": "ring-2"}, "close", r"is 'ring-2'; write tensor-N"),
        (
            own,
            {"onw": "tensor-2"},
            "close",
            r"splits has the pattern 'onw', which matches no layer; did you mean 'own'",
        ),
        (
            own,
            {"first": "tensor-2"},
            "close",
            r"none of these layers can be split .* no method split and are none of torch",
        ),
        (own, {"own": "tensor-2"}, "same", r"numerics=same allows the same bits only; set numerics=close"),
        (own, {"own": "tensor-3"}, "close", r"'own' cannot be split by tensor-3: its 4 columns cannot be shared out"),
        (functools.partial(own, "half"), {"own": "tensor-2"}, "close", r"parts .* do not hold all of its 'weight'"),
        (functools.partial(own, "foreign"), {"own": "tensor-2"}, "close", r"'weight' that the layer has not"),
        (tied, {"own": "tensor-2"}, "close", r"would cut 'weight', which other layers use as 'own.weight'"),
        (tiny_chain, {"encoder.1": "tensor-3"}, "close", r"its 4 heads cannot be shared out equally among 3 parts"),
    ],
)
def test_one_sentence_per_mistake(chain: Any, splits: dict[str, str], numerics: str, sentence: str) -> None:
    with pytest.raises(CapslogError, match=sentence):
        split_chain(chain(), splits, numerics)


def test_layers_of_factories_are_not_split() -> None:
    chain = Chain.from_factories([LayerFactory("own", functools.partial(_Own, 4, 4))], seed=0)
    with pytest.raises(CapslogError, match="built by factories, which cannot be split; give the model as modules"):
        split_chain(chain, {"own": "tensor-2"}, "close")


def test_layers_that_cannot_be_split_stay_whole() -> None:
    chain = split_chain(own(), {"*": "tensor-2"}, "close")
    assert [layer.name for layer in chain.layers][:1] == ["first"]
    assert [layer.name for layer in chain.layers if layer.part] == ["own.0", "own.1"]
