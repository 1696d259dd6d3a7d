"""Weights files of other programs: what is in them, or one sentence."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.state_file import read_state_file


def test_every_form_holds_the_same(tmp_path: Path) -> None:
    state = {"a.weight": torch.arange(6.0).view(2, 3), "a.count": torch.tensor(3)}
    torch.save(state, tmp_path / "bare.pth")
    torch.save({"model": state, "epoch": 3}, tmp_path / "more.pth")
    save_file(state, tmp_path / "file.safetensors")
    for name in ("bare.pth", "more.pth", "file.safetensors"):
        found = read_state_file(tmp_path / name)
        assert found.keys() == state.keys()
        assert all(torch.equal(found[key], value) for key, value in state.items())


def test_unusable_files_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CapslogError, match=r"nothing\.pth' cannot be read: No such file"):
        read_state_file(tmp_path / "nothing.pth")
    (tmp_path / "text.pth").write_text("hello")
    with pytest.raises(CapslogError, match=r"text\.pth'"):
        read_state_file(tmp_path / "text.pth")
    (tmp_path / "empty.pth").write_bytes(b"")
    with pytest.raises(CapslogError, match=r"empty\.pth'"):
        read_state_file(tmp_path / "empty.pth")
    torch.save({"model": {}, "args": argparse.Namespace(lr=1)}, tmp_path / "args.pth")
    with pytest.raises(CapslogError, match=r"args\.pth' is no torch file or holds more than tensors"):
        read_state_file(tmp_path / "args.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(CapslogError, match=r"list\.pth' holds no state dict"):
        read_state_file(tmp_path / "list.pth")
    save_file({"a": torch.zeros(100)}, tmp_path / "cut.safetensors")
    whole = (tmp_path / "cut.safetensors").read_bytes()
    for size in (0, 4, len(whole) // 2):
        (tmp_path / "cut.safetensors").write_bytes(whole[:size])
        with pytest.raises(CapslogError, match=r"cut\.safetensors' is no safetensors file, or it is cut off"):
            read_state_file(tmp_path / "cut.safetensors")
    with pytest.raises(CapslogError, match=r"none\.safetensors' cannot be read: "):
        read_state_file(tmp_path / "none.safetensors")
