"""Files of tokens and texts as sequences of equal length."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.own_data import TextFile, TokenFile, write_text


def test_the_samples_of_two_parts_are_the_text_in_order(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("Grüße, " * 20, encoding="utf-8")
    data = path.read_bytes()
    first, last = (TextFile(path, 8, part) for part in ((0, 0.5), (0.5, 1)))
    half = len(data) // 2
    for part, content in ((first, data[:half]), (last, data[half:])):
        samples = [bytes(part[index]["input_ids"].tolist()) for index in range(len(part))]
        assert samples == [content[at : at + 8] for at in range(0, len(content) - 7, 8)]
    again = pickle.loads(pickle.dumps(first))
    assert torch.equal(again[1]["labels"], first[1]["input_ids"])
    assert first[0]["input_ids"].dtype == torch.int64
    with pytest.raises(IndexError):
        first[len(first)]


def test_shifted_labels_are_the_next_tokens(tmp_path: Path) -> None:
    np.arange(300, 331, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    data = TokenFile(tmp_path / "tokens.bin", 10, shifted=True)
    assert len(data) == 3
    assert data[2]["input_ids"].tolist() == list(range(320, 330))
    assert data[2]["labels"].tolist() == list(range(321, 331))


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        ("", {}, r"book.txt is empty; a sample needs 8"),
        ("abc", {}, r"book.txt has 3 tokens, of which this part holds not one sample; a sample needs 8"),
        ("abc" * 9, {"part": (0.5, 0.5)}, r"two rising fractions"),
        (None, {}, r"book.txt cannot be read: No such file"),
    ],
)
def test_a_file_without_a_sample_is_refused(
    tmp_path: Path, text: str | None, options: dict[str, Any], sentence: str
) -> None:
    if text is not None:
        (tmp_path / "book.txt").write_text(text)
    with pytest.raises(CapslogError, match=sentence):
        TextFile(tmp_path / "book.txt", 8, **options)


class Successor(nn.Module):
    """Says that the next byte is one more than the last."""

    def forward(self, tokens: Tensor) -> SimpleNamespace:
        assert tokens.shape[1] <= 3
        return SimpleNamespace(logits=50.0 * nn.functional.one_hot((tokens + 1) % 256, 256).float())


def test_text_goes_on_as_the_model_says() -> None:
    assert write_text(Successor(), "ab", 5, context=3) == "abcdefg"
    assert write_text(Successor(), "x", 2, context=3, temperature=0) == "xyz"
