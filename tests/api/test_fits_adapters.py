"""`capslog.fits` with the adapters of peft: what is trained, and bytes by a count by hand."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import varuna_capslog as capslog
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.hugging_face import model

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")  # nor imported by others

WIDTH, INNER, WORDS, LAYERS, RANK = 256, 512, 512, 2, 8
LINEAR = [(WIDTH, WIDTH), (WIDTH, WIDTH // 2), (WIDTH, WIDTH // 2), (WIDTH, WIDTH)]
LINEAR += [(WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH)]
"""Numbers that each linear layer of a block takes and gives: q, k, v, o, gate, up, down."""
ADAPTERS = LAYERS * sum(RANK * (takes + gives) for takes, gives in LINEAR)
BASE = LAYERS * sum(takes * gives for takes, gives in LINEAR)
OTHERS = 2 * WORDS * WIDTH + (2 * LAYERS + 1) * WIDTH
"""Embedding, head and norms."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": WORDS,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_adapters_alone_are_trained() -> None:
    made, _ = model(".", lora=RANK)
    trained = {name for name, parameter in made.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in made.named_parameters() if "lora_" in name}
    assert sum(parameter.numel() for parameter in made.parameters() if parameter.requires_grad) == ADAPTERS


@pytest.mark.parametrize(
    ("base", "weight_bytes"),
    [
        (None, 4 * (BASE + OTHERS)),
        ("4bit", BASE // 2 + 4 * BASE // 64 + 64 * 7 * LAYERS + 2 * OTHERS),
        ("8bit", BASE + 4 * LAYERS * sum(gives for _, gives in LINEAR) + 2 * OTHERS),
    ],
)
def test_gradients_and_moments_are_those_of_the_adapters(base: str | None, weight_bytes: int) -> None:
    """Beside few bits the other weights have 16, and adapters always 32."""
    settings: dict[str, Any] = {"model.arguments.lora": RANK, "train.microbatch_size": 1}
    settings |= {} if base is None else {"model.arguments.base": base}
    fit = capslog.fits(str(Path.cwd()), devices="1x rtx4090", settings=settings)
    held = fit.kinds
    assert held["weights"] == pytest.approx(weight_bytes + 4 * ADAPTERS, rel=1e-3)
    assert held["gradients"] == pytest.approx(4 * ADAPTERS, rel=0.03)
    assert held["optimizer states"] == pytest.approx(8 * ADAPTERS, rel=0.03)
    assert sum(held.values()) == fit.memory.peaks[0]
    assert f"adapters of rank {RANK} in float32" in str(fit)
    assert base is None or f"linear layers in {base}" in str(fit)


def test_few_bits_without_adapters_and_unknown_forms_are_refused() -> None:
    with pytest.raises(CapslogError, match="--base 4bit holds the weights below adapters in few bits; give their rank"):
        model(".", base="4bit")
    with pytest.raises(CapslogError, match="--base"):
        model(".", lora=RANK, base="3bit")
