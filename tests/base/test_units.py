"""Byte counts in readable form."""

from __future__ import annotations

from typing import Any

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.units import (
    format_bytes,
    format_percent,
    parse_bytes,
    parse_capacity,
    parse_latency,
    parse_rate,
    with_unit,
)


@pytest.mark.parametrize(
    ("written", "count"),
    [
        ("16GiB", 17_179_869_184),
        ("16GB", 16_000_000_000),
        ("500MiB", 524_288_000),
        (" 1.5 KiB ", 1536),
        ("2tib", 2_199_023_255_552),
        ("7", 7),
        ("7B", 7),
        (7, 7),
        (16e9, 16_000_000_000),
        ("16e9", 16_000_000_000),
        ("0.1GB", 100_000_000),
        ("1.0001kB", 1000),
    ],
)
def test_parse(written: Any, count: int) -> None:
    assert parse_bytes(written) == count


@pytest.mark.parametrize(
    "wrong",
    ["", "GiB", "-1GiB", "0", 0, -3, "0.1B", "16GiBs", "1,5GiB", "nan", float("nan"), float("inf"), True, None, [1]],
)
def test_what_is_no_size_is_refused_by_value(wrong: Any) -> None:
    with pytest.raises(CapslogError) as error:
        parse_bytes(wrong, "capacity")
    assert f"capacity is {wrong!r}" in str(error.value)


def test_a_unit_with_two_readings_is_refused() -> None:
    with pytest.raises(CapslogError, match=r"16GiB \(1024\) or 16GB \(1000\)"):
        parse_bytes("16G")


@pytest.mark.parametrize("bare", ["16", 16, 80.0, "81559"])
def test_few_bytes_without_a_unit_are_a_forgotten_unit(bare: Any) -> None:
    """A capacity of "16" was 16 bytes, in which nothing fits; nvidia-smi prints 81559 for MiB."""
    with pytest.raises(CapslogError, match=f"is {bare}, without a unit; write {bare}GiB or {bare}MiB, or {bare}B for"):
        parse_capacity(bare)
    assert parse_capacity(f"{bare}B") == int(float(bare))
    assert [parse_capacity(with_unit(size) or 0) for size in (16, 1 << 20)] == [16, 1 << 20]


def test_capacity_of_all_or_of_each_device() -> None:
    assert parse_capacity("16GiB") == 16 << 30
    assert parse_capacity("1KiB,2KiB, 3B") == [1024, 2048, 3]
    assert parse_capacity(1 << 20) == 1 << 20
    with pytest.raises(CapslogError, match="capacity of device 1 is ''"):
        parse_capacity("1KiB,,3")


@pytest.mark.parametrize(
    ("count", "written"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1024**2 - 1, "1 MiB"),
        (6_646_312_345, "6.19 GiB"),
        (16 << 30, "16 GiB"),
        (-1536, "-1.5 KiB"),
        (10**19, "8881.78 PiB"),
    ],
)
def test_format(count: int, written: str) -> None:
    assert format_bytes(count) == written


@pytest.mark.parametrize("size", ["1 B", "3 KiB", "500 MiB", "1.25 GiB", "2 TiB"])
def test_short_sizes_survive_both_ways(size: str) -> None:
    assert format_bytes(parse_bytes(size)) == size


@pytest.mark.parametrize(
    ("written", "rate"),
    [
        ("1GiB/s", 1 << 30),
        ("5MB", 5_000_000),
        ("100Mbit", 12_500_000),
        ("2.5 kbit/s", 312),
        ("1Gbit", 125_000_000),
        ("1Gbps", 125_000_000),
    ],
)
def test_rates_are_bytes_or_bits_of_a_second(written: str, rate: int) -> None:
    assert parse_rate(written) == rate


@pytest.mark.parametrize("written", ["1Gb/s", "1.5 Mb"])
def test_a_rate_that_is_bits_to_some_and_bytes_to_others_is_refused(written: str) -> None:
    with pytest.raises(CapslogError, match=r"bits or bytes; write 1(.5)?[GM]bit/s or 1(.5)?[GM]B/s"):
        parse_rate(written)


def test_a_small_rate_needs_its_unit_in_text() -> None:
    with pytest.raises(CapslogError, match="is 1, without a unit; write 1Gbit/s or 1GB/s, or 1B/s for bytes"):
        parse_rate("1")
    assert [parse_rate(written) for written in ("1B/s", 1, "1000000000")] == [1, 1, 10**9]


def test_a_latency_of_seconds_needs_its_unit() -> None:
    """Regression: pipeline.latency=20 was 20 seconds for every message, without a word."""
    assert [parse_latency(text, "latency") for text in ("20ms", "1s", 0.001, "0")] == [0.02, 1.0, 1e-3, 0.0]
    with pytest.raises(CapslogError, match=r"latency is 20, which means seconds; write the unit: 20us, 20ms or 20s"):
        parse_latency("20", "latency")
    with pytest.raises(CapslogError, match="latency is 1, which"):
        parse_latency(1, "latency")
    assert parse_latency(parse_latency("2s", "latency"), "latency") == 2.0, "as the workers of a run read it"


@pytest.mark.parametrize(("share", "written"), [(0.0312, "3.1 %"), (1.029, "103 %"), (0.0997, "10 %"), (0, "0 %")])
def test_percent_is_never_in_powers_of_ten(share: float, written: str) -> None:
    assert format_percent(share) == written
