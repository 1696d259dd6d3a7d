"""The table of GPUs."""

from __future__ import annotations

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.gpus import GPUS, NamedDevices, gpu_of, parse_device, parse_devices


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
    """Float32 rates equal the number of processors times their clock, and 16-bit rates are not below them."""
    lanes = {"volta": 64, "turing": 64, "ampere": 64, "cdna3": 128, "cdna4": 128}
    for name, gpu in GPUS.items():
        flops = 2 * gpu.processors * gpu.clock_hertz * lanes.get(gpu.architecture, 128)
        # the H20 runs below its limit, and CDNA doubles its rate by packed instructions
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


def test_devices_are_a_number_or_kinds() -> None:
    assert parse_devices(4) == parse_devices(" 4 ") == NamedDevices(4)
    assert NamedDevices(4).pipeline_keys == {"devices": 4}
    assert NamedDevices(4).fastest is None
    alike = parse_devices("2x a100-80gb")
    assert alike.kinds == ("a100-80gb",) * 2
    assert alike.pipeline_keys == {"devices": 2, "capacity": GPUS["a100-80gb"].memory_bytes, "speeds": None}
    for text in ("2x rtx4090, rtx3090", "2xRTX 4090,3090 geforce", "2 * cuda:rtx4090 , 1x 3090"):
        assert parse_devices(text).kinds == ("rtx4090", "rtx4090", "rtx3090")


def test_a_slower_kind_has_less_speed_beside_the_fastest() -> None:
    """Expected by hand: arithmetic 35.6 / 82.6 in float32 and 71 / 165.2 in 16 bits, memory 936 / 1008 GB/s."""
    mixed = parse_devices("rtx3090, 2x rtx4090")
    assert mixed.fastest == "rtx4090"
    slower = ((35.6 / 82.6 * 71 / 165.2) ** 0.5 * 936 / 1008) ** 0.5
    assert mixed.pipeline_keys["speeds"] == [pytest.approx(slower, abs=5e-4), 1.0, 1.0]
    assert mixed.pipeline_keys["capacity"] == GPUS["rtx3090"].memory_bytes == GPUS["rtx4090"].memory_bytes
    unlike = parse_devices("gb300, t4").pipeline_keys
    assert unlike["capacity"] == [GPUS["gb300"].memory_bytes, GPUS["t4"].memory_bytes]
    assert 0 < unlike["speeds"][1] < 0.1


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "2.5", "2x", "x", "2x, t4", "4, 2x t4", "0x t4", "100001", "60000x t4, 60000x t4", "t4,"]
)
def test_malformed_devices_are_refused_with_the_form(text: str) -> None:
    with pytest.raises(
        CapslogError, match=r"^--devices is .*; write a number from 1 to 100000, or kinds such as 2x a1"
    ):
        parse_devices(text, "--devices")


def test_an_unknown_kind_of_a_list_names_the_nearest() -> None:
    with pytest.raises(
        CapslogError, match=r"^--devices: the kind of GPU 'rtx409' is not in the table; the nearest are rtx4"
    ):
        parse_devices("2x rtx409", "--devices")
    with pytest.raises(CapslogError, match="choose a100-40gb or a100-80gb"):
        parse_devices("2x a100")
