"""`engine: varuna`: the engine whose steps Varuna computes.

Only the execution of a step differs from our own engine, so resuming, checkpoints, evaluation and reports are the same,
and a run may continue on the other engine.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.interface import NO_REPORT, EngineParts, Load, RankReport, Verdict
from varuna_capslog.engine.layers import EngineLayer, seed_layer
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.optimizer import StageOptimizer
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.engine.stage import LossFunction
from varuna_capslog.engine.step import (
    check_minibatch,
    data_failure,
    no_targets,
    take_weight,
)
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.layer import put_in_training
from varuna_capslog.model.workload import Minibatch, known_targets
from varuna_capslog.varuna_plugin.executor import Microbatches
from varuna_capslog.varuna_plugin.install import forward_only, install, silent
from varuna_capslog.varuna_plugin.options import configure

__all__ = ["ChainModule", "VarunaEngine"]


class ChainModule(nn.Module):
    """A chain as one module, whose children `layers.0`, `layers.1`, ... have a CutPoint between every two of them.

    The modules are the chain's own. Cut i of the chain is CutPoint i, and the same tensors cross it, so a plan for the
    chain is a cut list for Varuna. User scripts may use this class, too.

    Args:
        cut: Varuna's class `CutPoint`.
        loss: the workload's loss, computed by the last stage.
        seed: seed of the run. Every layer draws from (seed, step, microbatch, layer), as on our own engine.

    Attributes:
        parts: by microbatch, the loss parts of training forwards on the last stage, until they are cleared.
    """

    def __init__(self, chain: Chain, cut: type[nn.Module], loss: LossFunction, seed: int = 0) -> None:
        super().__init__()
        chain.fill()
        self.layers = nn.ModuleList(layer.module for layer in chain.layers)
        self.points = nn.ModuleList(cut() for _ in chain.layers[1:])
        self._wiring = [(layer.reads, layer.writes) for layer in chain.layers]
        self._crossing = [chain.crossing(cut) for cut in range(len(chain))]
        self._outputs, self._loss, self._seed = chain.outputs, loss, seed
        self.parts: dict[int, dict[str, float]] = {}

    def forward(
        self,
        inputs: Mapping[str, Tensor],
        targets: Any = None,
        normalisers: Mapping[str, float] | None = None,
        step: int = 0,
        microbatch: int = 0,
    ) -> Any:
        """Run a microbatch; return the loss in training mode, else the chain's outputs by name.

        Only the first stage uses `inputs`, only the last one `targets` and `normalisers`.
        """
        values: dict[str, Any] = dict(inputs)
        device = next(self.parameters()).device
        for index, (layer, (reads, writes)) in enumerate(zip(self.layers, self._wiring, strict=True)):
            if index > 0:
                names = self._crossing[index]
                crossed = self.points[index - 1](*[values.get(name) for name in names])
                values = dict(zip(names, (crossed,) if len(names) == 1 else crossed, strict=True))
            if self.training:
                seed_layer(device, self._seed, step, microbatch, index)
            result = layer(*[values.get(name) for name in reads])
            values.update(zip(writes, result if isinstance(result, tuple) else (result,), strict=True))
        outputs = {name: values[name] for name in self._outputs}
        if not self.training:
            return outputs
        seed_layer(device, self._seed, step, microbatch, len(self.layers))
        parts = self._loss(outputs, known_targets(targets, device), normalisers or {})
        self.parts[microbatch] = {name: float(part.detach()) for name, part in parts.items()}
        return parts["loss"]


class VarunaEngine:
    """Engine of a rank whose steps are computed by an installed Varuna; see `Engine`.

    Results differ from our own engine's: gradients are summed in the order of Varuna's autograd graph (equal to
    rounding, not bit for bit), and running statistics are those of replica 0. The example of `parts` is the microbatch
    on which rank 0 traces the model. Raises CapslogError: no fitting Varuna, or a layout or option that it cannot run.
    """

    def __init__(self, parts: EngineParts) -> None:
        chain, layout, options = parts.chain, parts.layout, parts.options
        communicator, device = parts.communicator, parts.device
        _check(layout, options, communicator)
        self.chain, self.layout, self.options = chain, layout, options
        self.communicator, self.device = communicator, device
        self.rank = communicator.rank
        self._way, pipeline_rank = divmod(self.rank, layout.devices)
        communicator.describe_ranks({rank: layout.describe(rank) for rank in range(layout.world_size)})
        ends = (*layout.cuts[1:], len(chain))
        own_layers = range(layout.cuts[pipeline_rank], ends[pipeline_rank])
        self._microbatches = layout.microbatches_of(self.rank, own_layers[0], options.num_microbatches)
        shared = [chain.shared_names(index) for index in own_layers]  # read while the chain is whole
        put_in_training(layer.module for layer in chain.layers)
        with silent():
            install()
            configure(cuts=layout.cuts, loss="sum", timeout_seconds=parts.timeout_seconds)
            import varuna

            self._module = ChainModule(chain, varuna.CutPoint, parts.loss, options.seed)

            def one_microbatch(size: int, device: Any = None) -> dict[str, Any]:
                inputs, targets, normalisers = parts.example()
                return {"inputs": inputs, "targets": targets, "normalisers": normalisers}

            stages, replicas = range(layout.devices), range(layout.replicas)
            self._varuna = varuna.Varuna(
                self._module,
                "".join(",".join(str(s + layout.devices * r) for r in replicas) + ";" for s in stages),
                one_microbatch,
                options.num_microbatches,
                1,
                device=device,
                local_rank=self.rank,
            )
        self.layers = [
            EngineLayer(index, chain.layers[index], device, options.precision, names)
            for index, names in zip(own_layers, shared, strict=True)
        ]
        self.optimizer = StageOptimizer(self.layers, options.recipe)
        # Varuna reads only the parameters of an optimizer: the update is ours
        self._varuna.set_optimizer(SimpleNamespace(param_groups=[{"params": list(self.optimizer.parameters.values())}]))
        self.loaded_microbatches = self._microbatches if own_layers[0] == 0 else []
        self.judged_microbatches = self._microbatches if own_layers[-1] == len(chain) - 1 else []
        self.doing = "starting"
        self._norm = 0.0

    def forget(self) -> None:
        """Drop all traces of an interrupted step."""
        self._module.parts.clear()
        for parameter in self.optimizer.parameters.values():
            parameter.grad = None

    def compute(self, step: int, minibatch: Minibatch, load: Load) -> None:
        """Compute like `Engine.compute`; the forwards, backwards and sums are Varuna's."""
        check_minibatch(minibatch, self.options)
        self.doing = f"step {step}"
        batches = [self._inputs(step, minibatch, load, index) for index in self._microbatches]
        try:
            self._varuna.step(Microbatches(batches))
        except BaseException:
            self.forget()
            raise
        self._norm = self._varuna.capslog_grad_norm

    def vote(
        self,
        step: int,
        minibatch: Minibatch,
        stop: bool = False,
        ballot: bytes = b"",
        data: RankReport = NO_REPORT,
    ) -> Verdict:
        """Vote like `Engine.vote`: gather the loss parts, the wishes to stop, the ballots and the reports."""
        try:
            own_vote = dict(self._module.parts), stop, ballot, data.waited_seconds, data.failure
            gathered = self.communicator.gather(own_vote)
        except BaseException:
            self.forget()
            raise
        total = _sum_parts([parts for parts, *_ in gathered])
        counted = take_weight(total, len(minibatch.inputs))
        weight = counted or 1.0
        total = {name: part / weight for name, part in total.items()}
        norm = self._norm / weight
        finite = all(math.isfinite(value) for value in (norm, *total.values()))
        refusal = data_failure(step, [failure for *_, failure in gathered])
        if refusal is None and self.options.refuses and not finite:
            shown = ", ".join(f"{name}={value:g}" for name, value in total.items())
            samples = [sample for group in minibatch.sample_ids for sample in group]
            refusal = (
                f"step {step}: not finite: {shown}, gradient norm {norm:g} (samples {samples}); nothing was applied: "
                "lower train.lr or look at them"
            )
        if counted == 0:
            refusal = refusal or no_targets(step)
        clipped = min(1.0, self.options.clip_norm / (norm + 1e-6)) if self.options.clip_norm > 0 else 1.0
        scale = clipped / weight
        ballots = tuple(ballot_of_rank for _, _, ballot_of_rank, *_ in gathered)
        stops = any(wish for _, wish, *_ in gathered)
        waited = tuple(seconds for *_, seconds, _ in gathered)
        return Verdict(step, total, norm, scale, finite, refusal, stops, ballots if any(ballots) else (), waited)

    def apply(self, verdict: Verdict) -> float:
        """Apply like `Engine.apply`; the update is our optimizer's."""
        rate = self.optimizer.step(verdict.step, verdict.scale)
        self.forget()
        return rate

    def evaluate(
        self,
        minibatches: Sequence[Minibatch],
        load: Callable[[int, int], dict[str, Tensor]],
        take: Callable[[int, int, dict[str, Tensor]], None],
    ) -> None:
        """Evaluate like `Engine.evaluate`; this rank computes only its own pipeline's minibatch."""
        if self._way >= len(minibatches):
            return
        minibatch, load_inputs = minibatches[self._way], functools.partial(load, self._way)
        batches = [self._inputs(0, minibatch, load_inputs, index) for index in range(len(minibatch.inputs))]
        self._varuna.eval()
        try:
            forward_only(self._varuna, Microbatches(batches), functools.partial(take, self._way))
        finally:
            self._varuna.train()
            for layer in self.layers:
                layer.train()

    def _inputs(self, step: int, minibatch: Minibatch, load: Load, index: int) -> dict[str, Any]:
        inputs = load(index) if self.layers[0].index == 0 else {}
        return {
            "inputs": {name: tensor.to(self.device) for name, tensor in inputs.items()},
            "targets": minibatch.targets[index],
            "normalisers": minibatch.normalisers,
            "step": step,
            "microbatch": index,
        }


def _sum_parts(gathered: list[dict[int, dict[str, float]]]) -> dict[str, float]:
    """Return the loss parts of the minibatch, added in the order of the microbatches."""
    by_microbatch = {index: parts for theirs in gathered for index, parts in theirs.items()}
    total: dict[str, float] = {}
    for _, parts in sorted(by_microbatch.items()):
        for name, value in parts.items():
            total[name] = total.get(name, 0.0) + value
    return total


def _check(layout: Layout, options: EngineOptions, communicator: Communicator) -> None:
    refused = ""
    if layout != Layout.pipelines(layout.cuts, layout.num_layers, None, layout.replicas, layout.num_blocks):
        refused = "Varuna runs one stage per rank, in order: give pipeline.cuts as many entries as pipeline.devices"
    elif options.schedule != "varuna" or not options.recompute or options.actions is not None:
        refused = "Varuna has its own schedule and always recomputes: set pipeline.schedule=varuna, recompute=true"
    elif options.stage_inputs != "host" or options.transport != "gloo":
        refused = "Varuna keeps and sends tensors by host memory: set pipeline.stage_inputs=host, transport=gloo"
    elif options.precision != "float32":
        refused = f"precision {options.precision} is not verified on Varuna: set train.precision=float32"
    elif communicator.world_size != layout.world_size:
        refused = f"the layout needs {layout.world_size} ranks, but {communicator.world_size} are connected"
    if refused:
        raise CapslogError(f"engine=varuna cannot run this: {refused}")
