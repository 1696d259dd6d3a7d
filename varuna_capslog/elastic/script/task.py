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
import json
import math
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError, StepRefused
from varuna_capslog.config.settings import Elastic
from varuna_capslog.elastic.member.runtime import Runtime
from varuna_capslog.elastic.member.timeouts import Patience
from varuna_capslog.elastic.script.packing import pack
from varuna_capslog.elastic.script.work import Group, Script, ScriptWork, loss_of
from varuna_capslog.elastic.store.torch_store import open_store
from varuna_capslog.membership.generation import Stamp
from varuna_capslog.start.member_worker import Wish, report_failures
from varuna_capslog.training.layer_state import digest

__all__ = ["TRUTH", "Group", "Script", "main", "train"]

TRUTH = "CAPSLOG_TRUTH"
"""Variable: a JSON list of a file and a step. A script that runs alone writes its losses there up to that step, then a
digest of its state, and ends."""


def train(
    script: Script,
    steps: int,
    done: Callable[[int, float], None] = lambda number, loss: None,
    checkpoint_every: int | None = None,
) -> None:
    """Makes the steps up to number `steps`, together with whoever takes part.

    Without `capslog script` around it this is a loop in this process alone. Returns when the last step is made; where
    this member is told to leave before, or somebody stops the run, the process ends here (SystemExit).

    Args:
        done: told of each step that is final, and of its loss (NaN: none), on the first member.
        checkpoint_every: steps between checkpoints in the run's folder; None: one at the end only.

    Raises:
        StepRefused: a loss was not finite; under `capslog script` the state before that step is on disk.
        CapslogError: see `Runtime.run`.
    """
    if _task is not None:
        _task.train(script, steps, done, checkpoint_every)
        return
    truth, last = json.loads(os.environ.get(TRUTH, "[null, null]"))
    for number in range(1, (steps if last is None else min(steps, last)) + 1):
        loss = loss_of(script.step(number, Group(None)))
        if math.isinf(loss):
            raise StepRefused(f"step {number}: the loss is not finite")
        if truth is not None:
            files.append_jsonl(truth, {"step": number, "loss": None if math.isnan(loss) else loss})
        done(number, loss)
    if truth is not None:
        files.append_jsonl(truth, {"state": digest(pack(script.state(), copy=False)).hex()})
        raise SystemExit(0)


@dataclass
class _Task:
    """The run that this process belongs to; `status`: how its part in it ended."""

    me: str
    run_dir: Path
    settings: Elastic
    wish: Wish
    status: int | None = None

    def train(
        self, script: Script, steps: int, done: Callable[[int, float], None], checkpoint_every: int | None
    ) -> None:
        from varuna_capslog.elastic.member.peers import local_address

        address, settings = os.environ["CAPSLOG_STORE"], self.settings
        store = open_store(address, os.environ.get("CAPSLOG_STORE_IDENTITY"))
        told = {key: store.get(key, 10.0) for key in ("first-plan", "resumed-step", "resumed-path")}
        if None in told.values():
            raise CapslogError("the store does not say where the run begins; its first host is gone: start anew")
        resumed, path = Stamp(int(told["resumed-step"] or 0), 0), told["resumed-path"]
        work = ScriptWork(
            self.me,
            script,
            steps,
            self.run_dir,
            int(told["first-plan"] or 1) - 1,
            {resumed: Path(path)} if path else {},
            settings,
            done,
            checkpoint_every,
            lambda: self.wish.stop,
        )
        end = Runtime(
            self.me,
            os.environ.get("CAPSLOG_HOST", "host"),
            work,
            store,
            store.identity,
            os.environ.get("CAPSLOG_ADDRESS") or local_address(address),
            checkpoint=resumed,
            shadows=False,  # all members hold all of it: nothing is to be copied ahead
            patience=Patience(change=settings.patience_seconds),
            stop_wished=lambda: self.wish.stop,
        ).run()
        self.status = 130 if end.stopped and work.asked else 0
        if self.status or end.step < steps:
            raise SystemExit(self.status)


_task: _Task | None = None


def main(arguments: Mapping[str, Any]) -> int:
    """One member: runs the script, which calls `train`; returns the exit status.

    Args:
        arguments: "run_dir"; "script": its path; "arguments": its own; "elastic": the settings.
    """
    run_dir, me = Path(arguments["run_dir"]), os.environ["CAPSLOG_MEMBER"]
    return report_failures(run_dir, me, lambda wish: _run(arguments, run_dir, me, wish))


def _run(arguments: Mapping[str, Any], run_dir: Path, me: str, wish: Wish) -> int:
    global _task
    _task = _Task(me, run_dir, Elastic.model_validate(arguments["elastic"]), wish)
    path = str(arguments["script"])
    sys.argv = [path, *arguments["arguments"]]
    sys.path.insert(0, str(Path(path).resolve().parent))
    with contextlib.suppress(ValueError):
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as ending:
        if _task.status is None and ending.code not in (None, 0):
            raise CapslogError(f"{path} ended itself with {ending.code!r}") from None
    if _task.status is None:
        raise CapslogError(f"{path} has ended without calling varuna_capslog.elastic.script.train")
    return _task.status
