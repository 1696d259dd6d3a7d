"""Makes a workload of an ordinary model, for `capslog plan --model package.module:function` and configs without code.

It captures the model as a chain, makes up data of the right shapes from a fixed seed, and chooses a loss: enough for
profiling, planning and a trial of training. To train on real data, write a `Workload`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.functions import call_function
from varuna_capslog.config.defaults import BF16_MASTER, BF16_WEIGHTS, MICROBATCHES_PER_DEVICE
from varuna_capslog.config.reading import Config, section
from varuna_capslog.config.settings import FUNCTION, Section
from varuna_capslog.model.capture import FixedSize, Kept, OneOf, Varying
from varuna_capslog.model.capture.export import input_tensors
from varuna_capslog.model.capture.runtime import runs_its_children
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.hollow import hollow_copy
from varuna_capslog.model.state_file import read_state_file
from varuna_capslog.model.trace import ShapeTable
from varuna_capslog.model.workload import DataSource, Minibatch, Workload

__all__ = [
    "InputSpec",
    "ModelSection",
    "ModelWorkload",
    "config_values",
    "kind_of_model",
    "parse_input",
    "workload",
    "workload_of_model",
]


# -- Reads the inputs of an ordinary model as text (`--input` and `model.inputs`), and makes up tensors for them.


INPUT_GRAMMAR = (
    "NAME=DTYPE[SIZE,...], such as x=float32[8,3,224,224], or input_ids=int64[1,128]:50257 for whole numbers below "
    "50257 (:=VALUE fills with a value; LOW..HIGH or 192/224/256 is a SIZE that changes)"
)
_PATTERN = re.compile(
    r"^(?P<name>[A-Za-z_][\w.]*)=(?P<dtype>\w+)\[(?P<sizes>[\d,\s./]*)\](?::(?P<fixed>=)?(?P<number>-?[\d.]+))?$"
)
SEED = 20210323


@dataclass(frozen=True)
class InputSpec:
    """Input of a model, as text `NAME=DTYPE[SIZE,...]`, `...:HIGH` or `...:=VALUE`.

    Made-up values are normally distributed for floating types, whole numbers from 0 below `high` for integers (default
    2, valid for any vocabulary), true or false for bool; `value` fills the tensor with one number instead. A size
    LOW..HIGH changes from microbatch to microbatch: `shape` has its greatest value and `least` the smallest, by
    dimension. A size A/B/C changes among these values only (`choices`, ascending): the first values of all such sizes
    of a model go together, then the second values, and so on.

    values: whole numbers or truth values of example inputs, used in place of made-up ones where their size does not
    change: a model may count the tokens that stand for a picture.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    high: int = 2
    value: float | None = None
    least: Mapping[int, int] = field(default_factory=dict)
    choices: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    values: Tensor | None = field(default=None, compare=False)

    def sized(self, part: float) -> tuple[int, ...]:
        """Return the shape with each changing size at position `part` of its range or choices: 0 least, 1 greatest."""
        sizes = list(self.shape)
        for dimension, low in self.least.items():
            sizes[dimension] = low + round(part * (self.shape[dimension] - low))
        for dimension, values in self.choices.items():
            sizes[dimension] = values[round(part * (len(values) - 1))]
        return tuple(sizes)

    def make(self, shape: Sequence[int], seed: int) -> Tensor:
        """Make a tensor; equal seeds give equal values. shape: of the whole input or, without its batch, of one sample,
        whose number is the seed.
        """
        if self.values is not None and (values := self._example_values(self.values, tuple(shape), seed)) is not None:
            return values
        if self.value is not None:
            return torch.full(shape, self.value, dtype=self.dtype)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{SEED} {self.name} {seed}".encode()))
        if self.dtype.is_floating_point:
            return torch.randn(shape, generator=generator).to(self.dtype)
        high = 2 if self.dtype == torch.bool else self.high
        return torch.randint(0, high, shape, generator=generator).to(self.dtype)

    def _example_values(self, values: Tensor, shape: tuple[int, ...], seed: int) -> Tensor | None:
        """Return the example's values in a shape, its samples in turn; None for another size of a sample."""
        if shape == values.shape:
            return values.clone()
        if values.dim() == 0 or len(shape) > values.dim():
            return None
        if shape == values.shape[1:]:
            return values[seed % len(values)].clone()
        return values[torch.arange(shape[0]) % len(values)] if shape[1:] == values.shape[1:] else None


def parse_input(text: str) -> InputSpec:
    """Read one `--input`.

    Raises CapslogError: not of the form; an unknown dtype; a size of 0; a number that does not go with the dtype.
    """
    match = _PATTERN.match(text.strip().replace(" ", ""))
    if match is None:
        raise CapslogError(f"the input {text!r} is not of the form {INPUT_GRAMMAR}")
    dtype = getattr(torch, match["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise CapslogError(
            f"the input {text!r} has the unknown dtype {match['dtype']!r}; write float32, int64, bool, ..."
        )
    try:
        texts = match["sizes"].split(",")
        choices = {at: tuple(map(int, size.split("/"))) for at, size in enumerate(texts) if "/" in size}
        ranges = [choices.get(at) or tuple(map(int, size.split(".."))) for at, size in enumerate(texts)]
        shape = tuple(high for *_, high in ranges)
        least = {at: size[0] for at, size in enumerate(ranges) if len(size) == 2 and at not in choices}
        if any(len(size) > 2 and at not in choices for at, size in enumerate(ranges)):
            raise ValueError
    except ValueError:
        raise CapslogError(f"the input {text!r} needs at least one size, the batch; write {INPUT_GRAMMAR}") from None
    if any(not 1 < low < shape[at] for at, low in least.items()):
        raise CapslogError(f"the input {text!r} has a range that does not rise from at least 2; write LOW..HIGH")
    if any(list(values) != sorted(set(values)) for values in choices.values()):
        raise CapslogError(f"the input {text!r} has sizes that do not rise; write them from the least to the greatest")
    if min(shape) < 1 or any(values[0] < 1 for values in choices.values()):
        raise CapslogError(f"the input {text!r} has a size of 0; every size must be at least 1")
    made = InputSpec(match["name"], dtype, shape, least=least, choices=choices)
    if match["number"] is None:
        return made
    number = float(match["number"])
    if match["fixed"]:
        return replace(made, value=number)
    if dtype.is_floating_point or dtype == torch.bool or number != int(number) or number < 1:
        raise CapslogError(f"the input {text!r}: HIGH must be a whole number above 0 and goes with integer dtypes only")
    return replace(made, high=int(number))


# -- the workload around an ordinary model


_log = logging.getLogger(__name__)
_BUCKETS = 4
"""Number of different sizes of made-up microbatches where sizes change."""


class ModelSection(Section):
    """Keys under `model.` of an ordinary model, with made-up data or the user's own."""

    factory: str = Field(pattern=f"^{FUNCTION}$")
    """`package.module:function`; the function takes `arguments` and returns an nn.Module, a Chain, or a pair of an
    nn.Module and its example inputs (a dict or a tuple)."""

    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the factory."""

    inputs: list[str] | dict[str, str] = Field(default_factory=list)
    """Input specs `NAME=DTYPE[SIZE,...]`, or a mapping from name to the rest; the first size is the batch, and a size
    LOW..HIGH changes from microbatch to microbatch. Empty takes the shapes of the factory's example inputs."""

    cut_points: list[str] | None = None
    """Submodules to cut before; null cuts before every repeated block."""

    name: str | None = None
    """What plans and messages call the model; null takes the factory."""

    samples: int = Field(1024, gt=0)
    """Size of the made-up data set."""


def workload(config: Config) -> ModelWorkload:
    """Return the workload that a config's `model` section describes; see `ModelSection`."""
    settings = section(ModelSection, config.model, "model")
    section(Section, config.data, "data")  # the data is made up, so the section has no keys
    return ModelWorkload(settings, config.train.microbatch_size, run_dir=config.run_dir, grains=config.profile.grains)


def config_values(
    model: str,
    inputs: Sequence[str],
    cut_points: Sequence[str] | None = None,
    devices: int = 1,
    arguments: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the config that `--model`, `--input`, `--cut-points` and `--model-arg` stand for, as plain values for
    `config.section(Config, ...)`.

    The microbatch size is the batch size of the first input spec (1 without specs); a minibatch holds
    `defaults.MICROBATCHES_PER_DEVICE` microbatches for each device. Raises CapslogError for a spec that cannot be read.
    """
    size = parse_input(inputs[0]).shape[0] if inputs else 1
    return {
        "workload": f"{__name__}:workload",
        "model": {
            "factory": model,
            "arguments": dict(arguments or {}),
            "inputs": list(inputs),
            "cut_points": None if cut_points is None else list(cut_points),
        },
        "train": {"microbatch_size": size, "minibatch_size": size * devices * MICROBATCHES_PER_DEVICE},
        "pipeline": {"devices": devices},
    }


class ModelWorkload(Workload):
    """Ordinary model with made-up data; it is its own `DataSource`, which makes samples up from their index.

    The loss is the model's output named `loss` where it has one, else the mean square of its first floating-point
    output that carries a gradient; each microbatch counts 1 / number of microbatches. The first size of the first input
    is the batch, as is the first size of every other input that equals it; the run's microbatch size replaces it.

    Args:
        settings: the config's `model` section.
        microbatch_size: batch size that the model is captured for.
        made: called instead of the factory, where the model exists already.
        run_dir: the run's folder, where `hand_over` keeps the captured model and every process finds it.
        grains: numbers of microbatches, other than 1, that a call may take: the model is captured for any batch then.

    Raises:
        CapslogError: an input spec that cannot be read.
    """

    def __init__(
        self,
        settings: ModelSection,
        microbatch_size: int,
        made: Callable[[], Any] | None = None,
        run_dir: Path | None = None,
        grains: Sequence[int] = (),
    ) -> None:
        texts = settings.inputs
        if isinstance(texts, dict):
            texts = [f"{name}={text}" for name, text in texts.items()]
        self.name = settings.name or settings.factory
        self._settings = settings
        self._specs = tuple(parse_input(text) for text in texts)
        self._constants: dict[str, Any] = {}
        self._size = microbatch_size
        self._grains = tuple(grains)
        self._captured_size: int | None = None
        self._made = made or self._call_factory
        self._floats: torch.dtype | None = None
        self._kept = None if run_dir is None else Kept(run_dir / "captured", [settings.factory.partition(":")[0]])

    def __len__(self) -> int:
        return self._settings.samples

    def build_chain(self) -> Chain:
        """Call the factory and capture its model for this run's microbatch size.

        Raises CapslogError: no such function, it failed or returned something else, or the model cannot be captured.
        """
        return self._captured(evaluates=True)

    def build_training_chain(self) -> Chain:
        """Capture the model as `build_chain` does, but for training only, in half the time."""
        return self._captured(evaluates=False)

    def build_model(self) -> nn.Module | None:
        """Return the module that the factory returns; None where that is a chain."""
        made = self._made()
        model = made[0] if isinstance(made, tuple) else made
        return model if isinstance(model, nn.Module) else None

    def hold_bfloat16(self) -> None:
        """Cast the model and its floating-point inputs, unless it has bfloat16 weights already."""
        self._floats = torch.bfloat16
        self._specs = tuple(map(self._cast_spec, self._specs))

    def _cast_spec(self, spec: InputSpec) -> InputSpec:
        if self._floats is None or not spec.dtype.is_floating_point:
            return spec
        return replace(spec, dtype=self._floats)

    def _cast_model(self, model: nn.Module | Chain) -> None:
        """Cast all weights, as `Module.to` does; a model with some weights of this dtype already stays as it is."""
        parameters = model.named_parameters().values() if isinstance(model, Chain) else model.parameters()
        if self._floats is None or any(parameter.dtype == self._floats for parameter in parameters):
            return
        if isinstance(model, Chain):
            raise CapslogError(
                f"train.precision={BF16_WEIGHTS} casts an nn.Module, but {self.name!r} is a chain of float32; make its "
                f"layers in bfloat16, or choose {BF16_MASTER}"
            )
        model.to(self._floats)

    def own_names(self, chain: Chain) -> Mapping[str, str]:
        """Map each address to the weight's name in the model: the address without the layer's name at its beginning."""
        model = self.build_model()
        if model is None:
            return super().own_names(chain)
        model_names = model.state_dict().keys()
        names: dict[str, str] = {}
        for address in chain.named_tensors():
            own_name = next((name for name in _endings(address) if name in model_names), None)
            if own_name is not None:
                names[address] = own_name
        return names

    def _call_factory(self) -> Any:
        return call_function(self._settings.factory, f"the model {self.name!r}", **self._settings.arguments)

    def hand_over(self) -> None:
        """Capture the model, unless the run's folder has it already, and keep it there."""
        if self._kept is not None:
            self._kept.writes = True
            self.build_chain()

    def _captured(self, evaluates: bool | None) -> Chain:
        made = self._made()
        example: Any = None
        if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
            made, example = made
        if not isinstance(made, (nn.Module, Chain)):
            raise CapslogError(
                f"{self.name!r} returned {type(made).__name__}; it must return an nn.Module, a Chain, or a "
                "pair of an nn.Module and its example inputs"
            )
        self.take_example(made, example)
        self._cast_model(made)
        self._ready(made)
        if isinstance(made, Chain):
            chain = made
        else:
            self._check_names(made)
            chain = self._from_module(made, evaluates)
        if len(chain.inputs) == len(self._specs) == 1:  # a single input may have any name: capture names it
            self._specs = (dataclasses.replace(self._specs[0], name=chain.inputs[0]),)
        names = [spec.name for spec in self._specs]
        if set(chain.inputs) != set(names):
            raise CapslogError(f"the inputs {names} are not the model's {list(chain.inputs)}; give one spec for each")
        return self._finished(chain)

    def _from_module(self, model: nn.Module, evaluates: bool | None) -> Chain:
        """Capture the model; for any batch if calls may take several microbatches. Raises CapslogError if the model's
        code fixes the batch in that case.
        """
        try:
            return self._from_module_in_sizes(model, evaluates)
        except FixedSize as error:
            if not self._grains:
                raise
            calls, reason = " or ".join(map(str, self._grains)), str(error).partition(";")[0]
            other = "let the model's code take any batch" if self._size > 1 else "microbatches of 2 samples or more"
            raise CapslogError(
                f"{self.name} is to run in calls of {calls} microbatches (profile.grains, stages[].grain of a plan), "
                f"but {reason}; choose grain 1 for every stage, or {other}"
            ) from error

    def _from_module_in_sizes(self, model: nn.Module, evaluates: bool | None) -> Chain:
        """Capture once, with the changing sizes open, where torch can do so; else once for each size."""
        capture = functools.partial(
            Chain.from_module,
            model,
            self._settings.cut_points,
            name=self.name,
            evaluates=evaluates,
            kept=self._kept,
            compares=self._kept is not None and self._kept.writes,
        )
        fixed: FixedSize | None = None
        if not any(spec.choices for spec in self._specs):
            try:
                examples = self._examples_of_calls(1.0, varying=True)
                chain = capture(OneOf(examples) if len(examples) > 1 else examples[0])
            except FixedSize as error:
                fixed = error
            else:
                if any(isinstance(layer.module, torch.fx.GraphModule) for layer in chain.layers):
                    self._captured_size = None if 0 in self._specs[0].least else self._size
                return chain
        if fixed is not None and (any(spec.least.get(0) for spec in self._specs) or not self._changes):
            raise fixed  # the batch does not change from microbatch to microbatch
        parts = self._bucket_parts()
        if fixed is not None and (self._kept is None or self._kept.writes):
            _log.warning("%s: %s. It is captured for each of %d sizes instead", self.name, fixed, len(parts))
        self._captured_size = self._size
        return capture(OneOf([example for part in reversed(parts) for example in self._examples_of_calls(part)]))

    def _examples_of_calls(self, part: float, varying: bool = False) -> list[dict[str, Any]]:
        """Return example inputs for calls with every number of microbatches; arguments as in `_examples`."""
        if not self._grains:
            return [self._examples(part, varying)]
        if self._size > 1:
            return [self._examples(part, varying, self._size)]
        # torch takes a size of 1 for a constant
        return [self._examples(part, varying, max(self._grains)), self._examples(part, varying)]

    def _examples(self, part: float, varying: bool = False, open_batch: int | None = None) -> dict[str, Any]:
        """Return example inputs with the changing sizes at position `part` of their ranges. varying: leave these sizes
        open. open_batch: size of a batch that is left open, too; None: the fixed batch of a microbatch.
        """
        batch, made, changing = open_batch or self._size, dict[str, Any](), dict[str, set[int]]()
        for spec in self._specs:
            made[spec.name] = spec.make(self._shape(spec, batch, part), 0)
            changing[spec.name] = {*(spec.least if varying else ())}
            if open_batch is not None and self._has_batch(spec):
                changing[spec.name].add(0)
        made |= {name: Varying(made[name], sorted(sizes)) for name, sizes in changing.items() if sizes}
        nested = {name: _with_tensors(name, value, made) for name, value in self._constants.items()}
        inside = {place for name, value in nested.items() for place in input_tensors(name, value)}
        return {name: tensor for name, tensor in made.items() if name not in inside} | nested

    @property
    def _changes(self) -> bool:
        """True where sizes change from microbatch to microbatch."""
        return any(spec.least for spec in self._specs)

    def _bucket_parts(self) -> list[float]:
        """Return the positions of the made-up data in the ranges of the changing sizes, rising from 0 to 1."""
        counts = {len(values) for spec in self._specs for values in spec.choices.values()}
        if len(counts) > 1:
            raise CapslogError(
                f"{self.name}: the sizes that change have {' and '.join(map(str, sorted(counts)))} values, but the "
                "first ones of all go together, and so on; give as many for each"
            )
        count = counts.pop() if counts else _BUCKETS if self._changes else 1
        return [1.0] if count == 1 else [at / (count - 1) for at in range(count)]

    def _ready(self, model: nn.Module | Chain) -> None:
        """Prepare a model and its input specs before the capture; does nothing here."""

    def _finished(self, chain: Chain) -> Chain:
        return self._with_loss(chain)

    def loss(self, outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
        """Return the model's own loss or the mean square of its output, times this microbatch's share."""
        ((name, output),) = outputs.items()
        value = output if name == "loss" and output.dim() == 0 else output.float().square().mean()
        return {"loss": value / normalisers["microbatches"]}

    def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
        """Return the specs of one microbatch with the greatest value of each changing size, for which plans are made.

        Raises CapslogError where the chain was captured for another microbatch size.
        """
        if not self._specs:
            self.build_chain()  # takes the shapes from the factory's example inputs
        if self._captured_size not in (None, microbatch_size):
            raise CapslogError(
                f"{self.name} was captured for microbatches of {self._captured_size}, asked for {microbatch_size}; "
                f"set train.microbatch_size={microbatch_size}"
            )
        return self._input_specs(microbatch_size)

    def sampled_inputs(self, microbatch_size: int, count: int, seed: int = 0) -> list[dict[str, TensorSpec]]:
        """Return one entry of specs for each size of the made-up data; all sizes are equally frequent."""
        self.profile_inputs(microbatch_size)
        return [self._input_specs(microbatch_size, part) for part in self._bucket_parts()]

    def profile_targets(self, microbatch_size: int) -> tuple[Any, dict[str, float]]:
        """Return no targets, since labels are inputs of the model."""
        return None, {"microbatches": 1.0}

    def train_data(self) -> DataSource:
        """Return made-up samples, the same in every process."""
        if not self._specs:
            self.build_chain()
        return self

    def read_samples(self) -> Mapping[str, int]:
        """Return {}: the samples are made up."""
        return {}

    def minibatch(self, groups: Sequence[Sequence[int]], epoch: int) -> Minibatch:
        """Describe microbatches whose first sample decides their changing sizes; the recipe of each is its samples."""
        samples = [list(group) for group in groups]
        return Minibatch(
            inputs=[self._input_specs(len(group), self._part(group)) for group in groups],
            targets=[None] * len(groups),
            normalisers={"microbatches": float(len(groups))},
            sample_ids=samples,
            recipes=samples,
        )

    def load(self, minibatch: Minibatch, microbatch: int) -> dict[str, Tensor]:
        """Make up the samples of a microbatch."""
        made, samples = {}, minibatch.recipes[microbatch]
        for spec in self._specs:
            shape = spec.sized(self._part(samples))
            if self._has_batch(spec):
                made[spec.name] = torch.stack([spec.make(shape[1:], sample) for sample in samples])
            else:
                made[spec.name] = spec.make(shape, 0)
        return made

    def import_weights(self, path: Path) -> tuple[dict[str, Tensor], list[str]]:
        """Read a state dict of the model itself, as torch.save or safetensors wrote it."""
        state = read_state_file(path)
        weights: dict[str, Tensor] = {}
        for address in self.build_chain().named_parameters():
            own_name = next((name for name in _endings(address) if name in state), None)
            if own_name is not None:
                weights[address] = state[own_name]
        used = {id(tensor) for tensor in weights.values()}
        return weights, [name for name, tensor in state.items() if id(tensor) not in used]

    def _input_specs(self, size: int, part: float = 1.0) -> dict[str, TensorSpec]:
        return {spec.name: TensorSpec(self._shape(spec, size, part), spec.dtype) for spec in self._specs}

    def _part(self, samples: Sequence[int]) -> float:
        parts = self._bucket_parts()
        return parts[zlib.crc32(f"{SEED} {samples[0]}".encode()) % len(parts)]

    def _has_batch(self, spec: InputSpec) -> bool:
        return spec.shape[:1] == self._specs[0].shape[:1] != ()

    def _shape(self, spec: InputSpec, size: int, part: float = 1.0) -> tuple[int, ...]:
        shape = spec.sized(part)
        return (size, *shape[1:]) if self._has_batch(spec) else shape

    def take_example(self, model: nn.Module | Chain, example: Any) -> None:
        """Take shapes from example inputs, unless specs state them, and keep inputs that are not plain tensors.

        Raises CapslogError: neither states a shape; more inputs than the model has.
        """
        if isinstance(example, (tuple, list)):
            names = model.inputs if isinstance(model, Chain) else inspect.signature(model.forward).parameters
            kinds = {parameter.kind for parameter in names.values()} if isinstance(names, Mapping) else set()
            if len(example) > len(names) and inspect.Parameter.VAR_POSITIONAL not in kinds:
                raise CapslogError(
                    f"{self.name}: {len(example)} example inputs, but the model takes {len(names)}: {', '.join(names)}"
                )
            example = dict(zip(names, example, strict=False))
        if isinstance(example, Mapping):
            self._constants = {name: value for name, value in example.items() if not isinstance(value, Tensor)}
            if not self._specs:
                self._specs = tuple(
                    self._cast_spec(_spec_of(place, tensor))
                    for name, value in example.items()
                    for place, tensor in input_tensors(name, value).items()
                )
        if not self._specs:
            raise CapslogError(
                f"{self.name} gave no example inputs, so say their shapes with --input or model.inputs: {INPUT_GRAMMAR}"
            )

    def _check_names(self, model: nn.Module) -> None:
        """Refuse inputs that the model's forward does not take, and missing inputs that it needs."""
        parameters = inspect.signature(model.forward).parameters
        kinds = {parameter.kind for parameter in parameters.values()}
        if runs_its_children(model) or inspect.Parameter.VAR_POSITIONAL in kinds:
            return
        nested = {place for name, value in self._constants.items() for place in input_tensors(name, value)}
        available = {spec.name for spec in self._specs} - nested | {*self._constants}
        named = [name for name, parameter in parameters.items() if parameter.kind != inspect.Parameter.VAR_KEYWORD]
        needed = [name for name in named if parameters[name].default is inspect.Parameter.empty]
        unknown = sorted(available - {*named}) if inspect.Parameter.VAR_KEYWORD not in kinds else []
        lacking = [name for name in needed if name not in available]
        if unknown or lacking:
            problem = f"has no input {unknown[0]!r}" if unknown else f"needs the input {lacking[0]!r} too"
            raise CapslogError(f"{self.name}: the model {problem}; its forward takes {', '.join(named)}")

    def _with_loss(self, chain: Chain) -> Chain:
        if "loss" in chain.outputs:
            output = "loss"
        else:
            last = ShapeTable(chain).boundaries(self._input_specs(self._size))[-1]
            candidates = [
                name for name in chain.outputs if last[name].dtype.is_floating_point and last[name].requires_grad
            ]
            if not candidates:
                raise CapslogError(
                    f"{self.name}: none of the outputs {list(chain.outputs)} carries a gradient, so "
                    "there is nothing to train"
                )
            output = candidates[0]
        return Chain(chain.layers, chain.inputs, (output,), chain.name, chain.factories)


def _with_tensors(name: str, value: Any, tensors: Mapping[str, Tensor | Varying]) -> Any:
    """Replace the tensors inside an argument by those of the same name in `tensors`; others stay."""
    places = iter(input_tensors(name, value).items())

    def other(tensor: Tensor) -> Any:
        return tensors.get(next(places)[0], tensor)

    return pytree.tree_map_only(Tensor, other, value)


def _spec_of(name: str, example: Tensor) -> InputSpec:
    """Return the spec of an example input; whole numbers and truth values are kept."""
    shape = tuple(example.shape)
    if example.is_floating_point() or example.is_complex() or example.is_meta or not example.numel():
        return InputSpec(name, example.dtype, shape)
    high = 2 if example.dtype == torch.bool else max(2, int(example.max()) + 1)
    return InputSpec(name, example.dtype, shape, high=high, values=example.detach().cpu())


def _endings(address: str) -> Iterator[str]:
    """Yield possible names in the model: an address is <layer>.<name in the model>, and layer names may have dots."""
    pieces = address.split(".")
    return (".".join(pieces[first:]) for first in range(1, len(pieces)))


# -- Makes a workload of a model object, for `capslog.plan(model, sample)`.
#
# It is a `ModelWorkload` whose factory copies the object without memory for its weights. Called by `start.ordinary`.


def kind_of_model(model: Any) -> str:
    """Describe, for an error, a value that is no model: its type, or that it is a class."""
    return (
        f"the class {model.__name__}, not an object of it" if isinstance(model, type) else f"a {type(model).__name__}"
    )


def workload_of_model(
    model: nn.Module | Chain, sample: Any, cut_points: Sequence[str] | None = None
) -> tuple[ModelWorkload, int]:
    """Return the workload of a model object, and its microbatch size: the batch size of the sample.

    A module is not changed: every chain is made of a copy whose parameters have shapes only, which can be planned and
    estimated, but not trained. A Chain is used as it is.

    Args:
        model: on any device, also meta.
        sample: its example inputs, batch first: a tensor, a tuple of them in the order of its `forward`, a mapping by
            name; or input specs as text (`x=float32[8,3,224,224]`), one or a list.
        cut_points: as `ModelSection.cut_points`.

    Raises:
        CapslogError: a model or a sample of another kind; a sample without a batch.
    """
    if not isinstance(model, (nn.Module, Chain)):
        raise CapslogError(
            f"the model is {kind_of_model(model)}; give an nn.Module, a Chain, or the name of a function that "
            "returns one, as 'package.module:function'"
        )
    texts = [sample] if isinstance(sample, str) else sample
    example: Any = None
    if isinstance(texts, (list, tuple)) and texts and all(isinstance(text, str) for text in texts):
        size = parse_input(texts[0]).shape[0]
    else:
        texts, example = [], (sample,) if isinstance(sample, Tensor) else sample
        size = _batch_of(example)
    factory = f"{type(model).__module__}:{type(model).__name__}"
    settings = ModelSection(
        factory=factory, inputs=list(texts), cut_points=None if cut_points is None else [*cut_points]
    )

    def made() -> Any:
        return model if isinstance(model, Chain) else (hollow_copy(model), example)

    workload = ModelWorkload(settings, size, made)
    workload.name = type(model).__name__
    if isinstance(model, Chain):
        workload.take_example(model, example)
    return workload, size


def _batch_of(example: Any) -> int:
    """Return the first size of the first tensor, in dicts and lists too. Raises CapslogError where there is none."""
    values = list(example.values()) if isinstance(example, Mapping) else example
    if not isinstance(values, (list, tuple)):
        raise CapslogError(
            f"the sample is {'missing' if example is None else f'a {type(example).__name__}'}; give a tensor, a tuple "
            f"or a dict of tensors, batch first, or text: {INPUT_GRAMMAR}"
        )
    first = next((leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)), None)
    if first is None or first.dim() == 0 or 0 in first.shape:
        raise CapslogError(
            "the sample holds no tensor whose first size is a batch; give the model's inputs, batch first"
        )
    return int(first.shape[0])
