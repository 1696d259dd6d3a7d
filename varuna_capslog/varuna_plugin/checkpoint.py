"""Checkpoints in Varuna's layout: one file per piece and kind, so that they load under any cut list.

Replaces `Varuna.checkpoint` and `load_checkpoint`. Checkpoints also hold state that Varuna leaves out (buffers,
learning rates by parameter, random state) and a manifest with sizes and digests. A checkpoint is written under a
temporary name and renamed when all ranks are done. Files of unpatched Varuna, without manifest, load too.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from varuna_capslog.base import fields, files
from varuna_capslog.base.errors import CapslogError, DiskFailed
from varuna_capslog.elastic.member.holdings import take_newest, write_boundaries
from varuna_capslog.membership.generation import Generation, Stamp
from varuna_capslog.training.checkpoint import publish, read_file, write_synced, write_whole
from varuna_capslog.training.layer_state import LayerState, flatten
from varuna_capslog.varuna_plugin.executor import restore_random_state, save_random_state
from varuna_capslog.varuna_plugin.options import current
from varuna_capslog.varuna_plugin.stages import ANCHOR
from varuna_capslog.varuna_plugin.wire import peer_errors

__all__ = [
    "FORMAT",
    "MANIFEST",
    "RESUMED",
    "Reader",
    "begin_with",
    "load",
    "newest",
    "read_held",
    "read_tensors",
    "save",
    "write_held",
]


# -- Files of a run on Varuna: a checkpoint's folder, and the boundary with which an elastic run continues.
#
# A checkpoint (`varuna_ckpt_<step>`) has Varuna's layout, one file per piece and kind, with a manifest where the
# plugin wrote it. A member of an elastic run that must stop between two checkpoints writes the pieces that it holds
# into `run_dir/held/`. The next run begins with the newest boundary that has all pieces, if it is newer than the last
# checkpoint. The functions of this section know no ranks, stages or model.


MANIFEST = "capslog-manifest.json"
FORMAT = "varuna-capslog/varuna-checkpoint/1"
PARAMETERS, STATE, COMMON = "opt-fp32-params-{}", "opt-state-{}", "opt-common-state"
EXTRA = "capslog-extra-{}"
_MOST_PIECES = 100_000
RESUMED = "resumed-"
"""Prefix, before a step, of folders in the run's folder: boundaries that members left, from which a later run began."""


def newest(folder: Path) -> tuple[int, Path] | None:
    """Return step and path of the newest complete checkpoint that the plugin wrote; None without a checkpoint."""
    steps = _numbered("varuna_ckpt_", (path.parent for path in folder.glob(f"varuna_ckpt_*/{MANIFEST}")))
    return max(steps.items()) if steps else None


def _numbered(prefix: str, paths: Iterable[Path]) -> dict[int, Path]:
    """Return the paths by the number behind the prefix of their names; other paths are left out."""
    return {int(match[1]): path for path in paths if (match := re.fullmatch(f"{prefix}([0-9]{{1,18}})", path.name))}


def read_tensors(place: Path, parameters: Iterable[str], buffers: Iterable[str]) -> LayerState:
    """Read parts of a checkpoint that the plugin wrote, in the form of `training.layer_state`.

    Raises CapslogError for a checkpoint that is damaged, incomplete, of unpatched Varuna, or lacks a name.
    """
    reader = Reader(place, check=True)
    if reader.manifest is None:
        raise CapslogError(f"{place} was written by Varuna itself, which leaves parts out; load it in a script")
    wanted, extra = list(parameters), [name for name in buffers if name in reader.manifest["buffers"]]
    values, kept = reader.search(PARAMETERS, wanted), reader.search(EXTRA, extra, "buffers")
    missing = sorted({*wanted, *extra} - values.keys() - kept.keys())
    if missing:
        raise CapslogError(f"{place} lacks {', '.join(missing[:4])}: it was written for another model")
    return flatten(values, kept, reader.search(STATE, wanted))


def _manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint. Raises CapslogError where it has another form."""
    manifest = files.read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CapslogError(f"{path}: format is not {FORMAT!r}; load an older checkpoint")

    def check() -> None:
        if fields.whole(manifest.get("num_pieces"), "num_pieces", 1) > _MOST_PIECES:
            raise CapslogError(f"num_pieces is {manifest['num_pieces']}, more than the {_MOST_PIECES} of any model")
        for kind in ("parameters", "buffers"):
            for name, piece in fields.mapping(manifest.get(kind), kind).items():
                fields.whole(piece, f"{kind}[{name!r}]")
        for name, entry in fields.mapping(manifest.get("files"), "files").items():
            fields.text(fields.mapping(entry, f"files[{name!r}]").get("digest"), f"files[{name!r}].digest")
        fields.mapping(manifest.get("stage_to_rank_map"), "stage_to_rank_map")
        fields.listed(manifest.get("cuts"), "cuts")

    fields.within(str(path), check)
    return manifest


class Reader:
    """Reader of a checkpoint folder; files are read once.

    home: the expected piece of each parameter and buffer, where the manifest does not have it.
    """

    def __init__(self, folder: Path, check: bool, home: Mapping[str, int] | None = None) -> None:
        self.folder, self.check = folder, check
        self._home = dict(home or {})
        self.manifest: dict[str, Any] | None = None
        self._cache: dict[str, Any] = {}
        if not folder.is_dir():
            raise CapslogError(f"{folder} is not there; give the folder that holds varuna_ckpt_* and a step of it")
        if (folder / MANIFEST).exists():
            self.manifest = _manifest(folder / MANIFEST)
            self._home |= self.manifest["parameters"] | self.manifest["buffers"]
        names = (path.name for path in folder.glob(PARAMETERS.format("*")))
        numbers = (re.match(PARAMETERS.format("([0-9]{1,9})(_|$)"), name) for name in names)
        self.pieces = sorted({int(number[1]) for number in numbers if number})
        wanted = range(self.manifest["num_pieces"]) if self.manifest else range(max(self.pieces, default=-1) + 1)
        if check and (not self.pieces or self.pieces != list(wanted)):
            raise CapslogError(
                f"{folder} holds the pieces {self.pieces}, not all of 0 to {max(wanted, default=0)}: it was broken "
                "off; load an older one"
            )

    def piece(self, pattern: str, piece: int) -> dict[str, Any]:
        """Return the content of a piece's file, or of its shards together; empty without a file."""
        name = pattern.format(piece)
        if name not in self._cache:
            piece_file = self.folder / name
            paths = [piece_file] if piece_file.exists() else sorted(self.folder.glob(f"{name}_*"))
            self._cache[name] = {key: value for path in paths for key, value in self.file(path).items()}
        return dict(self._cache[name])

    def file(self, path: Path) -> Any:
        """Return the content of a file, checked against the manifest, if any."""
        if self.check and self.manifest is not None:
            entry = self.manifest["files"].get(path.name)
            if entry is None or not path.is_file() or files.digest_of(path) != entry["digest"]:
                raise CapslogError(f"{path}: damaged (not what the manifest says); load an older checkpoint")
        return read_file(path, "load an older checkpoint")

    def search(self, pattern: str, names: Collection[str], part: str | None = None) -> dict[str, Any]:
        """Return the entries of `names`, searched first in their expected pieces, then in all pieces."""
        entries: dict[str, Any] = {}
        for piece in [*sorted({self._home[name] for name in names if name in self._home}), *self.pieces]:
            if len(entries) == len(names):
                break
            content = self.piece(pattern, piece)
            content = content.get(part, {}) if part is not None else content
            entries |= {name: content[name] for name in names if name in content and name not in entries}
        return entries


# -- state that members of an elastic run leave


def write_held(
    run_dir: Path, held: Mapping[tuple[int, Stamp], LayerState], record: Generation, num_pieces: int
) -> None:
    """Write the states that a member holds; see `holdings.write_boundaries`."""

    def write(place: Path, piece: int, state: LayerState) -> None:
        if not _file(place, piece).exists():
            write_whole(_file(place, piece), {key: tensor.cpu() for key, tensor in state.items()})

    write_boundaries(run_dir, held, record, {"num_pieces": num_pieces}, write)


def begin_with(run_dir: Path) -> tuple[int, Path | None]:
    """Return the step after which a run continues, and the folder of its state; (0, None) for a new run. Called by one
    process before a run starts. The generations begin anew, so unusable state of an earlier run is removed.
    """
    newest_checkpoint: tuple[int, Path | None] = newest(run_dir / "checkpoints") or (0, None)

    def take(place: Path, step: int, about: Mapping[str, Any]) -> Path | None:
        """Move a complete boundary into a folder of its own; return None for an incomplete boundary."""
        count = fields.whole(about.get("num_pieces"), f"{run_dir}/held: num_pieces", 1)
        if not all(_file(place, piece).exists() for piece in range(count)):
            return None
        final = run_dir / f"{RESUMED}{step:08d}"
        shutil.rmtree(final, ignore_errors=True)
        os.replace(place, final)
        return final

    take_newest(run_dir, newest_checkpoint[0], take)
    resumed = _numbered(RESUMED, (path for path in run_dir.glob(f"{RESUMED}*") if path.is_dir()))
    step, path = max([newest_checkpoint, *resumed.items()], key=lambda boundary: boundary[0])
    for place in resumed.values():
        if place != path:
            shutil.rmtree(place, ignore_errors=True)
    return step, None if path is None else path.absolute()


def read_held(folder: Path, piece: int) -> LayerState:
    """Read a piece's state from a folder of `begin_with`. Raises CapslogError where it cannot be read."""
    state: LayerState = read_file(_file(folder, piece), f"remove {folder} to use the last checkpoint")
    return state


def _file(folder: Path, piece: int) -> Path:
    return folder / f"piece-{piece:04d}.pt"


# -- Checkpoints in Varuna's layout


_log = logging.getLogger(__name__)

_RANDOM = "capslog-random-{}"


# -- writing


def save(
    self: Any,
    global_store: str | os.PathLike[str],
    step: int | None = None,
    tempdir: str | None = None,
    shard: bool = False,
    on_demand: bool = False,
) -> Future[None] | None:
    """Replace `Varuna.checkpoint`: write `varuna_ckpt_<step>` together with all ranks; complete when it returns.

    Args:
        global_store: a folder that all ranks see.
        step: default: steps done so far.
        tempdir: accepted for compatibility; with it, a finished future is returned, as callers wait for a future.
        shard, on_demand: accepted for compatibility; replica 0 writes whole files, which every reader accepts.

    Raises:
        DiskFailed: on every rank, when any rank could not write; an older checkpoint of that name is untouched.
    """
    _refuse_trimmed(self)
    step = self.iteration if step is None else step
    folder = Path(global_store)
    partial = folder / f".partial-varuna_ckpt_{step}"
    entries: dict[str, Any] = {}
    # by rank 0 alone, before others write: it removes the folder that a broken attempt left
    _agree(self, _attempt(lambda: _empty(partial)) if self.rank == 0 else None, folder, step)
    problem = _attempt(lambda: entries.update(_write_own(self, partial)))
    gathered = _gather(self, (problem, entries))
    problem = next((f"rank {rank}: {text}" for rank, (text, _) in enumerate(gathered) if text), None)
    if problem is None and self.rank == 0:
        together = {name: entry for _, theirs in gathered for name, entry in theirs.items()}
        problem = _attempt(lambda: _finish(self, partial, folder / f"varuna_ckpt_{step}", step, together))
    if problem is not None and self.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    _agree(self, problem, folder, step)
    _track(self, step)
    if tempdir is None:
        return None
    done: Future[None] = Future()
    done.set_result(None)
    return done


def _empty(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "markers").mkdir(parents=True, exist_ok=True)


def _refuse_trimmed(self: Any) -> None:
    if current().stages_of_interest is not None:
        raise CapslogError(
            "with stages_of_interest only some stages hold parameters, and their values have no meaning: there is "
            "nothing to write or to go on from; leave it out to train"
        )


def _attempt(work: Callable[[], object]) -> str | None:
    """Call `work`; return its error as text, or None."""
    try:
        work()
    except (OSError, CapslogError) as error:
        return f"{getattr(error, 'strerror', None) or error}"
    return None


def _agree(self: Any, problem: str | None, folder: Path, step: int) -> None:
    problems = [text for text in _gather(self, problem) if text]
    if problems:
        raise DiskFailed(
            f"the checkpoint of step {step} could not be written to {folder} ({'; '.join(problems)}); older ones are "
            "untouched: make room and write again"
        )


def _gather(self: Any, value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    with peer_errors("agreeing on a checkpoint with all ranks", None, current().timeout):
        dist.all_gather_object(everyone, value, group=self.capslog_world)
    return everyone


def _write_own(self: Any, folder: Path) -> dict[str, Any]:
    """Write this rank's files: its random state, and on replica 0 every piece of its stage."""
    random = {"state": list(save_random_state(self.device))}
    entries = {_RANDOM.format(self.rank): write_synced(folder / _RANDOM.format(self.rank), random)}
    if self.rank_within_stage > 0:
        return entries
    partition, stage = self.partitioned_model.capslog.partition, self.stage
    parameters, buffers = _held(self)
    groups = {
        id(parameter): {key: value for key, value in group.items() if key != "params"}
        for group in self.optimizer.param_groups
        for parameter in group["params"]
    }
    for piece in partition.pieces(stage):
        piece_parameters = {name: parameter for name, parameter in parameters.items() if partition.home[name] == piece}
        content: dict[str, dict[str, Any]] = {
            PARAMETERS: piece_parameters,
            STATE: {
                name: dict(self.optimizer.state[parameter])
                for name, parameter in piece_parameters.items()
                if parameter in self.optimizer.state
            },
            EXTRA: {
                "buffers": {name: buffer for name, buffer in buffers.items() if partition.home[name] == piece},
                "groups": {
                    name: groups[id(parameter)]
                    for name, parameter in piece_parameters.items()
                    if id(parameter) in groups
                },
            },
        }
        for pattern, value in content.items():
            # copies: a view would be saved with its whole storage
            copied = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), value)
            entries[pattern.format(piece)] = write_synced(folder / pattern.format(piece), copied)
    return entries


def _finish(self: Any, partial: Path, final: Path, step: int, entries: Mapping[str, Any]) -> None:
    """Write common state, markers and manifest, then rename the folder, which makes it a checkpoint."""
    common = self.optimizer.state_dict()
    common["state"] = {}
    entries = {**entries, COMMON: write_synced(partial / COMMON, common)}
    partition = self.partitioned_model.capslog.partition
    for stage, ranks in self.stage_to_rank_map.items():
        held = sum(partition.stage_of(partition.home[name]) == stage for name in partition.trace.parameters)
        for rank in ranks:
            # Varuna wants these counts to add up to the number of parameters, plus one for a name of its own
            count = held + int(stage == 0) if rank == ranks[0] else 0
            (partial / "markers" / f"complete_{rank}.txt").write_text(str(count), encoding="utf-8")
    files.write_json(
        partial / MANIFEST,
        {
            "format": FORMAT,
            "iteration": step,
            "cuts": list(partition.cuts),
            "num_pieces": partition.trace.num_pieces,
            "stage_to_rank_map": {str(stage): list(ranks) for stage, ranks in self.stage_to_rank_map.items()},
            "parameters": {name: partition.home[name] for name in partition.trace.parameters},
            "buffers": {name: partition.home[name] for name in partition.trace.buffers},
            "files": entries,
        },
    )
    publish(partial, final, final.with_name(f".replaced-{final.name}"))


def _held(self: Any) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """Return this stage's parameters, and its buffers that belong into a file, by name."""
    model = self.partitioned_model.module
    persistent = model.state_dict()
    parameters = {name: parameter for name, parameter in model.named_parameters() if name != ANCHOR}
    return parameters, {name: buffer for name, buffer in model.named_buffers() if name in persistent}


def _track(self: Any, step: int) -> None:
    """Write the last step to the file from which Varuna's launcher reads it."""
    from varuna.checkpoint import get_local_ckpt_tracker

    files.write_text(get_local_ckpt_tracker(self.local_rank), str(step))


# -- reading


def load(self: Any, global_store: str | os.PathLike[str], iteration: int, check_complete: bool = True) -> None:
    """Replace `Varuna.load_checkpoint`: load this stage's state from a checkpoint, whatever cuts it was written under.

    Args:
        check_complete: refuse a checkpoint that lacks a parameter or whose files are damaged; False keeps the present
            values of missing parameters, with a warning.

    Raises:
        CapslogError: on every rank, when any rank cannot load; some parameters may then be overwritten.
    """
    _refuse_trimmed(self)
    if self.optimizer is None:
        raise CapslogError("load_checkpoint needs the optimizer: call set_optimizer first")
    folder = Path(global_store) / f"varuna_ckpt_{iteration}"
    home = self.partitioned_model.capslog.partition.home
    problem = _attempt(lambda: _take(self, Reader(folder, check_complete, home)))
    for rank, text in enumerate(_gather(self, problem)):
        if text:
            raise CapslogError(f"rank {rank}: {text}")
    self.iteration = iteration
    _track(self, iteration)


def _take(self: Any, reader: Reader) -> None:
    parameters, buffers = _held(self)
    _copy_all(parameters, reader.search(PARAMETERS, parameters), reader)
    if reader.manifest is not None:
        _copy_all(buffers, reader.search(EXTRA, buffers, "buffers"), reader)
    elif buffers:
        _log.warning("%s has no buffers (Varuna writes none); %d keep their values", reader.folder, len(buffers))
    state = reader.search(STATE, parameters)
    for name, parameter in parameters.items():
        self.optimizer.state.pop(parameter, None)
        if name in state:
            self.optimizer.state[parameter] = {
                key: value.to(parameter.device) if isinstance(value, Tensor) and key != "step" else value
                for key, value in state[name].items()
            }
    _take_groups(self, reader, parameters)
    _take_random_state(self, reader)


def _copy_all(targets: Mapping[str, Tensor], values: Mapping[str, Tensor], reader: Reader) -> None:
    missing = [name for name in targets if name not in values]
    if missing:
        text = f"{reader.folder} lacks {', '.join(missing[:4])}{' ...' if len(missing) > 4 else ''}"
        if reader.check:
            raise CapslogError(
                f"{text}: it was written for another model, or by Varuna itself, which leaves out some parameters; "
                "load with check_complete=False to keep their present values"
            )
        _log.warning("%s; their present values stay", text)
    with torch.no_grad():
        for name, value in values.items():
            if targets[name].shape != value.shape:
                raise CapslogError(
                    f"{reader.folder}: {name!r} has shape {list(value.shape)}, the model wants "
                    f"{list(targets[name].shape)}"
                )
            targets[name].copy_(value)


def _take_groups(self: Any, reader: Reader, parameters: Mapping[str, nn.Parameter]) -> None:
    """Load learning rates and other group settings: by parameter from the plugin's files, by position from Varuna's."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    if reader.manifest is not None:
        saved_groups = reader.search(EXTRA, parameters, "groups")
        for group in self.optimizer.param_groups:
            mine = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
            group.update(next((saved_groups[name] for name in mine if name in saved_groups), {}))
        return
    common = reader.folder / COMMON
    if not common.exists():
        return
    groups = reader.file(common)["param_groups"]
    if len(groups) != len(self.optimizer.param_groups):
        _log.warning("%s has other parameter groups than this optimizer: none taken over", common)
        return
    for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})


def _take_random_state(self: Any, reader: Reader) -> None:
    """Load the random state only under the layout in which it was written: every rank has its own random stream."""
    manifest = reader.manifest
    if manifest is None:
        return
    ranks = {str(stage): list(ranks) for stage, ranks in self.stage_to_rank_map.items()}
    cuts = list(self.partitioned_model.capslog.partition.cuts)
    if (manifest["cuts"], manifest["stage_to_rank_map"]) != (cuts, ranks):
        _log.info("%s was written under other cuts or ranks; random numbers go on from where they are", reader.folder)
        return
    cpu, cuda = reader.file(reader.folder / _RANDOM.format(self.rank))["state"]
    restore_random_state((cpu, cuda), self.device)
