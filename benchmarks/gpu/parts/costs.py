"""What CUDA itself takes (context, workspaces of cuBLAS and cuDNN, NCCL's buffers), and the allocator beside its model.

Only a GPU can tell. `varuna_capslog/profiling/estimation/headroom.py` says what is assumed of each; docs/gpu.md has the
table.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import truth
from common import run_ranks
from parts.trained import TRANSFORMER, batch_of, kind_of
from torch import nn

from varuna_capslog.base.gpus import GPUS
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.options import EngineOptions
from varuna_capslog.engine.pair_groups import opener_of
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.workload import load_workload
from varuna_capslog.profiling.estimation.allocator import Event, replay
from varuna_capslog.profiling.estimation.cuda_kernels import CUDA_KERNELS
from varuna_capslog.profiling.estimation.headroom import COMMUNICATOR_BYTES, context_bytes
from varuna_capslog.profiling.estimation.quirks import (
    CUBLAS_WORKSPACE,
    CUBLAS_WORKSPACE_HOPPER,
    CUBLASLT_WORKSPACE,
)

CONTEXT, CUBLAS, CUDNN = (
    "context of a process with kernels",
    "cuBLAS workspaces of two threads",
    "cuDNN workspaces of RN50 at 1333x1333",
)
NCCL, REPLAY = "NCCL, two neighbours", "reserved bytes of 3 steps beside the allocator's model"
MIB = 1 << 20
MICROBATCHES = 4
ROWS: dict[str, dict[str, str]] = {
    "cuda": {
        CONTEXT: "<= what is assumed",
        CUBLAS: "as torch's source says",
        CUDNN: "",
        NCCL: f"<= {4 * COMMUNICATOR_BYTES // MIB} MiB, which is assumed",
        REPLAY: "the same",
    },
    "cpu": {},
}
CONVOLUTIONS = (
    (3, 64, 7, 2, 1333),
    (64, 64, 3, 1, 334),
    (128, 128, 3, 2, 334),
    (256, 256, 3, 1, 84),
    (512, 512, 3, 1, 42),
)
"""Input and output channels, kernel, stride and side of the input, of RN50 on images of 1333 x 1333."""
_aten = torch.ops.aten


def measure(device: torch.device, tell: Any) -> None:
    """Tells all of them."""
    run_ranks(measure_one, 2, kind_of(tell.facts), tell, timeout=600.0)
    if len(tell.facts["gpus"]) < 2:
        tell.not_run(NCCL, "NCCL needs a GPU for every rank, and torch sees one here")
        return
    most = max(run_ranks(nccl, 2))
    tell(NCCL, f"{most / MIB:.0f} MiB for one neighbour", most <= 2 * COMMUNICATOR_BYTES, bytes=most)


def measure_one(communicator: Communicator, gpu: str, tell: Any) -> None:
    """All of one GPU: rank 1 takes its memory, and rank 0 sees by how much less is free."""
    taken, assumed = context(communicator), context_bytes(gpu)
    if communicator.rank == 1:
        return
    tell(CONTEXT, f"{taken / MIB:.0f} MiB; {assumed // MIB} assumed", taken <= assumed, bytes=taken)
    known = 2 * (CUBLAS_WORKSPACE_HOPPER if GPUS[gpu].hopper_or_later else CUBLAS_WORKSPACE)
    product, bias = cublas()
    result = f"{product / MIB:.3f} MiB, by the source {known / MIB:.3f}; a bias {bias / MIB:.0f} MiB more"
    tell(CUBLAS, result, product == known and bias == CUBLASLT_WORKSPACE, bytes=[product, bias])
    found = cudnn(gpu)
    most, guess = (max(pair[kind] for pair in found.values()) / MIB for kind in (0, 1))
    same = sum(abs(real - told) <= max(real, MIB) / 50 for real, told in found.values())
    result = f"at most {most:.1f} MiB, estimated {guess:.1f}; {same} of {len(found)} within 2 %"
    tell(CUDNN, result, bytes=found)
    real, replayed = reserved(Communicator(0, 1, 0, datetime.timedelta(seconds=60)))
    tell(REPLAY, f"{real / MIB:.0f} MiB, replayed {replayed / MIB:.0f}", real == replayed, reserved=[real, replayed])


def context(communicator: Communicator) -> int:
    """Free memory that another process takes beside its tensors once kernels are loaded; seen by rank 0."""
    if communicator.rank == 0:
        free = torch.cuda.mem_get_info()[0]
    communicator.barrier()
    segments = 0
    if communicator.rank == 1:
        layer = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(), nn.Linear(288, 8)).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            layer(torch.ones(4, 8, 8, 8, device="cuda")).sum().backward()
        torch.optim.AdamW(layer.parameters()).step()
        torch.cuda.synchronize()
        segments = torch.cuda.memory_reserved()
    communicator.barrier()
    taken = free - torch.cuda.mem_get_info()[0] if communicator.rank == 0 else 0
    communicator.barrier()
    return taken - max(communicator.gather(segments) or [0])


def cublas() -> tuple[int, int]:
    """What products of matrices leave allocated in this thread and in autograd's, and what a bias adds."""
    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    bias = torch.ones(64, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(x @ x, [x], torch.ones_like(x))
    product = torch.cuda.memory_allocated() - before
    torch.addmm(bias, x, x)
    return product, torch.cuda.memory_allocated() - before - product


def cudnn(gpu: str) -> dict[str, tuple[int, int]]:
    """What each convolution takes beside its tensors, forward and backward, and what estimates count."""
    found = {}
    for channels, outputs, kernel, stride, side in CONVOLUTIONS:
        what = f"{channels}x{side}x{side}, {kernel}x{kernel}/{stride}"
        x = torch.randn(1, channels, side, side, device="cuda")
        w = torch.randn(outputs, channels, kernel, kernel, device="cuda")
        rest = ([stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], 1)
        y = torch.ones_like(_aten.convolution(x, w, None, *rest))  # the first call loads kernels
        forward, backward = (x, w, None, *rest), (y, x, w, None, *rest, [True, True, False])
        _aten.convolution_backward(*backward)
        for name, operator, args in (
            (what, _aten.convolution.default, forward),
            (f"{what}, backward", _aten.convolution_backward.default, backward),
        ):
            found[name] = (_scratch(operator, args), sum(CUDA_KERNELS[operator](args, y, GPUS[gpu])))
    return found


def _scratch(operator: Any, args: tuple[Any, ...]) -> int:
    """The most that is allocated while it runs, beyond what it leaves."""
    torch.cuda.reset_peak_memory_stats()
    results = operator(*args)
    peak, left = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    del results
    return peak - left


def nccl(communicator: Communicator) -> int:
    """What opening a group in each direction takes of the rank's GPU."""
    device = torch.device("cuda", communicator.rank)
    torch.cuda.set_device(device)
    torch.zeros(1, device=device).item()
    before = torch.cuda.mem_get_info(device)[0]
    opener = opener_of("nccl")
    assert opener is not None
    communicator.open_pair_groups([(0, 1), (1, 0)], opener, device)
    return before - torch.cuda.mem_get_info(device)[0]


def reserved(communicator: Communicator) -> tuple[int, int]:
    """Reserved bytes of a short training, and what the model of the allocator makes of the same allocations."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, context=None)
    workload = load_workload(truth.config_of(TRANSFORMER))
    chain = workload.build_chain()
    options = EngineOptions(MICROBATCHES, clip_norm=0.1)
    device = torch.device("cuda", 0)
    engine = PipelineEngine(chain, workload.loss, Layout.pipelines((0,), len(chain)), options, communicator, device)
    minibatch, load = batch_of(workload, 4, MICROBATCHES)
    for step in (1, 2, 3):
        train_step(engine, step, minibatch, load)
    torch.cuda.synchronize()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    return torch.cuda.memory_reserved(), replay(events_of(trace)).reserved_bytes


def events_of(trace: Iterable[Mapping[str, Any]]) -> list[Event]:
    """A trace of torch's allocator, as its model takes it: a block is named by its address."""
    found: list[Event] = []
    for entry in trace:
        if entry["action"] == "alloc":
            found.append((entry["addr"], entry["size"]))
        elif entry["action"] == "free_completed":
            found.append((entry["addr"], 0))
    return found
