"""Profiles taken on Varuna: a trimmed job's rows against whole jobs, and against our own engine's profile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import varuna_capslog.varuna_plugin as plugin
from tests.engine.pool import WorkerPool
from tests.profiling.workloads import Megabytes
from tests.varuna_plugin import megabytes
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.profiles.record import Profile, read_profile, write_profile
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.measure import profile_workload
from varuna_capslog.varuna_plugin import FoundVaruna, options

CHUNK = 4
BOUNDARY = 294912 + 384
"""Bytes of the activations and the mask at every cut."""

RANDOM_STATES = 4 * 5056
"""Tolerance in bytes: up to 4 microbatches, a varying number, are in flight, each with a generator state of 5056 bytes.
"""


@pytest.fixture(scope="module")
def profile(varuna: FoundVaruna) -> Profile:
    measured = plugin.profile(megabytes.build, megabytes.get_batch, CHUNK, loss="sum", timeout_seconds=60.0)
    assert not plugin.installed_patches()
    return measured


@pytest.fixture
def fresh() -> Iterator[None]:
    yield
    options.configure()


def test_it_is_a_profile_like_any_other(profile: Profile, tmp_path: Path) -> None:
    write_profile(tmp_path / "profile.json", profile)
    assert read_profile(tmp_path / "profile.json") == profile
    assert profile.conditions["engine"] == "varuna"
    assert profile.conditions["input"] == {"inputs.tokens": [4, 96], "targets": [4, 96]}
    assert [row.layers for row in profile.observations] == [
        *((i, i + 1) for i in range(7)),
        *((i, i + 2) for i in range(6)),
    ]
    assert [(shared.name, shared.layers) for shared in profile.shared] == [("layers.0.table", (0, 6))]


@pytest.mark.parametrize("cuts", [[0, 2, 3], [0, 4, 6]])
def test_a_trimmed_stage_costs_what_it_costs_in_a_whole_job(
    pool: WorkerPool, profile: Profile, cuts: list[int]
) -> None:
    row = pool.run(megabytes.whole_job, 3, cuts, CHUNK)[1]
    ours = next(observation for observation in profile.observations if observation.layers == (cuts[1], cuts[2]))
    for name in ("static_bytes", "saved_bytes", "boundary_in_bytes", "boundary_out_bytes"):
        assert getattr(ours, name) == getattr(row, name), name
    assert ours.peak_bytes == pytest.approx(row.peak_bytes, abs=RANDOM_STATES)


def test_bytes_beside_our_own_engines_profile(profile: Profile) -> None:
    """Static and saved bytes are equal. On a CPU our own engine counts tensors that wait in host memory, Varuna's rows
    never do: the peaks differ by 2 to 8 boundaries. This is nearly the same everywhere, so M_a hardly differs.
    """
    engine_profile = profile_workload(Megabytes(), RunConditions(microbatch_size=CHUNK))
    assert profile.column("parameter_bytes") == engine_profile.column("parameter_bytes")
    for ours, theirs in zip(profile.observations, engine_profile.observations, strict=True):
        assert ours.layers == theirs.layers
        assert ours.static_bytes == theirs.static_bytes
        last = theirs.layers[1] == 7
        # our engine keeps the model's outputs beside the loss; inputs here include the targets
        outputs = theirs.boundary_out_bytes or 0 if last else 0
        assert ours.saved_bytes == pytest.approx((theirs.saved_bytes or 0) - outputs, abs=4096), ours.layers
        assert 2 * BOUNDARY <= theirs.peak_bytes - ours.peak_bytes <= 8 * BOUNDARY, ours.layers
    for layer, engine_layer in zip(profile.layers[1:], engine_profile.layers[1:], strict=True):
        assert layer.added_bytes == pytest.approx(engine_layer.added_bytes, abs=2 * BOUNDARY + RANDOM_STATES), (
            layer.name
        )


def test_a_job_searches_its_cuts_in_it(profile: Profile, fresh: None) -> None:
    plugin.configure(profile=profile, devices=3)
    cuts = options.current().cuts_for(7, 3)
    peaks = profile.column("isolated_bytes")
    # the two heavy pieces are parted
    heavy = sorted(range(7), key=lambda piece: -peaks[piece])[:2]
    assert any(cut in range(min(heavy) + 1, max(heavy) + 1) for cut in cuts)


def test_a_piece_that_cannot_bear_dummies_is_named(varuna: FoundVaruna) -> None:
    with pytest.raises(CapslogError, match=r"the run of second.*failed: ValueError: values above 0"):
        plugin.profile(megabytes.Picky, megabytes.picky_batch, 2, timeout_seconds=30.0)


def test_what_cannot_be_profiled_is_refused(varuna: FoundVaruna) -> None:
    with pytest.raises(CapslogError, match="workers=0"):
        plugin.profile(megabytes.build, megabytes.get_batch, 4, workers=0)
    with pytest.raises(CapslogError, match="passes no CutPoint"):
        plugin.profile(_no_cuts, megabytes.picky_batch, 2)


def _no_cuts() -> megabytes.nn.Module:
    class Plain(megabytes.nn.Linear):
        def forward(self, x: megabytes.Any) -> megabytes.Any:
            return super().forward(x).sum()

    return Plain(4, 4)
