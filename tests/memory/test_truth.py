"""The models of 1F1B beside the peaks of whole multi-rank training runs, by the same meter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.engine.pool import WorkerPool
from tests.profiling.cases import trim_all
from tests.profiling.workloads import Megabytes
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.options import EngineOptions
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.probe import PeakProbe, resident_tensors
from varuna_capslog.engine.step import train_step
from varuna_capslog.memory import MEMORY_MODELS
from varuna_capslog.model.workload import Minibatch
from varuna_capslog.profiles.record import Observation, Profile, layers_of_runs
from varuna_capslog.profiles.runs import stage_runs
from varuna_capslog.profiling.trim import MEASURED_RANK
from varuna_capslog.schedules import RunShape

SIZE, MICROBATCHES, CUTS = 16, 4, (0, 2, 4, 6)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    workers = WorkerPool()
    yield workers
    workers.close()


def observe(communicator: Communicator, recompute: bool) -> list[Observation]:
    """The runs of a profile. Dummy tokens are all alike, and what is left of their differences is slow to multiply."""
    torch.set_flush_denormal(True)
    return trim_all(communicator, Megabytes(), stage_runs(7), SIZE, recompute)[0]


def real_peak(communicator: Communicator, recompute: bool) -> int:
    """This rank's peak in the second step of an ordinary training run under 1F1B."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    workload, cpu = Megabytes(), torch.device("cpu")
    options = EngineOptions(MICROBATCHES, schedule="1f1b", recompute=recompute, clip_norm=1.0)
    chain = workload.build_chain()
    layout = Layout.pipelines(CUTS, len(chain))
    engine = PipelineEngine(chain, workload.loss, layout, options, communicator, cpu)
    inputs = workload.profile_inputs(SIZE)
    targets, normalisers = workload.profile_targets(SIZE)
    minibatch = Minibatch([inputs] * MICROBATCHES, [targets] * MICROBATCHES, normalisers)

    def load(_: int) -> dict[str, torch.Tensor]:
        return {name: torch.ones(spec.shape, dtype=spec.dtype) for name, spec in inputs.items()}

    train_step(engine, 1, minibatch, load)
    with PeakProbe(cpu, resident_tensors(engine.layers, engine.optimizer)) as probe:
        train_step(engine, 2, minibatch, load)
    return probe.peak_bytes


def test_1f1b_meets_the_peaks_of_a_real_pipeline(pool: WorkerPool) -> None:
    """Profiled without recomputation, which is what the rows are the least like a single microbatch under."""
    rows: list[Observation] = pool.run(observe, 2, False)[MEASURED_RANK]
    layers = layers_of_runs([str(number) for number in range(7)], rows)
    profile = Profile(layers=layers, source="measured", conditions={"stage_inputs": "host"}, observations=tuple(rows))
    for recompute in (False, True):
        real = pool.run(real_peak, len(CUTS), recompute)
        predicted = MEMORY_MODELS["1f1b"].stage_costs(profile, RunShape(MICROBATCHES, "1f1b", recompute)).peaks(CUTS)
        errors = [found / true - 1 for found, true in zip(predicted, real, strict=True)]
        assert max(map(abs, errors[1:])) < 0.002, (recompute, errors)
        # Stage 0, nearly frozen, peaks in a forward, and before its first gradient no output is confirmed: on the CPU
        # it may hold all that it sends ahead.
        ahead = 3 * (rows[1].boundary_out_bytes or 0)
        assert -ahead <= predicted[0] - real[0] <= 0.002 * real[0], (recompute, errors)
