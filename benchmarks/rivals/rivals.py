"""Runs one training under every contender in turn, with the same faults, and writes the results.

    python rivals.py --rounds 3                     # in an environment that has all contenders, see README.md
    python rivals.py --only ours-dp --rounds 1
    python rivals.py --table                        # the table of results.jsonl; runs nothing

A machine is one program with all its processes. A fault kills all of them with SIGKILL; the program is started again
after `--back` seconds. Where all programs have ended before the last step, all are started again at once, as by a
scheduler that requeues the job. Machine 0 also serves the store, the rendezvous or the lighthouse, and is never lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

import torch  # noqa: E402
from judge import judge, read_lines  # noqa: E402
from task import MINIBATCH, SEED, Digits, evaluate, network, optimizer, write_digits  # noqa: E402

RESULTS, WORKERS, MARK = HERE / "results.jsonl", 4, "RIVALS_MACHINE"


class Setting(NamedTuple):
    """Settings of all runs: steps, seconds that a block sleeps per sample, the steps at which a machine is lost."""

    steps: int
    seconds: float
    faults: tuple[int, ...]
    back: float
    limit: float


class Contender(NamedTuple):
    """Command that starts one machine: (folder, slot, port, setting) to a command; `service` is started before them."""

    name: str
    command: Callable[[Path, int, int, Setting], list[str]]
    service: Callable[[int], list[str]] | None = None
    package: str = "torch"


# -- the contenders ----------------------------------------------------------------------------------------------------


def _ours(devices: int, replicas: int) -> Callable[[Path, int, int, Setting], list[str]]:
    def command(folder: Path, slot: int, port: int, setting: Setting) -> list[str]:
        shape = ["--devices", str(devices), "--replicas", str(replicas), "--steps", str(setting.steps)]
        options = ["--slot", str(slot), "--port", str(port), "--seconds", str(setting.seconds)]
        return [sys.executable, str(HERE / "our_machine.py"), str(folder), *options, *shape]

    return command


def _torchrun(checkpoint_steps: int, *options: str) -> Callable[[Path, int, int, Setting], list[str]]:
    def command(folder: Path, slot: int, port: int, setting: Setting) -> list[str]:
        meeting = [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{port}",
            "--rdzv-id=rivals",
            "--local-addr=127.0.0.1",
        ]
        agent = [sys.executable, "-m", "torch.distributed.run", *meeting, "--nproc-per-node=1", "--max-restarts=100"]
        program = [str(HERE / "with_torchrun.py"), str(folder)]
        return [*agent, *options, *program, f"--seconds={setting.seconds}", f"--every={checkpoint_steps}"]

    return command


def _torchft(shards: str) -> Callable[[Path, int, int, Setting], list[str]]:
    def command(folder: Path, slot: int, port: int, setting: Setting) -> list[str]:
        program = [sys.executable, str(HERE / "with_torchft.py"), str(folder)]
        return [*program, f"--seconds={setting.seconds}", f"--shards={shards}"]

    return command


def _lighthouse(*options: str) -> Callable[[int], list[str]]:
    program = str(Path(sys.executable).with_name("torchft_lighthouse"))
    return lambda port: [program, "--bind", f"127.0.0.1:{port}", "--min_replicas", "1", *options]


EPOCH = 1797 // MINIBATCH
"""Steps; torch's documentation shows a checkpoint after each epoch."""
CONTENDERS = (
    Contender("ours-dp", _ours(1, 4)),
    Contender("torchrun-default", _torchrun(EPOCH, "--nnodes=4")),
    Contender(
        "torchft-best",
        _torchft("participants"),
        _lighthouse("--quorum_tick_ms", "10", "--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "1000"),
        "torchft-nightly",
    ),
    Contender("ours-2x2", _ours(2, 2)),
    Contender(
        "torchrun-best",
        _torchrun(
            5,
            "--nnodes=3:4",
            "--monitor-interval=0.05",
            "--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2",
        ),
    ),
    Contender(
        "torchft-documented",
        _torchft("documented"),
        _lighthouse("--quorum_tick_ms", "100", "--join_timeout_ms", "10000"),
        "torchft-nightly",
    ),
)


# -- machines ----------------------------------------------------------------------------------------------------------


def _marked(mark: str) -> list[int]:
    """Return the processes whose environment has the mark, also those whose parent has changed."""
    pids = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}".encode() in (path / "environ").read_bytes():
                    pids.append(int(path.name))
    return pids


def _processor_seconds(mark: str) -> float:
    """Return the processor seconds of a run's living processes, and of those that they waited for."""
    ticks = 0
    for pid in _marked(mark):
        with contextlib.suppress(OSError):
            fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _end(mark: str) -> None:
    """Kill a machine, or with the folder alone all processes of a run."""
    while pids := [pid for pid in _marked(mark) if _alive(pid)]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Machines:
    """The machines of one run."""

    def __init__(self, contender: Contender, folder: Path, setting: Setting) -> None:
        self._contender, self._folder, self._setting, self._port = contender, folder, setting, _free_port()
        self._started: list[subprocess.Popen[bytes]] = []
        self.most = 0
        if contender.service is not None:
            self._start("service", contender.service(self._port))

    def start(self, slot: int) -> None:
        """Start a machine, for the first time or again."""
        self._start(str(slot), self._contender.command(self._folder, slot, self._port, self._setting))

    def _start(self, name: str, command: list[str]) -> None:
        quiet = {"RAY_USAGE_STATS_ENABLED": "0", "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
        lighthouse = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self._port}"}
        identity = {MARK: f"{self._folder}:{name}", "SLOT": name, "GLOO_SOCKET_IFNAME": "lo"}
        path = {"PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)])}
        with (self._folder / f"output-{name}.txt").open("ab") as output:
            environment = {**os.environ, **quiet, **lighthouse, **identity, **path}
            self._started.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=HERE))

    @property
    def alive(self) -> bool:
        """True while any machine runs; lost machines come back as long as this holds."""
        return any(process.poll() is None for process in self._started[self._contender.service is not None :])

    def kill(self, slot: int) -> None:
        """Kill all processes of a machine at once."""
        self.most = max(self.most, len(_marked(f"{self._folder}:")))
        _end(f"{self._folder}:{slot}")

    def close(self) -> None:
        """Kill the remaining processes of the run."""
        _end(f"{self._folder}:")
        for process in self._started:
            process.wait()


class Progress:
    """Newest step that any worker has kept, read as the logs grow."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.step = folder / "log", 0
        self._offsets: dict[Path, int] = {}
        self.first = 0.0

    def look(self) -> int:
        for path in self._folder.glob("*.jsonl"):
            at = self._offsets.get(path, 0)
            with path.open("rb") as file:
                file.seek(at)
                text = file.read()
            complete = text[: text.rfind(b"\n") + 1]
            self._offsets[path] = at + len(complete)
            for line in complete.splitlines():
                if line.startswith(b'{"kept"'):
                    record = json.loads(line)
                    self.first = self.first or record["time"]
                    self.step = max(self.step, record["kept"])
        return self.step


# -- a run -------------------------------------------------------------------------------------------------------------


def _order(steps: int) -> list[list[int]]:
    """Return the samples of each step, as the library's feed gives them for the seed."""
    from ours import Samples

    from varuna_capslog.training.feed import Feed

    feed = Feed(Samples(), MINIBATCH, MINIBATCH, SEED, ())
    return [feed.minibatch(step).sample_ids[0] for step in range(1, steps + 1)]


def _one_device(steps: list[list[int]]) -> float:
    """Return the final loss of a plain loop in this process."""
    model, data = network(), Digits()
    adam = optimizer(model)
    for samples in steps:
        adam.zero_grad()
        data.loss(model, samples).backward()
        adam.step()
    return evaluate(model.state_dict())


def _final(folder: Path) -> dict[str, torch.Tensor]:
    """Return the final weights of a run."""
    for path in sorted(folder.glob("final*.pt")):
        weights: dict[str, torch.Tensor] = torch.load(path)
        return weights
    from varuna_capslog.training.checkpoint import latest_checkpoint

    checkpoint, _ = latest_checkpoint(folder / "run" / "checkpoints")
    assert checkpoint is not None, "the run has left no weights"
    names = [entry for entry, _ in network().named_children()]
    layers = ["stem", *(f"block.{k}" for k in range(len(names) - 2)), "head"]
    return {
        f"{place}.{name}": value
        for place, layer in zip(names, layers, strict=True)
        for name, value in checkpoint.weights(layer).items()
    }


def _run(contender: Contender, setting: Setting, victims: list[int], steps: list[list[int]]) -> dict[str, Any]:
    """Train once from the start to the last step; return the row of results."""
    folder = Path(tempfile.mkdtemp(prefix="rivals-run-"))
    (folder / "order.json").write_text(json.dumps(steps))
    began, load, returns = time.time(), os.getloadavg()[0], []
    machines, progress, due = Machines(contender, folder, setting), Progress(folder), list(setting.faults)
    killed: list[float] = []
    worked: list[tuple[int, float]] = []  # (newest step, processor seconds), before a machine is lost
    requeued = 0
    try:
        for slot in range(WORKERS):
            machines.start(slot)
        while progress.look() < setting.steps and time.time() - began < setting.limit:
            if not machines.alive and progress.look() < setting.steps:
                requeued += 1
                returns.clear()
                for slot in range(WORKERS):
                    machines.start(slot)
            if progress.step and not worked:
                worked.append((progress.step, _processor_seconds(f"{folder}:")))
            if due and progress.step >= due[0]:
                if not killed:
                    worked.append((progress.step, _processor_seconds(f"{folder}:")))
                slot = victims[len(killed)]
                due.pop(0)
                machines.kill(slot)
                killed.append(time.time())
                returns.append((time.time() + setting.back, slot))
            if returns and time.time() >= returns[0][0]:
                machines.start(returns.pop(0)[1])
            time.sleep(0.02)
        done = progress.step >= setting.steps
        if not killed:
            worked.append((progress.step, _processor_seconds(f"{folder}:")))
        until = time.time() + 15  # for the final weights
        while done and time.time() < until and not _settled(folder):
            time.sleep(0.1)
        loss = evaluate(_final(folder)) if done else None
        lines = read_lines(folder / "log")
    finally:
        machines.close()
        if os.environ.get("RIVALS_KEEP"):
            sys.stderr.write(f"{folder}\n")
        else:
            shutil.rmtree(folder)
    verdict = judge(lines, steps)
    return {
        "contender": contender.name,
        "done": done,
        "seconds": round(verdict.finished - began, 2) if done else None,
        "first_step_after": round(progress.first - began, 2) if progress.first else None,
        "crashes": len(killed),
        "requeued": requeued,
        "victims": victims[: len(killed)],
        "processor_seconds": worked,
        "stalls": [round(_stall(lines, when), 2) for when in killed],
        "steps": verdict.steps,
        "repeated": verdict.repeated,
        "lost": verdict.lost,
        "doubled": verdict.doubled,
        "final_loss": loss,
        "processes": machines.most,
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "version": metadata.version(contender.package),
    }


def _settled(folder: Path) -> bool:
    return any(folder.glob("final*.pt")) or any((folder / "run" / "checkpoints").glob("step-*/manifest.json"))


def _stall(lines: list[dict[str, Any]], when: float) -> float:
    """Return the seconds from a kill to the first kept step beyond all steps kept before it."""
    kept = sorted((line["time"], line["kept"]) for line in lines if "kept" in line)
    newest = max((step for at, step in kept if at <= when), default=0)
    return next((at - when for at, step in kept if at > when and step > newest), float("inf"))


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT).stdout.strip()


def _middle(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.1f} ({', '.join(f'{s:.1f}' for s in seconds)})" if seconds else "-"


def _table() -> str:
    """Return the table: one row per contender, of the runs with the setting of the newest line."""
    runs: dict[str, list[dict[str, Any]]] = {}
    alone = None
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    for line in lines:
        if any(line["setting"][key] != lines[-1]["setting"][key] for key in ("steps", "seconds", "faults", "back")):
            continue
        alone = line["one_device_loss"]
        runs.setdefault(line["contender"], []).append(line)
    text = [
        "| contender | runs, finished | seconds: median (all) | from the first step on | stalled by a crash: median, "
        "max | steps repeated per crash: mean, max | requeued | samples lost | samples doubled | final loss | load |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, group in runs.items():
        done = [run for run in group if run["done"]]
        seconds = [run["seconds"] for run in done]
        training = [run["seconds"] - run["first_step_after"] for run in done]
        stalls = [stall for run in done for stall in run["stalls"]]
        again = [run["repeated"] / run["crashes"] for run in done if run["crashes"]]
        cells = [
            name,
            f"{len(group)}, {len(done)}",
            _middle(seconds),
            _middle(training),
            f"{statistics.median(stalls or [0]):.2f} s, {max(stalls or [0]):.2f} s",
            f"{statistics.mean(again or [0]):.1f}, {max(again or [0]):.1f}",
            *(", ".join(str(run.get(key, 0)) for run in done) for key in ("requeued", "lost", "doubled")),
            ", ".join(f"{run['final_loss']:.6f}" for run in done),
            ", ".join(f"{statistics.mean(run['load']):.0f}" for run in group),
        ]
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join([*text, f"\nOne device: final loss {alone:.6f}"])


def _rounds(args: argparse.Namespace) -> None:
    setting = Setting(args.steps, args.seconds, tuple(args.faults), args.back, args.limit)
    steps = _order(args.steps)
    alone = _one_device(steps)
    chosen = [contender for contender in CONTENDERS if not args.only or contender.name in args.only]
    for number in range(args.first, args.rounds):
        draw = random.Random(number)
        victims = [draw.randrange(1, WORKERS) for _ in setting.faults]
        for contender in chosen:
            outcome = _run(contender, setting, victims, steps)
            line = {
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "commit": _commit(),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "round": number,
                "setting": setting._asdict(),
                "one_device_loss": alone,
                **outcome,
            }
            print(json.dumps(line), flush=True)
            if not args.dry:
                with RESULTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the round to begin with, of those that --rounds counts")
    parser.add_argument("--only", action="append", help="the names of contenders; may be given several times")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--faults", type=int, nargs="*", default=[22, 53], help="steps after which a machine is lost")
    parser.add_argument("--back", type=float, default=20.0, help="seconds until a lost machine is back")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds after which a run is given up")
    parser.add_argument("--seconds", type=float, default=0.0015, help="that a block sleeps per sample")
    parser.add_argument("--dry", action="store_true", help="write no results")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.table:
        print(_table())
        return
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no machine outlives this script
    with tempfile.TemporaryDirectory(prefix="rivals-data-") as data:
        os.environ["RIVALS_DATA"] = str(Path(data) / "digits.pt")
        write_digits(Path(os.environ["RIVALS_DATA"]))
        _rounds(args)


if __name__ == "__main__":
    main()
