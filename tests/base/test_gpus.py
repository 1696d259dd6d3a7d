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
    ("text", "kind"),
    [
        ("h100", "h100-80gb"),
        ("4090", "rtx4090"),
        ("RTX 4090", "rtx4090"),
        ("cuda:H200", "h200"),
        ("Titan RTX", "titan-rtx"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_kinds_are_read_as_people_and_torch_write_them(text: str, kind: str) -> None:
    """`cuda:h100` was refused, and so was every name that torch gives a device."""
    assert parse_device(text) == f"cuda:{kind}"


def test_sheets_agree_with_themselves() -> None:
    """Float32 rates are those of the processors and their clock, and 16-bit ones are not below them."""
    lanes = {"volta": 64, "turing": 64, "ampere": 64, "cdna3": 128, "cdna4": 128}
    for name, gpu in GPUS.items():
        flops = 2 * gpu.processors * gpu.clock_hertz * lanes.get(gpu.architecture, 128)
        # the H20 runs at less than it could, and CDNA doubles its rate by packed instructions
        assert 0.6 < gpu.float32_flops / flops < 2.1, name
        assert gpu.half_flops >= 1.9 * gpu.float32_flops, name
        assert gpu.tensor_flops <= gpu.half_flops, name


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("gpu", "choose cpu, cuda, another accelerator of torch such as xpu, or cuda:KIND"),
        ("cuda:a100", "several memories; choose a100-40gb or a100-80gb"),
        ("v100", "several memories; choose v100-16gb or v100-32gb"),
        ("rtx3080ti", "the nearest are .*rtx3080ti-laptop"),
        ("cuda:", "not in the table"),
        ("cpu:t4", "unknown"),
    ],
)
def test_others_are_refused(text: str, reason: str) -> None:
    with pytest.raises(CapslogError, match=reason):
        parse_device(text)
