"""The paper's six models, estimated for CUDA, for the benchmarks of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from varuna_capslog.config.reading import load_config
from varuna_capslog.profiles.record import Profile
from varuna_capslog.profiling.estimate import estimate_config

__all__ = ["paper_profiles"]


def paper_profiles() -> Iterator[tuple[str, Profile]]:
    """Yield the name and the profile of each model, sorted by name; a profile is estimated when it is needed."""
    for path in sorted((Path(__file__).parents[2] / "configs/paper").glob("*.yaml")):
        yield path.stem, estimate_config(load_config(path, ["pipeline.schedule=1f1b"]))
