"""Default values of config keys, without the import of `settings`, which would slow down plans without a config."""

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
"""Default of `pipeline.planner`: FASTEST for every run that it can plan, else SMALLEST."""
FASTEST: Final = "budget"
"""The planner of the shortest step that fits."""
ALL: Final = "auto"
"""Value of `pipeline.planner` that means FASTEST, too."""
SMALLEST: Final = "exact"
"""The planner of the smallest peak, which needs no seconds."""
MEMORY: Final = "auto"
"""Default of `pipeline.memory`."""
SCHEDULE: Final = "auto"
"""Default of `pipeline.schedule`."""
MICROBATCHES_PER_DEVICE: Final = 4
"""Microbatches of a step per device of a pipeline, where no config sets the samples of a step."""
STAGES_PER_RANK: Final = 2
"""Default of `pipeline.stages_per_rank` with schedule interleaved."""

BF16_WEIGHTS: Final = "bf16-weights"
"""`train.precision` of a training whose weights, gradients and optimizer states are all bfloat16."""
BF16_MASTER: Final = "bf16-master"
"""Short for a `train.precision` of bfloat16 with `train.weights` of bfloat16: masters, sums and states are float32."""
_PRECISIONS: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "bfloat16-weights": BF16_WEIGHTS}


def precision_named(name: Any) -> Any:
    """Return the value of `train.precision` that a short or long name means; any other name unchanged."""
    return _PRECISIONS.get(name, name) if isinstance(name, str) else name


OWN_TRAIN: Final = {"optimizer": "adamw", "lr": 1e-3, "clip_norm": 0.0}
"""`train` defaults for the user's model and data set (no clipping). Those in `config/settings.py` are DETR's."""
OWN_MINIBATCH: Final = 32
"""Default of `train.minibatch_size` for own data; less where there are fewer samples."""
OWN_MICROBATCH: Final = 8
"""Default of `train.microbatch_size` for own data; less where it would not divide the minibatch, or where there are
fewer validation samples."""


# -- Defaults of a run on own data, filled into a config's values before they are validated.


_SIZES = ("minibatch_size", "microbatch_size")


def fill_own_train(
    values: dict[str, Any], samples: Callable[[str], int | None], kept: Mapping[str, Any] | None
) -> str | None:
    """Set the keys that the `train` section of a config for own data leaves out. Returns one line with optimizer and
    sizes, which marks the values that were not given; None where all were given.

    Args:
        samples: number of samples of "dataset" or "val", None without such data; called only for sizes not given.
        kept: the `train` section of the run that continues, whose values are kept; None for a new run.
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
