"""Measures CUDA's own memory (context, workspaces of cuBLAS and cuDNN, NCCL's buffers), and the allocator's model.

It needs a GPU. `varuna_capslog/profiling/estimation/headroom.py` has the assumed bytes of each; docs/gpu.md has the
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
from varuna_capslog.engine.pair_groups import opener_of
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.recipe import EngineOptions
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
    """Measure all rows."""
    run_ranks(measure_one, 2, kind_of(tell.facts), tell, timeout=600.0)
    if len(tell.facts["gpus"]) < 2:
        tell.not_run(NCCL, "NCCL needs a GPU for every rank, and torch sees one here")
        return
    most = max(run_ranks(nccl, 2))
    tell(NCCL, f"{most / MIB:.0f} MiB for one neighbour", most <= 2 * COMMUNICATOR_BYTES, bytes=most)


def measure_one(communicator: Communicator, gpu: str, tell: Any) -> None:
    """Measure all rows of one GPU: rank 1 takes its memory, and rank 0 reads the fall in free memory."""
    taken, assumed = context(communicator), context_bytes(gpu)
    if communicator.rank == 1:
        return
    tell(CONTEXT, f"{taken / MIB:.0f} MiB; {assumed // MIB} assumed", taken <= assumed, bytes=taken)
    workspace = 2 * (CUBLAS_WORKSPACE_HOPPER if GPUS[gpu].hopper_or_later else CUBLAS_WORKSPACE)
    product, bias = cublas()
    result = f"{product / MIB:.3f} MiB, by the source {workspace / MIB:.3f}; a bias {bias / MIB:.0f} MiB more"
    tell(CUBLAS, result, product == workspace and bias == CUBLASLT_WORKSPACE, bytes=[product, bias])
    scratch = cudnn(gpu)
    most, guess = (max(pair[kind] for pair in scratch.values()) / MIB for kind in (0, 1))
    same = sum(abs(real - told) <= max(real, MIB) / 50 for real, told in scratch.values())
    result = f"at most {most:.1f} MiB, estimated {guess:.1f}; {same} of {len(scratch)} within 2 %"
    tell(CUDNN, result, bytes=scratch)
    real, replayed = reserved(Communicator(0, 1, 0, datetime.timedelta(seconds=60)))
    tell(REPLAY, f"{real / MIB:.0f} MiB, replayed {replayed / MIB:.0f}", real == replayed, reserved=[real, replayed])


def context(communicator: Communicator) -> int:
    """Return the bytes that another process takes besides its tensors once kernels are loaded, as rank 0 sees them."""
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
    """Return the bytes that matrix products leave allocated in this thread and autograd's, and those a bias adds."""
    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    bias = torch.ones(64, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(x @ x, [x], torch.ones_like(x))
    product = torch.cuda.memory_allocated() - before
    torch.addmm(bias, x, x)
    return product, torch.cuda.memory_allocated() - before - product


def cudnn(gpu: str) -> dict[str, tuple[int, int]]:
    """Return the measured and estimated scratch bytes of each convolution, forward and backward."""
    scratch = {}
    for channels, outputs, kernel, stride, side in CONVOLUTIONS:
        convolution = f"{channels}x{side}x{side}, {kernel}x{kernel}/{stride}"
        x = torch.randn(1, channels, side, side, device="cuda")
        w = torch.randn(outputs, channels, kernel, kernel, device="cuda")
        settings = ([stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], 1)
        y = torch.ones_like(_aten.convolution(x, w, None, *settings))  # the first call loads kernels
        forward, backward = (x, w, None, *settings), (y, x, w, None, *settings, [True, True, False])
        _aten.convolution_backward(*backward)
        for name, operator, args in (
            (convolution, _aten.convolution.default, forward),
            (f"{convolution}, backward", _aten.convolution_backward.default, backward),
        ):
            scratch[name] = (_scratch(operator, args), sum(CUDA_KERNELS[operator](args, y, GPUS[gpu])))
    return scratch


def _scratch(operator: Any, args: tuple[Any, ...]) -> int:
    """Return the peak bytes while the operator runs, minus the bytes that its results keep."""
    torch.cuda.reset_peak_memory_stats()
    results = operator(*args)
    peak, kept = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    del results
    return peak - kept


def nccl(communicator: Communicator) -> int:
    """Return the bytes of the rank's GPU that opening a group in each direction takes."""
    device = torch.device("cuda", communicator.rank)
    torch.cuda.set_device(device)
    torch.zeros(1, device=device).item()
    before = torch.cuda.mem_get_info(device)[0]
    opener = opener_of("nccl")
    assert opener is not None
    communicator.open_pair_groups([(0, 1), (1, 0)], opener, device)
    return before - torch.cuda.mem_get_info(device)[0]


def reserved(communicator: Communicator) -> tuple[int, int]:
    """Return the reserved bytes of a short training, and those of the allocator's model for the same allocations."""
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
    """Convert a trace of torch's allocator to the events of its model; a block is named by its address."""
    events: list[Event] = []
    for record in trace:
        if record["action"] == "alloc":
            events.append((record["addr"], record["size"]))
        elif record["action"] == "free_completed":
            events.append((record["addr"], 0))
    return events
