"""The table of GPUs."""

from __future__ import annotations

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.gpus import GPUS, gpu_of, parse_device


def test_a_device_names_a_kind_or_none() -> None:
    devices = ("cpu", "cuda", "xpu", "cuda:t4")
    assert [gpu_of(parse_device(text)) for text in devices] == [None, None, None, GPUS["t4"]]
    assert 79 * 2**30 < GPUS["a100-80gb"].memory_bytes < 80 * 2**30


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("gpu", "choose cpu, cuda, another accelerator of torch such as xpu, or cuda:KIND"),
        ("cuda:a100", "known: .*a100-40gb, a100-80gb"),
        ("cuda:", "not in the table"),
        ("cpu:t4", "unknown"),
    ],
)
def test_others_are_refused(text: str, reason: str) -> None:
    with pytest.raises(CapslogError, match=reason):
        parse_device(text)
