"""`capslog.fits`: its verdict against the allocator, its bytes against a count by hand, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import varuna_capslog as capslog
from varuna_capslog import cli
from varuna_capslog.api.fits import PlannedRun
from varuna_capslog.base.errors import CapslogError, ConfigError
from varuna_capslog.config.reading import load_config
from varuna_capslog.config.settings import Config
from varuna_capslog.model.workload import load_workload
from varuna_capslog.profiling import estimate
from varuna_capslog.profiling.estimation.rates import cpu_speed
from varuna_capslog.profiling.measure import profile_config
from varuna_capslog.profiling.rehearsal import rehearse_plan
from varuna_capslog.start import prepare
from varuna_capslog.start.ordinary import folder_keys, with_choices_of

NET = """
from torch import nn

def pair():
    return nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256))

def wide():
    return nn.Sequential(*(nn.Linear(16384, 16384, bias=False) for _ in range(4)))

class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(256, 256), nn.Linear(256, 256)])

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).relu()
        return x
"""
PARAMETERS = 2 * 256 * 512 + 512 + 256
INPUT = "x=float32[1,4,256]"
BLOCKS_INPUT = "x=float32[1,64,256]"


@pytest.fixture(autouse=True)
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net_of_fits.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


ONE = {"train.microbatch_size": 1}


def fit(capacity: int, **options: Any) -> Any:
    options = {"devices": 1, "device": "cpu", "capacity": capacity, "settings": ONE, **options}
    return capslog.fits("net_of_fits:pair", INPUT, **options)


def test_the_verdict_is_the_allocators() -> None:
    """A device of 0.99 of the measured peak is too small, and one of 1.01 (with the CPU's headroom, 1.02) is not."""
    settings = {
        "workload": "varuna_capslog.model.model_workload:workload",
        "model": {"factory": "net_of_fits:pair", "inputs": [INPUT]},
        "train": {"minibatch_size": 4, "microbatch_size": 1},
        "pipeline": {"recompute": False},
        "profile": {"source": "measured", "device": "cpu"},
    }
    Path("pair.yaml").write_text(json.dumps(settings))
    measured = profile_config(load_config("pair.yaml"), workers=1)
    (peak,) = {row.peak_bytes for row in measured.observations if row.layers == (0, 2)}
    assert not fit(int(0.99 * peak)).fits
    enough = fit(int(1.02 * peak))
    assert enough.fits
    assert enough.memory.peaks[0] == pytest.approx(peak, rel=1e-3)
    assert sum(enough.kinds.values()) == enough.memory.peaks[0]
    assert enough.kinds["weights"] == enough.kinds["gradients"] == 4 * PARAMETERS
    assert enough.kinds["optimizer states"] == pytest.approx(8 * PARAMETERS, rel=1e-4)


def test_one_capture_serves_every_batch_and_the_answer_is_that_of_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    captures, capture = [], capslog.Chain.from_module.__func__  # type: ignore[attr-defined]

    def counted(cls: type, *arguments: Any, **options: Any) -> Any:
        captures.append(arguments)
        return capture(cls, *arguments, **options)

    monkeypatch.setattr(capslog.Chain, "from_module", classmethod(counted))
    tried: list[str] = []
    options: dict[str, Any] = {"devices": 1, "device": "cpu", "capacity": "4MiB"}
    one: dict[str, Any] = {**options, "settings": ONE}
    fit = capslog.fits("net_of_fits:Blocks", BLOCKS_INPUT, **one, say=tried.append)
    best = fit.largest_batch.size
    assert fit.fits
    assert best is not None
    assert best > 1
    assert len(captures) == 2
    assert len(tried) <= 5
    for size, fits in ((best, True), (best + 1, False)):
        settings = {"train.microbatch_size": size, "pipeline.host_capacity": 0}
        plan = capslog.plan("net_of_fits:Blocks", BLOCKS_INPUT, **options, settings=settings)
        assert plan.fits is fits
    monkeypatch.setattr("varuna_capslog.api.fits._SEARCH_SECONDS", 0)
    late = capslog.fits("net_of_fits:Blocks", BLOCKS_INPUT, **one)
    assert late.largest_batch.text().startswith("at least 1 (stopped after ")


def test_the_largest_microbatch_of_the_fastest_step_that_fits_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside every size alone, with room for all and for half of the samples of a step, which stay as many."""
    speed = cpu_speed("a processor", 1e11, 1e11, 1e11, 1e-4)  # a measured clock gives no two equal speeds
    monkeypatch.setattr(estimate, "corrected_speed", lambda *kind: speed)
    options: dict[str, Any] = {"devices": 1, "device": "cpu"}
    step = {"train.minibatch_size": 4}

    def planned(size: int, capacity: int) -> Any:
        settings = {**step, "train.microbatch_size": size, "pipeline.host_capacity": 0}
        return capslog.plan("net_of_fits:Blocks", BLOCKS_INPUT, **options, capacity=capacity, settings=settings)

    needed = capslog.fits(
        "net_of_fits:Blocks", BLOCKS_INPUT, **options, capacity=1 << 30, settings={**step, "train.microbatch_size": 2}
    ).memory.needed[0]
    for capacity, most in ((1 << 30, 4), (needed, 2)):
        steps = {size: plan.step_seconds for size in (1, 2, 4) if (plan := planned(size, capacity)).fits}
        best = max(size for size in steps if steps[size] == min(steps.values()))
        fit = capslog.fits("net_of_fits:Blocks", BLOCKS_INPUT, **options, capacity=capacity, settings=step)
        assert fit.split.endswith(f"4 samples per step in {4 // best} microbatch{'es' * (best < 4)} of {best}")
        assert 1 < best <= most


def test_a_larger_microbatch_is_rehearsed_where_its_step_is_no_longer_and_its_bytes_are_near_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speed = cpu_speed("a processor", 1e11, 1e11, 1e11, 1e-4)
    monkeypatch.setattr(estimate, "corrected_speed", lambda *kind: speed)
    asked: list[tuple[Config, bool]] = []
    plan_run = prepare.plan_run

    def recorded(config: Config, *others: Any, longest: float | None = None, **options: Any) -> Any:
        asked.append((config, longest is None))
        return plan_run(config, *others, longest=longest, **options)

    monkeypatch.setattr(prepare, "plan_run", recorded)

    def of_two(capacity: int) -> list[bool]:
        """Return of each plan for microbatches of 2 within the capacity whether it may be rehearsed."""
        asked.clear()
        options: dict[str, Any] = {"devices": 1, "device": "cpu", "capacity": capacity}
        capslog.fits("net_of_fits:Blocks", BLOCKS_INPUT, **options, settings={"train.minibatch_size": 4})
        kinds = [(config.train.microbatch_size, str(config.pipeline.capacity)) for config, _ in asked]
        return [confirms for kind, (_, confirms) in zip(kinds, asked, strict=True) if kind == (2, str(capacity))]

    step = {"train.minibatch_size": 4, "train.microbatch_size": 2}
    alone = capslog.fits("net_of_fits:Blocks", BLOCKS_INPUT, devices=1, device="cpu", capacity=1 << 30, settings=step)
    assert of_two(1 << 30) == [False]  # far below the limit
    assert of_two(alone.memory.needed[0]) == [False, True]
    config = next(config for config, _ in asked if config.train.microbatch_size == 2)
    asked.clear()
    PlannedRun.of(config, None, longest=0.0)  # any step is longer
    assert [confirms for _, confirms in asked] == [False]


def test_cards_of_which_as_many_would_do_are_those_that_share_the_load_of_unequal_ones() -> None:
    """Two of four layers, at 16 bytes a parameter, are 8.6 GB: too much for 8 GB, and little for 16 GB."""
    for devices in ("h200, t4", "2x t4"):
        answer = capslog.fits("net_of_fits:wide", "x=float32[1,16384]", devices=devices, settings=ONE)
        assert answer.fits
        assert answer.cards[0] == "t4"
        assert "rtx2080" not in answer.cards


def test_a_search_is_told_how_much_is_lacking() -> None:
    small, large = fit(1 << 20), fit(1 << 30)
    assert small._answer.question.lacking_bytes() == -min(small.memory.margins) > 0
    assert -(1 << 30) < large._answer.question.lacking_bytes() <= -min(large.memory.margins) < -(1 << 29)


@pytest.mark.parametrize(
    ("precision", "each"),
    [("fp32", (4, 0, 4, 8)), ("bf16", (4, 0, 4, 8)), ("bfloat16-master", (2, 4, 4, 8)), ("bf16-weights", (2, 0, 2, 4))],
)
def test_each_precision_holds_its_bytes_of_a_parameter(precision: str, each: tuple[int, ...]) -> None:
    held = capslog.fits("net_of_fits:pair", INPUT, devices="t4", settings={**ONE, "train.precision": precision}).kinds
    names = ("weights", "masters", "gradients", "optimizer states")
    assert [round(held.get(name, 0) / PARAMETERS, 2) for name in names] == list(each)


@pytest.mark.parametrize(("optimizer", "of_matrices"), [("adamw8bit", 2 + 2 * 4 / 256), ("muon", 4)])
def test_optimizers_by_a_word_hold_their_bytes(optimizer: str, of_matrices: float) -> None:
    """Biases have two states of 32 bits with either."""
    settings = {**ONE, "train.optimizer": optimizer}
    kept = capslog.fits("net_of_fits:pair", INPUT, devices="t4", settings=settings).kinds["optimizer states"]
    assert kept == pytest.approx(of_matrices * 2 * 256 * 512 + 8 * (512 + 256), rel=0.01)


def test_replicas_that_share_optimizer_states_hold_a_half_each_by_fold_and_rehearsal() -> None:
    settings = {**ONE, "pipeline.replicas": 2, "train.precision": "fp32"}
    options: dict[str, Any] = {"devices": 1, "device": "cpu", "capacity": "1GiB"}
    whole, shared = (
        capslog.fits("net_of_fits:pair", INPUT, **options, settings={**settings, "pipeline.zero": zero})
        for zero in (0, 1)
    )
    assert "on 2 pipelines of 1 device of 1 GiB, with" in shared.verdict
    assert whole.kinds["optimizer states"] == pytest.approx(8 * PARAMETERS, rel=1e-3)
    assert shared.kinds["optimizer states"] == pytest.approx(8 * PARAMETERS / 2, rel=1e-2)  # one of two layers
    assert {**shared.kinds, "optimizer states": 0} == pytest.approx({**whole.kinds, "optimizer states": 0}, rel=1e-2)
    config = with_choices_of(shared._answer.config, shared.plan)
    assert list(shared.memory.peaks) == pytest.approx(rehearse_plan(config, shared.plan), rel=1e-3)


def test_the_command_says_the_verdict_first_and_exits_with_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("varuna_capslog.api.fits.GPUS", {})
    words = ["fits", "net_of_fits:pair", "--input", INPUT, "--devices", "1", "--device", "cpu", "--capacity"]
    assert cli._run([*words, "1MiB"]) == 3
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("does not fit: net_of_fits:pair on 1 device of 1 MiB lacks ")
    assert "largest microbatch at this sequence: none" in printed
    assert cli._run(["fits", "net_of_fits:pair"]) == 2
    assert cli._run(["fits", "net_of_fits:pair", "--free"]) == 2
    assert "stands alone" in capsys.readouterr().err


def test_a_name_that_the_hub_does_not_give_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def refused(name: str, file: str, local_files_only: bool) -> str:
        asked.append(local_files_only)
        raise OSError(f"no {file} of {name}")

    monkeypatch.setattr("transformers.utils.cached_file", refused)
    for offline, sentence in ((True, "there is no network, and no copy"), (False, "no config.json of maker/net")):
        monkeypatch.setattr("varuna_capslog.model.hugging_face._hub_has_an_address", lambda known=not offline: known)
        with pytest.raises(CapslogError, match=f"maker/net is no folder here, .*{sentence}"):
            capslog.fits("maker/net", devices="t4")
    assert asked == [True, False]


def test_weights_are_bfloat16_where_the_config_says_so() -> None:
    Path("low").mkdir()
    Path("low/config.json").write_text(json.dumps({"text_config": {"torch_dtype": "bfloat16"}}))
    assert folder_keys("low", {}, {})[1] == {"train.precision": "bf16-weights"}
    assert folder_keys("low", {}, {"train.precision": "bf16"})[0] == {"dtype": "float32", "path": "low"}
    assert folder_keys("low", {"dtype": "float32"}, {})[1] == {}
    assert folder_keys("none", {}, {})[0]["dtype"] == "float32"


def test_precisions_that_contradict_other_keys_or_chains_are_refused() -> None:
    for text, sentence in (
        ("train: {precision: bf16-weights, moments: bfloat16}", "keeps weights and optimizer states in bfloat16"),
        ("train: {precision: bf16-master, weights: float16}", "keeps weights in bfloat16, but train.weights=float16"),
    ):
        Path("wrong.yaml").write_text(f"workload: a:b\n{text}\n")
        with pytest.raises(ConfigError, match=sentence):
            load_config("wrong.yaml")
    chain = capslog.Chain([capslog.Layer("one", nn.Linear(2, 2))], name="made")
    with pytest.raises(CapslogError, match=r"casts an nn.Module, but .* is a chain of float32"):
        capslog.estimate(chain, torch.ones(1, 2), device="cpu", settings={"train.precision": "bf16-weights"})


def test_a_workload_with_its_own_chain_is_refused_by_name() -> None:
    config = load_config(Path(__file__).parents[2] / "configs/tiny.yaml", ["train.precision=bf16-weights"])
    with pytest.raises(CapslogError, match="makes its own chain; return layers in bfloat16"):
        load_workload(config)
