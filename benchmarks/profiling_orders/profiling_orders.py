"""Compares measured profiling in three orders: launches, rounds, seconds, M_i and M_a. Prints README's tables.

Real runs of a small DETR, none taken from the cache. The paper's counts for its own sizes come from the lists of runs.
"""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path

import torch

from varuna_capslog.base.units import format_bytes
from varuna_capslog.config.reading import load_config
from varuna_capslog.profiles.record import Profile
from varuna_capslog.profiles.runs import capslog_partitionings, mcap_partitionings, stage_runs
from varuna_capslog.profiling.measure import profile_config

CONFIG = Path(__file__).parents[2] / "configs" / "tiny.yaml"
ORDERS = ("packed", "capslog", "mcap")


def counts(gpus: int) -> None:
    """Print counts for the paper's sizes: |P| of its Fig. 12 and by its formula, and ours."""
    head = ("L", "mCAP, as printed", "mCAP, L - G + 1", "CAPSlog", f"ours: rounds of one launch ({gpus} GPUs)")
    print(f"\n| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for layers in (25, 42, 48):
        partitionings = mcap_partitionings(layers, gpus)
        full = sum(len(launch.layers_per_gpu) == gpus for launch in partitionings)
        rounds = -(-len(stage_runs(layers)) // gpus)
        print(f"| {layers} | {len(partitionings)} | {full} | {len(capslog_partitionings(layers, gpus))} | {rounds} |")


def differences(profiles: dict[str, Profile], column: str) -> None:
    """Print the differences of each order from the packed one, by layer."""
    print(f"\n| layer | {column}, packed | capslog less packed | mcap less packed |\n|---|---|---|---|")
    for number, layer in enumerate(profiles["packed"].layers):
        first = getattr(layer, column)
        if first is not None:
            others = [getattr(profiles[order].layers[number], column) - first for order in ORDERS[1:]]
            cells = [f"{difference:+,} B ({100 * difference / max(1, abs(first)):+.2f} %)" for difference in others]
            print(f"| {layer.name} | {format_bytes(first)} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=4, help="processes of a pipeline (default 4)")
    gpus = parser.parse_args().gpus
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} CPUs ({platform.machine()})"
    )
    counts(8)
    profiles = {}
    head = ("order", "launches", "stage runs", "rounds", "s per round", "s in all", "s end to end")
    print(f"\n| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for order in ORDERS:
        config = load_config(CONFIG, [f"pipeline.devices={gpus}", f"profile.order={order}"])
        profiles[order] = profile_config(config, workers=gpus, use_cache=False)
        told = profiles[order].conditions["profiling"]
        cells = [told[key] for key in ("order", "launches", "stage_runs", "rounds")]
        seconds = [f"{told[key]:.2f}" for key in ("mean_seconds", "total_seconds", "end_to_end_seconds")]
        print(f"| {' | '.join(map(str, [*cells, *seconds]))} |", flush=True)
    for column in ("isolated_bytes", "added_bytes"):
        differences(profiles, column)


if __name__ == "__main__":
    main()
