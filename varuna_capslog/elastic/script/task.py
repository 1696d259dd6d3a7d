"""Supervision, notices and live changes of membership for any program with `state()`, `load()` and `step()`.

    class Training:
        def state(self): ...            # all that must survive: nested dicts and lists of tensors, numbers and text
        def load(self, state): ...      # take over what another member's (or an earlier) state() gave
        def step(self, number, group):  # one optimizer step over group.size members, of which this is group.rank
            ...

    train(Training(), steps=1000)

Every member holds all of the state, as in plain data parallelism, so a loss costs the step under way and nothing else.
A step that the others did not finish is taken back: `step` must not keep what it cannot `load`, and should choose its
data by `number` alone. Run alone such a script trains by itself; `capslog script` starts it with a supervisor.
"""

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError, StepRefused
from varuna_capslog.config.settings import Elastic
from varuna_capslog.elastic.member.runtime import take_part
from varuna_capslog.elastic.member.start_up import RuntimeOptions, enter, report_failures
from varuna_capslog.elastic.member.timeouts import Timeouts
from varuna_capslog.elastic.script.work import Group, Script, ScriptWork, loss_of, pack
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.training.layer_state import digest
from varuna_capslog.training.worker_process import StopWish

__all__ = ["TRUTH", "Group", "MemberScript", "Script", "current_script", "main", "train"]

TRUTH = "CAPSLOG_TRUTH"
"""Variable: a JSON list of a file and a step. A script that runs alone writes its losses there up to that step, then a
digest of its state, and ends."""

_CURRENT: contextvars.ContextVar[MemberScript | None] = contextvars.ContextVar("member_script", default=None)
"""The script of this context: another run in the same process has its own."""


def train(
    script: Script,
    steps: int,
    done: Callable[[int, float], None] = lambda number, loss: None,
    checkpoint_every: int | None = None,
) -> None:
    """Makes the steps up to number `steps`, together with the other members, if there are any.

    Without `capslog script` around it this is a loop in this process alone. Returns when the last step is made; where
    this member has to leave before, or the run is stopped, the process ends here (SystemExit).

    Args:
        done: told of each step that is final, and of its loss (NaN: none), on the first member.
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
    alone = Group(Communicator(0, 1, "alone", datetime.timedelta(0)))
    for number in range(1, (steps if last is None else min(steps, last)) + 1):
        loss = loss_of(script.step(number, alone))
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
    """Makes the steps as one member of a run; raises SystemExit where this member leaves before the last one."""
    (start, store), settings = enter(member.run_dir, member.wish), member.settings
    work = ScriptWork(start, settings, script, steps, done, checkpoint_every)
    options = RuntimeOptions(
        shadows=False,  # all members hold all of it: nothing is to be copied ahead
        timeouts=Timeouts(change=settings.patience_seconds),
    )
    end, member.status = take_part(start, store, work, options)
    if member.status or end.step < steps:
        raise SystemExit(member.status)


@dataclass
class MemberScript:
    """A user's script, run by the process of one member; `current_script` finds it when the script calls the library.

    Attributes:
        settings: the config's section `elastic`; a script of Varuna's brings its own.
        status: exit status of this member's part in the run; None until it has ended.
    """

    run_dir: Path
    wish: StopWish
    settings: Elastic
    status: int | None = None

    def run(self, path: str, arguments: Sequence[str], folder: str) -> int | str | None:
        """Runs the script as the program of this process; returns the code of its SystemExit (None: it raised none).

        Args:
            arguments: the script's own.
            folder: where its imports are looked for first.
        """
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
    """The script from which this call comes; None in a process that is no member's.

    Raises:
        CapslogError: called in another thread than the one that runs the script.
    """
    script = _CURRENT.get()
    if script is None and "CAPSLOG_MEMBER" in os.environ and threading.current_thread() is not threading.main_thread():
        raise CapslogError(
            "a member of a run trains in the thread that runs its script; this call came from the thread "
            f"{threading.current_thread().name!r}: make it in the main thread"
        )
    return script


def main(arguments: Mapping[str, Any]) -> int:
    """Runs the script of one member, which calls `train`; returns the exit status.

    Args:
        arguments: "run_dir"; "script": its path; "arguments": its own; "elastic": the settings.
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
