"""Names of a captured model's modules and tensors, layer by layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.planning.export.models import made
from varuna_capslog.model.chain import Chain, Layer
from varuna_capslog.model.names import LayerModules, ModelNames, names_of


def test_layers_of_a_captured_model_name_what_they_hold() -> None:
    model, _, chain = made("decoder")
    names = names_of(chain)
    assert names.layers == ("model.embed_tokens", *(f"model.layers.{n}" for n in range(4)), "model.norm")
    assert names.held is not None
    assert sorted(name for layer in names.held for name in layer.parameters) == sorted(dict(model.named_parameters()))
    assert "model.embed_tokens" in names.held[0].modules
    assert {path.rpartition(".")[0] for path in names.held[5].parameters} == {"model.norm", "lm_head"}
    assert names.lists == {"model.layers"}  # the Sequential in a block is not listed
    assert names.copied == {"model.rotary_emb"}
    assert names.shared == ()


class Constant(nn.Module):
    """A tensor in its code, which the capture turns into a buffer, and a parameter that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * torch.tensor([1.0, 2.0, 3.0]))


def test_tensors_have_the_names_that_the_model_gives_them() -> None:
    names = names_of(Chain.from_module(Constant(), ["second"], (torch.zeros(1, 3),)))
    assert names.held is not None
    assert [layer.buffers for layer in names.held] == [(), ()]
    assert names.shared == (("first.weight", (0, 1)),)


def test_layers_of_a_sequential_are_named_by_its_children() -> None:
    chain = Chain.from_module(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), ["1"])
    held = names_of(chain).held
    assert held is not None
    assert held[0] == LayerModules(("0",), ("0.weight", "0.bias"))
    assert held[1].buffers == ("1.running_mean", "1.running_var", "1.num_batches_tracked")


def test_a_chain_written_by_hand_has_its_own_names_only() -> None:
    tied = nn.Linear(4, 4)
    chain = Chain([Layer("a", tied), Layer("b", nn.ReLU()), Layer("c", tied)])
    assert names_of(chain) == ModelNames(
        ("a", "b", "c"), (("a.weight", (0, 2)), ("a.bias", (0, 2))), held=None, copied=frozenset()
    )
