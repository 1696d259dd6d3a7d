"""A model is captured once; other processes read the capture, which is the same to the last bit or is made anew."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from varuna_capslog.model.capture import Kept, exporting
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.sources import code_digest
from varuna_capslog.profiling.cache import model_digest


class Mixed(nn.Module):
    """A model with everything that a capture can hold: modules that run as they are, operations, a constant, a region,
    tied weights, modes.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, 16, batch_first=True) for _ in range(2))
        self.width = width
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(tokens) * torch.tensor([0.5, 2.0]).repeat(self.width // 2)
        with torch.no_grad():
            shift = hidden.mean(-1, keepdim=True)
        for block in self.blocks:
            hidden = nn.functional.dropout(block(hidden) - shift, 0.5, self.training)
        return {"scores": self.head(hidden)[:, 1:], "hidden": hidden}


TOKENS = torch.arange(10).view(2, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the capture of Mixed in both modes, and in training mode alone."""
    kept = Kept(tmp_path_factory.mktemp("run") / "captured")
    kept.writes = True
    chain(kept)
    return kept._folder


def chain(kept: Kept | None, evaluates: bool = True, width: int = 8) -> Chain:
    torch.manual_seed(0)
    return Chain.from_module(Mixed(width), None, [TOKENS], evaluates=evaluates, kept=kept)


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Return the list of exported models."""
    models: list[nn.Module] = []
    export = exporting.export_model

    def counted(model: nn.Module, *arguments: Any) -> Any:
        models.append(model)
        return export(model, *arguments)

    monkeypatch.setattr(exporting, "export_model", counted)
    return models


def step(made: Chain, training: bool) -> list[Tensor]:
    """Return outputs of a chain and its parameters' gradients."""
    for layer in made.layers:
        layer.module.train(training)
    torch.manual_seed(1)
    outputs = made.run({"tokens": TOKENS})
    parameters = list(made.named_parameters().values())
    gradients = torch.autograd.grad(sum(value.square().sum() for value in outputs.values()), parameters)
    return [*outputs.values(), *gradients]


@pytest.mark.parametrize("evaluates", [True, False])
def test_a_kept_capture_is_the_captured_model_to_the_last_bit(
    folder: Path, exports: list[nn.Module], evaluates: bool
) -> None:
    read = chain(Kept(folder), evaluates)
    assert not exports
    made = chain(None, evaluates)
    assert len(exports) == 1 + evaluates
    assert [layer.name for layer in read.layers] == [layer.name for layer in made.layers]
    assert [shared.uses for shared in read.shared] == [shared.uses for shared in made.shared] != []
    assert list(read.named_tensors()) == list(made.named_tensors())
    workload: Any = SimpleNamespace(costs_depend_on=tuple)
    assert model_digest(workload, read) == model_digest(workload, made)
    dtypes = [[layer.module.guard.dtypes for layer in mixed.layers] for mixed in (read, made)]  # type: ignore[union-attr]
    assert dtypes[0] == dtypes[1] != [()] * len(made.layers)
    for training in (True, False)[: 1 + evaluates]:
        pairs = zip(step(read, training), step(made, training), strict=True)
        assert all(torch.equal(actual, expected) for actual, expected in pairs)


def flipped(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b"scores", b"scared"))


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-50])


@pytest.mark.parametrize("damage", [flipped, truncated, lambda path: path.write_bytes(b""), Path.unlink])
def test_a_damaged_or_missing_capture_is_made_anew_and_one_line_says_so(
    folder: Path,
    tmp_path: Path,
    exports: list[nn.Module],
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
        damage(tmp_path / path.name)
    with caplog.at_level(logging.WARNING):
        made = chain(Kept(tmp_path))
    assert len(exports) == 2
    assert made.outputs == ("scores", "hidden")
    [line] = caplog.messages
    assert "captured here" in line


def test_another_model_or_another_shape_has_a_capture_of_its_own(folder: Path, exports: list[nn.Module]) -> None:
    chain(Kept(folder), width=16)
    assert len(exports) == 2
    Chain.from_module(Mixed(), None, [TOKENS[:, :4]], kept=Kept(folder))
    Chain.from_module(Mixed(), ["blocks.1"], [TOKENS], kept=Kept(folder))
    assert len(exports) == 6


def test_a_change_in_a_file_that_the_models_file_imports_captures_anew(
    tmp_path: Path, exports: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class's own file stays as it is; only a helper of the user changes the forward."""
    (tmp_path / "kept_model.py").write_text(
        "import kept_helper\nfrom torch import nn\n\n\nclass Model(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])\n\n"
        "    def forward(self, x):\n        return kept_helper.scaled(self.blocks[1](self.blocks[0](x)))\n"
    )
    helper = tmp_path / "kept_helper.py"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for factor, total in ((2, 2), (2, 2), (3, 4)):
        helper.write_text(f"def scaled(x):\n    return x * {factor}.0\n")
        for name in ("kept_model", "kept_helper"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        kept = Kept(tmp_path / "captured")
        kept.writes = True
        made = Chain.from_module(importlib.import_module("kept_model").Model(), None, [torch.ones(2, 2)], kept=kept)
        assert len(exports) == total
        model = [layer.module for layer in made.layers]
        assert torch.equal(made.run({"x": torch.zeros(2, 2)})["output"], _plain(model, factor))
    for name in ("kept_model", "kept_helper"):
        sys.modules.pop(name, None)


def test_code_that_was_compiled_has_the_digest_that_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile puts what a backend returns into the user's module, so that other processes captured anew."""
    (tmp_path / "compiled_model.py").write_text(
        "from torch import nn\n\n\nclass Model(nn.Module):\n    def forward(self, x):\n        return x * 2\n"
    )
    (tmp_path / "compiled_backend.py").write_text(
        "def backend(graph, inputs):\n    def run(*tensors):\n        return graph(*tensors)\n\n    return run\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("compiled_model")
    names, before = set(vars(module)), code_digest({module.Model}, ())
    torch.compile(module.Model(), backend=importlib.import_module("compiled_backend").backend)(torch.ones(2))
    assert set(vars(module)) > names
    assert code_digest({module.Model}, ()) == before
    for name in ("compiled_model", "compiled_backend"):
        sys.modules.pop(name, None)


def _plain(model: list[nn.Module], factor: int) -> Tensor:
    (first, first_bias), (second, second_bias) = [list(module.parameters()) for module in model]
    return ((torch.zeros(2, 2) @ first.T + first_bias) @ second.T + second_bias) * factor
