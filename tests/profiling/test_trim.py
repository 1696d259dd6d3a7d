"""Trimmed stages against ordinary multi-rank runs of the same layers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.engine import models
from tests.engine.pool import WorkerPool
from tests.profiling import cases
from tests.profiling.workloads import Equal, Megabytes, Watched
from varuna_capslog.model.chain import Chain, Layer, TensorSpec
from varuna_capslog.model.workload import Workload
from varuna_capslog.profiles.record import HALVES, Observation
from varuna_capslog.profiles.runs import stage_runs
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.estimate import StageEstimator
from varuna_capslog.profiling.trim import MEASURED_RANK, skeleton

SIZE = 4


class Tiny(Workload):
    """Workload of the engine tests' chain, with every kind of layer."""

    def build_chain(self) -> Chain:
        return models.build_chain()

    loss = staticmethod(models.loss)  # type: ignore[assignment]

    def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
        return {"x": TensorSpec((microbatch_size, 3, 6, 8)), "sizes": TensorSpec((microbatch_size, 2), torch.int64)}

    def profile_targets(self, microbatch_size: int) -> tuple[torch.Tensor, dict[str, float]]:
        return torch.zeros(microbatch_size, 4, 3), {"count": 1.0}


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    workers = WorkerPool()
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def megabytes(pool: WorkerPool) -> dict[tuple[int, int], Observation]:
    rows, _ = pool.run(cases.trim_all, 2, Megabytes(), stage_runs(7), SIZE, True, True)[MEASURED_RANK]
    return {row.layers: row for row in rows}


def predict(runs: dict[tuple[int, int], Observation], first: int, end: int) -> int:
    """Return M_i + sum M_a."""
    peak = {layers: row.peak_bytes for layers, row in runs.items()}
    return peak[first, first + 1] + sum(peak[k - 1, k + 1] - peak[k - 1, k] for k in range(first + 1, end))


@pytest.mark.parametrize("cuts", [(0, 4, 6), (0, 2, 5)])
def test_predictions_meet_the_peaks_of_a_real_pipeline(
    pool: WorkerPool, megabytes: dict[tuple[int, int], Observation], cuts: tuple[int, ...]
) -> None:
    real = pool.run(cases.real_peak, 3, Megabytes(), cuts, SIZE, 4)
    assert {extra["source"] for _, extra in real} == {"cpu allocator events"}
    ends = (*cuts[1:], 7)
    errors = [predict(megabytes, cuts[s], ends[s]) / real[s][0] - 1 for s in range(3)]
    # the middle and the last stage are in the same state as in the trimmed run
    assert abs(errors[1]) < 0.01, errors
    assert abs(errors[2]) < 0.01, errors
    # On the CPU, outputs that stage 0 has sent ahead wait in the same memory: it may hold some boundaries more.
    ahead = 3 * (megabytes[ends[0] - 1, ends[0]].boundary_out_bytes or 0)
    assert -ahead <= predict(megabytes, 0, ends[0]) - real[0][0] <= 0.05 * real[0][0], errors


def test_the_parts_of_a_peak(megabytes: dict[tuple[int, int], Observation]) -> None:
    chain = skeleton(Megabytes())
    crossing = SIZE * 96 * 192 * 4
    mask = SIZE * 96
    for (first, end), row in megabytes.items():
        parameters = {id(p): p for layer in chain.layers[first:end] for p in layer.module.parameters()}
        expected = sum(p.nbytes * (4 if p.requires_grad else 1) for p in parameters.values())
        steps = 4 * sum(p.requires_grad for p in parameters.values())  # AdamW keeps its step count per parameter
        assert row.static_bytes == expected + steps
        assert row.transient_bytes == row.peak_bytes - row.static_bytes
        assert 0 < row.saved_bytes <= row.transient_bytes  # type: ignore[operator]
        assert row.boundary_out_bytes == (crossing + (mask if end < 6 else 0) if end < 7 else SIZE * 96 * 512 * 4)
        assert row.forward_seconds > 0  # type: ignore[operator]
        assert row.backward_seconds > 0  # type: ignore[operator]
    # gelu's input and output (4 x WIDTH each) and the layer's input
    assert megabytes[3, 4].saved_bytes == 9 * crossing


def test_what_each_action_takes_is_what_an_estimate_says(megabytes: dict[tuple[int, int], Observation]) -> None:
    """Bytes are read from the allocator's events between the marks of each action; the other side is another
    program's.
    """
    estimator = StageEstimator(Megabytes(), RunConditions(microbatch_size=SIZE))
    for layers, row in megabytes.items():
        assert row.action_bytes is not None
        halves = estimator.halves(*layers)
        estimated = vars(estimator.stage(*layers).actions) | {name: getattr(halves, name) for name in HALVES}
        measured = vars(row.action_bytes)
        for name, size in measured.items():
            if size is None:  # memory that libraries keep, on a CPU
                assert estimated[name] is None, name
            else:
                assert size == pytest.approx(estimated[name], rel=0.01, abs=4096), (layers, name)
        assert row.weight_bytes == pytest.approx(halves.held_bytes, rel=0.01, abs=4096), layers
        assert row.input_seconds > 0  # type: ignore[operator]
        assert row.weight_seconds > 0  # type: ignore[operator]


def test_no_more_than_two_layers_are_ever_real(pool: WorkerPool) -> None:
    workload = Watched(length=4, width=256)
    of_layer = (256 * 256 + 256) * 4
    rows, seen = pool.run(cases.trim_all, 2, workload, stage_runs(4), 8)[MEASURED_RANK]
    assert len(rows) == 7
    assert seen == 2 * of_layer


def test_the_loss_belongs_to_the_last_layers_run(pool: WorkerPool) -> None:
    scratch = 1 << 20
    workload = Equal(length=3, width=64, wide_output=scratch)
    rows, _ = pool.run(cases.trim_all, 2, workload, stage_runs(3), 4)[MEASURED_RANK]
    peaks = {row.layers: row.peak_bytes for row in rows}
    assert all((peak > 4 * scratch) == (layers[1] == 3) for layers, peak in peaks.items()), peaks


@pytest.mark.parametrize("recompute", [True, False])
def test_every_kind_of_layer_can_be_trimmed(pool: WorkerPool, recompute: bool) -> None:
    pairs = [(first, min(first + 2, 11)) for first in range(0, 11, 2)]  # all layers, in half of the runs
    runs = stage_runs(11) if recompute else [(0, 1), (2, 3), *pairs]
    rows, _ = pool.run(cases.trim_all, 2, Tiny(), runs, 2, recompute)[MEASURED_RANK]
    assert [row.layers for row in rows] == runs
    static = {row.layers: row.static_bytes for row in rows}
    assert static[0, 1] == (8 * 3 * 9 + 8) * 4  # frozen parameters
    assert static[2, 3] == 0  # a pooling layer
    assert all(row.peak_bytes > 0 for row in rows)


def test_a_chain_of_two_layers_needs_no_neighbour_for_its_pair(pool: WorkerPool) -> None:
    rows, _ = pool.run(cases.trim_all, 2, Equal(length=2), stage_runs(2), 4)[MEASURED_RANK]
    assert [row.layers for row in rows] == [(0, 1), (1, 2), (0, 2)]


def test_a_skeleton_holds_no_weights_keeps_ties_and_leaves_the_model_alone() -> None:
    class Kept(Workload):
        def __init__(self) -> None:
            self.chain = Megabytes().build_chain()

        def build_chain(self) -> Chain:
            return self.chain

        loss = None  # type: ignore[assignment]
        profile_inputs = None  # type: ignore[assignment]

    for workload in (Megabytes(), Kept()):
        chain = skeleton(workload)
        assert all(parameter.is_meta for parameter in chain.named_parameters().values())
        assert [shared.uses for shared in chain.shared] == [((0, "table"), (6, "table"))]
        assert [p.requires_grad for p in chain.layers[1].module.parameters()] == [False] * 4
    assert not any(parameter.is_meta for parameter in workload.chain.named_parameters().values())  # type: ignore[attr-defined]


def test_a_model_that_needs_its_weights_while_it_is_built_is_stripped_afterwards() -> None:
    class Picky(Equal):
        def build_chain(self) -> Chain:
            chain = super().build_chain()
            assert float(next(iter(chain.named_parameters().values())).detach().sum()) is not None  # meta has no values
            linear = torch.nn.Linear(2, 2)
            linear.register_buffer("scale", linear.weight.detach().abs().mean())
            return Chain([*chain.layers, Layer("scaled", linear)])

    chain = skeleton(Picky())
    assert all(parameter.is_meta for parameter in chain.named_parameters().values())
    assert float(chain.layers[-1].module.get_buffer("scale")) > 0
