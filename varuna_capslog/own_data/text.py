"""Texts and files of tokens as data sets of sequences, and text that a trained language model goes on with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from varuna_capslog.base.errors import CapslogError

__all__ = ["TextFile", "TokenFile", "write_text"]

_TYPES = ("uint8", "uint16", "uint32", "int32", "int64")


class TokenFile(Dataset[dict[str, Tensor]]):
    """Sequences of equal length, one behind the other, of a file that holds nothing but token numbers.

    A sample is {"input_ids": int64[length], "labels": int64[length]}. The file is mapped into memory, not read.

    Args:
        path: raw numbers, as `array.tofile` writes them.
        length: tokens of a sample; tokens that do not fill a last one are left out.
        part: where the samples lie in the file, as fractions of it: (0, 0.9) is all but the last tenth.
        dtype: of the numbers: uint8, uint16, uint32, int32 or int64.
        shifted: the labels are the tokens after each one, for models whose loss compares place by place. Models of
            transformers shift the labels themselves.

    Raises:
        CapslogError: no such file, or not one sample in it.
    """

    def __init__(
        self,
        path: str | Path,
        length: int,
        part: Sequence[float] = (0.0, 1.0),
        dtype: str = "uint16",
        shifted: bool = False,
    ) -> None:
        self.path, self.length, self.dtype, self.shifted = Path(path), length, dtype, shifted
        if dtype not in _TYPES:
            raise CapslogError(f"the dtype {dtype!r} is not one of {', '.join(_TYPES)}")
        first, last = part
        if not 0 <= first < last <= 1 or length < 1:
            raise CapslogError(f"part={list(part)} and length={length}: give two rising fractions and a length above 0")
        try:
            count = self.path.stat().st_size // np.dtype(dtype).itemsize
        except OSError as error:
            raise CapslogError(f"{path} cannot be read: {error.strerror}; check the path") from error
        self._first = int(count * first)
        self._count = (int(count * last) - self._first - int(shifted)) // length
        if self._count < 1:
            problem = "is empty" if count == 0 else f"has {count} tokens, of which this part holds not one sample"
            raise CapslogError(f"{path} {problem}; a sample needs {length + int(shifted)}, so give a longer file")
        self._tokens: Any = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self._count:
            raise IndexError(index)
        if self._tokens is None:
            self._tokens = np.memmap(self.path, np.dtype(self.dtype), "r")
        at = self._first + index * self.length
        tokens = torch.from_numpy(self._tokens[at : at + self.length + int(self.shifted)].astype(np.int64))
        inputs = tokens[: self.length]
        return {"input_ids": inputs, "labels": tokens[1:] if self.shifted else inputs.clone()}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_tokens": None}  # another process maps the file itself


class TextFile(TokenFile):
    """A `TokenFile` of a text: its tokens are the bytes of UTF-8, so that a vocabulary has 256 entries."""

    def __init__(
        self, path: str | Path, length: int, part: Sequence[float] = (0.0, 1.0), shifted: bool = False
    ) -> None:
        super().__init__(path, length, part, "uint8", shifted)


def write_text(model: nn.Module, prompt: str, count: int, context: int, temperature: float = 0.8) -> str:
    """The prompt and its continuation by a language model over bytes.

    Args:
        model: takes int64[1, n] and returns scores [1, n, 256], or something with them as `logits`.
        count: bytes that are added.
        context: the most bytes that the model looks at.
        temperature: divisor of the scores before a byte is drawn; 0 takes the largest score.
    """
    tokens = list(prompt.encode())
    for _ in range(count):
        outputs = model(torch.tensor([tokens[-context:]]))
        scores = getattr(outputs, "logits", outputs)[0, -1].float()
        drawn = torch.multinomial(torch.softmax(scores / temperature, -1), 1) if temperature else scores.argmax()
        tokens.append(int(drawn))
    return bytes(tokens).decode("utf-8", "replace")
