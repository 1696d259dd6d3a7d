"""The workload of `capslog.train(model, dataset)`: a model with a data set, the user's or a ready-made one.

It is the workload of an ordinary model whose example is the first microbatch of the data, and whose loss is a function
of outputs and batch. The configs of such runs name `varuna_capslog.own_data:workload`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn import functional as F

from varuna_capslog.base.errors import CapslogError, RunFinding
from varuna_capslog.base.processes import OwnedThread, logged
from varuna_capslog.config.reading import Config, section
from varuna_capslog.model.capture.causality import makers_of
from varuna_capslog.model.capture.runtime import runs_its_children
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.model_workload import ModelSection, ModelWorkload
from varuna_capslog.model.trace import ShapeTable
from varuna_capslog.model.workload import COUNTED, Evaluator, Minibatch, known_targets
from varuna_capslog.own_data.handed import DataSection
from varuna_capslog.own_data.loader import DatasetSource, Loader
from varuna_capslog.own_data.reading import SampleReader, named_or_handed, seeded
from varuna_capslog.variants.chunked_loss import chunked_cross_entropy

__all__ = ["COUNTS", "LOSSES", "DatasetWorkload", "counted_by_model", "returned", "workload"]

# -- Losses and scores that a config may name, and the form of a model's outputs for a user's loss


class Outputs(dict[str, Tensor]):
    """Outputs of a model that names them: `outputs.logits` is `outputs["logits"]`."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the model has no output {name!r}; it has {', '.join(self)}") from None


def returned(outputs: Mapping[str, Tensor]) -> Any:
    """Return the outputs as the model returned them: one tensor, a tuple, or `Outputs` where they have names."""
    if set(outputs) <= {"output", "x"} and len(outputs) == 1:
        return next(iter(outputs.values()))
    if all(name.isdigit() for name in outputs):
        return tuple(outputs.values())
    return Outputs(outputs)


def _scores_and_classes(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    scores = _main(outputs)
    classes = _target(batch)
    if scores.dim() < 2 or classes.is_floating_point():
        raise CapslogError(
            f"classes are compared here, but the model returned a tensor of shape {list(scores.shape)} and the batch's "
            f"target is of {classes.dtype}; name a function of your own as loss or metric"
        )
    return scores.reshape(-1, scores.shape[-1]), classes.reshape(-1)


def _main(outputs: Any) -> Tensor:
    if isinstance(outputs, Mapping):
        scores = outputs.get("logits", next(iter(outputs.values())))
    else:
        scores = outputs[0] if isinstance(outputs, tuple) else outputs
    return scores


def _target(batch: Any) -> Tensor:
    target = None
    if isinstance(batch, Mapping):
        target = next((batch[name] for name in ("labels", "label", "target") if name in batch), None)
    elif isinstance(batch, (tuple, list)):
        target = batch[-1]
    if not isinstance(target, Tensor):
        raise CapslogError(
            "the batch has no target: its last entry, or its entry labels, label or target, must be a tensor; name a "
            "function of your own as loss or metric"
        )
    return target


def _cross_entropy(outputs: Any, batch: Any) -> Tensor:
    return F.cross_entropy(*_scores_and_classes(outputs, batch))


def _chunked_cross_entropy(outputs: Any, batch: Any) -> Tensor:
    return chunked_cross_entropy(*_scores_and_classes(outputs, batch))


def _mse(outputs: Any, batch: Any) -> Tensor:
    return F.mse_loss(_main(outputs), _target(batch))


def _accuracy(outputs: Any, batch: Any) -> dict[str, float]:
    scores, classes = _scores_and_classes(outputs, batch)
    return {"accuracy": float((scores.argmax(-1) == classes).float().mean())}


def counted_part(batch: Any) -> float:
    """Return the fraction of a batch's targets that cross entropy does not ignore; 1 for fake targets."""
    classes = _target(batch)
    if isinstance(classes, FakeTensor):
        return 1.0
    with unset_fake_temporarily():  # an estimate has the values of its first batch
        return float((classes != IGNORED).sum()) / max(classes.numel(), 1)


IGNORED = -100
"""Default `ignore_index` of torch's `cross_entropy`."""
LOSSES = {"cross_entropy": _cross_entropy, "chunked_cross_entropy": _chunked_cross_entropy, "mse": _mse}
COUNTS = {"cross_entropy": counted_part, "chunked_cross_entropy": counted_part}
"""By a loss's name, the function that returns the fraction of a batch's targets over which the loss takes its mean."""
METRICS = {"accuracy": _accuracy}


# -- the targets of a loss that the model computes itself


class _NotOfOneInput(Exception):
    """Raised where the targets of a model's loss are not made from one of the model's inputs alone."""


def counted_by_model(chain: Chain) -> Callable[[Mapping[str, Tensor]], float] | None:
    """Return a function from the inputs of a captured model to the number of targets that the model's own loss counts,
    divided by their number without ignored labels. None where that loss is not torch's `cross_entropy` alone.

    The captured graph computes the targets: decoders of transformers shift their labels, other models do not.
    """
    last = chain.layers[-1]
    if not isinstance(last.module, fx.GraphModule) or "loss" not in last.writes:
        return None
    graph = last.module.graph
    written: Any = graph.output_node().args[0]
    loss = written if isinstance(written, fx.Node) else written[last.writes.index("loss")]
    if loss.target is not torch.ops.aten.cross_entropy_loss.default:
        return None
    names = ("self", "target", "weight", "reduction", "ignore_index")
    arguments: dict[str, Any] = dict(zip(names, loss.args, strict=False)) | loss.kwargs
    if arguments.get("weight") is not None or arguments.get("reduction", 1) != 1:
        return None
    inputs = {
        node: name
        for node, name in zip(graph.find_nodes(op="placeholder"), last.reads, strict=True)
        if name in chain.inputs
    }
    try:
        name, targets_of = _targets_of(arguments["target"], inputs)
    except _NotOfOneInput:
        return None
    ignored = int(arguments.get("ignore_index", IGNORED))

    def count(labels: Tensor) -> int:
        return int((targets_of(labels) != ignored).sum())

    def part(tensors: Mapping[str, Tensor]) -> float:
        labels = tensors[name]
        if isinstance(labels, FakeTensor) or labels.is_floating_point():
            return 1.0
        with torch.no_grad(), unset_fake_temporarily():  # an estimate has the values of its first batch
            labels = labels.cpu()
            return count(labels) / max(1, count(torch.full_like(labels, int(ignored == 0))))

    return part


def _targets_of(targets: fx.Node, inputs: Mapping[fx.Node, str]) -> tuple[str, fx.GraphModule]:
    """Return the name of the input from which the targets are made, and the graph that makes them on the CPU."""
    makers, graph, copies = makers_of([targets], _is_device), fx.Graph(), dict[fx.Node, Any]()
    names = [name for node, name in inputs.items() if node in makers]
    if len(names) != 1:
        raise _NotOfOneInput
    for node in targets.graph.nodes:
        if node not in makers:
            continue
        if node in inputs:
            copies[node] = graph.placeholder("labels")
        elif _is_device(node):
            copies[node] = torch.device("cpu")
        elif not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
            raise _NotOfOneInput
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[targets])
    return names[0], fx.GraphModule(nn.Module(), graph)


def _is_device(node: fx.Node) -> bool:
    """Return True for a node that reads a tensor's device."""
    return bool(node.target is getattr and node.args[1] == "device")


# -- the workload


_log = logging.getLogger(__name__)


def workload(config: Config) -> DatasetWorkload:
    """Return the workload of a config's `model` and `data` sections; see `ModelSection` and `DataSection`."""
    return DatasetWorkload(config)


class DatasetWorkload(ModelWorkload):
    """Workload of a model, a data set, and a loss of outputs and batch.

    The collate function joins samples into a microbatch. A microbatch's share of the minibatch's loss follows the
    number of its targets that count, where known; else it is 1 / number of microbatches. Validation leaves out samples
    that do not fill a last microbatch.
    """

    def __init__(self, config: Config) -> None:
        settings = section(ModelSection, config.model, "model")
        keys = section(DataSection, config.data, "data")
        if settings.inputs:
            raise CapslogError("model.inputs is set, but the data says the shapes of the inputs; leave it out")
        if config.engine != "capslog":
            raise CapslogError(
                f"engine={config.engine} takes targets that are known before the samples are read, which those of own "
                "data are not; set engine=capslog"
            )
        size, grains = config.train.microbatch_size, config.profile.grains
        super().__init__(settings, size, self._model_on_data, config.run_dir, grains)
        self._keys: dict[str, Any] = keys.model_dump(mode="json")
        self._seed, self._patience = config.train.seed, config.pipeline.timeout_seconds
        self._reader = SampleReader(self._keys, self._seed)
        self._loader = Loader(self._reader, self._keys, self._seed, keys.workers)
        self._ahead = keys.workers * keys.prefetch
        self._names: dict[str, str | int] | None = None
        self._counted_by_model: Callable[[Mapping[str, Tensor]], float] | None = None

    # -- the data ------------------------------------------------------------------------------------------------------

    def train_data(self) -> DatasetSource:
        """Return all samples of data.dataset."""
        if self._names is None:
            self._model_on_data()
        return self._source("dataset", len(self._reader.dataset("dataset")))

    def val_data(self) -> DatasetSource | None:
        """Return the samples of data.val that fill whole microbatches; None without data.val."""
        dataset = self._reader.dataset("val")
        if dataset is None:
            return None
        if len(dataset) < self._size:
            raise CapslogError(
                f"the validation data has {len(dataset)} samples, fewer than train.microbatch_size={self._size}; give "
                "more, or lower it"
            )
        return self._source("val", len(dataset) // self._size * self._size)

    def _source(self, split: str, count: int) -> DatasetSource:
        return DatasetSource(split, count, self._input_specs, self._loader, self._inputs_of, self._ahead)

    @functools.cached_property
    def _first(self) -> Any:
        """Batch of the first microbatch, which sets the shapes of all."""
        count = len(self._reader.dataset("dataset"))
        if count < self._size:
            raise CapslogError(
                f"the training data has {count} samples, fewer than train.microbatch_size={self._size}; give more, or "
                "lower it"
            )
        read = threading.Event()

        def note_delay() -> None:
            if not read.wait(self._patience):
                limit = f"{self._patience:g} s"
                sys.stderr.write(f"capslog: note: the first samples of the data set are not read after {limit}\n")

        thread = OwnedThread("first-samples", note_delay, logged)
        thread.start()
        try:
            return self._reader.read("dataset", 0, range(self._size))
        finally:
            read.set()
            thread.join()  # a later fork must find no other thread

    def _inputs_of(self, batch: Any) -> dict[str, Tensor]:
        """Return the model's inputs of a batch."""
        assert self._names is not None
        inputs: dict[str, Tensor] = {}
        for name, key in self._names.items():
            value = _entry(batch, key)
            if not isinstance(value, Tensor):
                raise CapslogError(
                    f"the batch has no tensor {key!r} for the model's input {name!r} ({_described(batch)}); say with "
                    "data.inputs what of a batch the model takes"
                )
            casts = self._floats is not None and value.is_floating_point()
            inputs[name] = value.to(self._floats) if casts else value
        return inputs

    def _find_names(self, model: nn.Module | Chain) -> dict[str, str | int]:
        """Return the model's inputs that a batch has: input name -> key or index in the batch."""
        batch, listed = self._first, self._keys["inputs"]
        if isinstance(model, Chain):
            taken = list(model.inputs)
        elif runs_its_children(model):
            taken = ["x"]
        else:
            taken = list(inspect.signature(model.forward).parameters)
        if listed is not None and len(listed) > len(taken):
            raise CapslogError(f"data.inputs has {len(listed)} entries, but the model takes {', '.join(taken)}")
        if isinstance(batch, Mapping):
            keys = listed or [name for name in taken if name in batch]
            names = {key if key in taken else taken[place]: key for place, key in enumerate(keys)}
        else:
            count = len(listed) if listed else max(1, len(batch) - 1) if isinstance(batch, (tuple, list)) else 1
            names = {name: place for place, name in enumerate(listed or taken[:count])}
        if not names:
            raise CapslogError(
                f"{self.name}: the batch ({_described(batch)}) has nothing that the model's forward takes "
                f"({', '.join(taken)}); name the entries alike, or say with data.inputs what of a batch the model takes"
            )
        return names

    def _model_on_data(self) -> Any:
        """Return the model, and the first microbatch as its example."""
        made = self._call_factory()
        model = made[0] if isinstance(made, tuple) and made and isinstance(made[0], nn.Module) else made
        if not isinstance(model, (nn.Module, Chain)):
            return made
        self._names = self._find_names(model)
        inputs = self._inputs_of(self._first)
        self._specs = ()
        self.take_example(model, inputs)
        return model if isinstance(model, Chain) else (model, inputs)

    # -- the loss ------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _loss_function(self) -> Any:
        name = self._keys["loss"]
        return LOSSES.get(name) or named_or_handed(self._keys, "loss")

    @functools.cached_property
    def _metric(self) -> Any:
        name = self._keys["metric"]
        return METRICS.get(name) or named_or_handed(self._keys, "metric")

    def _finished(self, chain: Chain) -> Chain:
        if self._loss_function is None and "loss" not in chain.outputs:
            raise CapslogError(
                f"{self.name} has no output named loss for this data (its outputs are {', '.join(chain.outputs)}), so "
                "give a loss: cross_entropy, chunked_cross_entropy, mse, or a function f(outputs, batch) (data.loss)"
            )
        if self._loss_function is not None:
            return chain
        self._counted_by_model = counted_by_model(chain)
        return self._with_loss(chain) if self._metric is None else chain

    def _warn_of_ignored(self) -> None:
        """Warn where labels are ignored but microbatches have equal shares, since the loss's targets are not known."""
        ignoring = [
            name
            for name, tensor in self._inputs_of(self._first).items()
            if not (tensor.is_floating_point() or isinstance(tensor, FakeTensor)) and bool((tensor == IGNORED).any())
        ]
        if ignoring:
            _log.warning(
                "%s: its own loss is not torch's cross_entropy of %s alone, so that each microbatch counts the same, "
                "however many labels are ignored (%d); give a loss of outputs and batch (data.loss) that returns its "
                "count",
                self.name,
                ignoring[0],
                IGNORED,
            )

    def loss(self, outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
        """Return the parts of the user's loss, times this microbatch's share of the minibatch. The share follows the
        number of targets that count, where the loss returns it, or is one of this library's, or the model's own.
        """
        parts = self._parts(outputs, targets)
        counted = parts.pop(COUNTED, None)
        if torch.is_grad_enabled() and not parts["loss"].requires_grad:
            raise CapslogError(
                "the loss is a tensor without gradient, so nothing would be trained; compute it from the model's "
                "outputs, without detach, item or torch.no_grad"
            )
        if counted is not None:
            parts = {name: _weighted(value, float(counted), outputs) for name, value in parts.items()}
        shares = {name: value / normalisers["microbatches"] for name, value in parts.items()}
        return shares if counted is None else {**shares, COUNTED: counted}

    def _parts(self, outputs: Mapping[str, Tensor], batch: Any) -> dict[str, Tensor]:
        """Return the parts of a microbatch's mean loss and, where known, the number or fraction of counted targets."""
        if self._loss_function is None:
            mean_loss = {"loss": outputs["loss"]}
            if self._counted_by_model is None:
                return mean_loss
            part = self._counted_by_model(self._inputs_of(batch))
            return {**mean_loss, COUNTED: torch.tensor(part, dtype=torch.float64)}
        losses = self._loss_function(returned(outputs), batch)
        parts = dict(losses) if isinstance(losses, Mapping) else {"loss": losses}
        count = parts.pop("count", None)
        for name, value in parts.items():
            if not isinstance(value, Tensor) or value.dim() != 0:
                shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
                raise CapslogError(
                    f"the loss returned a {type(value).__name__}{shape} as {name!r}; return the mean over the "
                    "microbatch, a tensor with one value, or a mapping of such with the entry 'loss', and 'count' for "
                    "the number of targets that it is the mean of"
                )
        if (counts := COUNTS.get(self._keys["loss"])) is not None:
            count = counts(batch)
        if count is not None:
            parts[COUNTED] = torch.tensor(float(count), dtype=torch.float64)
        return parts

    def profile_targets(self, microbatch_size: int) -> tuple[Any, dict[str, float]]:
        """Return the first batch."""
        return self._first, {"microbatches": 1.0}

    def costs_depend_on(self) -> Sequence[str]:
        return [self._keys["loss"]] if self._keys["loss"] else []

    def evaluator(self) -> Evaluator | None:
        """Return the evaluator for mean loss and scores of the validation data; None without such data."""
        if self._keys["val"] is None and self._reader.dataset("val") is None:
            return None
        return _Judge(self)

    def judged(self, outputs: Mapping[str, Tensor], batch: Any) -> tuple[dict[str, float], float]:
        """Return the scores of one microbatch, and the weight of its losses."""
        with torch.no_grad():
            parts = self._parts(outputs, batch)
            weight = float(parts.pop(COUNTED, 1.0))
            losses = {f"val_{name}": float(value) for name, value in parts.items()}
            scores = {} if self._metric is None else self._metric(returned(outputs), batch)
        return {name: float(value) for name, value in scores.items()} | losses, weight

    # -- before the workers --------------------------------------------------------------------------------------------

    def data_facts(self) -> Mapping[str, Any]:
        """Return the number of samples."""
        return {"number of samples": len(self._reader.dataset("dataset"))}

    def check(self) -> Sequence[RunFinding]:
        """Open the validation data; raises as `val_data`."""
        self.val_data()
        return ()

    def read_samples(self) -> Mapping[str, int]:
        """Read the first microbatch of data.dataset and of data.val, in this process."""
        names = {"training": "dataset", "validation": "val"}
        sets = {name: split for name, split in names.items() if self._reader.dataset(split) is not None}
        counts = {name: len(self._reader.dataset(split)) for name, split in sets.items()}
        for name, split in sets.items():
            if counts[name]:
                self._reader.read(split, 0, range(min(self._size, counts[name])))
        return counts

    def hand_over(self) -> None:
        """Capture the model, and try the loss on the first batch with made-up outputs."""
        super().hand_over()
        chain = self.build_training_chain()
        if self._loss_function is None and self._counted_by_model is None:
            self._warn_of_ignored()
        outputs = {}
        last = ShapeTable(chain).boundaries(self._input_specs(self._size))[-1]
        for name in chain.outputs:
            made = torch.zeros(last[name].shape, dtype=last[name].dtype)
            outputs[name] = made.requires_grad_() if last[name].requires_grad else made
        try:
            with torch.enable_grad():
                self.loss(outputs, self._first, {"microbatches": 1.0})
        except CapslogError:
            raise
        except Exception as error:
            raise CapslogError(
                f"the loss failed on the first batch, with zeros for what the model returns ({type(error).__name__}: "
                f"{error}); the outputs are {_described(returned(outputs))}, the batch is {_described(self._first)}"
            ) from error

    def sample_text(self, trained: Callable[[], Chain]) -> str | None:
        """Return the text that data.sample makes of the trained model."""
        function = named_or_handed(self._keys, "sample")
        if function is None:
            return None
        model, chain = self.build_model(), trained()
        if model is None:
            raise CapslogError(f"data.sample gets a model, and {self.name} is a chain; leave data.sample out")
        names, tensors = self.own_names(chain), chain.named_tensors()
        model.load_state_dict({name: tensors[address] for address, name in names.items()}, strict=False)
        try:
            with torch.no_grad(), seeded(self._seed):
                return str(function(model.eval()))
        except Exception as error:
            raise CapslogError(f"data.sample failed ({type(error).__name__}: {error})") from error


class _Judge:
    """Evaluator: mean scores over microbatches, which have one size, and mean losses over the targets that count."""

    def __init__(self, workload: DatasetWorkload) -> None:
        self._workload = workload

    def collect(self, outputs: Mapping[str, Tensor], minibatch: Minibatch, microbatch: int) -> list[Any]:
        device = next(iter(outputs.values())).device
        return [self._workload.judged(outputs, known_targets(minibatch.targets[microbatch], device))]

    def summarize(self, results: list[Any]) -> dict[str, Any]:
        totals: dict[str, float] = {}
        weights: dict[str, float] = {}
        for scores, counted in results:
            for name, value in scores.items():
                weight = counted if name.startswith("val_") else 1.0
                totals[name] = totals.get(name, 0.0) + (value * weight if weight else 0.0)
                weights[name] = weights.get(name, 0.0) + weight
        return {name: total / weights[name] if weights[name] else math.nan for name, total in totals.items()}


def _weighted(value: Tensor, weight: float, outputs: Mapping[str, Tensor]) -> Tensor:
    """Return a mean times its weight; for weight 0, where the mean is NaN, zero with a gradient of zero. value: may be
    an output itself.
    """
    if weight == 1.0:
        return value
    if weight:
        return value * weight
    numbers = [output.nan_to_num() if output is value else output for output in outputs.values()]
    return torch.stack([(output * 0).sum() for output in numbers if output.is_floating_point()]).sum()


def _entry(batch: Any, key: str | int) -> Any:
    """Return an entry of a batch; None where it has no such entry."""
    if isinstance(key, str):
        return batch.get(key)
    entries = batch if isinstance(batch, (tuple, list)) else [batch]
    return entries[key] if key < len(entries) else None


def _described(value: Any) -> str:
    """Return types and shapes, in short."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_described(member)}" for name, member in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_described(member) for member in value)})"
    return type(value).__name__
