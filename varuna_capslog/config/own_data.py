"""Defaults of a run on own data, filled into a config's values before they are validated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from varuna_capslog.config import defaults

__all__ = ["fill_own_train"]

_SIZES = ("minibatch_size", "microbatch_size")


def fill_own_train(
    values: dict[str, Any], samples: Callable[[str], int | None], kept: Mapping[str, Any] | None
) -> str | None:
    """Set the keys that the `train` section of a config of own data leaves out. Returns one line, the optimizer and the
    sizes and which of them were not given; None where all were.

    Args:
        samples: counts those of "dataset" or "val", None without such data; called only for sizes that are not given.
        kept: the `train` section of the run that goes on, whose values are kept; None where a run begins.
    """
    train, names = values.get("train"), (*defaults.OWN_TRAIN, *_SIZES)
    train = {} if train is None else train
    if not isinstance(train, dict) or all(name in train for name in names):
        return None
    filled = kept if kept is not None else defaults.OWN_TRAIN | _sizes(values, train, samples)
    values["train"] = {**{name: filled[name] for name in names if name in filled}, **train}
    whence = "default" if kept is None else "of the run that goes on"
    shown = ((name, values["train"].get(name)) for name in names)
    return "train: " + ", ".join(f"{name} {value}{'' if name in train else f' ({whence})'}" for name, value in shown)


def _sizes(values: Mapping[str, Any], train: Mapping[str, Any], samples: Callable[[str], int | None]) -> dict[str, int]:
    """Return minibatch and microbatch sizes; empty where a given value is not a size, which the validation reports."""
    pipeline = values.get("pipeline") or {}
    replicas = pipeline.get("replicas", 1) if isinstance(pipeline, Mapping) else 1
    blocks = train.get("accumulation_blocks") or replicas
    minibatch, microbatch = (train.get(name) for name in _SIZES)
    if any(type(size) is not int or size < 1 for size in (blocks, minibatch or 1, microbatch or 1)):
        return {}
    if minibatch is None:
        unit = blocks * (microbatch or 1)
        minibatch = max(unit, min(defaults.OWN_MINIBATCH, samples("dataset") or 1) // unit * unit)
    if microbatch is None:
        largest = min(defaults.OWN_MICROBATCH, samples("val") or defaults.OWN_MICROBATCH)
        microbatch = max((size for size in range(1, largest + 1) if minibatch % (size * blocks) == 0), default=1)
    return dict(zip(_SIZES, (minibatch, microbatch), strict=True))
