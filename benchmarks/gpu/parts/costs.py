"""What CUDA itself takes (context, workspaces of cuBLAS and cuDNN, NCCL's buffers), and the allocator beside its model.

Only a GPU can tell. `varuna_capslog/profiling/estimation/headroom.py` says what is assumed of each; docs/gpu.md has the
table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import truth
from common import run_ranks
from parts.estimates import MICROBATCHES, TRANSFORMER
from parts.trained import batch_of
from torch import nn

from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.options import EngineOptions
from varuna_capslog.engine.pair_groups import opener_of
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.workload import load_workload
from varuna_capslog.profiling.estimation.allocator import Event, replay
from varuna_capslog.profiling.estimation.headroom import CONTEXT_BYTES, NCCL_BYTES
from varuna_capslog.profiling.estimation.quirks import CUBLAS_WORKSPACE, CUBLAS_WORKSPACE_HOPPER

CONTEXT, CUBLAS, CUDNN = (
    "context of a process",
    "cuBLAS workspaces of two threads",
    "cuDNN workspace, largest of RN50's",
)
NCCL, REPLAY = "NCCL, two neighbours", "reserved bytes of 3 steps beside the allocator's model"
MIB = 1 << 20
ROWS: dict[str, dict[str, str]] = {
    "cuda": {
        CONTEXT: f"<= {CONTEXT_BYTES // MIB} MiB, which is assumed",
        CUBLAS: "as torch's source says",
        CUDNN: "",
        NCCL: f"<= {NCCL_BYTES // MIB} MiB, which is assumed",
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


def measure(device: torch.device, tell: Any) -> None:
    """Tells all of them."""
    taken = run_ranks(context, 2)[0]
    tell(CONTEXT, f"{taken / MIB:.0f} MiB", taken <= CONTEXT_BYTES, bytes=taken)
    (one,) = run_ranks(cublas, 1)
    known = 2 * (CUBLAS_WORKSPACE_HOPPER if one["hopper"] else CUBLAS_WORKSPACE)
    tell(CUBLAS, f"{one['bytes'] / MIB:.3f} MiB, by the source {known / MIB:.3f}", one["bytes"] == known, **one)
    (found,) = run_ranks(cudnn, 1)
    tell(CUDNN, f"{max(found.values()) / MIB:.1f} MiB", bytes=found)
    (both,) = run_ranks(reserved, 1)
    tell(REPLAY, f"{both[0] / MIB:.0f} MiB, replayed {both[1] / MIB:.0f}", both[0] == both[1], reserved=both)
    if len(tell.facts["gpus"]) < 2:
        tell.not_run(NCCL, "NCCL needs a GPU for every rank, and torch sees one here")
        return
    most = max(run_ranks(nccl, 2))
    tell(NCCL, f"{most / MIB:.0f} MiB for one neighbour", 2 * most <= NCCL_BYTES, bytes=most)


def context(communicator: Communicator) -> int:
    """Free memory that another process's context takes; seen by rank 0."""
    if communicator.rank == 0:
        free = torch.cuda.mem_get_info()[0]
    communicator.barrier()
    if communicator.rank == 1:
        torch.zeros(1, device="cuda").item()
    communicator.barrier()
    taken = free - torch.cuda.mem_get_info()[0] if communicator.rank == 0 else 0
    communicator.barrier()
    return taken - 2 * MIB  # of the tensor's segment


def cublas(communicator: Communicator) -> dict[str, Any]:
    """What products of matrices leave allocated, in this thread and in autograd's."""
    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    gradient = torch.ones(64, 64, device="cuda")
    before = torch.cuda.memory_allocated()
    y = x @ x
    (found,) = torch.autograd.grad(y, [x], gradient)
    left = torch.cuda.memory_allocated() - before - y.nbytes - found.nbytes
    return {"bytes": left, "hopper": torch.cuda.get_device_capability()[0] >= 9}


def cudnn(communicator: Communicator) -> dict[str, int]:
    """The most that a convolution takes beside its tensors, forward or backward."""
    found = {}
    for channels, outputs, kernel, stride, side in CONVOLUTIONS:
        layer = nn.Conv2d(channels, outputs, kernel, stride, kernel // 2, bias=False, device="cuda")
        x = torch.randn(1, channels, side, side, device="cuda", requires_grad=True)
        sizes = []
        for _ in range(2):  # the first call loads kernels
            torch.cuda.reset_peak_memory_stats()
            y = layer(x)
            sizes.append(torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())
            gradient = torch.ones_like(y)
            torch.cuda.reset_peak_memory_stats()
            gradients = torch.autograd.grad(y, [x, layer.weight], gradient, retain_graph=True)
            sizes.append(torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())
            del y, gradient, gradients
        found[f"{channels}x{side}x{side}, {kernel}x{kernel}/{stride}"] = max(sizes[2:])
    return found


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
