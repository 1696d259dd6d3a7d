"""What the scripts of this folder ask planner `budget` about: capacities, rates of links, and microbatches."""

from __future__ import annotations

import argparse
from pathlib import Path

from varuna_capslog.base.units import parse_rate
from varuna_capslog.planners.seconds import Link

__all__ = ["link_of", "questions"]


def questions(description: str) -> argparse.ArgumentParser:
    """A parser of the command line that says what to ask."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacities", default="16GiB,8GiB,4GiB")
    parser.add_argument("--bandwidths", default="none,12GB/s", help="of links between stages and to the host")
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--json", type=Path, help="where to write the results")
    return parser


def link_of(rate: str) -> Link:
    """Links between stages and to the host of one rate; "none": messages take no time, and copies are not timed."""
    found = None if rate == "none" else parse_rate(rate)
    return Link(bandwidth=found, host_bandwidth=found)
