"""A device map puts every tensor of the model where its stage runs."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

from tests.planning.export.models import BLOCKS, detr_names, made, named, names, plan_of
from tests.planning.export.readers import device_of_tensors
from tests.sweeps import crossed
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.names import LayerModules
from varuna_capslog.planning.export import device_map
from varuna_capslog.plans.parts import Units
from varuna_capslog.plans.plan import Plan, stages_of_pipelines

BEHIND = ("ln_f", "lm_head", "layernorm", "classifier", "norm")


def layer_of(tensor: str) -> int:
    """Return a tensor's layer by its name: block k is layer k + 1, modules behind the blocks are the last layer."""
    pieces = tensor.split(".")
    number = next((int(piece) for piece in pieces if piece.isdigit()), None)
    if number is not None:
        return number + 1
    return BLOCKS + 1 if any(piece in BEHIND for piece in pieces) else 0


@pytest.mark.parametrize(
    ("model", "cuts"), crossed(["gpt2", "vit", "decoder", "titan"], [(0,), (0, 3), (0, 2, 4), (0, 1, 5)])
)
def test_every_tensor_is_on_the_device_of_its_stage(model: str, cuts: tuple[int, ...]) -> None:
    devices = device_of_tensors(made(model)[0], json.loads(device_map(plan_of(*cuts), names(model))))
    for tensor, device in devices.items():
        assert device == sum(layer_of(tensor) >= cut for cut in cuts) - 1, tensor


def test_stages_of_one_rank_and_tied_parameters() -> None:
    stages = stages_of_pipelines(6, [0, 2, 3, 5], 1, 1, [0, 1, 0, 1])
    looped = json.loads(device_map(Plan(6, stages, Units(2, 1, 1), "interleaved"), names("gpt2")))
    assert looped["transformer.h.1"] == 1
    assert looped["transformer.h.2"] == looped["transformer.h.3"] == looped["transformer.wte"] == 0
    with pytest.raises(CapslogError, match=r"wte\.weight' is used on ranks \[0, 1\], but accelerate wants tied"):
        device_map(plan_of(0, 3), names("tied gpt2"))
    stages = stages_of_pipelines(6, [0, 2], 1, 1, [3, 3])
    on_one = json.loads(device_map(Plan(6, stages, Units(2, 1, 1), "1f1b"), names("tied gpt2")))
    assert on_one == {"transformer": 3, "lm_head": 3}


def held(*parameters: str) -> LayerModules:
    return LayerModules(tuple(parameter.rpartition(".")[0] for parameter in parameters), parameters)


def test_modules_whose_own_code_needs_one_device_are_not_split() -> None:
    block = named("h.0", "h.0_2", held=(held("h.0.attn.weight"), held("h.0.mlp.1.weight")))
    with pytest.raises(CapslogError, match=r"'h\.0' lies on ranks \[0, 1\], but its own code needs all of it"):
        device_map(plan_of(0, 1, layers=2), block)
    plain = named("a", "b", held=(held("top.a.weight"), held("top.b.weight")))
    with pytest.raises(CapslogError, match=r"'top' lies on ranks \[0, 1\]"):
        device_map(plan_of(0, 1, layers=2), plain)
    owner = named("h.0", "h.1", held=(held("top.h.0.weight", "top.token"), held("top.h.1.weight")))
    with pytest.raises(CapslogError, match=r"the tensor 'token' belongs to the module 'top', which lies on ranks"):
        device_map(plan_of(0, 1, layers=2), owner)
    root = named("h.0", "h.1", held=(held("h.0.weight", "token"), held("h.1.weight")))
    with pytest.raises(CapslogError, match=r"the tensor 'token' belongs to the model itself"):
        device_map(plan_of(0, 1, layers=2), root)
    assert json.loads(device_map(plan_of(0, layers=2), root)) == {"": 0}
    frozen = named("h.0", "h.1", held=(held("h.0.weight"), LayerModules(("norm",), (), ("norm.mean",))))
    assert json.loads(device_map(plan_of(0, 1, layers=2), frozen)) == {"h.0": 0, "norm": 1}
    lists = named("f.0.0", "f.0.1", held=(held("f.0.0.weight"), held("f.0.1.weight")))
    assert json.loads(device_map(plan_of(0, 1, layers=2), lists)) == {"f.0.0": 0, "f.0.1": 1}
    with pytest.raises(CapslogError, match="a device map speaks of the model's modules"):
        device_map(plan_of(0, 5, layers=len(detr_names().layers)), detr_names())


def test_accelerate_itself_takes_the_map() -> None:
    reason = "accelerate is not installed; docs/export.md says with which version the maps were tried by hand"
    accelerate = pytest.importorskip("accelerate", reason=reason)
    for name in ("gpt2", "vit", "decoder"):
        model, inputs, _ = made(name)
        devices = json.loads(device_map(plan_of(0, 2, 4), names(name)))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of keys that are no modules
            accelerate.utils.check_device_map(model, devices)
        cpu = torch.device("cpu")
        dispatched = accelerate.dispatch_model(model, dict.fromkeys(devices, cpu), main_device=cpu, force_hooks=True)
        assert all(hasattr(dispatched.get_submodule(key), "_hf_hook") for key in devices if key != "model.rotary_emb")
        dispatched(**inputs)
        accelerate.hooks.remove_hook_from_module(model, recurse=True)
