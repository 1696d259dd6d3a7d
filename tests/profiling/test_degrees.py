"""Runs on several devices beside runs on one device, the real allocator, and bytes counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from tests.profiling.workloads import Equal
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import load_config
from varuna_capslog.config.settings import Config
from varuna_capslog.model.chain import Chain, Layer
from varuna_capslog.profiles.record import Profile
from varuna_capslog.profiling.degrees import SharedStages, Sharing, sharings, with_degrees
from varuna_capslog.profiling.estimate import Memo, StageEstimator, estimate_config

pytestmark = pytest.mark.usefixtures("imported_once")

DIM, WIDE = 64, 512


class Blocks(Equal):
    """A linear layer, and two layers of two linear maps, which can be split by their columns."""

    name = "blocks"

    def __init__(self, config: Config) -> None:
        super().__init__(width=DIM)

    def build_chain(self) -> Chain:
        wide = [nn.Sequential(nn.Linear(DIM, WIDE), nn.GELU(), nn.Linear(WIDE, DIM)) for _ in range(2)]
        layers = [Layer("first", nn.Linear(DIM, DIM)), *(Layer(f"wide.{n}", block) for n, block in enumerate(wide))]
        return Chain(layers, name=self.name)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = tmp_path_factory.mktemp("blocks") / "blocks.yaml"
    path.write_text("workload: tests.profiling.test_degrees:Blocks\ndevice: cpu\ntrain: {microbatch_size: 2}\n")
    return load_config(Path(path), [])


@pytest.fixture(scope="module")
def memo() -> Memo:
    return Memo()


RANGES = [(0, 1), (1, 2), (2, 3), (0, 2), (1, 3)]


def test_on_one_device_a_run_has_the_bytes_of_an_ordinary_one(config: Config, memo: Memo) -> None:
    stages = SharedStages(config, Sharing("data", 1, 8), memo)
    plain = StageEstimator.of_config(stages.config, memo)
    for run in RANGES:
        assert stages.estimated(*run).peak_bytes == plain.stage(*run).peak_bytes, run


@pytest.mark.parametrize("sharing", [Sharing("data", 2, 8), Sharing("tensor", 2, 4)])
def test_an_estimate_is_what_the_allocator_counts_on_several_processes(
    config: Config, memo: Memo, sharing: Sharing
) -> None:
    stages = SharedStages(config, sharing, memo)
    runs = [(0, 1), (2, 3), (1, 3)]
    measured = stages.measured(runs)
    for run, row in zip(runs, measured, strict=True):
        assert row.peak_bytes == stages.estimated(*run).peak_bytes, run
        assert (row.layers, row.parallel) == (run, {"kind": sharing.kind, "degree": 2})


def test_a_tensor_part_holds_its_share_of_the_weights(config: Config, memo: Memo) -> None:
    """With hardly any samples nearly all bytes are 4 times the weights: values, gradients, and two moments."""
    peaks = [SharedStages(config, Sharing("tensor", degree, 1), memo).estimated(1, 2).peak_bytes for degree in (2, 4)]
    whole = 4 * 4 * (2 * DIM * WIDE + WIDE + DIM)
    one_device = SharedStages(config, Sharing("data", 1, 1), memo).estimated(1, 2).peak_bytes
    for degree, peak in zip((2, 4), peaks, strict=True):
        assert peak - whole / degree == pytest.approx(one_device - whole, abs=0.25 * whole)
        assert whole / degree < peak < 1.4 * whole / degree + 4 * 4 * DIM


def test_batches_are_a_quarter_and_half_or_what_the_devices_need() -> None:
    assert {sharing.samples for sharing in sharings([1, 2, 4], 32)} == {8, 16}
    assert {sharing.samples for sharing in sharings([1, 2, 4], 1)} == {4, 8}
    assert [(s.kind, s.degree) for s in sharings([1, 2], 8)][:3] == [("data", 1), ("data", 2), ("tensor", 2)]
    assert {s.microbatch_size for s in sharings([4], 16) if s.kind == "data"} == {1, 2}


def test_the_rows_of_all_layers_and_pairs_join_the_profile(config: Config, memo: Memo) -> None:
    profile = with_degrees(config, estimate_config(config, memo=memo), [2, 1])
    assert len(profile.by_degree) == 2 * 3 * 5  # two sizes, three ways, five runs
    assert profile.observations == Profile.from_json(profile.to_json()).observations
    assert Profile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize(
    ("degrees", "source", "reason"),
    [
        ([], "estimated", "name one or more numbers of devices"),
        ([0, 2], "estimated", "name one or more numbers of devices"),
        ([8], "measured", "degree 8 would be measured on as many processes, of which 4 is the most"),
    ],
)
def test_other_degrees_are_refused(config: Config, degrees: list[int], source: str, reason: str) -> None:
    profile = Profile.from_json({"format": "varuna-capslog/profile/1", "layers": [{"name": "a", "isolated_bytes": 1}]})
    object.__setattr__(profile, "source", source)
    with pytest.raises(CapslogError, match=reason):
        with_degrees(config, profile, degrees)


def test_a_config_with_splits_is_refused(config: Config, memo: Memo) -> None:
    split = config.model_copy(update={"splits": {"wide.*": "tensor-2"}, "numerics": "close"})
    with pytest.raises(CapslogError, match="leave splits out"):
        SharedStages(split, Sharing("tensor", 2, 4), memo)
