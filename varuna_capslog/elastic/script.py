"""Any data-parallel program as an elastic run, whose members may change while it trains; see docs/scripts.md."""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import json
import math
import os
import runpy
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from varuna_capslog.base import files
from varuna_capslog.base.clock import wall_seconds
from varuna_capslog.base.errors import CapslogError, DiskFailed, StepRefused
from varuna_capslog.base.failures import StopWish
from varuna_capslog.config.settings import Elastic
from varuna_capslog.elastic.member.runtime import take_part
from varuna_capslog.elastic.member.start_up import MemberStart, RuntimeOptions, Timeouts, enter, report_failures
from varuna_capslog.elastic.member.work import LayerState, Opening, Outcome, Work
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.membership.generation import INITIAL, Generation, MemberLayout, Stamp
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.plans.plan import Plan
from varuna_capslog.training.checkpoint import read_file, write_whole
from varuna_capslog.training.journal import RecentSteps
from varuna_capslog.training.layer_state import digest

__all__ = [
    "TRUTH",
    "Group",
    "MemberScript",
    "Script",
    "ScriptWork",
    "current_script",
    "loss_of",
    "main",
    "pack",
    "read_state",
    "saved_states",
    "train",
    "unpack",
]


# -- The `Work` of a data-parallel script: its whole state is one layer, which every member holds.


_KEPT = 3
"""Number of newest checkpoints that are kept."""

_STRUCTURE = "structure"
"""Name of the tensor in a packed state that has the state's nesting and plain values, as JSON."""


class Script(Protocol):
    """Interface that a program implements. Called by one thread."""

    def state(self) -> Any:
        """Return all that later steps need, the same on every member: nested dicts, lists, tuples, tensors, numbers."""

    def load(self, state: Any) -> None:
        """Continue from a result of `state` of this or another member. The script may keep the tensors."""

    def step(self, number: int, group: Group) -> float | Tensor | None:
        """Make an optimizer step; return the loss, or None. If it is not finite, the run ends with the state before.

        Exceptions of `group` must not be caught: a member is lost, and the step will be made again.
        """


class Group:
    """Members that make a step together. Every method raises `PeerLost` when one of them is lost."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.rank, self.size = communicator.rank, communicator.world_size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Add the tensors of all members, in place; the result has the same bits on every member.

        The bits depend on the number of members, unless every element is zero on all members but one.
        """
        return self._communicator.add(tensor)

    def gather(self, value: Any) -> list[Any]:
        """Return every member's value (numbers, text, bytes, tensors, arrays, lists and dicts of these), by rank."""
        return self._communicator.gather(value)

    def barrier(self) -> None:
        """Wait until all members have called this method."""
        self._communicator.barrier()


class ScriptWork(Work):
    """Training of one member in the run of a script. Raises CapslogError for a state that `pack` refuses.

    Args:
        start: its `run_dir` gets metrics.jsonl, events.jsonl and checkpoints/step-<step>-<generation>.pt.
        steps: number of the last step.
        done: called with each step's number and loss, on the first member.
        checkpoint_every: steps between two checkpoints; None: one at the end only.
    """

    def __init__(
        self,
        start: MemberStart,
        settings: Elastic,
        script: Script,
        steps: int,
        done: Callable[[int, float], None],
        checkpoint_every: int | None,
    ) -> None:
        self._start, self._run_dir, self._settings = start, start.run_dir, settings
        self._script, self._steps, self._done, self._checkpoint_every = script, steps, done, checkpoint_every
        self._first = pack(self._script.state(), copy=True)
        size = sum(tensor.numel() * tensor.element_size() for tensor in self._first.values())
        self.layer_bytes: tuple[int, ...] = (size,)
        self._communicator: Communicator | None = None
        self._generation = 0
        self._before: LayerState | None = None  # state before a step, from its computation to its vote
        self._shelved: LayerState | None = None  # state of the script between two generations
        self._loss = math.nan
        self._began = 0.0
        self._recent: RecentSteps[dict[str, Any]] = RecentSteps(start.run_dir / "metrics.jsonl")

    def place(self, seats: Sequence[Seat], plan: Plan | None = None) -> MemberLayout | str:
        if len(seats) < self._settings.min_devices:
            return f"{len(seats)} member(s) are here; waiting for elastic.min_devices={self._settings.min_devices}"
        hosts, wanted = len({seat.host for seat in seats}), self._settings.redundancy + 1
        problem = None
        if hosts < wanted:
            problem = f"the state is held on {hosts} host(s); {wanted} are needed to lose {wanted - 1} at once"
        return MemberLayout(1, {seat.member: (0,) for seat in seats}, {}, problem)

    # -- generations ---------------------------------------------------------------------------------------------------

    def open(self, opening: Opening, communicator: Communicator, states: Mapping[int, LayerState]) -> None:
        state, self._communicator, self._generation = states[0], communicator, opening.number + self._start.offset
        if opening.base == INITIAL and len(set(communicator.gather(digest(state)))) > 1:
            # the script draws its weights without a seed: all members begin with the weights of the first one
            state = communicator.gather(state if communicator.rank == 0 else None)[0]
        if state is not self._shelved:
            self._script.load(unpack({name: tensor.clone() for name, tensor in state.items()}))
        self._shelved = None
        if communicator.rank == 0:
            for record in self._recent.missing(opening.base.step):
                files.append_jsonl(self._run_dir / "metrics.jsonl", record)

    def shelve(self) -> Mapping[int, LayerState]:
        if self._communicator is None:
            return {}
        self._communicator = None
        if self._before is not None:  # the script has changed its state: `open` must load one
            state, self._before = self._before, None
            return {0: state}
        self._shelved = pack(self._script.state(), copy=True)
        return {0: self._shelved}

    # -- a step --------------------------------------------------------------------------------------------------------

    @property
    def _group(self) -> Communicator:
        assert self._communicator is not None
        return self._communicator

    def is_done(self, step: int) -> bool:
        return step >= self._steps

    def compute(self, step: int) -> bool:
        self._began = time.perf_counter()
        self._before = pack(self._script.state(), copy=True)
        self._loss = loss_of(self._script.step(step, Group(self._group)))
        return True  # the vote finds losses that are not finite

    def vote(self, step: int, ballot: bytes) -> Outcome:
        group = self._group
        wishes = [math.isinf(self._loss), self._start.stop_wished(), bool(ballot)]
        infinite, stops, has_ballot = group.sum_numbers([float(wish) for wish in wishes])
        ballots = group.gather(ballot) if has_ballot else [b""] * group.world_size
        return Outcome(not infinite, ballots, bool(stops), 1.0)

    def apply(self, step: int) -> None:
        self._before = None
        record = {
            "step": step,
            "loss": None if math.isnan(self._loss) else self._loss,
            "generation": self._generation,
            "world_size": self._group.world_size,
            "step_seconds": time.perf_counter() - self._began,
            "time": wall_seconds(),
        }
        self._recent.add(step, record)
        if self._group.rank == 0:
            files.append_jsonl(self._run_dir / "metrics.jsonl", record)
            self._done(step, self._loss)

    def discard(self, step: int) -> str:
        return f"step {step}: the loss is not finite; nothing was kept of it"

    # -- states --------------------------------------------------------------------------------------------------------

    def state(self, layer: int, copy: bool) -> LayerState:
        if self._before is not None:
            return self._before  # already a copy, which does not change
        return pack(self._script.state(), copy)

    def initial(self, layer: int) -> LayerState:
        return self._first

    def load(self, layer: int, stamp: Stamp) -> LayerState:
        return read_state(self._start.resumed.get(stamp) or self._path(stamp))

    def persist(self, held: Mapping[tuple[int, Stamp], LayerState], record: Generation) -> None:
        for (_, stamp), state in held.items():
            if stamp.step and record.continues(stamp) and stamp not in self._start.resumed:
                _write(self._path(stamp), state)

    def _path(self, stamp: Stamp) -> Path:
        return self._run_dir / "checkpoints" / f"step-{stamp.step:08d}-{stamp.generation + self._start.offset:06d}.pt"

    # -- boundaries ----------------------------------------------------------------------------------------------------

    def between(self, stamp: Stamp, save: bool = False) -> Stamp | None:
        interval = self._checkpoint_every
        due = bool(interval) and stamp.step % (interval or 1) == 0
        if not stamp.step or not (due or save):
            return None
        self._save(stamp)
        return stamp

    def _save(self, stamp: Stamp) -> None:
        """Write the checkpoint of a boundary; a file that exists from before a change of members stays."""
        state = pack(self._script.state(), copy=False)
        if len(set(self._group.gather(digest(state)))) > 1:
            raise CapslogError(
                f"after step {stamp.step} the members' states differ; what state() gives must be the same on all, "
                "whatever the rank: gradients summed, statistics of batches exchanged, random numbers drawn by step"
            )
        if self._group.rank == 0 and stamp not in self._start.resumed:
            _write(self._path(stamp), state)
            for path in sorted((self._run_dir / "checkpoints").glob("step-*-*.pt"))[:-_KEPT]:
                path.unlink(missing_ok=True)
        self._group.barrier()

    def finish(self, stamp: Stamp, stopped: bool) -> None:
        self.asked = stopped and any(self._group.gather(self._start.stop_wished()))
        if stamp.step:
            self._save(stamp)
        if self._group.rank == 0:
            self.note("stop", step=stamp.step, asked=self.asked, generation=self._generation - self._start.offset)

    def note(self, kind: str, **details: Any) -> None:
        if kind == "begin":
            details["step"] -= 1  # noted after the first step, but meant for the boundary before it
            kind = "resume" if details["step"] else "start"
        details["generation"] = int(details.get("generation", 0)) + self._start.offset
        files.append_jsonl(self._run_dir / "events.jsonl", {"kind": kind, "time": wall_seconds(), **details})


def loss_of(returned: float | Tensor | None) -> float:
    """Return the loss of a step as a number. NaN: the step returned None; infinite: the loss was not finite."""
    if returned is None:
        return math.nan
    value = float(returned)
    return value if math.isfinite(value) else math.inf


# -- the form in which a state is sent and stored ----------------------------------------------------------------------


def pack(state: Any, copy: bool) -> LayerState:
    """Pack a nested state as tensors by name; equal states give equal names, types and bytes.

    Raises CapslogError for a value that is no dict, list, tuple, tensor, number, text, boolean or None.
    """
    tensors: LayerState = {}

    def fold(value: Any, where: str) -> Any:
        if isinstance(value, Tensor):
            name = f"tensor/{len(tensors):06d}"
            tensors[name] = value.detach().clone() if copy else value.detach()
            return {"tensor": name}
        if isinstance(value, Mapping):  # a list of pairs: keys may be numbers, and their order counts
            return {"dict": [[fold(key, where), fold(entry, f"{where}[{key!r}]")] for key, entry in value.items()]}
        if isinstance(value, tuple | list):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [fold(entry, f"{where}[{index}]") for index, entry in enumerate(value)]}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise CapslogError(
            f"state(){where} is a {type(value).__name__}; a state may hold dicts, lists, tuples, tensors, numbers, "
            "text, booleans and None"
        )

    text = json.dumps(fold(state, "")).encode()
    tensors[_STRUCTURE] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return tensors


def unpack(packed: Mapping[str, Tensor]) -> Any:
    """Return the nested state, with the tensors of `packed` themselves."""

    def unfold(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "tensor":
            return packed[content]
        if kind == "dict":
            return {unfold(key): unfold(entry) for key, entry in content}
        entries = [unfold(entry) for entry in content]
        return tuple(entries) if kind == "tuple" else entries

    return unfold(json.loads(packed[_STRUCTURE].numpy().tobytes()))


# -- checkpoints -------------------------------------------------------------------------------------------------------


def saved_states(run_dir: Path) -> list[tuple[Stamp, Path]]:
    """Boundaries with a checkpoint on disk, the newest last; their generations are numbers of the run's files."""
    states = []
    for path in (run_dir / "checkpoints").glob("step-*-*.pt"):
        if (stamp := Stamp.of_name(path.stem.removeprefix("step-"))) is not None:
            states.append((stamp, path))
    return sorted(states)


def _write(path: Path, state: LayerState) -> None:
    """Write a checkpoint completely or not at all; equal stamps are equal states, so an existing file stays."""
    if path.exists():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, dict(state))
    except OSError as error:
        why = error.strerror or error
        raise DiskFailed(f"{path} cannot be written: {why}; free space or choose another path") from error


def read_state(path: Path) -> LayerState:
    """Read the packed state in a checkpoint. Raises CapslogError."""
    advice = "remove it to go on from the one before"
    state: LayerState = read_file(path, advice)
    try:
        unpack(state)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CapslogError(f"{path}: holds no state of a script; {advice}") from error
    return state


# -- Elastic training for any program with `state()`, `load()` and `step()`.
#
#     class Training:
#         def state(self): ...            # all that later steps need: nested dicts and lists of tensors, numbers, text
#         def load(self, state): ...      # continue from a state() of another member, or of an earlier step
#         def step(self, number, group):  # one optimizer step over group.size members; this one is number group.rank
#             ...
#
#     train(Training(), steps=1000)
#
# Every member holds the whole state, as in plain data parallelism, so the loss of a member costs only the step under
# way. A step that the others did not finish is taken back: all that `step` changes must be part of `state`, and its
# data should depend on `number` alone. Started by itself, such a script trains in one process; `capslog script` starts
# it with a supervisor.


TRUTH = "CAPSLOG_TRUTH"
"""Environment variable: a JSON list of a file and a step. A script that runs alone writes its losses up to that step to
the file, then a digest of its state, and ends."""

_CURRENT: contextvars.ContextVar[MemberScript | None] = contextvars.ContextVar("member_script", default=None)
"""Script of this context; another run in the same process has another context."""


def train(
    script: Script,
    steps: int,
    done: Callable[[int, float], None] = lambda number, loss: None,
    checkpoint_every: int | None = None,
) -> None:
    """Make the steps up to number `steps`, together with the other members, if there are any.

    Without `capslog script` this is a loop in one process. Returns after the last step; if this member must leave
    earlier, or the run is stopped, raises SystemExit, so that the process ends.

    Args:
        done: called with each final step and its loss (NaN: none), on the first member.
        checkpoint_every: steps between checkpoints in the run's folder; None: one at the end only.

    Raises:
        StepRefused: a loss was not finite; under `capslog script` the state before that step is on disk.
        CapslogError: see `Runtime.run`.
    """
    member = current_script()
    if member is not None:
        _take_part(member, script, steps, done, checkpoint_every)
        return
    truth, last = json.loads(os.environ.get(TRUTH, "[null, null]"))
    lone_group = Group(Communicator(0, 1, "alone", datetime.timedelta(0)))
    for number in range(1, (steps if last is None else min(steps, last)) + 1):
        loss = loss_of(script.step(number, lone_group))
        if math.isinf(loss):
            raise StepRefused(f"step {number}: the loss is not finite")
        if truth is not None:
            files.append_jsonl(truth, {"step": number, "loss": None if math.isnan(loss) else loss})
        done(number, loss)
    if truth is not None:
        files.append_jsonl(truth, {"state": digest(pack(script.state(), copy=False)).hex()})
        raise SystemExit(0)


def _take_part(
    member: MemberScript, script: Script, steps: int, done: Callable[[int, float], None], checkpoint_every: int | None
) -> None:
    """Make the steps as one member of a run; raise SystemExit where this member leaves before the last one."""
    (start, store), settings = enter(member.run_dir, member.wish), member.settings
    work = ScriptWork(start, settings, script, steps, done, checkpoint_every)
    options = RuntimeOptions(
        shadows=False,  # all members hold the whole state: nothing must be copied ahead
        timeouts=Timeouts(change=settings.patience_seconds),
    )
    end, member.status = take_part(start, store, work, options)
    if member.status or end.step < steps:
        raise SystemExit(member.status)


@dataclass
class MemberScript:
    """A user's script in the process of one member; `current_script` finds it when the script calls the library.

    Attributes:
        settings: the config's section `elastic`; the defaults in a run of the Varuna plugin.
        status: exit status of this member's part in the run; None until it has ended.
    """

    run_dir: Path
    wish: StopWish
    settings: Elastic
    status: int | None = None

    def run(self, path: str, arguments: Sequence[str], folder: str) -> int | str | None:
        """Run the script as `__main__`; return its SystemExit's code or None. folder: first in `sys.path`."""
        sys.argv = [path, *arguments]
        sys.path.insert(0, folder)
        token = _CURRENT.set(self)
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            return end.code
        finally:
            _CURRENT.reset(token)
        return None


def current_script() -> MemberScript | None:
    """Script that makes this call; None outside a member's process. Raises CapslogError in other threads than main."""
    script = _CURRENT.get()
    if script is None and "CAPSLOG_MEMBER" in os.environ and threading.current_thread() is not threading.main_thread():
        raise CapslogError(
            "a member of a run trains in the thread that runs its script; this call came from the thread "
            f"{threading.current_thread().name!r}: make it in the main thread"
        )
    return script


def main(arguments: Mapping[str, Any]) -> int:
    """Run the script of one member, which calls `train`; return the exit status.

    arguments: "run_dir"; "script": path of the script; "arguments": for the script; "elastic": the settings.
    """
    return report_failures(Path(arguments["run_dir"]), lambda wish: _run(arguments, wish))


def _run(arguments: Mapping[str, Any], wish: StopWish) -> int:
    member = MemberScript(Path(arguments["run_dir"]), wish, Elastic.model_validate(arguments["elastic"]))
    path = str(arguments["script"])
    with contextlib.suppress(ValueError):
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    code = member.run(path, arguments["arguments"], str(Path(path).resolve().parent))
    if member.status is not None:
        return member.status
    if code not in (None, 0):
        raise CapslogError(f"{path} ended itself with {code!r}")
    raise CapslogError(f"{path} has ended without calling varuna_capslog.elastic.script.train")
