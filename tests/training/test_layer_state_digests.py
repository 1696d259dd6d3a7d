"""A digest sees every change of a state, small tensors and large ones, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from varuna_capslog.training.layer_state import digest

ROW = 4096 * 8
"""Bytes of which one sum is made."""


def test_a_digest_sees_every_change() -> None:
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros((), dtype=torch.int64)}
    original = digest(state)
    assert digest({"b": state["b"], "a": state["a"].t().contiguous().t()}) == original
    changed = state["a"].clone()
    changed[1, 2] = torch.nextafter(changed[1, 2], torch.tensor(9.0))
    for different in (
        {"a": changed, "b": state["b"]},
        {"a": state["a"].reshape(3, 2), "b": state["b"]},
        {"a": state["a"].view(torch.int32), "b": state["b"]},
        {"c": state["a"], "b": state["b"]},
        {"a": state["a"]},
    ):
        assert digest(different) != original


@pytest.mark.parametrize("size", [ROW, 3 * ROW, 100 * ROW, 33 * ROW + 8, 40 * ROW + 5, ROW - 1])
def test_every_bit_of_a_large_tensor_counts(size: int) -> None:
    dice = torch.Generator().manual_seed(size)
    content = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=dice)
    original = digest({"x": content})
    places = [0, 7, 8, size // 2, size - 1, *torch.randint(0, size, (20,), generator=dice).tolist()]
    for place in places:
        for bit in (1, 128):
            content[place] ^= bit
            assert digest({"x": content}) != original, (place, bit)
            content[place] ^= bit
    assert digest({"x": content}) == original


def swapped(rows: Tensor, first: tuple[int, int], second: tuple[int, int]) -> Tensor:
    rows = rows.clone()
    rows[first], rows[second] = rows[second].clone(), rows[first].clone()
    return rows


def test_what_changes_places_is_seen() -> None:
    words = torch.randint(-(2**62), 2**62, (70, 4096), generator=torch.Generator().manual_seed(1))
    others = {
        "two words of a row": swapped(words, (3, 5), (3, 9)),
        "two words of a column": swapped(words, (3, 5), (40, 5)),
        "two words": swapped(words, (3, 5), (68, 9)),
        "two rows": words[[1, 0, *range(2, 70)]],
        "two columns": words[:, [1, 0, *range(2, 4096)]],
        "rows by one": words.roll(1, 0),
        "columns by one": words.roll(1, 1),
        "all by one": words.flatten().roll(1).view_as(words),
        "bytes by one": words.view(torch.uint8).flatten().roll(1).view(torch.int64).view_as(words),
    }
    digests = {name: digest({"x": permuted}) for name, permuted in others.items()}
    assert len({digest({"x": words}), *digests.values()}) == len(digests) + 1


def test_layout_and_place_in_memory_do_not_count() -> None:
    tensor = torch.randn(2 * ROW + 3, generator=torch.Generator().manual_seed(2)).half()
    part = tensor[3:]  # its memory begins at a byte that no word of 8 begins at
    assert part.storage_offset() * part.itemsize % 8
    assert digest({"x": part}) == digest({"x": part.clone()})
    table = part[: 2 * ROW].view(2, ROW)
    assert digest({"x": table.t().contiguous().t()}) == digest({"x": table})
    assert digest({"x": table.t()}) != digest({"x": table})
