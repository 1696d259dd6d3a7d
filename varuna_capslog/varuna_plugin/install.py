"""Finds Varuna at the supported commit, patches it, and undoes the patches.

Only `install` and `uninstall` here change Varuna. Varuna's files are compared before anything is imported or changed:
an unrelated package of that name must not run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import io
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from varuna_capslog import accelerator
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.varuna_plugin import wire
from varuna_capslog.varuna_plugin.executor import WatchedQueue
from varuna_capslog.varuna_plugin.options import configure, current

__all__ = [
    "COMMIT",
    "FoundVaruna",
    "Patches",
    "build",
    "find_varuna",
    "forward_only",
    "install",
    "installed_patches",
    "make_temporary_folder",
    "silent",
    "temporary_folder",
    "uninstall",
]


COMMIT = "a2145cc30b976a7917829a55e2a866f0ca4c54e5"
"""The commit of https://github.com/microsoft/varuna that the patches are written for."""

_SOURCES = {
    "__init__.py": "410080c0ed95a5e9c698500d38b4c06f567cbafcadb4b718caeffb80ab5ded7e",
    "checkpoint.py": "2a80fbc36bbae780781aeefe9aaa3291238c60e1ec3462973ea101d34bef0138",
    "launcher.py": "773a867fa88c4f5384d468c9109c09a1e6c35fc9036cc9eb5649983a5a24c020",
    "partitioned_model.py": "5e10cc504c44099fc0e6f3617e57e19f0d19a6b2633df120c43d47c3f2775872",
    "pipeline.py": "a8153ee40460edc140c4ad9654281dbd26b10ab3d78d915a8ca259138ddbac07",
    "run_varuna.py": "f38e5a9912e4c2094bff8ee01d8181273063b12c5dbb561c2d66188ccf8c6965",
    "utils.py": "f47e6ac4e876a2a90a828c5a5a741b71cfc0c72d91a6692a8aff1c661cbee81b",
    "varuna.py": "d10bf87f89265b712402c58291d87d2838960aceaf25954da51580571930c7b3",
}
"""SHA-256 of every file that a patch touches or relies on, at `COMMIT`."""

_ADVICE = (
    f"get it with `git clone https://github.com/microsoft/varuna && git -C varuna checkout {COMMIT[:7]}` and put that "
    "folder on PYTHONPATH (docs/varuna.md)"
)


@dataclass(frozen=True)
class FoundVaruna:
    """The right Varuna: its folder and commit."""

    folder: Path
    commit: str = COMMIT


def find_varuna() -> FoundVaruna:
    """Return the Varuna that `import varuna` would import. Raises CapslogError where there is none, where it is the
    unrelated package of that name, or where files differ from `COMMIT`; the message names files and next action.
    """
    try:
        spec = importlib.util.find_spec("varuna")
    except (ImportError, ValueError) as error:
        raise CapslogError(f"`varuna` cannot be looked up ({error}); {_ADVICE}") from error
    if spec is None:
        raise CapslogError(f"Microsoft's Varuna is not importable here; {_ADVICE}")
    folders = list(spec.submodule_search_locations or ())
    where = Path(folders[0]) if folders else Path(spec.origin or "?")
    missing = [name for name in _SOURCES if not (where / name).is_file()]
    if "partitioned_model.py" in missing or "pipeline.py" in missing:
        raise CapslogError(
            f"the `varuna` at {where} is not Microsoft's pipeline trainer (it has no {missing[-1]}): the package of "
            f"that name on the package index is something else; uninstall it, then {_ADVICE}"
        )
    if missing:
        raise CapslogError(f"the Varuna at {where} lacks {', '.join(missing)}; {_ADVICE}")
    changed = [name for name, digest in _SOURCES.items() if _digest(where / name) != digest]
    if changed:
        raise CapslogError(
            f"the Varuna at {where} differs from commit {COMMIT[:7]} in {', '.join(changed)}; patches written for "
            f"other code could give wrong numbers without a word: {_ADVICE}"
        )
    return FoundVaruna(where)


def _digest(path: Path) -> str:
    # a checkout on another platform may have other line ends
    return hashlib.sha256(path.read_bytes().replace(b"\r\n", b"\n")).hexdigest()


class Patches:
    """Replacements of attributes in another package's modules and classes, undone exactly and in reverse order.

    names: the replaced attributes, as `module.Class.attribute`, in order.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._before = contextlib.ExitStack()

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name` of a module or class; raise AttributeError where `owner` itself does not define `name`."""
        if name not in vars(owner):
            raise AttributeError(f"{owner!r} has no attribute {name!r} of its own to replace")
        path = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
        self.names.append(f"{path}.{name}")
        self._before.callback(setattr, owner, name, vars(owner)[name])
        setattr(owner, name, value)

    def undo(self) -> None:
        """Restore all replaced attributes."""
        self._before.close()
        self.names.clear()


_patches = Patches()


def install() -> FoundVaruna:
    """Patch the importable Varuna, once; return its place and commit. Raises CapslogError as `find_varuna`."""
    found_varuna = find_varuna()
    if _patches.names:
        return found_varuna
    import varuna
    import varuna.checkpoint
    import varuna.partitioned_model
    import varuna.pipeline
    import varuna.utils
    import varuna.varuna

    try:
        _apply(varuna)
    except BaseException:
        _patches.undo()
        raise
    return found_varuna


def silent() -> contextlib.redirect_stdout[io.StringIO]:
    """Return a context that drops Varuna's prints, at its import and for every model that it builds."""
    return contextlib.redirect_stdout(io.StringIO())


def uninstall() -> None:
    """Restore every attribute of Varuna and reset the options.

    Models that were built stay split; the unpatched Varuna cannot run them.
    """
    _patches.undo()
    configure()


def installed_patches() -> list[str]:
    """Return the attributes that are replaced now, as `module.Class.attribute`; empty without patches."""
    return list(_patches.names)


def _apply(varuna: Any) -> None:
    from varuna_capslog.varuna_plugin import checkpoint, executor, gradients, stages

    models, pipeline, core, utils = varuna.partitioned_model, varuna.pipeline, varuna.varuna, varuna.utils
    # any cut list; a stage holds the parameters that it really uses
    _patches.replace(models.CutPoint, "forward", stages.cut_forward)
    _patches.replace(models.PartitionedModel, "initialize", stages.initialize)
    _patches.replace(models.PartitionedModel, "parameter_names_to_cuts", parameter_names_to_cuts)
    _around(models.PartitionedModel, "forward", executor.forward)
    # random numbers, also without CUDA
    for module in (utils, models):
        _patches.replace(module, "save_rng_states", executor.save_random_state)
        _patches.replace(module, "restore_rng_states", executor.restore_random_state)
    # messages
    _patches.replace(pipeline, "dist", executor.BoundedDistributed())
    _patches.replace(pipeline, "Queue", executor.WatchedQueue)
    for messages in (executor.spawn_send_workers, executor.spawn_receive_workers, executor.grads_receiver):
        _patches.replace(pipeline.Pipeline, messages.__name__, messages)
    _around(pipeline.Pipeline, "worker", executor.worker)
    _around(pipeline.Pipeline, "run", executor.run)
    # inputs and schedule
    _patches.replace(utils, "scatter", executor.scatter)
    _patches.replace(utils, "generate_schedule", executor.varuna_tasks)
    # the step
    _around(core.Varuna, "__init__", build)
    _around(core.Varuna, "step", gradients.step_alone)
    _patches.replace(core.Varuna, "init_communication", init_communication)
    _patches.replace(core.Varuna, "init_distributed", gradients.init_distributed)
    # does nothing: sync_across_workers adds up the gradients of all ties, declared or not
    _patches.replace(core.Varuna, "share_weight_grads", lambda self: None)
    _patches.replace(core.Varuna, "sync_across_workers", gradients.sync_across_workers)
    _patches.replace(core.Varuna, "evaluate", evaluate)
    # checkpoints
    _patches.replace(core.Varuna, "checkpoint", checkpoint.save)
    _patches.replace(core.Varuna, "load_checkpoint", checkpoint.load)
    for module in (utils, models, varuna.checkpoint):
        _patches.replace(module, "VARUNA_TEMP_FOLDER", temporary_folder())


def _around(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method by `wrapper(original, self, ...)`."""
    original = vars(owner)[name]

    @functools.wraps(original)
    def wrapped(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return wrapper(original, self, *arguments, **keywords)

    _patches.replace(owner, name, wrapped)


# -- Patches of Varuna's constructor, communication and evaluation: checked arguments, the CPU as a device, any shapes.


def build(original: Callable[..., None], self: Any, *arguments: Any, **keywords: Any) -> None:
    """Wrap `Varuna.__init__`. Without a CUDA device the default device is the CPU; a `torch.device` is accepted, too.

    Raises CapslogError: fp16, a batch that the replicas cannot share, a `stage_to_rank_map` that does not name each
    rank once, a capacity with a profile of other microbatches, a `temporary_folder` of another user.
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
    mapping = call_arguments["stage_to_rank_map"].rstrip(";") + ";"  # without a last ; Varuna loses the last stage
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
        # Varuna's executor compares it with the text "cpu", else it synchronises CUDA
        self.config["device"] = "cpu"


def init_communication(self: Any) -> None:
    """Replace `Varuna.init_communication`: set the neighbours' ranks only, since each message describes its shapes."""
    ranks = self.stage_to_rank_map
    last = self.partitions - 1
    self.send_rank = ranks[self.stage + 1][self.rank_within_stage] if self.stage < last else None
    self.receive_rank = ranks[self.stage - 1][self.rank_within_stage] if self.stage > 0 else None
    self.fwd_inp_shape = self.bwd_grad_shape = None
    self.fwd_inp_shape_changes = self.bwd_grad_shape_changes = None


def parameter_names_to_cuts(self: Any) -> dict[str, int]:
    """Replace the method of `PartitionedModel`: return parameter name -> piece whose checkpoint file holds it."""
    partition = self.capslog.partition
    return {name: partition.home[name] for name in partition.trace.parameters}


def evaluate(self: Any, inputs: Any, batch_size: int | None = None) -> float:
    """Replace `Varuna.evaluate`, which on later stages computes on a placeholder instead of the received tensors.

    batch_size: samples in `inputs`; default: this replica's samples in a training step. Returns, on every rank, the
    mean loss over the samples of all replicas, or under `loss="sum"` the sum of the microbatches' losses.
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
    with wire.peer_errors("adding up the evaluation's losses", None, current().timeout):
        dist.all_reduce(result, group=self.capslog_world)
    return float(result)


@torch.no_grad()
def forward_only(self: Any, batches: Mapping[int, dict[str, Any]], take: Callable[[int, Any], None]) -> None:
    """Run forwards of microbatches, inputs by number. take: called with (number, model's result) on the last stage."""
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
    """Return a folder for this user and job; Varuna has one for all jobs of a host. port: default `MASTER_PORT`."""
    job = port or os.environ.get("MASTER_PORT", str(os.getpid()))
    return os.path.join(tempfile.gettempdir(), f"varuna-{os.getuid()}-{job}")


def make_temporary_folder(folder: str) -> None:
    """Create the `temporary_folder` of a job, unless another process of the job has created it.

    Raises CapslogError where it is no folder of this user, or others may write into it: they may have put links there.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    about = os.lstat(folder)
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise CapslogError(
            f"{folder} is there already, and others may write into it or it is no folder of yours; remove it, or set "
            "TMPDIR to a folder of your own"
        )
