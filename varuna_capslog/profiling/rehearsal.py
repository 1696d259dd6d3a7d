"""A plan rehearsed on fake tensors: every rank's own program of a step, so that its peak is known before the launch.

Where `estimate` runs single layers and pairs between dummies, from which a memory model predicts any stage, this runs
the stages of one given cut list under its schedule, with all that is in flight: inputs and graphs that wait, receives
posted ahead, messages sent and not yet confirmed. On the CPU these share the stage's memory. It takes a few seconds and
therefore confirms a plan, it does not search one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import Config
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import EngineOptions, PipelineEngine, Ready
from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.model.workload import Minibatch
from varuna_capslog.profiling.estimate import StageEstimator
from varuna_capslog.profiling.estimation.allocator import replay, round_up
from varuna_capslog.profiling.estimation.hollow import SilentCommunicator, fake_step, host_tier
from varuna_capslog.profiling.estimation.quirks import Quirks
from varuna_capslog.profiling.skeleton import with_real_layers
from varuna_capslog.profiling.trim import KnownShapes

__all__ = ["rehearse", "rehearse_config"]

_CPU = torch.device("cpu")


def rehearse(estimator: StageEstimator, cuts: Sequence[int], schedule: str, num_microbatches: int) -> list[int]:
    """Peak bytes of every stage of a cut list, stage s on rank s, in one step of training after the first.

    Args:
        estimator: the workload and its conditions.
        num_microbatches: of a pipeline's step.

    Raises:
        CapslogError: a layer or the loss cannot run on fake tensors; cuts that do not fit the chain.
    """
    chain, conditions = estimator.chain, estimator.conditions
    chain.check_cuts(cuts)
    options = EngineOptions(
        num_microbatches=num_microbatches,
        num_blocks=conditions.blocks,
        schedule=schedule,
        recompute=conditions.recompute,
        stage_inputs=conditions.stage_inputs,
        precision=conditions.precision,
        clip_norm=1.0,
        refuses=False,
    )
    targets, normalisers = estimator.workload.profile_targets(conditions.microbatch_size)
    inputs = [dict(estimator.specs[0])] * num_microbatches
    minibatch = Minibatch(inputs, [targets] * num_microbatches, dict(normalisers))
    layout, mode = Layout.pipelines(cuts, len(chain)), FakeTensorMode(allow_non_fake_inputs=True)
    peaks = []
    for rank, (first, end) in enumerate(zip(cuts, [*cuts[1:], len(chain)], strict=True)):
        quirks = Quirks(conditions.device)
        with torch.random.fork_rng(devices=[]), mode, quirks.dispatch():
            engine = PipelineEngine(
                with_real_layers(chain, first, end),
                estimator.workload.loss,
                layout,
                options,
                SilentCommunicator(rank, len(cuts), quirks.has("host staging")),
                _CPU,
                Ready(KnownShapes(estimator.specs), tier=host_tier(quirks, conditions)),
            )
            peak_bytes, events = fake_step(engine, quirks, minibatch, (f"stage {rank}", "its layers"))
            peaks.append(replay(events).allocated_bytes if quirks.has("caching allocator") else peak_bytes)
    return peaks


def rehearse_config(
    config: Config, cuts: Sequence[int], shapes: Mapping[str, Sequence[int]] | None = None
) -> list[int]:
    """`rehearse` for the run that a config describes.

    Args:
        shapes: of the chain's inputs, by name; None: of the largest inputs that the run can meet.

    Raises:
        CapslogError: as `rehearse`; also shapes whose names are not those of the chain's inputs.
    """
    pipeline = config.pipeline
    estimator = StageEstimator.of_config(config)
    if shapes is not None:
        inputs = estimator.specs[0]
        if shapes.keys() != inputs.keys():
            raise CapslogError(f"shapes are given for {sorted(shapes)}, the chain's inputs are {sorted(inputs)}")
        estimator = estimator.at({name: TensorSpec(tuple(shapes[name]), inputs[name].dtype) for name in inputs})
    # more microbatches than any stage has in flight show nothing new; GPipe has all of them
    count = config.num_microbatches // pipeline.replicas
    if pipeline.schedule != "gpipe":
        count = min(count, 3 * len(cuts) + 2)
    blocks = estimator.conditions.blocks
    return rehearse(estimator, cuts, pipeline.schedule, round_up(count, blocks))
