"""Our cuts run in torch.distributed.pipelining."""

from __future__ import annotations

import copy
import functools
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.forks import Fork
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model import interop
from varuna_capslog.model.chain import Chain, Layer, TensorSpec

MICROBATCHES, SIZE = 4, 2


class Transformer(nn.Module):
    """Plain transformer with torchtitan's names for its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(31, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.norm = nn.LayerNorm(16)
        self.output = nn.Linear(16, 31)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tok_embeddings(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.output(self.norm(hidden))


@functools.cache
def captured(kind: type[nn.Module]) -> tuple[nn.Module, Chain]:
    """A model and its chain, which share their weights; for copies."""
    torch.manual_seed(0)
    model, example = kind(), (torch.zeros(SIZE, 8, dtype=torch.int64),)
    return model, Chain.from_module(model, [f"layers.{index}" for index in range(4)], example, evaluates=False)


def plain() -> tuple[nn.Module, Chain, list[int]]:
    return *copy.deepcopy(captured(Transformer)), [0, 2]


class Masked(Transformer):
    """Values that every block uses are computed once: a boolean mask and a float tensor without gradient cross the
    cuts.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tok_embeddings(tokens)
        mask = torch.ones(8, 8, dtype=torch.bool).triu(1)
        position = torch.arange(8.0).unsqueeze(-1).sin()
        for layer in self.layers:
            hidden = layer(hidden + position, src_mask=mask)
        return self.output(self.norm(hidden))


def masked() -> tuple[nn.Module, Chain, list[int]]:
    return *copy.deepcopy(captured(Masked)), [0, 2]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (MICROBATCHES * SIZE, 8)
    return torch.randint(0, 31, shape, generator=generator), torch.randint(0, 31, shape, generator=generator)


def run_pipeline(build: Callable[[], tuple[nn.Module, Chain, list[int]]], schedule: str, rank: int) -> None:
    from torch.distributed import pipelining

    _, chain, cuts = build()
    (name,) = chain.inputs
    [stage] = interop.pipeline_stages(chain, cuts, rank, "cpu", {name: TensorSpec((SIZE, 8), torch.int64)})
    runner = getattr(pipelining, schedule)(stage, MICROBATCHES, loss_fn=loss_of)
    tokens, target = batch()
    losses: list[Tensor] = []
    if rank == 0:
        runner.step(tokens)
    else:
        runner.step(target=target, losses=losses)
    # one process with the same weights is the reference
    model, full_chain, _ = build()
    expected = loss_of(model(tokens), target)
    expected.backward()
    if rank == 1:
        assert torch.allclose(torch.stack(losses).mean(), expected, rtol=1e-5, atol=1e-6)
    reference = {name: p.grad for name, p in full_chain.named_parameters().items()}
    largest = max(float(gradient.abs().max()) for gradient in reference.values() if gradient is not None)
    layers = chain.layers[cuts[rank] : (*cuts, len(chain))[rank + 1]]
    checked = 0
    for layer in layers:
        for parameter, tensor in layer.module.named_parameters():
            wanted = reference[f"{layer.name}.{parameter}"]
            assert wanted is not None
            assert tensor.grad is not None, parameter
            bound = 1e-5 * max(float(wanted.abs().max()), 1e-3 * largest)
            assert float((tensor.grad - wanted).abs().max()) <= bound, parameter
            checked += 1
    assert checked > 5


def main(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    cases = [(plain, "Schedule1F1B"), (plain, "ScheduleGPipe")]
    if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 13):
        cases.append((masked, "Schedule1F1B"))
    for build, schedule in cases:
        run_pipeline(build, schedule, rank)
        print(f"passed {build.__name__} {schedule}", flush=True)  # noqa: T201
    dist.destroy_process_group()


@pytest.mark.timeout(300)
def test_cut_list_runs_in_torch_pipelining(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    outputs = [tmp_path / f"rank{rank}" for rank in range(2)]
    workers = []
    for rank, path in enumerate(outputs):
        with open(os.devnull, "rb") as nothing, open(path, "wb") as output:
            descriptors = {0: nothing.fileno(), 1: output.fileno(), 2: output.fileno()}
            workers.append(Fork("tests.model.test_interop:main", (rank, port), environment, descriptors, root))
    try:
        codes = [worker.wait(100) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    texts = [path.read_text() for path in outputs]
    assert codes == [0, 0], "\n".join(texts)
    assert all("passed plain Schedule1F1B" in text and "passed plain ScheduleGPipe" in text for text in texts)


def test_a_whole_chain_as_stage_modules_hands_tensors_on() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            first = self.a(x)
            return self.c(self.b(first) * 2) + first + x

    model = Skip()
    chain = Chain.from_module(model, ["b", "c"], (torch.randn(2, 4),))
    stages = [interop.StageModule(chain, index, index + 1) for index in range(3)]
    x = torch.randn(2, 4)
    values: tuple[Tensor, ...] = (x,)
    for stage in stages:
        result = stage(*values)
        values = result if isinstance(result, tuple) else (result,)
    assert torch.equal(values[0], model(x))
    assert "x" in stages[1].reads
    assert "x" in stages[1].writes


def test_what_torch_cannot_do_is_refused_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    _, chain, cuts = plain()
    spec = {"tokens": TensorSpec((SIZE, 8), torch.int64)}
    longer = {"tokens": TensorSpec((SIZE, 9), torch.int64)}
    with pytest.raises(CapslogError, match="microbatch 1 has inputs of another shape"):
        interop.pipeline_stages(chain, cuts, 0, "cpu", [spec, longer])
    with pytest.raises(CapslogError, match="rank=2"):
        interop.pipeline_stages(chain, cuts, 2, "cpu", spec)
    with pytest.raises(CapslogError, match="3 stages cannot be dealt evenly to 2"):
        interop.pipeline_stages(chain, [0, 1, 2], 0, "cpu", spec, num_ranks=2)
    tied = nn.Linear(4, 4)
    shared = Chain([Layer("a", tied), Layer("b", nn.ReLU()), Layer("c", tied)])
    with pytest.raises(CapslogError, match=r"'a.weight' is used by stages \[0, 1\]"):
        interop.pipeline_stages(shared, [0, 2], 0, "cpu", {"x": TensorSpec((2, 4))})
    masked = Chain([Layer("a", nn.Linear(4, 4)), Layer("b", nn.Linear(4, 4), ("x", "mask"))], inputs=("x", "mask"))
    monkeypatch.setattr(torch, "__version__", "2.11.0+cpu")
    with pytest.raises(CapslogError, match=r"'mask' \(torch.bool\) crosses the cut before layer 1"):
        interop._refuse(masked, [0, 1], [{}, {"mask": TensorSpec((2, 4), torch.bool)}, {}])
