"""Weights for other programs: read back by those programs, under the model's own names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.detr.tiny import tiny_chain
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.model_workload import ModelSection, ModelWorkload
from varuna_capslog.model.workload import Workload
from varuna_capslog.training.stored_layers import WholeChain, own_weights, write_weights


class Small(nn.Module):
    """Tied weights, blocks with dots in their names, a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("shift", torch.full((4,), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.emb(x) + self.shift
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden) @ self.emb.weight.t()


def made(model: nn.Module, **example: Tensor) -> tuple[ModelWorkload, Chain]:
    """Return the model's workload and its chain, whose weights differ from those with which the model begins."""
    settings = ModelSection(
        factory="a:model", inputs=[], cut_points=[name for name in CUTS if name in dict(model.named_modules())]
    )
    workload = ModelWorkload(settings, next(iter(example.values())).shape[0], made=lambda: (model, example))
    chain = workload.build_chain()
    torch.manual_seed(3)
    chain.begin_with({name: torch.rand_like(parameter) for name, parameter in chain.named_parameters().items()})
    return workload, chain


CUTS = ("blocks.1", "1", "transformer.h.1")


def small() -> tuple[ModelWorkload, Chain]:
    return made(Small(), x=torch.tensor([1, 2, 3]))


def read_safetensors(path: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(path)


def read_dcp(path: Path) -> Any:
    from torch.distributed import checkpoint

    model = Small().state_dict()
    checkpoint.load({"model": model}, checkpoint_id=path, no_dist=True)
    return model


@pytest.mark.parametrize(
    ("form", "read"),
    [
        ("safetensors", read_safetensors),
        ("torch", lambda path: torch.load(path, weights_only=True)["model"]),
        pytest.param("dcp", read_dcp, marks=pytest.mark.filterwarnings("ignore:torch.distributed is")),
    ],
)
def test_the_model_itself_takes_them(form: str, read: Any, tmp_path: Path) -> None:
    workload, chain = small()
    write_weights(workload, chain, tmp_path / "out", form)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    fresh = Small()
    fresh.load_state_dict(read(tmp_path / "out"))
    for layer in chain.layers:
        layer.module.eval()
    x = torch.tensor([4, 0, 2])
    assert torch.equal(fresh.eval()(x), WholeChain(chain)(x)[0])


def test_a_sequential_models_numbers_are_its_own(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.Linear(3, 2))
    workload, chain = made(model, input=torch.zeros(2, 3))
    assert own_weights(workload, chain).keys() == model.state_dict().keys()


def test_detr_has_facebooks_names_and_no_other_model_has(tmp_path: Path) -> None:
    from detr_pipeline.chain import to_reference
    from varuna_capslog.model.state_file import read_state_file

    chain = tiny_chain()

    class Detr(Workload):
        name = "detr"
        from detr_pipeline.task import DetrWorkload

        own_names = DetrWorkload.own_names
        build_chain = loss = profile_inputs = None  # type: ignore[assignment]

    write_weights(Detr(), chain, tmp_path / "detr.pth", "detr")
    weights = read_state_file(tmp_path / "detr.pth")
    assert weights.keys() == to_reference(chain).keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in to_reference(chain).items())
    with pytest.raises(CapslogError, match="the model 'a:model' is no DETR, whose original layout this form is"):
        write_weights(*small(), tmp_path / "other.pth", "detr")


def test_transformers_reads_a_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.tensor([[1, 5, 2]])
    workload, chain = made(model, input_ids=ids)
    write_weights(workload, chain, tmp_path / "gpt2", "hf")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "gpt2")
    weights = own_weights(workload, chain)
    state = again.state_dict()
    assert len(weights) > 20
    assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())
    with pytest.raises(CapslogError, match=r"is no Hugging Face model .it has no save_pretrained"):
        write_weights(*small(), tmp_path / "small", "hf")


def test_what_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CapslogError, match="unknown form of weights 'safetensor'; did you mean 'safetensors'"):
        write_weights(*small(), tmp_path / "out", "safetensor")
    (tmp_path / "out").touch()
    with pytest.raises(CapslogError, match="out is there already; name a new file, or remove it"):
        write_weights(*small(), tmp_path / "out", "torch")
    with pytest.raises(CapslogError, match="cannot be written: File exists"):
        write_weights(*small(), tmp_path / "out" / "x", "torch")
    if __import__("importlib.util").util.find_spec("onnxscript") is None:
        with pytest.raises(CapslogError, match="this form needs the package onnx"):
            write_weights(*small(), tmp_path / "new", "onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
