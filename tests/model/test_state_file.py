"""Weights files of other programs: their contents, or a one-sentence error."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.state_file import read_state_file
from varuna_capslog.training.checkpoint import read_file


def test_every_form_holds_the_same(tmp_path: Path) -> None:
    state = {"a.weight": torch.arange(6.0).view(2, 3), "a.count": torch.tensor(3)}
    torch.save(state, tmp_path / "bare.pth")
    torch.save({"model": state, "epoch": 3}, tmp_path / "more.pth")
    save_file(state, tmp_path / "file.safetensors")
    for name in ("bare.pth", "more.pth", "file.safetensors"):
        tensors = read_state_file(tmp_path / name)
        assert tensors.keys() == state.keys()
        assert all(torch.equal(tensors[key], tensor) for key, tensor in state.items())


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
    content = (tmp_path / "cut.safetensors").read_bytes()
    for size in (0, 4, len(content) // 2):
        (tmp_path / "cut.safetensors").write_bytes(content[:size])
        with pytest.raises(CapslogError, match=r"cut\.safetensors' is no safetensors file, or it is cut off"):
            read_state_file(tmp_path / "cut.safetensors")
    with pytest.raises(CapslogError, match=r"none\.safetensors' cannot be read: "):
        read_state_file(tmp_path / "none.safetensors")


def deflated(path: Path, size: int) -> None:
    """Write a file of torch.save, repacked by a program that compresses."""
    torch.save({"model": {"a": torch.zeros(size)}}, path)
    with zipfile.ZipFile(path) as archive:
        members = {member.filename: archive.read(member) for member in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def test_no_file_takes_more_memory_than_it_has_bytes(tmp_path: Path) -> None:
    """A weights file of 400 kB became a tensor of 400 MiB."""
    deflated(tmp_path / "small.pt", 1_000_000)
    assert (tmp_path / "small.pt").stat().st_size < 10_000
    with pytest.raises(CapslogError, match=r"unpacks to 3\.81 MiB from .* KiB, but torch\.save does not compress"):
        read_state_file(tmp_path / "small.pt")
    with pytest.raises(CapslogError, match=r"small\.pt: cannot be read \(it unpacks to .*; resume from another"):
        read_file(tmp_path / "small.pt", "resume from another")


@pytest.mark.parametrize("legacy", [True, False])
def test_a_tensor_larger_than_its_file_is_refused(tmp_path: Path, legacy: bool) -> None:
    """The file claims more elements than it has; the older format allocates the memory before it reads."""
    torch.save({"a": torch.zeros(4)}, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    count = (1 << 31) - 1
    with contextlib.suppress(zipfile.BadZipFile):
        with zipfile.ZipFile(tmp_path / "a.pt") as archive:
            members = {member.filename: archive.read(member) for member in archive.infolist()}
        with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
            for name, content in members.items():
                archive.writestr(name, claiming(content, count))
    if legacy:
        (tmp_path / "a.pt").write_bytes(claiming((tmp_path / "a.pt").read_bytes(), count))
    with pytest.raises(CapslogError, match=r"a\.pt' is no torch file"):
        read_state_file(tmp_path / "a.pt")


def claiming(content: bytes, count: int) -> bytes:
    """Return a pickle whose storage of 4 elements claims to have `count`."""
    return content.replace(b"cpuq\x06K\x04", b"cpuq\x06J" + count.to_bytes(4, "little"))


@pytest.mark.parametrize(
    ("header", "length"),
    [
        ({}, 1 << 60),
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 40]}}, None),
        ({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 16]}}, None),
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
          "b": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, None),
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [-4, 12]}}, None),
    ],
    ids=str.split("header beyond shape overlap negative"),
)  # fmt: skip
def test_safetensors_that_leave_their_file_are_refused(tmp_path: Path, header: object, length: int | None) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes((length or len(text)).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(CapslogError, match=r"a\.safetensors' is no safetensors file"):
        read_state_file(tmp_path / "a.safetensors")


def test_a_pipe_is_no_weights_file(tmp_path: Path) -> None:
    for name in ("a.pt", "a.safetensors"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(CapslogError, match=rf"{name}'.* is no "):
            read_state_file(tmp_path / name)
