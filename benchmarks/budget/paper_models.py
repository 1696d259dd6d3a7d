"""The paper's six models, estimated for CUDA: what the benchmarks of this folder plan for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from varuna_capslog.config.reading import load_config
from varuna_capslog.profiles.record import Profile
from varuna_capslog.profiling.estimate import estimate_config

__all__ = ["paper_profiles"]


def paper_profiles() -> Iterator[tuple[str, Profile]]:
    """The name and the profile of each, by name, made when it is asked for."""
    for path in sorted((Path(__file__).parents[2] / "configs/paper").glob("*.yaml")):
        yield path.stem, estimate_config(load_config(path, ["pipeline.schedule=1f1b"]))
