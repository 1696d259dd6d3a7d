"""Options of this folder's scripts for planner `budget`: capacities, rates of links, and microbatches."""

from __future__ import annotations

import argparse
from pathlib import Path

from varuna_capslog.base.units import parse_rate
from varuna_capslog.planners.seconds import Link

__all__ = ["link_of", "questions"]


def questions(description: str) -> argparse.ArgumentParser:
    """Return a parser of the command line with these options."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacities", default="16GiB,8GiB,4GiB")
    parser.add_argument("--bandwidths", default="none,12GB/s", help="of links between stages and to the host")
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--json", type=Path, help="where to write the results")
    return parser


def link_of(rate: str) -> Link:
    """Return links between stages and to the host of one rate; "none": messages and copies take no time."""
    bandwidth = None if rate == "none" else parse_rate(rate)
    return Link(bandwidth=bandwidth, host_bandwidth=bandwidth)
