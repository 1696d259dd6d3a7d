"""The conditions of all runs of a profile, the sizes of the inputs, and the rows made under these conditions.

Sizes come from the workload's description of its data; nothing is decoded.
"""

from __future__ import annotations

import functools
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from varuna_capslog import accelerator
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.gpus import gpu_named
from varuna_capslog.engine.recipe import Recipe
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.layer import low_bytes
from varuna_capslog.model.names import names_of
from varuna_capslog.model.workload import Workload
from varuna_capslog.plans.parts import recomputed_parts
from varuna_capslog.plans.plan import read_plan
from varuna_capslog.profiles.conditions import HYBRID_LETTERS, JOINED_PARTS, KEPT_WHOLE, LAST_HOLDS
from varuna_capslog.profiles.record import (
    ActionBytes,
    Observation,
    Profile,
    SharedParameter,
    TensorRecord,
    layers_of_runs,
)
from varuna_capslog.schedules import RunShape

if TYPE_CHECKING:
    from varuna_capslog.config.reading import Config

__all__ = [
    "InputSizes",
    "Progress",
    "RunConditions",
    "conditions_of_run",
    "input_sizes",
    "kind_here",
    "profile_of",
    "shapes_of",
]

Progress = Callable[[int, int, str], None]
"""Called with (runs done, all runs, text about the run that ended); first with 0 runs done."""

_SAMPLES = 256
"""Number of random minibatches whose input sizes are read."""

Inputs = Mapping[str, TensorSpec]


@dataclass(frozen=True)
class RunConditions:
    """Conditions of all runs of a profile.

    device: its type, such as "cpu" or "cuda".
    input: shape of every input of the chain.
    precision, weights: as in the config's `train` section. recompute, stage_inputs: as in its `pipeline` section.
    blocks: accumulation blocks of one pipeline; from two on, a second sum of gradients is in memory.
    halves: True where the training run splits its backwards: each row then has the bytes of the halves too.
    recipe: of the optimizer, which determines the optimizer state of each parameter.
    gpu: kind of GPU (`base.gpus`) that an estimate's seconds are for; "" for no particular kind.
    grains: microbatches of one call, other than 1, that a stage may take (`profile.grains`); an estimate has rows of
        calls of these sizes too.
    parts: (layer, its recomputed parts) in the plan file of the run; an estimate has rows and seconds of these too.
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
    weights: str = "float32"
    parts: tuple[tuple[int, tuple[str, ...]], ...] = ()

    def types(self, chain: Chain) -> dict[str, Any]:
        """Return a profile's conditions about dtypes and the copies of this chain's parameters: "dtype"; with weights
        of 16 bits "weights" and "weight_copies" (bytes of these weights per byte of the trained parameters); and the
        conditions of `Recipe.described`.
        """
        parameters = chain.named_parameters().values()
        described: dict[str, Any] = {"dtype": self.precision}
        if self.weights != "float32":
            trained = sum(
                parameter.nbytes
                for layer in chain.layers
                for parameter in layer.module.parameters()
                if parameter.requires_grad
            )
            weight_bytes = sum(low_bytes(layer.module, self.weights)[0] for layer in chain.layers)
            described |= {"weights": self.weights, "weight_copies": round(weight_bytes / max(1, trained), 4)}
        return described | self.recipe.described(parameters)

    @property
    def schedule(self) -> str:
        """Schedule that a profile of these conditions names."""
        return "zb-h1" if self.halves else "varuna" if self.recompute else "1f1b"

    def row(
        self,
        layers: tuple[int, int],
        boundaries: tuple[Inputs, Inputs],
        bytes_: tuple[int, int, int],
        seconds: tuple[float, float],
        actions: ActionBytes | None = None,
    ) -> Observation:
        """Return the row of one run.

        layers: (first, end) of the stage in its whole chain.
        boundaries: tensors across its first and its last cut.
        bytes_: peak, static and saved. seconds: of a forward and of a backward.
        actions: bytes of each action, where they are known.
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
    """Return the conditions of the training run that a config describes, for chain inputs of these sizes."""
    device = config.profile.device or config.device
    if device == "auto":
        device = accelerator.auto_type()
    device, _, kind = device.partition(":")
    if device == "cuda" and not kind:
        kind = kind_here()
    run = RunShape.of_config(config).share(config.pipeline.replicas)
    stages = () if config.pipeline.plan is None else read_plan(config.pipeline.plan).stages
    return RunConditions(
        device=device,
        microbatch_size=config.train.microbatch_size,
        input=shapes_of(inputs),
        precision=config.train.precision,
        # only a run that recomputes shows the bytes of a forward without a graph
        recompute=run.recomputes or any(stage.recomputes(run) for stage in stages),
        stage_inputs=run.stage_inputs,
        blocks=run.num_blocks,
        halves=run.splits_backwards,
        gpu=kind,
        recipe=Recipe.of_config(config.train),
        grains=tuple(sorted({*config.profile.grains})),
        weights=config.train.weights,
        parts=tuple(sorted(set().union(*map(recomputed_parts, stages)))),
    )


@functools.cache
def kind_here() -> str:
    """Return the kind in `GPUS` of this machine's GPUs; "" without GPUs, and for several or unknown kinds.

    It runs `nvidia-smi`: torch would start CUDA, which takes memory, and processes forked later could not use it.
    """
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    names = set(listing.stdout.split("\n")) - {""} if listing.returncode == 0 else set()
    try:
        return gpu_named(names.pop()) if len(names) == 1 else ""
    except CapslogError:
        return ""


def profile_of(
    chain: Chain,
    rows: Sequence[Observation],
    source: str,
    conditions: Mapping[str, Any],
    grown_from_first: bool = False,
    specs: Sequence[Inputs] = (),
) -> Profile:
    """Make the profile of these rows.

    grown_from_first: as for `layers_of_runs`.
    specs: of the tensors across the cuts 0 .. L, from which the profile's `tensors` are made; () leaves them out.
    """
    names = [layer.name for layer in chain.layers]
    weights = conditions.get("weights", "float32")
    parameters = [
        sum(parameter.numel() * parameter.itemsize for parameter in layer.module.parameters())
        - low_bytes(layer.module, weights)[1]
        for layer in chain.layers
    ]
    more_conditions: dict[str, Any] = {KEPT_WHOLE: list(chain.kept_whole)} if chain.kept_whole else {}
    if chain.joined_parts:
        more_conditions[JOINED_PARTS] = chain.joined_parts
    if letters := names_of(chain).letters:
        more_conditions[HYBRID_LETTERS] = "|".join(letters)
    if len(holds := _modules_of_last(chain)) > 1:
        more_conditions[LAST_HOLDS] = holds
    return Profile(
        layers=layers_of_runs(names, rows, parameters, grown_from_first),
        model=chain.name,
        source=source,
        conditions={**conditions, **more_conditions},
        shared=tuple(SharedParameter(shared.name, shared.num_bytes, shared.layers) for shared in chain.shared),
        observations=tuple(rows),
        tensors=_tensors(chain, specs) if specs else (),
    )


def _modules_of_last(chain: Chain) -> list[str]:
    """Return the name of the last layer, and of the other modules whose parameters it has (in a captured model, the
    layer of the last norm also has the head); only its name where its parameters are not named as in the model.
    """
    last = chain.layers[-1]
    called = {layer.name: [name for name, _ in layer.module.named_parameters()] for layer in chain.layers}
    if not any(name.startswith(f"{layer}.") for layer, names in called.items() for name in names):
        return [last.name]
    first = last.name.partition(".")[0]
    others = [name.rpartition(".")[0] for name in called[last.name] if not name.startswith(f"{last.name}.")]
    tops = [name if name.partition(".")[0] == first else name.partition(".")[0] for name in others]
    return list(dict.fromkeys([last.name, *filter(None, tops)]))


def _tensors(chain: Chain, specs: Sequence[Inputs]) -> tuple[TensorRecord, ...]:
    """Return the tensors that the layers pass on, one entry per name and writer, with all readers."""
    records = []
    for (name, writer), readers in sorted(chain.readers.items(), key=lambda entry: entry[0].writer):
        spec = specs[writer + 1][name]
        made_by = None if writer < 0 else writer
        records.append(TensorRecord(name, spec.num_bytes, spec.requires_grad, made_by, readers))
    return tuple(records)


@dataclass(frozen=True)
class InputSizes:
    """Inputs of one microbatch.

    largest: the largest that can occur in the run.
    sampled: of random minibatches, the smallest first; one entry where all are equal.
    """

    largest: Inputs
    sampled: tuple[Inputs, ...]

    def quantile(self, part: float) -> Inputs:
        """Return the quantile `part` of the sampled inputs; 0.5 is the median."""
        return self.sampled[min(int(part * len(self.sampled)), len(self.sampled) - 1)]

    def to_json(self) -> dict[str, Any]:
        """Return shapes: largest, median, and the histogram as [shapes, number of minibatches] by ascending bytes."""
        counts = Counter(_text(inputs) for inputs in self.sampled)
        shapes = {_text(inputs): shapes_of(inputs) for inputs in self.sampled}
        return {
            "largest": shapes_of(self.largest),
            "median": shapes_of(self.quantile(0.5)),
            "sampled": len(self.sampled),
            "histogram": [[shapes[text], counts[text]] for text in shapes],
        }


def input_sizes(workload: Workload, microbatch_size: int) -> InputSizes:
    """Return the input sizes of training with this workload, from the same samples in every call."""
    sampled = workload.sampled_inputs(microbatch_size, _SAMPLES)
    return InputSizes(workload.profile_inputs(microbatch_size), tuple(sorted(sampled, key=_num_bytes)))


def _num_bytes(inputs: Inputs) -> int:
    return sum(spec.num_bytes for spec in inputs.values())


def shapes_of(inputs: Inputs) -> dict[str, list[int]]:
    """Return the shape of every input, in the form of a profile."""
    return {name: list(spec.shape) for name, spec in inputs.items()}


def _text(inputs: Inputs) -> str:
    """Return the shape of the input with most bytes as text, which represents all inputs."""
    name, spec = max(inputs.items(), key=lambda item: item[1].num_bytes)
    return f"{name} {'x'.join(map(str, spec.shape))}"
