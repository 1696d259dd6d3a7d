"""`train_step`, the order of a training step for any engine; and `Poll`, the vote, called by `PipelineEngine.vote`.

The vote is one exact sum over all ranks, before anything changes: a float64 vector of loss parts by microbatch, squared
gradient norms by layer, requests to stop, ranks with a ballot, seconds and, in float16, the loss scale. Every slot has
one owner, so all ranks get the same bits and reach the same verdict. After the vote the only messages are updated
values of layers whose moments one replica keeps (`replicated`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from torch import Tensor

from varuna_capslog.base.errors import CapslogError, StepRefused
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.interface import NO_REPORT, Engine, Load, RankReport, Verdict
from varuna_capslog.engine.recipe import EngineOptions, LossScale
from varuna_capslog.engine.stage import Stage
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.workload import COUNTED, Minibatch

__all__ = [
    "Poll",
    "check_minibatch",
    "data_failure",
    "no_targets",
    "take_weight",
    "train_step",
]


def train_step(
    engine: Engine,
    step: int,
    minibatch: Minibatch,
    load: Load,
    before_commit: Callable[[], None] | None = None,
) -> Verdict:
    """Make one optimizer step; all ranks call it. Commit rule: the model changes only after all ranks know that the
    step is finite. After that a rank waits for others only where they update values for it.

    Args:
        step: counted from 1; with the run's seed it fixes all random numbers.
        before_commit: called between the vote and the update, when all gradients are complete.

    Raises StepRefused, with the model unchanged, where the vote refuses the step, PeerLost where a rank is gone.
    """
    engine.compute(step, minibatch, load)
    verdict = engine.vote(step, minibatch)
    if verdict.refusal is not None:
        engine.forget()
        raise StepRefused(verdict.refusal)
    if before_commit is not None:
        before_commit()
    engine.apply(verdict)
    return verdict


def check_minibatch(minibatch: Minibatch, options: EngineOptions) -> None:
    """Raise CapslogError unless the minibatch has the run's number of microbatches."""
    if len(minibatch.inputs) != options.num_microbatches:
        raise CapslogError(
            f"the minibatch has {len(minibatch.inputs)} microbatches, the run is set to {options.num_microbatches}"
        )


def data_failure(step: int, failures: Sequence[str | None]) -> str | None:
    """Reason to refuse the step where a rank could not read its data; None where all could."""
    reason = next((failure for failure in failures if failure is not None), None)
    return None if reason is None else f"step {step}: {reason}; nothing was applied"


class Poll:
    """Votes of one engine. part_names: names of the loss parts; None: the first vote gathers them."""

    def __init__(
        self, chain: Chain, communicator: Communicator, options: EngineOptions, part_names: Sequence[str] | None = None
    ) -> None:
        self._chain, self._communicator, self._options = chain, communicator, options
        self.part_names = None if part_names is None else list(part_names)

    def hold(
        self,
        step: int,
        minibatch: Minibatch,
        last: Sequence[Stage],
        squared_norms: Mapping[int, Tensor],
        stop: bool,
        ballot: bytes,
        data: RankReport = NO_REPORT,
        loss_scale: LossScale | None = None,
    ) -> Verdict:
        """Hold one vote; every rank calls it, also a rank without stages.

        Args:
            last: this rank's stages that computed the loss; their parts and refusals are cleared.
            squared_norms: of the gradients, by layer, for the layers that this rank reports.
            ballot: this rank's message to all; ballots are gathered only if at least one is not empty.
            data: report of this rank; failures are gathered only if there is one on some rank.
            loss_scale: of the step, on the rank that reports layer 0; None elsewhere.

        Raises PeerLost where another rank is gone; the remaining ranks may or may not have got the verdict.
        """
        count, layers, world = len(minibatch.inputs), len(self._chain), self._communicator.world_size
        names = self._names(last)
        scaled = self._options.loss_scale
        losses = [[0.0] * len(names) for _ in range(count)]
        norms = [0.0] * layers
        has_ballot, waited, busy, failed = ([0.0] * world for _ in range(4))
        refusals: dict[int, str] = {}
        for stage in last:
            for microbatch, values in stage.parts.items():
                losses[microbatch] = [float(values.get(name, math.nan)) for name in names]
            refusals |= stage.refusals
            stage.parts.clear()
            stage.refusals.clear()
        for index, value in squared_norms.items():
            norms[index] = float(value)
        has_ballot[self._communicator.rank] = float(bool(ballot))
        waited[self._communicator.rank] = data.waited_seconds
        busy[self._communicator.rank] = data.busy_seconds
        failed[self._communicator.rank] = float(data.failure is not None)
        scales = [0.0] * (0 if scaled is None else 2)
        if loss_scale is not None:
            scales = [loss_scale.scale, float(loss_scale.streak)]
        slots = [
            *(part for row in losses for part in row),
            *norms,
            *has_ballot,
            *waited,
            *busy,
            *failed,
            float(stop),
            *scales,
        ]
        sums = iter(self._communicator.sum_numbers(slots))
        losses = [list(islice(sums, len(names))) for _ in range(count)]
        norms = list(islice(sums, layers))
        has_ballot, waited, busy, failed = (list(islice(sums, world)) for _ in range(4))
        stops, *scales = sums
        if scaled is not None:
            scaled = replace(scaled, scale=scales[0], streak=int(scales[1]))
        total = _fold(losses)
        squared = _fold([[norm] for norm in norms])[0]
        finite = all(math.isfinite(value) for value in (squared, *total))
        parts = dict(zip(names, total, strict=True))
        counted = take_weight(parts, count)
        weight = counted or 1.0
        parts = {name: part / weight for name, part in parts.items()}
        norm, largest = math.sqrt(squared) / weight / (1.0 if scaled is None else scaled.scale), self._options.clip_norm
        scale = (min(1.0, largest / (norm + 1e-6)) if largest > 0 else 1.0) / weight
        if scaled is not None:
            scale /= scaled.scale
        refusal = None
        if self._options.refuses and any(failed):
            refusal = data_failure(step, self._communicator.gather(data.failure))
        elif self._options.refuses and not finite:
            if scaled is None or scaled.exhausted or not all(map(math.isfinite, total)):
                refusal = _refusal(step, names, losses, norms, minibatch, refusals, self._chain, scaled)
            else:
                norm, scale = math.inf, 0.0
        if counted == 0:
            refusal = refusal or no_targets(step)
        ballots = tuple(self._communicator.gather(ballot)) if any(has_ballot) else ()
        seconds = {"waited_seconds": tuple(waited), "busy_seconds": tuple(busy)}
        factor = None if scaled is None else scaled.scale
        return Verdict(step, parts, norm, scale, finite, refusal, stops > 0, ballots, **seconds, loss_scale=factor)

    def _names(self, last: Sequence[Stage]) -> list[str]:
        """Names of the loss parts, gathered once from the ranks that compute the loss."""
        if self.part_names is None:
            parts = [values for stage in last for values in stage.parts.values()]
            mine = next((list(values) for values in parts if len(values) > 1), None)
            mine = mine or next((list(values) for values in parts), None)
            self.part_names = next(names for names in self._communicator.gather(mine) if names is not None)
        return self.part_names


def take_weight(parts: dict[str, float], count: int) -> float:
    """Remove `COUNTED` from the loss parts of a minibatch; return the mean weight of its `count` microbatches.
    Gradients and loss parts divided by this weight are means over all targets of the minibatch.
    """
    return parts.pop(COUNTED, float(count)) / count


def no_targets(step: int) -> str:
    """Reason to refuse a step whose minibatch has the weight 0 (`take_weight`)."""
    return f"step {step}: none of its targets counts in the loss; nothing was applied"


def _fold(rows: Sequence[Sequence[float]]) -> list[float]:
    """Sum of the rows, added in their order in float64."""
    total = [0.0] * len(rows[0])
    for row in rows:
        total = [partial + value for partial, value in zip(total, row, strict=True)]
    return total


def _refusal(
    step: int,
    names: Sequence[str],
    parts: Sequence[Sequence[float]],
    norms: Sequence[float],
    minibatch: Minibatch,
    refusals: Mapping[int, str],
    chain: Chain,
    scaled: LossScale | None,
) -> str:
    where = []
    for microbatch, row in enumerate(parts):
        if not all(math.isfinite(value) for value in row):
            samples = minibatch.sample_ids[microbatch] if minibatch.sample_ids else []
            detail = refusals.get(microbatch) or ", ".join(
                f"{name}={value:g}" for name, value in zip(names, row, strict=True)
            )
            where.append(f"microbatch {microbatch} (samples {samples}): {detail}")
    if where:
        places = "; ".join(where)
        return f"step {step}: the loss is not finite in {places}; nothing was applied: lower train.lr or look at them"
    layers = [chain.layers[index].name for index, value in enumerate(norms) if not math.isfinite(value)]
    samples = [sample for group in minibatch.sample_ids for sample in group]
    total = ", ".join(f"{name}={value:g}" for name, value in zip(names, _fold(parts), strict=True))
    skipped, advice = "", ""
    if scaled is not None:
        count = -min(scaled.streak, 0)
        skipped = f" at the loss scale {scaled.scale:g}, after {count} steps in a row were skipped for it"
        advice = ", or compute in bfloat16 with train.precision" if scaled.dynamic else ", or lower train.loss_scale"
    return (
        f"step {step}: the gradient is not finite in layers {layers} ({total}; samples {samples}){skipped}; nothing "
        f"was applied: lower train.lr or set train.clip_norm{advice}"
    )
