"""`EngineLayer`, a layer with its own parameter leaves and random numbers; and autograd graphs of consecutive layers.

Every sum of gradients has the same terms in the same order for any cut list. Therefore layers share a
graph only where gradients flow from one layer to the next. A tensor that several layers read ends the graph: their
gradients are added one by one, last reader first. Each use of a shared parameter accumulates separately.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from varuna_capslog import accelerator
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.seeds import mix
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.functions import BoundFunctions, LayerFunctions
from varuna_capslog.engine.halves import WeightHalf, input_half
from varuna_capslog.engine.layout import Gradients, Layout
from varuna_capslog.engine.offload import GradientBox, laid_out
from varuna_capslog.model.capture.python_calls import Whole, WholeModel
from varuna_capslog.model.chain import Chain, Layer, TensorSpec, Value
from varuna_capslog.model.hollow import replace_parameters
from varuna_capslog.model.layer import dense_gradient, frozen_parts, gradient_hooks, low_parameters, put_in_training
from varuna_capslog.model.python_state import PythonState, RandomStates, crafted_draws, seed_generators
from varuna_capslog.model.trace import autocast_context

__all__ = [
    "BatchStatistics",
    "CompiledForward",
    "EngineLayer",
    "FunctionGraph",
    "LayerGraph",
    "StatisticsBook",
    "check_backend",
    "keep_layout",
    "persistent_buffers",
    "seed_layer",
    "take_layers",
    "tracking_modules",
]


# -- A layer compiled by torch.compile, with code that does not depend on what its process has run before.


_MOST_VERSIONS = 100_000
"""Limit of recompilations. By default torch silently runs a layer uncompiled after eight kinds of shapes or layers, and
the cuts decide how many kinds a process runs."""


def check_backend(backend: str) -> None:
    """Raise CapslogError for a backend that this torch does not know."""
    backends = torch._dynamo.list_backends(exclude_tags=())
    if backend not in backends:
        raise CapslogError(
            f"train.compile={backend!r} is no backend of torch.compile here; known: {', '.join(sorted(backends))}; "
            "null runs the layers as they are"
        )


class CompiledForward:
    """Layer's module, compiled by torch.compile; the module and its state stay as they are.

    Each size gets its own code. By default torch makes code for any size after the second size, so that a process that
    has run only one size would compute with other code.
    """

    def __init__(self, module: torch.nn.Module, backend: str) -> None:
        self.backend = backend
        self._call = torch.compile(module, backend=backend, dynamic=False)
        self._limits = torch._dynamo.config.patch(
            recompile_limit=_MOST_VERSIONS,
            accumulated_recompile_limit=_MOST_VERSIONS,
            fail_on_recompile_limit_hit=True,
        )

    def __call__(self, *tensors: torch.Tensor) -> Any:
        with self._limits:
            return self._call(*tensors)


# -- Running statistics (BatchNorm): collected during a step, applied with its update.
#
# torch's modules update their buffers in every forward, so that a recomputation would count twice and a refused step
# would leave traces. Here each forward of a microbatch records its batch statistics once, and `commit` applies them in
# microbatch order.


_TAG = 3 << 28


class BatchStatistics(NamedTuple):
    """Mean and variance of one batch, [2, features]. module: number of the normalisation module in its layer."""

    module: int
    values: Tensor


_Norm = nn.modules.batchnorm._NormBase


def tracking_modules(module: nn.Module) -> Iterator[tuple[str, _Norm]]:
    """Normalisation modules inside `module` that have running statistics, with their names."""
    for name, child in module.named_modules():
        if isinstance(child, nn.SyncBatchNorm):
            raise CapslogError(
                f"module {name!r} is a SyncBatchNorm, which talks between ranks; use BatchNorm or GroupNorm"
            )
        if isinstance(child, _Norm) and child.track_running_stats and child.running_mean is not None:
            yield name, child


class RunningStatistics:
    """Recorder of batch statistics by hooks on one layer's modules, which leave their buffers unchanged meanwhile.

    Records between `begin(microbatch)` and `end()`; with `microbatch=None` (recomputation) the statistics are dropped.
    Frozen modules (eval mode) have none. Memory: two vectors per module and microbatch until `commit`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = [child for _, child in tracking_modules(module)]
        self._recording: list[BatchStatistics] | None = None
        self._batches: dict[int, list[BatchStatistics]] = {}
        self._calls: tuple[int, ...] | None = None
        """Numbers of the modules that a forward calls, in the order of `arrange`; None before the first forward."""
        for child in self._modules:
            child.register_forward_pre_hook(self._divert)
            child.register_forward_hook(self._record, always_call=True)
        self._kept: dict[int, tuple[Tensor | None, Tensor | None, Tensor | None, float | None]] = {}
        self._active = False

    def __bool__(self) -> bool:
        return bool(self._modules)

    def begin(self, microbatch: int | None) -> None:
        """Record the next forwards for `microbatch` (None: a recomputation, whose statistics are dropped)."""
        self._active = True
        self._recording = None if microbatch is None else self._batches.setdefault(microbatch, [])

    def end(self) -> None:
        """Stop recording forwards."""
        self._active = False
        self._recording = None

    def _divert(self, module: nn.Module, _: object) -> None:
        if not self._active or not module.training:
            return
        assert isinstance(module, _Norm)
        assert module.running_mean is not None
        assert module.running_var is not None
        self._kept[id(module)] = (module.running_mean, module.running_var, module.num_batches_tracked, module.momentum)
        # with momentum 1 the kernel writes exactly this batch's statistics
        module.running_mean = torch.zeros_like(module.running_mean)
        module.running_var = torch.ones_like(module.running_var)
        module.num_batches_tracked = None
        module.momentum = 1.0

    def _record(self, module: nn.Module, _: object, __: object) -> None:
        kept = self._kept.pop(id(module), None)
        if kept is None:
            return
        assert isinstance(module, _Norm)
        assert module.running_mean is not None
        assert module.running_var is not None
        if self._recording is not None:
            number = next(number for number, child in enumerate(self._modules) if child is module)
            self._recording.append(BatchStatistics(number, torch.stack([module.running_mean, module.running_var])))
        module.running_mean, module.running_var, module.num_batches_tracked, module.momentum = kept

    def arrange(self, microbatch: int) -> None:
        """Sort the statistics of a microbatch after its forward, first calls before repeated calls, each by module, so
        that all ranks with the layer have the same order. Raises CapslogError where the layer called other modules in
        an earlier forward.
        """
        batches = self._batches[microbatch]
        modules = [batch.module for batch in batches]
        order = sorted(range(len(modules)), key=lambda call: (modules[:call].count(modules[call]), modules[call]))
        batches[:] = [batches[call] for call in order]
        calls = tuple(batch.module for batch in batches)
        if self._calls is None:
            self._calls = calls
        if calls != self._calls:
            counts = [[row.count(number) for number in range(len(self._modules))] for row in (self._calls, calls)]
            raise CapslogError(
                f"the normalisations of one layer ran {counts[0]} times in one forward and {counts[1]} times in "
                "another; running statistics need equal calls for every microbatch: use GroupNorm"
            )

    def of(self, microbatch: int) -> Sequence[Tensor]:
        """Recorded statistics of one microbatch of this step, in the order of `arrange`."""
        return [batch.values for batch in self._batches.get(microbatch, ())]

    def take(self) -> dict[int, list[BatchStatistics]]:
        """Return the statistics of this step by microbatch, and clear them."""
        batches, self._batches = self._batches, {}
        return batches

    def commit(self, statistics: Mapping[int, Sequence[BatchStatistics]]) -> None:
        """Update the running buffers with the statistics of all replicas, in microbatch order as in one process."""
        for microbatch in sorted(statistics):
            for number, (mean, variance) in statistics[microbatch]:
                module = self._modules[number]
                assert module.running_mean is not None
                assert module.running_var is not None
                if module.num_batches_tracked is not None:
                    module.num_batches_tracked.add_(1)
                if module.momentum is None:
                    assert module.num_batches_tracked is not None
                    factor = 1.0 / float(module.num_batches_tracked)
                else:
                    factor = module.momentum
                module.running_mean.mul_(1 - factor).add_(mean, alpha=factor)
                module.running_var.mul_(1 - factor).add_(variance, alpha=factor)


class StatisticsBook:
    """Batch statistics of one rank's layers in a step, also those from other ranks that hold these layers."""

    def __init__(
        self, layers: Sequence[EngineLayer], communicator: Communicator, layout: Layout, num_microbatches: int
    ) -> None:
        self._communicator = communicator
        self._layers = {layer.index: layer for layer in layers if layer.statistics}
        # layer -> the other ranks that hold it -> the microbatches whose statistics they have
        self._others = {
            index: {
                rank: layout.microbatches_of(rank, index, num_microbatches)
                for rank in layout.holders(index)
                if rank != communicator.rank
            }
            for index in self._layers
        }
        self._found: dict[int, dict[int, list[BatchStatistics]]] = {}

    def collect(self) -> None:
        """Collect the statistics of all microbatches of the step, from this rank's layers and the other holders."""
        for index, layer in self._layers.items():
            statistics, others = layer.statistics.take(), self._others[index]
            self._found[index] = statistics | self._ask(index, statistics, others) if others else statistics

    def of(self, index: int) -> Mapping[int, list[BatchStatistics]]:
        """Statistics of a layer by microbatch, after `collect`."""
        return self._found.get(index, {})

    def commit(self) -> None:
        """Update the layers' running buffers."""
        for index, statistics in self._found.items():
            self._layers[index].statistics.commit(statistics)
        self._found = {}

    def forget(self) -> None:
        """Drop the statistics of an interrupted step."""
        self._found = {}

    def _ask(
        self, index: int, mine: Mapping[int, list[BatchStatistics]], others: Mapping[int, Sequence[int]]
    ) -> dict[int, list[BatchStatistics]]:
        """Exchange statistics with the other holders of a layer; return theirs, by microbatch."""
        order = sorted(mine)
        calls = mine[order[0]]
        sizes = [batch.values.numel() for batch in calls]
        flat = torch.cat([batch.values.reshape(-1) for microbatch in order for batch in mine[microbatch]])
        wanted = {peer: TensorSpec((sum(sizes) * len(theirs),), flat.dtype) for peer, theirs in others.items()}
        statistics = {}
        for peer, values in self._communicator.exchange(
            dict.fromkeys(others, flat), wanted, _TAG + index, flat.device
        ).items():
            pieces = iter(values.split(sizes * len(others[peer])))
            for microbatch in others[peer]:
                statistics[microbatch] = [
                    BatchStatistics(batch.module, next(pieces).reshape(batch.values.shape)) for batch in calls
                ]
        return statistics


# -- a layer as the engine runs it


@dataclass
class LayerGraph:
    """Autograd graph of one forward of consecutive layers, from layer `first` on.

    leaves: tensors that the first layer reads and that need a gradient, or the boxes that receive it.
    writes: values that the last layer writes. edges: gradient edges of those that carry a gradient.
    """

    first: int
    leaves: dict[Value, Tensor | GradientBox] = field(default_factory=dict)
    writes: tuple[Value, ...] = ()
    edges: dict[Value, GradientEdge] = field(default_factory=dict)

    def close(self, written: Mapping[Value, Tensor]) -> dict[Value, Tensor]:
        """End the graph after the layer that wrote these tensors; return them detached."""
        self.writes = tuple(written)
        self.edges = {value: get_gradient_edge(tensor) for value, tensor in written.items() if tensor.requires_grad}
        return {value: tensor.detach() for value, tensor in written.items()}

    def backward(self, gradients: Gradients) -> None:
        """Differentiate the layers and free the graph; gradients of parameters accumulate in `.grad`. Gradients of the
        outputs are taken from `gradients`, and those of the inputs are added to it.
        """
        outputs = self._take_outputs(gradients)
        if outputs:
            torch.autograd.backward([edge for edge, _ in outputs], [gradient for _, gradient in outputs])
        for value, leaf in self.leaves.items():
            if leaf.grad is not None:
                gradients.add(value, self.first, leaf.grad)
        self.leaves.clear()
        self.edges.clear()

    def backward_inputs(self, gradients: Gradients) -> WeightHalf:
        """Differentiate as `backward`, but for the inputs only; the result computes the gradients of the parameters."""
        leaf_gradients, weight_half = input_half(self._take_outputs(gradients), self.leaves)
        for value, gradient in leaf_gradients.items():
            gradients.add(value, self.first, gradient)
        self.leaves.clear()
        self.edges.clear()
        return weight_half

    def _take_outputs(self, gradients: Gradients) -> list[tuple[GradientEdge, Tensor]]:
        outputs = []
        for value in self.writes:
            gradient, edge = gradients.take(value), self.edges.get(value)
            if gradient is not None and edge is not None:
                outputs.append((edge, gradient))
        return outputs


class FunctionGraph(LayerGraph):
    """One forward of a layer by its functions, which takes the place of an autograd graph.

    reads: values that the layer reads. writes: values that it writes.
    """

    def __init__(self, index: int, functions: BoundFunctions, reads: Sequence[Value], writes: Sequence[Value]) -> None:
        super().__init__(index, writes=tuple(writes))
        self._functions, self._saved = functions, list[Any]()
        self._wanted = [value for value, wanted in zip(reads, functions.traced.wanted, strict=True) if wanted]

    def forward(self, tensors: Sequence[Tensor]) -> dict[Value, Tensor]:
        """Run the layer; return the tensors that it writes."""
        outputs, self._saved = self._functions.forward(tensors)
        return dict(zip(self.writes, outputs, strict=True))

    def backward(self, gradients: Gradients) -> None:
        """Differentiate the layer, as a graph of autograd."""
        taken = [gradients.take(value) for value in self.writes]
        if all(gradient is None for gradient in taken):
            return
        for value, gradient in zip(self._wanted, self._functions.backward(self._saved, taken), strict=True):
            if gradient is not None:
                gradients.add(value, self.first, gradient)

    def backward_inputs(self, gradients: Gradients) -> WeightHalf:
        """Raise AssertionError: an engine whose schedule splits backwards runs no functions."""
        raise AssertionError("functions have no halves")


def keep_layout(tensor: Tensor) -> None:
    """Give the tensor's gradient the layout of the tensor, as if the tensor crossed a cut."""
    stride, node, place = tensor.stride(), tensor.grad_fn, tensor.output_nr
    if node is None:  # the layer's output is a leaf
        tensor.register_hook(lambda gradient: laid_out(gradient, stride))
        return

    def lay_out(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        gradient = gradients[place]
        if gradient is None or gradient.stride() == stride:
            return None  # unchanged; cheaper than returning the gradients
        return (*gradients[:place], laid_out(gradient, stride), *gradients[place + 1 :])

    # cheaper than a hook on the tensor
    node.register_prehook(lay_out)


def seed_layer(device: torch.device, seed: int, step: int, microbatch: int, layer: int) -> None:
    """Seed the device's generator for one layer and microbatch, so that dropout is the same under any plan."""
    accelerator.seed(device, mix(seed, step, microbatch, layer))


class EngineLayer:
    """Layer on its device. Built by `take_layers`.

    Attributes:
        index: position in the chain. compiled: if not None, runs in training instead of the module.
        functions: if not None, may run in place of the module where a forward keeps its graph.
        parameters: this layer's own leaves, by name in the layer; all leaves of a shared parameter have one storage.
        masters: float32 masters of trained 16-bit parameters, by name in the layer; the optimizer steps a master, and
            the parameter is its rounding. All uses of a shared parameter have one master.
        shared: addresses of shared parameters, by name in the layer.
    """

    def __init__(
        self,
        index: int,
        layer: Layer,
        device: torch.device,
        precision: str,
        shared: Mapping[str, str],
        masters: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        self.index = index
        self.layer = layer
        self.name = layer.name
        self.device = device
        self.shared = dict(shared)
        self.parameters: dict[str, nn.Parameter] = dict(layer.module.named_parameters())
        self.masters: dict[str, nn.Parameter] = dict(masters or {})
        self._frozen = frozen_parts(layer.module)
        for part in layer.module.modules():
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse and part.weight.requires_grad:
                part.weight.register_hook(dense_gradient)
        self.statistics = RunningStatistics(layer.module)
        self.compiled: CompiledForward | None = None
        self.functions: LayerFunctions | None = None
        self._precision = precision
        self._python = any(isinstance(part, (Whole, WholeModel)) for part in layer.module.modules())
        self._stateless = self._plain = False
        self._generators: Mapping[str, Any] | None = None
        """Generators other than torch's that the layer's Python code uses; None until its first forward in training."""

    def reset(self) -> None:
        """Drop the gradients and statistics of the current step, and return to training mode."""
        self.train()
        self.statistics.take()
        for parameter in self.parameters.values():
            parameter.grad = None

    def train(self) -> None:
        """Set training mode, except for parts that were in eval mode when the layer was taken."""
        self.layer.module.train()
        for part in self._frozen:
            part.training = False

    def address(self, name: str) -> str:
        """Address of a parameter in the model, by its name in the layer."""
        return self.shared.get(name, f"{self.name}.{name}")

    @property
    def values(self) -> dict[str, nn.Parameter]:
        """Parameters by name; where a parameter has a master, the master."""
        return self.parameters | self.masters

    def round_masters(self) -> None:
        """Set the 16-bit parameters to the roundings of their masters."""
        if self.masters:
            with torch.no_grad():
                low: list[Tensor] = [self.parameters[name] for name in self.masters]
                torch._foreach_copy_(low, [*self.masters.values()])

    @property
    def compiles(self) -> bool:
        """True where `compiled` runs; evaluations run the module itself."""
        return self.compiled is not None and self.layer.module.training

    @property
    def plain(self) -> bool:
        """True where a forward is the module's own, with torch's random numbers alone; False before the first one."""
        return self._plain and not self.builds_graph

    @property
    def builds_graph(self) -> bool:
        """True where every forward builds a graph: compiled code needs it, and so may a module that runs as a whole."""
        return self._python or self.compiles

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Persistent buffers, by name in the layer."""
        return persistent_buffers(self.layer.module, self.parameters)

    def autocast(self) -> AbstractContextManager[Any]:
        """Context of autocast in which the layer runs."""
        return autocast_context(self.device.type, self._precision)

    def seed(self, seeds: int) -> int:
        """Seed torch's random numbers for this layer; return the seed. seeds: as for `forward`."""
        seed = mix(self.index, after=seeds)
        accelerator.seed(self.device, seed)
        return seed

    def forward(
        self,
        values: Mapping[str, Tensor],
        microbatch: int,
        seeds: int,
        graph: bool,
        record: bool,
        instead: Callable[..., Any] | None = None,
    ) -> dict[str, Tensor]:
        """Run the layer; return the tensors that it writes, by name.

        Args:
            values: at least the tensors that it reads. If it `builds_graph`, those whose specs require a gradient must
                have requires_grad, also without `graph`.
            seeds: `seeds.mixed` of (run seed, step, microbatch), for the random numbers.
            graph: keep the autograd graph. record: record running statistics (False in a recomputation).
            instead: called instead of the module, unless the layer is compiled.
        """
        seed = self.seed(seeds)
        if self._plain and self.compiled is None and torch.is_grad_enabled() is graph:
            return self.layer.run(values, instead)  # the code below would do the same, but slower
        versions = None
        if not self._stateless:
            versions = {name: tensor._version for name, tensor in self.layer.module.named_buffers()}
        if self.statistics:
            self.statistics.begin(microbatch if record else None)
        try:
            builds = self.builds_graph
            with (
                self._drawing(seed, any(isinstance(tensor, FakeTensor) for tensor in values.values())),
                torch.set_grad_enabled(graph or builds),
                self.autocast(),
            ):
                written = self.layer.run(values, self.compiled if self.compiles else instead)
        finally:
            self.statistics.end()
        if self.statistics and record:
            self.statistics.arrange(microbatch)
        if builds and not graph:
            written = {name: tensor.detach() for name, tensor in written.items()}
        if versions is not None:
            self._check_state(versions)
        return written

    @contextmanager
    def _drawing(self, seed: int, fake: bool) -> Iterator[None]:
        """Context in which the random numbers of the layer's Python code depend on `seed` alone. With `fake` (estimate)
        they are the highest numbers, with which code that skips layers at random skips none.
        """
        if fake:
            with crafted_draws(high=True):
                yield
            return
        generators = self._generators
        if generators is None:
            generators = PythonState(dict(self.layer.module.named_modules()), files=True).generators
        before = RandomStates(generators)
        seed_generators(generators, seed)
        seeded = RandomStates(generators) if self._generators is None else before
        try:
            yield
            if self._generators is None and self.layer.module.training:
                self._generators = generators if seeded.drawn() else {}
        finally:
            before.put_back()

    def _check_state(self, versions: Mapping[str, int]) -> None:
        """Raise CapslogError, after the first forward, for modules that change buffers in the forward."""
        for name, tensor in self.layer.module.named_buffers():
            if tensor._version != versions.get(name, tensor._version):
                raise CapslogError(
                    f"layer {self.name!r} changes its buffer {name!r} in the forward; only BatchNorm's running "
                    "statistics may change there, since recomputation would repeat the change: make it an output or "
                    "a parameter"
                )
        self._stateless = self._generators is not None
        self._plain = self._stateless and self._precision == "float32" and not (self.statistics or self._generators)


def persistent_buffers(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Entries of a module's state dict other than these parameters, by name."""
    return {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if name not in parameters}


def take_layers(
    chain: Chain,
    indices: Sequence[int],
    device: torch.device,
    precision: str = "float32",
    ready: Mapping[int, EngineLayer] | None = None,
    weights: str = "float32",
) -> list[EngineLayer]:
    """Layers of a chain for the engine, on `device`, in training mode except for frozen parts.

    A parameter used by several layers gets one storage on this device and one leaf for each of these layers.

    Args:
        weights: dtype in which parameters are kept (`low_parameters`).
        ready: layers of an earlier engine of this process, by index. They are used again, except those with shared
            parameters, whose storage depends on the other layers of the rank; all other layers are new modules, whose
            state is loaded later, and the chain stays unchanged. None (first engine of a process): the chain's own
            modules are used, and layers of factories are built.

    Raises CapslogError where layers share a module with running statistics, or a shared parameter has a gradient hook.
    """
    if ready is None:
        chain.check_unchanged()
        chain.fill(indices)
    storage: dict[nn.Parameter, Tensor] = {}
    by_place: _Masters = {}
    taken: dict[int, nn.Module] = {}
    for index in indices:
        layer = chain.layers[index]
        shared = chain.shared_names(index)
        if not shared and ready is not None and index in ready:
            ready[index].reset()
            continue
        module = layer.module if ready is None else chain.new_module(index)
        if module is not layer.module:
            _keep_hooks(layer.module, module)
        if shared:
            _refuse_shared_statistics(chain, index)
            parameters, originals = dict(module.named_parameters()), dict(layer.module.named_parameters())
            # the copy keeps all tensors except the shared parameters
            memo: dict[int, object] = {id(tensor): tensor for tensor in (*parameters.values(), *module.buffers())}
            for name in shared:
                original = originals[name]
                if gradient_hooks(original):
                    raise CapslogError(
                        f"the parameter {shared[name]!r} is used by several layers and has a hook on its gradient, "
                        "which would see the gradient of each use alone; change the gradient in the forward instead, "
                        "or use the parameter in one layer"
                    )
                if original not in storage:
                    storage[original] = parameters[name].detach().to(device, copy=True)
                memo[id(parameters[name])] = nn.Parameter(storage[original], requires_grad=original.requires_grad)
            module = copy.deepcopy(module, memo)
        if any(tensor.device != device for tensor in (*module.parameters(), *module.buffers())):
            module.to(
                device
            )  # not for a module that is on the device: torch would replace the fake tensors of an estimate
        taken[index] = module
    put_in_training(taken.values(), [layer.module for layer in chain.layers])
    layers = []
    for index in indices:
        if index in taken:
            layer = replace(chain.layers[index], module=taken[index])
            masters = _lower(layer.module, weights, by_place)
            layers.append(EngineLayer(index, layer, device, precision, chain.shared_names(index), masters))
        else:
            assert ready is not None
            layers.append(ready[index])
    return layers


def _keep_hooks(module: nn.Module, made: nn.Module) -> None:
    """Copy gradient hooks from a module's parameters to those of its copy `made`."""
    others = dict(made.named_parameters())
    for name, parameter in module.named_parameters():
        for hook in (parameter._backward_hooks or {}).values():
            if hook is not dense_gradient and others[name].requires_grad:
                others[name].register_hook(hook)


_Masters = dict[tuple[int, int], tuple[nn.Parameter, Tensor]]
"""Maps storage and offset to a float32 parameter and its rounding."""


def _lower(module: nn.Module, weights: str, by_place: _Masters) -> dict[str, nn.Parameter]:
    """Replace a module's parameters by 16-bit leaves; return the masters of the trained ones.

    A 16-bit gradient becomes float32 at its leaf, so that microbatches are added in float32. by_place: masters of
    earlier layers, with which parameters may share a storage; new masters are added.
    """
    lowered = low_parameters(module, weights)
    if not lowered:
        return {}
    for name, parameter in module.named_parameters():
        if parameter in lowered and gradient_hooks(parameter):
            raise CapslogError(
                f"the parameter {name!r} has a hook on its gradient, which the leaf of {weights} in its place does not "
                "have; set train.weights=float32"
            )
    names = {parameter: name for name, parameter in module.named_parameters()}
    masters: dict[str, nn.Parameter] = {}
    leaves: dict[nn.Parameter, nn.Parameter] = {}
    for parameter, dtype in lowered.items():
        place = parameter.untyped_storage()._cdata, int(parameter.storage_offset())
        if place not in by_place:
            by_place[place] = parameter, parameter.detach().to(dtype)
        master, low = by_place[place]
        leaf = leaves[parameter] = nn.Parameter(low, requires_grad=parameter.requires_grad)
        if leaf.requires_grad:
            leaf.grad_dtype = torch.float32
            masters[names[parameter]] = master
    replace_parameters([module], leaves)
    return masters


def _refuse_shared_statistics(chain: Chain, index: int) -> None:
    mine = {id(module): name for name, module in tracking_modules(chain.layers[index].module)}
    for layer in chain.layers[:index]:
        for _, module in tracking_modules(layer.module):
            if id(module) in mine:
                raise CapslogError(
                    f"layers {layer.name!r} and {chain.layers[index].name!r} share the module {mine[id(module)]!r}, "
                    "which keeps running statistics; share a normalisation without them (GroupNorm, LayerNorm)"
                )
