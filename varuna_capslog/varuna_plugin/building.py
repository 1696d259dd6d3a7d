"""Patches of `Varuna.__init__` and `Varuna.evaluate`: checks before it, the CPU as a device, any shapes."""

from __future__ import annotations

import contextlib
import inspect
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from varuna_capslog import accelerator
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.varuna_plugin import wire
from varuna_capslog.varuna_plugin.executor import WatchedQueue
from varuna_capslog.varuna_plugin.options import current

__all__ = [
    "build",
    "evaluate",
    "forward_only",
    "init_communication",
    "make_temporary_folder",
    "parameter_names_to_cuts",
    "temporary_folder",
]


def build(original: Callable[..., None], self: Any, *arguments: Any, **keywords: Any) -> None:
    """Wrap `Varuna.__init__`; the arguments are the same. Without a CUDA device the default device is the CPU; a
    `torch.device` is accepted, too.

    Raises:
        CapslogError: fp16, a batch that the replicas cannot share, a map that is not one rank for each process, a
            capacity for other microbatches, a `temporary_folder` of another user.
    """
    from varuna import utils

    call = inspect.signature(original).bind(self, *arguments, **keywords)
    call.apply_defaults()
    call_arguments = call.arguments
    if call_arguments["fp16"]:
        raise CapslogError(
            "fp16=True is not there: Varuna's mixed precision needs apex, and the plugin's sums of gradients know no "
            "loss scaling; leave it out"
        )
    batch_size, chunk_size = call_arguments["batch_size"], call_arguments["chunk_size"]
    mapping = call_arguments["stage_to_rank_map"].rstrip(";") + ";"  # without the last one Varuna loses the last stage
    call_arguments["stage_to_rank_map"] = mapping
    rows = [[int(rank) for rank in row.split(",")] for row in mapping[:-1].split(";")]
    named = sorted(rank for row in rows for rank in row)
    if len({len(row) for row in rows}) != 1 or named != list(range(dist.get_world_size())):
        raise CapslogError(
            f"stage_to_rank_map={mapping!r} must name each of the {dist.get_world_size()} ranks once, equally many for "
            "every stage"
        )
    if batch_size % len(rows[0]) or min(batch_size, chunk_size) < 1:
        raise CapslogError(
            f"batch_size={batch_size} with chunk_size={chunk_size} cannot be shared by {len(rows[0])} replicas; choose "
            "a batch size that their number divides"
        )
    search = current().search
    if search is not None:
        search.check_microbatch(chunk_size)
    if call_arguments["device"] == -1 and accelerator.auto_type() != "cuda":
        call_arguments["device"] = "cpu"
    elif isinstance(call_arguments["device"], torch.device):
        call_arguments["device"] = (
            "cpu" if call_arguments["device"].type == "cpu" else call_arguments["device"].index or 0
        )
    make_temporary_folder(utils.VARUNA_TEMP_FOLDER)
    original(*call.args, **call.kwargs)
    if self.device.type == "cpu":
        # the executor compares with the text "cpu", else it synchronises CUDA
        self.config["device"] = "cpu"


def init_communication(self: Any) -> None:
    """Replace Varuna's: set the neighbours' ranks; shapes travel with each message."""
    ranks = self.stage_to_rank_map
    last = self.partitions - 1
    self.send_rank = ranks[self.stage + 1][self.rank_within_stage] if self.stage < last else None
    self.receive_rank = ranks[self.stage - 1][self.rank_within_stage] if self.stage > 0 else None
    self.fwd_inp_shape = self.bwd_grad_shape = None
    self.fwd_inp_shape_changes = self.bwd_grad_shape_changes = None


def parameter_names_to_cuts(self: Any) -> dict[str, int]:
    """Replace `PartitionedModel`'s: return every parameter of the model with the piece whose file holds it."""
    partition = self.capslog.partition
    return {name: partition.home[name] for name in partition.trace.parameters}


def evaluate(self: Any, inputs: Any, batch_size: int | None = None) -> float:
    """Replace `Varuna.evaluate`, which on later stages computes on a placeholder instead of the received tensors.

    Args:
        inputs: as for `step`.
        batch_size: samples in `inputs`; default: those of a training step of this replica.

    Returns:
        The loss over all samples of all replicas, on every rank: their mean, or their sum under `loss="sum"`.
    """
    from varuna import utils

    assert isinstance(inputs, dict), "input must be a dictionary!"
    batches = utils.scatter(inputs, int(self.batch_size if batch_size is None else batch_size), self.micro_batch_size)
    losses: dict[int, float] = {}

    def take(microbatch: int, output: Any) -> None:
        losses[microbatch] = float(output[0] if isinstance(output, tuple) else output)

    forward_only(self, batches, take)
    summed = current().loss == "sum"
    weights = [1.0 if summed else size / sum(batches.sizes) / self.data_depth for size in batches.sizes]
    result = torch.tensor([sum(weights[index] * loss for index, loss in losses.items())], dtype=torch.float64)
    with wire.named_loss("adding up the evaluation's losses", None, current().timeout):
        dist.all_reduce(result, group=self.capslog_world)
    return float(result)


@torch.no_grad()
def forward_only(self: Any, batches: Mapping[int, dict[str, Any]], take: Callable[[int, Any], None]) -> None:
    """Runs microbatches forward through this replica's stages.

    Args:
        batches: by number.
        take: called with (microbatch, the model's result) on the last stage.
    """
    stage, partitioned, timeout = self.partitioned_model.capslog, self.partitioned_model, current().timeout
    under_way = []
    for microbatch, batch in batches.items():
        queues = [WatchedQueue() for _ in range(5)]
        partitioned.set_queues(*queues)
        acts_send, _, acts_received = queues[:3]
        if stage.entry is not None:
            count = len(stage.entry.spec.tensors)
            acts_received.put(wire.Expected(count, self.receive_rank, False, wire.Room()).take(microbatch, timeout))
        output = partitioned(batch, handle_comm=True)
        if stage.exit is not None:
            under_way.append(wire.send(acts_send.get(), microbatch, self.send_rank, False, wire.Room()))
        else:
            take(microbatch, output)
    for sending in under_way:
        sending.wait(timeout)
    partitioned.clear_recv_fn()


def temporary_folder(port: str | None = None) -> str:
    """Return a folder of this user and this job, in place of the one that all jobs of a host share.

    Args:
        port: of the job; default: this process's `MASTER_PORT`.
    """
    job = port or os.environ.get("MASTER_PORT", str(os.getpid()))
    return os.path.join(tempfile.gettempdir(), f"varuna-{os.getuid()}-{job}")


def make_temporary_folder(folder: str) -> None:
    """Makes the `temporary_folder` of a job, or takes the one that another of its processes has made.

    Raises:
        CapslogError: something else is there, such as a folder that another user has put links into.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    about = os.lstat(folder)
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise CapslogError(
            f"{folder} is there already, and others may write into it or it is no folder of yours; remove it, or set "
            "TMPDIR to a folder of your own"
        )
