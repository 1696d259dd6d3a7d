"""A checkpoint gives the same weights and moments to layers that are split into any parts, and to whole layers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.detr.tiny import tiny_chain
from tests.rig.toy import toy_config
from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.layer import TensorPiece, parts_from_json, put_together, split_table
from varuna_capslog.model.splitting.chains import split_chain
from varuna_capslog.model.workload import load_workload
from varuna_capslog.training.checkpoint import Checkpoint, entry_of, open_checkpoint, write_whole
from varuna_capslog.training.layer_state import LayerState, model_state, scaler_state
from varuna_capslog.training.manifest import FORMAT
from varuna_capslog.training.run_setup import initialise
from varuna_capslog.training.stored_layers import from_checkpoint, load_chain, manifest_of_layers, to_checkpoint

HEADS = {"encoder.*": "tensor-2", "decoder.*": "tensor-4"}
ROWS = {"encoder.*": "sequence-3"}
WAYS = [{}, HEADS, ROWS]
SCALER = {"scale": 512.0, "streak": -2}
Stored = tuple[Checkpoint, dict[str, Tensor]]


@functools.cache
def _transformer() -> Chain:
    """Transformer layers of a DETR whose decoder layers share their heads."""
    chain = tiny_chain(heads="every_decoder")
    first = next(index for index, layer in enumerate(chain.layers) if layer.name == "encoder.0")
    return Chain(chain.layers[first:], ("memory", "valid"), chain.outputs)


def transformer(splits: Mapping[str, str]) -> Chain:
    chain = copy.deepcopy(_transformer())
    return split_chain(chain, splits, "close") if splits else chain


def written(folder: Path, chain: Chain) -> Checkpoint:
    """A checkpoint of the chain as it is, with drawn moments and a loss scale."""
    folder.mkdir()
    entries: dict[str, object] = {}
    drawn: dict[str, Tensor] = {}
    for index, layer in enumerate(chain.layers):
        state: LayerState = model_state(chain, index) | scaler_state(SCALER)
        for name, parameter in layer.module.named_parameters():
            address = chain.shared_names(index).get(name, f"{layer.name}.{name}")
            state[f"optimizer/{name}/exp_avg"] = drawn.setdefault(address, torch.randn_like(parameter))
            state[f"optimizer/{name}/step"] = torch.tensor(3.0)
            state[f"number/{name}/rate"] = torch.tensor(0.5, dtype=torch.float64)
        file = f"layer-{index:04d}.pt"
        write_whole(folder / file, to_checkpoint(state, chain, index))
        entries[layer.name] = {"file": file, **entry_of(folder / file)}
    manifest = {"format": FORMAT, "step": 3, "model": chain.name, **manifest_of_layers(chain), "layers": entries}
    files.write_json(folder / "manifest.json", manifest)
    return open_checkpoint(folder)


def whole_states(states: Mapping[str, LayerState], chain: Chain) -> dict[str, Tensor]:
    """Every tensor of the states by its key in the whole layers, put together from the parts of the chain."""
    tensors = {}
    table = split_table(chain.layers)
    for layer in chain.layers:
        if layer.part is None:
            kept = {key: tensor for key, tensor in states[layer.name].items() if not key.startswith("scaler/")}
            tensors |= {f"{layer.name}/{key}": tensor for key, tensor in kept.items()}
    for layer_name, rows in table.items():
        parts = [(pieces, states[part]) for part, pieces in parts_from_json(rows).items()]
        for kind in ("parameters", "buffers", "optimizer", "number"):
            keyed = [(_by_key(pieces, state, kind), state) for pieces, state in parts]
            tensors |= {f"{layer_name}/{key}": tensor for key, tensor in put_together(keyed).items()}
    return tensors


def _by_key(pieces: Mapping[str, TensorPiece], state: LayerState, kind: str) -> dict[str, TensorPiece]:
    """The keys of one kind in a part's state, each with its place in the state of the whole layer."""
    keyed = {}
    for key, tensor in state.items():
        name, _, suffix = key.removeprefix(f"{kind}/").partition("/")
        if key.startswith(f"{kind}/"):
            piece = pieces[name]
            whole_key = f"{kind}/{piece.name}" + (f"/{suffix}" if suffix else "")
            keyed[key] = TensorPiece(whole_key, piece.size, piece.dim, piece.ranges if tensor.dim() else ())
    return keyed


@pytest.fixture(scope="module", params=WAYS)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """A checkpoint of drawn weights in these parts, and all its states by their keys in the whole layers."""
    torch.manual_seed(5)
    chain = transformer(request.param)
    with torch.no_grad():
        for parameter in chain.named_parameters().values():
            parameter.normal_()
    checkpoint = written(tmp_path_factory.mktemp("stored") / "step-00000003", chain)
    states = {layer.name: from_checkpoint(checkpoint, chain, index) for index, layer in enumerate(chain.layers)}
    return checkpoint, whole_states(states, chain)


@pytest.mark.parametrize("target", WAYS)
def test_any_parts_read_what_any_parts_wrote(stored: Stored, target: dict[str, str]) -> None:
    checkpoint, expected = stored
    chain = transformer(target)
    theirs = {layer.name: from_checkpoint(checkpoint, chain, index) for index, layer in enumerate(chain.layers)}
    tensors = whole_states(theirs, chain)
    assert tensors.keys() == expected.keys()
    assert not [key for key, tensor in expected.items() if not torch.equal(tensor, tensors[key])]
    for index, layer in enumerate(chain.layers):
        assert theirs[layer.name].keys() >= model_state(chain, index).keys()
        assert {key: float(theirs[layer.name][f"scaler/{key}"]) for key in SCALER} == SCALER
    # and for prediction, on one device
    load_chain(checkpoint, chain)
    states = {layer.name: model_state(chain, index) for index, layer in enumerate(chain.layers)}
    weights = whole_states(states, chain)
    assert not [key for key, tensor in weights.items() if not torch.equal(tensor, expected[key])]


def test_running_statistics_of_parts_come_together(tmp_path: Path) -> None:
    def chain(splits: str) -> Chain:
        config = toy_config(
            tmp_path / "toy",
            ["model.blocks=2", *([f"splits={{'block.*': {splits}}}"] if splits else []), "numerics=close"],
        )
        torch.manual_seed(1)
        return load_workload(config).chosen_chain()

    plain = chain("")
    for layer in plain.layers:
        for buffer in layer.module.buffers():
            buffer.copy_(torch.rand_like(buffer.float()) * 9)
    checkpoint = written(tmp_path / "one", plain)
    halves, quarters = chain("tensor-2"), chain("tensor-4")
    assert [sum(layer.part is not None for layer in model.layers) for model in (plain, halves, quarters)] == [0, 6, 10]
    load_chain(checkpoint, halves)
    load_chain(written(tmp_path / "two", halves), quarters)
    back = chain("")
    load_chain(written(tmp_path / "three", quarters), back)
    expected = plain.named_tensors()
    assert not [
        address for address, tensor in back.named_tensors().items() if not torch.equal(tensor, expected[address])
    ]


@pytest.mark.parametrize("target", [HEADS, ROWS])
def test_parts_begin_from_a_run_of_whole_layers(tmp_path: Path, target: dict[str, str]) -> None:
    source = transformer({})
    with torch.no_grad():
        for parameter in source.named_parameters().values():
            parameter.normal_()
    written(tmp_path / "step-00000003", source)
    chain = transformer(target)
    workload = load_workload(toy_config(tmp_path / "toy", []))  # is asked for files of other programs alone
    assert initialise(chain, workload, tmp_path / "step-00000003", []) == []
    states = {layer.name: model_state(chain, index) for index, layer in enumerate(chain.layers)}
    expected = {layer.name: model_state(source, index) for index, layer in enumerate(source.layers)}
    tensors, expected_tensors = whole_states(states, chain), whole_states(expected, source)
    assert not [key for key, tensor in expected_tensors.items() if not torch.equal(tensor, tensors[key])]


def test_parts_begin_from_a_file_of_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, chain = transformer({}), transformer(HEADS)
    weights = {address: torch.randn_like(parameter) for address, parameter in source.named_parameters().items()}
    (tmp_path / "weights").touch()
    workload = load_workload(toy_config(tmp_path / "toy", []))
    monkeypatch.setattr(workload, "import_weights", lambda path: (weights, ["one that is not known"]), raising=True)
    assert initialise(chain, workload, tmp_path / "weights", []) == ["one that is not known"]
    states = {layer.name: model_state(chain, index) for index, layer in enumerate(chain.layers)}
    tensors = whole_states(states, chain)
    for address, value in weights.items():
        layer = max(
            (candidate.name for candidate in source.layers if address.startswith(f"{candidate.name}.")), key=len
        )
        assert torch.equal(tensors[f"{layer}/parameters/{address.removeprefix(f'{layer}.')}"], value)


def test_a_checkpoint_of_another_model_is_refused_by_the_name_that_it_lacks(tmp_path: Path) -> None:
    chain = transformer(HEADS)
    checkpoint = written(tmp_path / "step-00000003", chain)
    torch.manual_seed(0)
    wider = tiny_chain(feedforward=64)
    with pytest.raises(CapslogError, match=r"has no layer 'backbone\.stem'; it was written for another model"):
        from_checkpoint(checkpoint, wider, 0)
    first = next(index for index, layer in enumerate(wider.layers) if layer.name == "encoder.0")
    with pytest.raises(
        CapslogError, match=r"'encoder\.0\.linear1\.weight' has shape \[48, 32\], the model wants \[64, 32\]"
    ):
        from_checkpoint(checkpoint, wider, first)
