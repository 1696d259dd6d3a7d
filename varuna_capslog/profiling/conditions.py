"""What holds for every run of a profile: the conditions, the sizes of the inputs, and the rows made under them.

`measure` runs stages under these conditions, `estimate` and `rehearsal` compute under them; a profile's own conditions
begin with them. Sizes come from the workload's description of its data; nothing is decoded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from varuna_capslog.engine.recipe import Recipe
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.workload import Workload
from varuna_capslog.plans.plan import Plan, read_plan
from varuna_capslog.profiles.action_bytes import ActionBytes
from varuna_capslog.profiles.conditions import KEPT_WHOLE
from varuna_capslog.profiles.record import Observation, Profile, SharedParameter, TensorRecord, layers_of_runs
from varuna_capslog.schedules import RunShape

if TYPE_CHECKING:
    from varuna_capslog.config.reading import Config

__all__ = [
    "InputSizes",
    "Progress",
    "RunConditions",
    "conditions_of_run",
    "input_sizes",
    "profile_of",
    "shapes_of",
]

Progress = Callable[[int, int, str], None]
"""Called with (runs done, all runs, what has just ended); first with 0 runs done."""

_SAMPLES = 256
"""Minibatches that are sampled."""

Inputs = Mapping[str, TensorSpec]


@dataclass(frozen=True)
class RunConditions:
    """What holds for every run of a profile.

    Attributes:
        device: "cpu" or "cuda".
        input: shape of every input of the chain.
        recompute, stage_inputs: as in the config's `pipeline` section.
        blocks: accumulation blocks of one pipeline; from two on, a second sum of gradients is alive.
        halves: whether the training run splits its backwards: each row then says too what the halves take.
        recipe: how parameters are stepped, which says what is kept of each of them.
        gpu: kind of GPU (`base.gpus`) that an estimate's seconds are for; "" for none in particular.
        grains: microbatches of one call, other than 1, in stages of the plan that the run is given; an estimate has
            rows of calls of these sizes too.
    """

    device: str = "cpu"
    microbatch_size: int = 1
    input: Mapping[str, Sequence[int]] = field(default_factory=dict)
    precision: str = "float32"
    recompute: bool = True
    stage_inputs: str = "host"
    blocks: int = 1
    halves: bool = False
    gpu: str = ""
    recipe: Recipe = field(default_factory=Recipe)
    grains: tuple[int, ...] = ()

    @property
    def schedule(self) -> str:
        """The schedule that a profile of these conditions names."""
        return "zb-h1" if self.halves else "varuna" if self.recompute else "1f1b"

    def row(
        self,
        layers: tuple[int, int],
        boundaries: tuple[Inputs, Inputs],
        bytes_: tuple[int, int, int],
        seconds: tuple[float, float],
        actions: ActionBytes | None = None,
    ) -> Observation:
        """The row of one run.

        Args:
            layers: (first, end) of the stage in its whole chain.
            boundaries: what crosses its first and its last cut.
            bytes_: peak, static and saved.
            seconds: of a forward and of a backward.
            actions: what each action takes, where that is known.
        """
        peak_bytes, static_bytes, saved_bytes = bytes_
        return Observation(
            layers=layers,
            device=self.device,
            microbatch_size=self.microbatch_size,
            input=dict(self.input),
            memory_action="recompute" if self.recompute else "none",
            peak_bytes=peak_bytes,
            static_bytes=static_bytes,
            saved_bytes=saved_bytes,
            transient_bytes=max(0, peak_bytes - static_bytes),
            boundary_in_bytes=_num_bytes(boundaries[0]),
            boundary_out_bytes=_num_bytes(boundaries[1]),
            forward_seconds=seconds[0],
            backward_seconds=seconds[1],
            action_bytes=actions,
        )


def conditions_of_run(config: Config, inputs: Mapping[str, TensorSpec]) -> RunConditions:
    """The conditions of the training run that a config describes, for chain inputs of these sizes."""
    device = config.profile.device or config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device, _, kind = device.partition(":")
    run = RunShape.of_config(config).share(config.pipeline.replicas)
    return RunConditions(
        device=device,
        microbatch_size=config.train.microbatch_size,
        input=shapes_of(inputs),
        precision=config.train.precision,
        recompute=run.recomputes,
        stage_inputs=run.stage_inputs,
        blocks=run.num_blocks,
        halves=run.splits_backwards,
        gpu=kind,
        recipe=Recipe.of_config(config.train),
        grains=() if config.pipeline.plan is None else _grains(read_plan(config.pipeline.plan)),
    )


def _grains(plan: Plan) -> tuple[int, ...]:
    return tuple(sorted({stage.grain for stage in plan.stages} - {1}))


def profile_of(
    chain: Chain,
    rows: Sequence[Observation],
    source: str,
    conditions: Mapping[str, Any],
    grown_from_first: bool = False,
    specs: Sequence[Inputs] = (),
) -> Profile:
    """The profile that these rows make.

    Args:
        grown_from_first: as for `layers_of_runs`.
        specs: what crosses the cuts 0 .. L, from which the profile's `tensors` are made; () leaves them out.
    """
    names = [layer.name for layer in chain.layers]
    parameters = [
        sum(parameter.numel() * parameter.itemsize for parameter in layer.module.parameters()) for layer in chain.layers
    ]
    whole = {KEPT_WHOLE: chain.kept_whole} if chain.kept_whole else {}
    return Profile(
        layers=layers_of_runs(names, rows, parameters, grown_from_first),
        model=chain.name,
        source=source,
        conditions={**conditions, **whole},
        shared=tuple(SharedParameter(shared.name, shared.num_bytes, shared.layers) for shared in chain.shared),
        observations=tuple(rows),
        tensors=_tensors(chain, specs) if specs else (),
    )


def _tensors(chain: Chain, specs: Sequence[Inputs]) -> tuple[TensorRecord, ...]:
    """What the layers hand on: one entry per name and writer, with all readers; what nobody reads has none."""
    found = []
    for (name, writer), readers in sorted(chain.readers.items(), key=lambda item: item[0].writer):
        spec = specs[writer + 1][name]
        made_by = None if writer < 0 else writer
        found.append(TensorRecord(name, spec.num_bytes, spec.requires_grad, made_by, readers))
    return tuple(found)


@dataclass(frozen=True)
class InputSizes:
    """Inputs of one microbatch.

    Attributes:
        largest: of those that the run can meet.
        sampled: of random minibatches, the smallest first; one entry where all are alike.
    """

    largest: Inputs
    sampled: tuple[Inputs, ...]

    def quantile(self, part: float) -> Inputs:
        """The sampled inputs that this part of all is smaller than; 0.5 is the median."""
        return self.sampled[min(int(part * len(self.sampled)), len(self.sampled) - 1)]

    def to_json(self) -> dict[str, Any]:
        """Shapes: the largest, the median, and the histogram as [shapes, number of minibatches] by rising bytes."""
        counts = Counter(_text(inputs) for inputs in self.sampled)
        shapes = {_text(inputs): shapes_of(inputs) for inputs in self.sampled}
        return {
            "largest": shapes_of(self.largest),
            "median": shapes_of(self.quantile(0.5)),
            "sampled": len(self.sampled),
            "histogram": [[shapes[text], counts[text]] for text in shapes],
        }


def input_sizes(workload: Workload, microbatch_size: int) -> InputSizes:
    """The sizes that training of this workload meets, in equal samples at every call."""
    sampled = workload.sampled_inputs(microbatch_size, _SAMPLES)
    return InputSizes(workload.profile_inputs(microbatch_size), tuple(sorted(sampled, key=_num_bytes)))


def _num_bytes(inputs: Inputs) -> int:
    return sum(spec.num_bytes for spec in inputs.values())


def shapes_of(inputs: Inputs) -> dict[str, list[int]]:
    """The shape of every input, as a profile writes it."""
    return {name: list(spec.shape) for name, spec in inputs.items()}


def _text(inputs: Inputs) -> str:
    """The shape of the input with most bytes, which the others go along with."""
    name, spec = max(inputs.items(), key=lambda item: item[1].num_bytes)
    return f"{name} {'x'.join(map(str, spec.shape))}"
