"""Hugging Face models from a local folder: the same modules as transformers builds, without weights; and mistakes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.chain import Chain
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


TOWER = {**SMALL, "image_size": 16, "patch_size": 4, "model_type": "siglip_vision_model"}
TOWERS: dict[str, tuple[dict[str, object], dict[str, tuple[int, ...]]]] = {
    "pictures and words": (
        {
            "model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full", "vision_config": TOWER, "image_token_index": 3,
            "text_config": {"model_type": "llama", "vocab_size": 16, **SMALL},
        },
        {"input_ids": (1, 8), "pixel_values": (1, 3, 16, 16), "labels": (1, 8)},
    ),
    "sound": (
        {
            "model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "d_model": 16,
            "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
            "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_mel_bins": 8, "max_source_positions": 10,
        },
        {"input_features": (1, 8, 20), "decoder_input_ids": (1, 8)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", TOWERS)
def test_every_tower_has_inputs_and_layers(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a model with a tower tokens alone were made, so that the tower was left out without a word; hooks that its
    code adds while it runs were added again by every export, and a cache of the model inside was returned.
    """
    pytest.importorskip("transformers")
    config, shapes = TOWERS[kind]
    made, example = model(folder(tmp_path, config), sequence=8)
    assert {key: tuple(tensor.shape) for key, tensor in example.items()} == shapes
    hooks = sum(len(part._forward_hooks) for part in made.modules())
    chain = Chain.from_module(made, None, example)
    assert sum(len(part._forward_hooks) for part in made.modules()) == hooks
    assert {id(parameter) for parameter in chain.named_parameters().values()} == set(map(id, made.parameters()))
    assert "in no operation" not in caplog.text
    if kind == "sound":
        return
    layers = [layer.name for layer in chain.layers]
    assert any("vision_tower" in name for name in layers)
    Chain.from_module(made, None, {"input_ids": example["input_ids"]}, evaluates=False)
    assert "vision_tower" in caplog.text  # named, since nothing of it runs
    assert "are in no operation on these inputs" in caplog.text


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
