"""Equality of nested states, bit by bit."""

from __future__ import annotations

from typing import Any

import torch


def assert_same(actual: Any, expected: Any) -> None:
    """Assert that dicts have the same keys and equal values, and that tensors have the same bits."""
    if isinstance(actual, dict):
        assert actual.keys() == expected.keys()
        for key in actual:
            assert_same(actual[key], expected[key])
    elif isinstance(actual, torch.Tensor):
        assert torch.equal(actual, expected)
    else:
        assert actual == expected
