"""Defaults of keys, also for plans without a config, which importing `settings` would slow down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = [
    "ALL",
    "BF16_MASTER",
    "BF16_WEIGHTS",
    "FASTEST",
    "MEMORY",
    "MICROBATCHES_PER_DEVICE",
    "OWN_MICROBATCH",
    "OWN_MINIBATCH",
    "OWN_TRAIN",
    "PLANNER",
    "SCHEDULE",
    "SMALLEST",
    "STAGES_PER_RANK",
    "fill_own_train",
    "precision_named",
]


PLANNER: Final = "default"
"""`pipeline.planner`: FASTEST for every run that it can plan, else SMALLEST."""
FASTEST: Final = "budget"
"""The planner of the shortest step that fits."""
ALL: Final = "auto"
"""Another word for FASTEST."""
SMALLEST: Final = "exact"
"""The planner of the smallest peak, which needs no seconds."""
MEMORY: Final = "auto"
"""`pipeline.memory`."""
SCHEDULE: Final = "auto"
"""`pipeline.schedule`."""
MICROBATCHES_PER_DEVICE: Final = 4
"""Microbatches of a step for each device of a pipeline, where no config says how many samples a step has."""
STAGES_PER_RANK: Final = 2
"""`pipeline.stages_per_rank` under schedule interleaved."""

BF16_WEIGHTS: Final = "bf16-weights"
"""`train.precision` of a training whose weights, gradients and optimizer states are all bfloat16."""
BF16_MASTER: Final = "bf16-master"
"""Short for a `train.precision` of bfloat16 with `train.weights` of bfloat16: masters, sums and states are float32."""
_PRECISIONS: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "bfloat16-weights": BF16_WEIGHTS}


def precision_named(name: Any) -> Any:
    """Return the value of `train.precision` that a short or long name means; any other name as it is."""
    return _PRECISIONS.get(name, name) if isinstance(name, str) else name


OWN_TRAIN: Final = {"optimizer": "adamw", "lr": 1e-3, "clip_norm": 0.0}
"""`train` of a run on the user's model and data set: no clipping. The defaults in `config/settings.py` are DETR's."""
OWN_MINIBATCH: Final = 32
"""`train.minibatch_size` of own data, or all samples where there are fewer."""
OWN_MICROBATCH: Final = 8
"""`train.microbatch_size` of own data, or the largest size below that divides the minibatch and fills from the
validation data."""


# -- Defaults of a run on own data, filled into a config's values before they are validated.


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
    train, names = values.get("train"), (*OWN_TRAIN, *_SIZES)
    train = {} if train is None else train
    if not isinstance(train, dict) or all(name in train for name in names):
        return None
    filled = kept if kept is not None else OWN_TRAIN | _sizes(values, train, samples)
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
        minibatch = max(unit, min(OWN_MINIBATCH, samples("dataset") or 1) // unit * unit)
    if microbatch is None:
        largest = min(OWN_MICROBATCH, samples("val") or OWN_MICROBATCH)
        microbatch = max((size for size in range(1, largest + 1) if minibatch % (size * blocks) == 0), default=1)
    return dict(zip(_SIZES, (minibatch, microbatch), strict=True))
