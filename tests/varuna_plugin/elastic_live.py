"""Elastic runs on the real Varuna for tests, and the results of an uninterrupted run. Workers are forked from one fork
server; this process acts as the host, so that a test chooses which worker is lost and when.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.varuna_plugin import models
from varuna_capslog.base import files
from varuna_capslog.base.fork_server import PRELOADED, ForkServer
from varuna_capslog.base.secret import run_secret
from varuna_capslog.elastic.member.start_up import Beginning
from varuna_capslog.elastic.store.opening import StoreGone, StoreServer, open_store
from varuna_capslog.engine.layers import seed_layer
from varuna_capslog.membership.generation import Generation, Stamp
from varuna_capslog.varuna_plugin.checkpoint import begin_with, newest
from varuna_capslog.varuna_plugin.executor import scatter

SCRIPT = str(Path(__file__).with_name("elastic_script.py"))
BATCH, CHUNK = 7, 2


class Cradle:
    """Fork server that many runs share."""

    def __init__(self, folder: Path) -> None:
        self.told: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        modules = (*PRELOADED, "varuna", "varuna_capslog.varuna_plugin.elastic_work", "torch._dynamo")
        entry = "varuna_capslog.varuna_plugin.elastic_run:main"
        self.fork_server = ForkServer(entry, self.told.put, folder / "fork-server.log", modules)
        self.runs = 0


@dataclass
class Ended:
    """Results of a run: statuses by member (minus a signal's number), the last line of each step, events."""

    run_dir: Path
    status: dict[str, int]
    pids: dict[str, int]
    rows: dict[int, dict[str, Any]]
    events: list[dict[str, Any]]

    def members(self) -> list[list[str]]:
        """Return the members of each generation that trained."""
        return [event["members"] for event in self.events if event["kind"] in ("begin", "morph")]

    def cuts(self) -> list[list[int]]:
        return [event["cuts"] for event in self.events if event["kind"] in ("begin", "morph")]

    def describe(self) -> str:
        """Return the message of a failed assertion."""
        logs = [path.read_text()[-3000:] for path in sorted((self.run_dir / "workers").glob("*.log"))]
        return "\n".join([str(self.status), *map(str, self.events), *logs])


class Live:
    """Live run of the script. Members are m0, m1, ... in the order of their ranks."""

    def __init__(self, cradle: Cradle, run_dir: Path, members: int, *arguments: str, first: int = 0) -> None:
        self.run_dir, self._cradle = run_dir, cradle
        self._arguments = [str(run_dir), SCRIPT, str(run_dir), *arguments]
        cradle.runs += 1
        self._prefix = f"{cradle.runs}"
        self.pids: dict[str, int] = {}
        self.status: dict[str, int] = {}
        self._next = first
        self._waited: list[str] = []
        (run_dir / "workers").mkdir(parents=True, exist_ok=True)
        step, path = begin_with(run_dir)
        secret = run_secret(run_dir, create=True)
        self.server = StoreServer(secret)
        port = self.server.port
        self._address = f"127.0.0.1:{port}"
        self.store = open_store(self._address, secret, self.server.identity)
        for key, value in Beginning(1, step, path).keys().items():
            self.store.put(key, value)
        names = [self.join() for _ in range(members)]
        self.store.compare_and_set(0, Generation(1, tuple(names), checkpoint=Stamp(step, 0)))

    def join(self) -> str:
        """Start another member and return its name."""
        member = f"m{self._next}"
        self._next += 1
        self._waited.append(member)
        environment = {
            "CAPSLOG_MEMBER": member,
            "CAPSLOG_HOST": f"host-{member}",
            "CAPSLOG_STORE": self._address,
            "CAPSLOG_STORE_IDENTITY": self.server.identity,
            "CAPSLOG_RUN_DIR": str(self.run_dir),
            "RES_OPTIONS": "timeout:1 attempts:5",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        log = str(self.run_dir / "workers" / f"{member}.log")
        order = {"environment": environment, "log": log, "arguments": self._arguments}
        self._cradle.fork_server.fork({"member": f"{self._prefix}-{member}", **order})
        return member

    def _look(self) -> None:
        """Take a message of the fork server, and write a loss into the log, as a host does."""
        with contextlib.suppress(queue.Empty):
            message = self._cradle.told.get(timeout=0.01)
            prefix, _, member = str(message.get("member", "")).partition("-")
            if prefix != self._prefix:
                return
            if "signal" not in message and "status" not in message:
                self.pids[member] = message["pid"]
                return
            self.status[member] = -message["signal"] if "signal" in message else message["status"]
            if self.status[member] not in (0, 130):
                with contextlib.suppress(StoreGone):
                    self.store.append({"kind": "dead", "member": member, "why": f"ended with {self.status[member]}"})

    def until(self, done: Callable[[], bool], awaited: str, seconds: float = 200.0) -> None:
        until = time.monotonic() + seconds
        while not done():
            if time.monotonic() > until:
                text = self._ended().describe()
                self.close()
                raise AssertionError(f"{awaited} did not come within {seconds:g} s\n{text}")
            self._look()

    def reaches(self, step: int) -> None:
        """Waits until a step is in the metrics."""
        path = self.run_dir / "metrics.jsonl"
        self.until(lambda: path.exists() and any(r["step"] >= step for r in files.read_jsonl(path)), f"step {step}")

    def size_is(self, members: int) -> None:
        """Wait until the events have a generation of this many members."""
        self.until(lambda: bool(self._ended().members()) and len(self._ended().members()[-1]) == members, "that many")

    def signal(self, member: str, number: int) -> None:
        self.until(lambda: member in self.pids, f"the process of {member}")
        os.kill(self.pids[member], number)

    def finish(self) -> Ended:
        """Waits until all members have ended."""
        self.until(lambda: len(self.status) == len(self._waited), "the end of all")
        ended = self._ended()
        self.close()
        return ended

    def _ended(self) -> Ended:
        lines = [
            files.read_jsonl(path) if path.exists() else []
            for path in (self.run_dir / "metrics.jsonl", self.run_dir / "events.jsonl")
        ]
        rows = {row["step"]: row for row in lines[0]}
        return Ended(self.run_dir, dict(self.status), dict(self.pids), rows, lines[1])

    def close(self) -> None:
        """Kill the remaining members."""
        for member in self.pids.keys() - self.status.keys():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[member], signal.SIGKILL)
        self.store.close()
        self.server.close()


# -- expected results


@dataclass(frozen=True)
class Truth:
    """Loss and norm of each step, and the tensors of the last checkpoint."""

    loss: dict[int, float]
    norm: dict[int, float]
    final: dict[str, Tensor]


def final_of(run_dir: Path) -> dict[str, Tensor]:
    """Return parameters, moments and buffers of the last checkpoint."""
    checkpoint = newest(run_dir / "checkpoints")
    assert checkpoint is not None
    state: dict[str, Tensor] = {"step of the run": torch.tensor(checkpoint[0])}
    for path in sorted(checkpoint[1].iterdir()):
        kind = path.name.rpartition("-")[0]
        if kind not in ("opt-fp32-params", "opt-state", "capslog-extra"):
            continue
        content = torch.load(path, weights_only=True)
        for name, value in (content["buffers"] if kind == "capslog-extra" else content).items():
            for key, tensor in value.items() if isinstance(value, dict) else [("", value)]:
                state[f"{kind}/{name}/{key}"] = torch.as_tensor(tensor)
    return state


def truth_of(run_dir: Path, ended: Ended) -> Truth:
    """Return losses, norms and last checkpoint of an undisturbed run."""
    return Truth(
        {step: row["loss"] for step, row in ended.rows.items()},
        {step: row["grad_norm"] for step, row in ended.rows.items()},
        final_of(run_dir),
    )


def check(ended: Ended, truth: Truth, tolerance: float = 0.0) -> None:
    """Check that every step is there once and equals the truth: bitwise by default, norms up to rounding, as they are
    sums of other parts.
    """
    assert sorted(ended.rows) == sorted(truth.loss), ended.describe()
    for step, row in ended.rows.items():
        assert abs(row["loss"] - truth.loss[step]) <= tolerance, (row, truth.loss[step], ended.describe())
        assert abs(row["grad_norm"] - truth.norm[step]) <= max(tolerance, 1e-12), (row, truth.norm[step])
    final = final_of(ended.run_dir)
    assert final.keys() == truth.final.keys()
    for name, tensor in final.items():
        difference = (tensor.double() - truth.final[name].double()).abs().max()
        assert difference <= tolerance, (name, float(difference))


def oracle(blocks: int, steps: int) -> Truth:
    """Train as the script does in plain torch: one process, one whole model, without Varuna or the plugin."""
    torch.manual_seed(0)
    model: nn.Module = models.Model(models.PlainCut, dropout=0.1, blocks=blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses, norms = {}, {}
    position = [0, 0, 0]  # step, microbatch, piece

    def cross() -> None:
        position[2] += 1
        seed_layer(torch.device("cpu"), 0, *position)

    models.PlainCut.on_cross = staticmethod(cross)
    try:
        for step in range(1, steps + 1):
            total = 0.0
            batches = scatter(models.batch(BATCH, 8 + 2 * (step % 3), 10, step), BATCH, CHUNK)
            for index, batch in batches.items():
                position[:] = [step, index, -1]
                cross()
                loss = model(**batch) * batches.sizes[index] / BATCH
                loss.backward()
                total += float(loss.detach())
            losses[step] = total
            norms[step] = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (1 + step // 5)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        models.PlainCut.on_cross = None
    final = {f"opt-fp32-params/{name}/": p.detach() for name, p in model.named_parameters()}
    return Truth(losses, norms, final | {f"capslog-extra/{name}/": b for name, b in model.named_buffers()})
