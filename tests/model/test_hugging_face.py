"""Hugging Face models from a local folder: the same modules as transformers builds, without weights; and mistakes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.hugging_face import model

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 16, "dtype": "bfloat16", **SMALL}
FAMILIES = {
    "LlamaForCausalLM": (LLAMA, {"input_ids": (1, 1024), "labels": (1, 1024)}),
    "BertForMaskedLM": (
        {"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 16, **SMALL},
        {"input_ids": (1, 512), "labels": (1, 512)},
    ),
    "ViTForImageClassification": (
        {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 32, **SMALL},
        {"pixel_values": (1, 3, 32, 32), "labels": (1,)},
    ),
    "T5ForConditionalGeneration": (
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 8, "num_layers": 1},
        {"input_ids": (1, 1024), "labels": (1, 1024)},
    ),
    "LlamaModel": (LLAMA | {"architectures": ["LlamaModel"]}, {"input_ids": (1, 1024)}),
}


def folder(tmp_path: Path, config: object) -> str:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_architecture_of_the_config_without_memory(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config, shapes = FAMILIES[name]
    made, example = model(folder(tmp_path, config))
    assert type(made).__name__ == name
    assert all(parameter.is_meta for parameter in made.parameters())
    assert {key: tuple(tensor.shape) for key, tensor in example.items()} == shapes
    reference = getattr(transformers, name)(transformers.AutoConfig.from_pretrained(tmp_path))
    assert {key: tensor.shape for key, tensor in made.state_dict().items()} == {
        key: tensor.shape for key, tensor in reference.state_dict().items()
    }


def test_what_a_model_that_is_served_takes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = folder(tmp_path, LLAMA)
    made, example = model(path, sequence=40, trains=False, num_hidden_layers=1)
    assert (len(made.model.layers), str(made.dtype)) == (1, "torch.bfloat16")  # as in the config
    assert example.pop("logits_to_keep") == 1
    assert {key: tuple(value.shape) for key, value in example.items()} == {"input_ids": (1, 40)}
    assert str(model(path, dtype="float32")[0].dtype) == "torch.float32"


def test_mistakes_are_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CapslogError, match="nowhere is no folder; give the local folder of a Hugging Face model"):
        model("nowhere")
    with pytest.raises(CapslogError, match=r"holds no config.json"):
        model(str(tmp_path))
    path = folder(tmp_path, LLAMA)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "transformers", None)
        with pytest.raises(CapslogError, match=r"--hf needs the module 'transformers'.*'varuna-capslog\[hf\]'"):
            model(path)
    pytest.importorskip("transformers")
    with pytest.raises(CapslogError, match=r"--sequence is 4000, but the model in .* takes 2048 tokens"):
        model(path, sequence=4000)
    with pytest.raises(CapslogError, match=r"--model-arg depth: config.json of a llama has no such key"):
        model(path, depth=3)
    with pytest.raises(CapslogError, match="--model-arg hidden_size='wide': transformers refuses it"):
        model(path, hidden_size="wide")
    with pytest.raises(CapslogError, match="transformers cannot build the model"):
        model(path, hidden_act="nothing")
    for text in ("{", json.dumps({"model_type": "nothing"}), json.dumps({"auto_map": {"AutoConfig": "own.Config"}})):
        with pytest.raises(CapslogError, match=r"transformers cannot read config.json \(.+\)$"):
            model(folder(tmp_path, text))
    resnet = {"model_type": "resnet", "architectures": ["ResNetForImageClassification"]}
    with pytest.raises(CapslogError, match=r"config.json has no image_size; give the pictures with --input"):
        model(folder(tmp_path, resnet))
    assert model(str(tmp_path), example=False)[1] == {}
    with pytest.raises(
        CapslogError, match=r"no Auto class of transformers [\d.]+ makes ResNetForNothing, which config"
    ):
        model(folder(tmp_path, resnet | {"architectures": ["ResNetForNothing"]}))
