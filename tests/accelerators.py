"""Replaces torch's answers about accelerators: the machines that run the tests have none."""

from __future__ import annotations

import pytest
import torch


def torch_has(patch: pytest.MonkeyPatch, kind: str | None, count: int = 0) -> None:
    """Make torch report that it was built for this type of accelerator (None: for none) and sees `count` of them."""
    built = None if kind is None else torch.device(kind)
    answers = {
        "current_accelerator": lambda check_available=False: built if count or not check_available else None,
        "device_count": lambda: count,
    }
    for name, answer in answers.items():
        patch.setattr(torch.accelerator, name, answer)
