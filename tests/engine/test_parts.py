"""Parts of layers that run again: the bits of a step that keeps everything, and what each call holds meanwhile."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from tests.engine.compare import differences
from tests.engine.pool import WorkerPool
from tests.memory.test_truth import trained
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.offload import HostTier
from varuna_capslog.engine.parts import check_parts
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.engine.step import train_step
from varuna_capslog.memory.fold import fold
from varuna_capslog.model.capture import Kept
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.workload import Minibatch, Workload
from varuna_capslog.plans.parts import MemoryInterval, PlanStage, Units, recomputed_parts, scheduled
from varuna_capslog.profiles.record import Profile
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.estimate import StageEstimator, estimated_profile
from varuna_capslog.profiling.estimation.lifetimes import Lifetimes
from varuna_capslog.profiling.estimation.rates import cpu_speed
from varuna_capslog.profiling.rehearsal import rank_peaks, rehearse_layout
from varuna_capslog.schedules import RunShape

ALL = ("attention", "mlp", "norms")
WIDTH, TOKENS = 32, 16


class Attention(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.qkv, self.out, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        query, key, value = self.qkv(x).view(rows, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            core = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = query @ key.transpose(-2, -1) / 2.0
            core = self.dropout(scores.softmax(-1)) @ value
        return self.out(core.transpose(1, 2).reshape(rows, tokens, width))


class Block(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.first, self.attention, self.second = nn.LayerNorm(WIDTH), Attention(fused), nn.RMSNorm(WIDTH)
        wide = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
        self.forth = nn.Sequential(*wide)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.forth(self.second(x))


class Experts(nn.Module):
    """What the norm returns changes in place before it is saved, so that it must stay."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)
        self.first, self.second = (nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).mul_(2.0).flatten(0, 1)
        wide = torch.bmm(rows.expand(2, -1, -1), self.first)
        made = torch.bmm(F.silu(wide) * wide, self.second)
        shares = self.router(rows).softmax(-1).t().unsqueeze(-1)
        return x + (made * shares).sum(0).view_as(x)


class Own(nn.Module):
    def __init__(self, experts: bool = False) -> None:
        super().__init__()
        blocks = (Experts() if experts else Block(fused=number == 0) for number in range(3))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def chain_of(kind: str, folder: Path, writes: bool = False) -> Chain:
    """Return the captured chain of a model with dropout; of transformers' models the weights are random."""
    torch.manual_seed(0)
    kept = Kept(folder)
    kept.writes = writes
    if kind != "gpt2":
        example = {"x": torch.zeros(2, TOKENS, WIDTH)}
        return Chain.from_module(Own(kind == "experts"), None, example, evaluates=False, kept=kept)
    transformers = pytest.importorskip("transformers", minversion="5.0")
    sizes = {"n_layer": 2, "n_embd": WIDTH, "n_head": 2, "vocab_size": 64, "n_positions": TOKENS}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)
    example = {"input_ids": torch.zeros(2, TOKENS, dtype=torch.long)}
    return Chain.from_module(transformers.GPT2Model(config), None, example, evaluates=False, kept=kept)


def loss(outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
    (output,) = outputs.values()
    return {"loss": (output * output.cos()).mean() / normalisers["microbatches"]}


BLOCKS = {"own": (0, 3), "gpt2": (1, 3), "experts": (0, 3)}
"""The layers with attention, feed-forward and norms; or experts and norms."""


def layout_of(kind: str, num_layers: int, cuts: Sequence[int], parts: Sequence[str]) -> Layout:
    """Return the pipeline of these cuts, in which the parts of all blocks run again; without parts all is kept."""
    layout = Layout.pipelines(tuple(cuts), num_layers)
    first, end = BLOCKS[kind]
    stages = []
    for stage in layout.stages:
        inside = max(first, stage.first), min(end, stage.end)
        memory = (MemoryInterval(*inside, "recompute", tuple(parts)),) if parts and inside[0] < inside[1] else ()
        stages.append(dataclasses.replace(stage, memory=memory))
    return dataclasses.replace(layout, stages=tuple(stages))


def steps(
    communicator: Communicator,
    kind: str,
    folder: Path,
    cuts: Sequence[int],
    parts: Sequence[str],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Make two steps of three microbatches, as `steps_of`."""
    torch.set_num_threads(1)
    chain = chain_of(kind, folder)
    draw = torch.Generator().manual_seed(0)
    rows: list[dict[str, Tensor]] = [
        {"x": torch.randn(2, TOKENS, WIDTH, generator=draw)}
        if kind != "gpt2"
        else {"input_ids": torch.randint(0, 64, (2, TOKENS), generator=draw)}
        for _ in range(3)
    ]
    return steps_of(communicator, chain, layout_of(kind, len(chain), cuts, parts), rows, options)


def steps_of(
    communicator: Communicator,
    chain: Chain,
    layout: Layout,
    rows: Sequence[dict[str, Tensor]],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Make two steps with the inputs of these microbatches; return their numbers, the first one's gradients and the
    weights behind them.
    """
    count = len(rows)
    settings = EngineOptions(
        **({"num_microbatches": count, "schedule": "1f1b", "recompute": False, "seed": 3} | options)
    )
    engine = PipelineEngine(chain, loss, layout, settings, communicator, torch.device("cpu"))
    specs = [{key: TensorSpec.of(tensor) for key, tensor in row.items()} for row in rows]
    batch, gradients = Minibatch(specs, [None] * count, {"microbatches": float(count)}), dict[str, Tensor]()

    def keep() -> None:
        for address, parameter in engine.optimizer.parameters.items():
            if parameter.grad is not None:
                gradients.setdefault(address, parameter.grad.clone())

    made = [train_step(engine, number, batch, rows.__getitem__, before_commit=keep) for number in (1, 2)]
    state = {f"{layer.name}.{name}": p.detach().clone() for layer in engine.layers for name, p in layer.values.items()}
    return {
        "parts": [step.parts for step in made],
        "norms": [step.grad_norm for step in made],
        "gradients": gradients,
        "state": state,
        "random": torch.random.get_rng_state(),
    }


def alone(kind: str, folder: Path, parts: Sequence[str] = (), **options: Any) -> dict[str, Any]:
    return steps(Communicator(0, 1, 0, 1), kind, folder, (0,), parts, options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("captures")


@pytest.mark.parametrize("kind", ["own", "gpt2"])
def test_parts_that_run_again_change_no_bit(pool: WorkerPool, kind: str, folder: Path) -> None:
    """Each part alone, two and all together, in one process and on two ranks; dropout draws the same numbers again."""
    chain_of(kind, folder, writes=True)
    expected = alone(kind, folder)
    assert expected["gradients"]
    for parts in (*([part] for part in ALL), ["attention", "norms"], ALL) if kind == "own" else (["attention"], ALL):
        again = alone(kind, folder, parts)
        assert not differences([again], expected), parts
        assert torch.equal(again["random"], expected["random"]), "code behind a backward draws other numbers"
    results = pool.run(steps, 2, kind, folder, (0, 2), ("attention", "norms"), {})
    assert not differences(results, expected)


def test_experts_that_run_again_change_no_bit(folder: Path) -> None:
    chain_of("experts", folder, writes=True)
    expected = alone("experts", folder)
    for parts in (["experts"], ["experts", "norms"]):
        assert not differences([alone("experts", folder, parts)], expected), parts


@pytest.mark.parametrize(
    "options", [{"precision": "bfloat16"}, {"weights": "bfloat16", "precision": "bfloat16"}, {"schedule": "zb-h1"}]
)
def test_types_and_split_backwards_change_no_bit(options: dict[str, Any], folder: Path) -> None:
    chain_of("own", folder, writes=True)
    assert not differences([alone("own", folder, ALL, **options)], alone("own", folder, **options))


class Large(Workload):
    """The module with matrices of softmax that are larger than its other activations."""

    name = "own"

    def build_chain(self) -> Chain:
        torch.manual_seed(0)
        return Chain.from_module(Own(), None, {"x": torch.zeros(2, 128, WIDTH)}, evaluates=False)

    def loss(self, outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
        return {"loss": next(iter(outputs.values())).square().mean()}

    def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
        return {"x": TensorSpec((microbatch_size, 128, WIDTH))}


def test_the_rehearsal_counts_what_calls_hold_as_the_real_allocator_does() -> None:
    """With the states of the random numbers. What norms return is not held either."""
    estimator, options = StageEstimator(Large(), RunConditions(microbatch_size=2)), EngineOptions(2, "gpipe")
    held, row = {}, 2 * 128 * WIDTH * 4
    for parts in ((), ("norms",), ALL):
        memory = (MemoryInterval(0, 3, "recompute", parts),) if parts else ()
        layout = Layout((PlanStage(((0, 3),), (0,), memory=memory),))
        (rehearsed,) = rehearse_layout(estimator, layout, options)
        if parts == ALL:
            _, peak = trained(Large(), layout, options, HostTier(torch.device("cpu")), 2)
            assert rehearsed.peak_bytes == pytest.approx(peak, rel=1e-4)
        held[parts] = dict(rehearsed.course)["0F1"]
    # of two calls: what six norms return, and what an RMS norm multiplies by its weight
    assert held[()] - held["norms",] > (2 * 3 * 3 - 1) * row
    matrices, wide = 2 * 4 * 128 * 128 * 4, 4 * row
    assert held[()] - held[ALL] > (2 * 3 - 1) * (2 * matrices + 2 * wide)


class Four(Large):
    """Four equal layers."""

    name = "four"

    def build_chain(self) -> Chain:
        model = Own()
        model.blocks = nn.ModuleList(Block(fused=False) for _ in range(4))
        return Chain.from_module(model, None, {"x": torch.zeros(2, 128, WIDTH)}, evaluates=False)


def test_equal_ranks_with_different_parts_are_rehearsed_apart() -> None:
    """Ranks of equal layers and actions share one rehearsal, which gave both the peak of the first one's parts."""
    estimator = StageEstimator(Four(), RunConditions(microbatch_size=2, device="cuda"))
    parts = {1: ("norms",), 2: ("mlp",)}
    stages = [
        PlanStage(((at, at + 1),), (at,), memory=(MemoryInterval(at, at + 1, "recompute", parts[at]),))
        if at in parts
        else PlanStage(((at, at + 1),), (at,))
        for at in range(4)
    ]
    layout, options = Layout(tuple(stages)), EngineOptions(6, "gpipe")
    peaks = rank_peaks(estimator, layout, options)
    assert peaks == [rank.peak_bytes for rank in rehearse_layout(estimator, layout, options)]
    assert peaks[1] > peaks[2]


def test_the_fold_of_chunks_with_recomputed_parts_is_their_rehearsal() -> None:
    """The fold refused plans with parts, since no profile had their bytes."""
    places = ((0, 1, 0, ("norms",)), (1, 3, 1, ALL), (3, 4, 0, ("mlp",)))
    stages = tuple(
        PlanStage(((first, end),), (rank,), memory=(MemoryInterval(first, end, "recompute", parts),))
        for first, end, rank, parts in places
    )
    told = tuple(part for stage in stages for part in recomputed_parts(stage))
    estimator = StageEstimator(Four(), RunConditions(microbatch_size=2, recompute=False, parts=told))
    layout, run = Layout(stages), RunShape(4, "interleaved", False)
    rehearsed = rehearse_layout(estimator, layout, EngineOptions(4, "interleaved", recompute=False))
    rows = scheduled("interleaved", stages, layout.graph(4, estimator.chain.edges), run)
    profile = estimated_profile(estimator)
    profile = Profile.from_json(json.loads(json.dumps(profile.to_json())))
    folded = fold(profile, stages, Units(4, 2, 1), rows, run)
    for real, rank in zip(rehearsed, folded, strict=True):
        assert rank.peak_bytes == pytest.approx(real.peak_bytes, rel=0.001)
    kept = fold(profile, [dataclasses.replace(stage, memory=()) for stage in stages], Units(4, 2, 1), rows, run)
    assert all(less.peak_bytes < most.peak_bytes for less, most in zip(folded, kept, strict=True))


def test_the_estimate_tells_the_seconds_of_the_second_run() -> None:
    """The feed-forward runs again until its last product, of which only the operands are wanted."""
    speed, work = cpu_speed("fixed", 1e11, 1e11, 1e10, 1e-6), dict[str, float]()
    estimator = StageEstimator(Large(), RunConditions(microbatch_size=2), speed=speed)
    with FakeTensorMode(), Lifetimes() as operators:
        forth, x = Block(fused=False).forth, torch.zeros(2, 128, WIDTH)
        operators.observer = functools.partial(speed.count, work)
        forth[:3](x)
    assert estimator.part_seconds(1, ("mlp",)) == pytest.approx(speed.seconds(work), rel=0.02)
    assert estimator.part_seconds(1, ALL) > estimator.part_seconds(1, ("mlp",))


def test_compiled_layers_have_no_parts(folder: Path) -> None:
    with pytest.raises(CapslogError, match=r"train.compile=eager .* but this plan recomputes parts of layers"):
        alone("own", folder, ALL, compile="eager")


def test_a_plan_whose_layers_do_not_show_a_part_is_refused_before_the_run(folder: Path) -> None:
    chain = chain_of("own", folder)
    layout = layout_of("own", len(chain), (0, 2), ("norms", "experts"))
    with pytest.raises(CapslogError, match=r"stages\[0\].memory: layer 'blocks.0' has no experts: it has no product"):
        check_parts(chain, layout)
    check_parts(chain, layout_of("own", len(chain), (0, 2), ALL))
