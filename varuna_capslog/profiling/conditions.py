"""What holds for every run of a profile, and what a config says of it.

`measure` runs under these conditions, `estimate` and `rehearsal` play under them; a profile's own conditions begin with
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.profiling.sizes import shapes_of
from varuna_capslog.schedules import RunShape

if TYPE_CHECKING:
    from varuna_capslog.config.reading import Config

__all__ = ["RunConditions", "conditions_of_run"]


@dataclass(frozen=True)
class RunConditions:
    """What holds for every run of a profile.

    Attributes:
        device: "cpu" or "cuda".
        input: shape of every input of the chain.
        recompute, stage_inputs: as in the config's `pipeline` section.
        blocks: accumulation blocks of one pipeline; from two on, a second sum of gradients is alive.
    """

    device: str
    microbatch_size: int
    input: Mapping[str, Sequence[int]]
    precision: str = "float32"
    recompute: bool = True
    stage_inputs: str = "host"
    blocks: int = 1


def conditions_of_run(config: Config, inputs: Mapping[str, TensorSpec]) -> RunConditions:
    """The conditions of the training run that a config describes, for chain inputs of these sizes."""
    device = config.profile.device or config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    run = RunShape.of_config(config).share(config.pipeline.replicas)
    return RunConditions(
        device=device,
        microbatch_size=config.train.microbatch_size,
        input=shapes_of(inputs),
        precision=config.train.precision,
        recompute=run.recomputes,
        stage_inputs=run.stage_inputs,
        blocks=run.num_blocks,
    )
