"""torchtitan and AutoModel keep the listed modules of each part: the parts one behind the other are the model."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.planning.export.models import CausalLM, detr_names, made, names, plan_of, stages_of_blocks
from tests.planning.export.readers import automodel_part, torchtitan_part
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.names import names_of
from varuna_capslog.planning.export import automodel, torchtitan
from varuna_capslog.plans.parts import Units
from varuna_capslog.plans.plan import Plan, stages_of_pipelines

CUTS = [(0,), (0, 3), (0, 2, 4), (0, 1, 2, 5)]


def blocks_in(part: nn.Module) -> list[int]:
    """Return the blocks that the part holds, recognised by the values of one parameter of the whole model."""
    key_of_value = {float(tensor.flatten()[0]): key for key, tensor in made("titan")[0].state_dict().items()}
    key_of_value |= {float(tensor.flatten()[0]): key for key, tensor in made("decoder")[0].state_dict().items()}
    block_keys = {
        key_of_value[float(tensor.flatten()[0])] for key, tensor in part.state_dict().items() if "attention.bias" in key
    }
    return sorted(int(key.split("layers.")[1].split(".")[0]) for key in block_keys)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(
    ("name", "export", "part_of"), [("titan", torchtitan, torchtitan_part), ("decoder", automodel, automodel_part)]
)
def test_the_parts_are_the_plans_stages(
    name: str, export: Callable[..., str], part_of: Callable[..., nn.Module], cuts: tuple[int, ...]
) -> None:
    model, inputs, _ = made(name)
    parts = json.loads(export(plan_of(*cuts), names(name)))
    built = [part_of(model, listed) for listed in parts]
    assert [blocks_in(part) for part in built] == stages_of_blocks(cuts)
    x = inputs["x"]
    for part in built:
        x = part(x)
    assert torch.equal(x, model(inputs["x"]))
    assert name != "titan" or all("rotary_emb" in listed for listed in parts)
    assert sum(len(part.state_dict()) for part in built) == len(model.state_dict())


def test_a_hugging_face_decoder_gets_torchtitans_names() -> None:
    assert automodel(plan_of(0, 2), names("decoder"), "layers.*") == automodel(plan_of(0, 2), names("decoder"))
    text = torchtitan(plan_of(0, 2, 4), names("decoder"))
    assert json.loads(text) == [
        ["tok_embeddings", "layers.0", "rotary_emb"],
        ["layers.1", "layers.2", "rotary_emb"],
        ["layers.3", "norm", "lm_head", "rotary_emb"],
    ]
    assert text.count("\n") == 3  # one line for each part
    stages = stages_of_pipelines(6, [0, 2, 3, 4], 1, 1, [0, 1, 0, 1])
    looped = Plan(6, stages, Units(2, 1, 1), "interleaved")
    assert [len(part) for part in json.loads(torchtitan(looped, names("decoder")))] == [3, 2, 2, 4]


class Positions(CausalLM):
    """Language model with a parameter that belongs to no submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.model(x) * self.scale)


class Convolutions(nn.Module):
    """Model whose blocks are Sequentials, which torchtitan keeps or drops as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


def test_torchtitan_keeps_sequentials_whole() -> None:
    model, x = Convolutions(), torch.randn(1, 4)
    chain = Chain.from_module(model, None, (x,))
    assert [layer.name for layer in chain.layers] == ["one.0", "one.1", "two.0", "two.1"]
    parts = json.loads(torchtitan(plan_of(0, 2, layers=4), names_of(chain)))
    assert parts == [["one"], ["two"]]
    assert [list(torchtitan_part(model, listed).state_dict()) for listed in parts] == [
        [f"{name}.{n}.{kind}" for n in (0, 1) for kind in ("weight", "bias")] for name in ("one", "two")
    ]
    with pytest.raises(CapslogError, match=r"a cut lies inside 'two', but torchtitan"):
        torchtitan(plan_of(0, 3, layers=4), names_of(chain))


def test_what_they_keep_whole_is_not_cut() -> None:
    with pytest.raises(CapslogError, match=r"a cut lies inside 'transformer', but torchtitan splits only between"):
        torchtitan(plan_of(0, 3), names("gpt2"))
    with pytest.raises(CapslogError, match=r"a cut lies inside 'vit', but torchtitan"):
        torchtitan(plan_of(0, 3), names("vit"))
    for model, pattern in (("gpt2", r"transformer\.h\.\*"), ("vit", r"vit\.layers\.\*")):
        with pytest.raises(CapslogError, match=rf"blocks are '{pattern}', but NeMo AutoModel splits Hugging"):
            automodel(plan_of(0, 3), names(model))
    with pytest.raises(CapslogError, match=r"'transformer\.wte\.weight' is used by stages \[0, 1\]"):
        torchtitan(plan_of(0, 3), names("tied gpt2"))
    for write in (torchtitan, automodel):
        with pytest.raises(CapslogError, match=r"speaks of the model's modules.*--model PACKAGE\.MODULE:FUNCTION"):
            write(plan_of(0, 5, layers=len(detr_names().layers)), detr_names())
    chain = Chain.from_module(Positions(), None, made("decoder")[1])
    for write in (torchtitan, automodel):
        with pytest.raises(CapslogError, match=r"'scale' \(stage 1\): .*may keep an untrained copy; put it into"):
            write(plan_of(0, 3, layers=len(chain)), names_of(chain))
        assert len(json.loads(write(plan_of(0, layers=len(chain)), names_of(chain)))) == 1  # no copies in one stage
