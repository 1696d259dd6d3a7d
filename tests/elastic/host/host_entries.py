"""Actions that the workers of these tests execute instead of training: `act` reads them from its arguments. Imported by
processes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from varuna_capslog.base.errors import CapslogError, DoesNotFit


def capslog_variables() -> dict[str, str]:
    """Variables of this process, such as the path of the data, which the process of the tests hands down."""
    return {name: value for name, value in os.environ.items() if name.startswith("CAPSLOG_")}


def act(arguments: dict[str, Any]) -> int:
    """Write a description of this worker, then execute the words of `do` for its index, or else those of `all`."""
    member = os.environ["CAPSLOG_MEMBER"]
    folder = Path(arguments["folder"])
    seen = {
        "pid": os.getpid(),
        "group": os.getpgid(0),
        "parent": os.getppid(),
        "threads": len(os.listdir("/proc/self/task")),
        "torch": "torch" in sys.modules,
        "forked": "--alone" not in sys.argv,
        "environment": capslog_variables(),
    }
    (folder / f"{member}.new").write_text(json.dumps(seen))
    os.replace(folder / f"{member}.new", folder / f"{member}.seen")
    sys.stdout.write(f"standard output of {member}\n")
    sys.stderr.write(f"error output of {member}\n")
    index = str(member.rpartition("-")[2])
    words = arguments.get("do", {}).get(index, arguments.get("all", "hang")).split()
    for word in words:
        done = globals()[word.partition("=")[0]](arguments, member, word.partition("=")[2])
        if done is not None:
            return int(done)
    return 0


def hang(arguments: dict[str, Any], member: str, value: str) -> None:
    until = time.monotonic() + 240
    wish: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: wish.append(number))
    while time.monotonic() < until and not wish:
        time.sleep(0.02)


def deaf(arguments: dict[str, Any], member: str, value: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(100)


def wait(arguments: dict[str, Any], member: str, value: str) -> None:
    """Wait until a file of this name is in the folder, at most 100 s."""
    until = time.monotonic() + 240
    while time.monotonic() < until and not (Path(arguments["folder"]) / value).exists():
        time.sleep(0.01)


def kill(arguments: dict[str, Any], member: str, value: str) -> None:
    os.kill(os.getpid(), int(value or 9))


def leave(arguments: dict[str, Any], member: str, value: str) -> int:
    return int(value)


def fail(arguments: dict[str, Any], member: str, value: str) -> int:
    """Write the cause into a file and return the exit status, as a worker does."""
    report = {
        "member": member,
        "kind": value,
        "cause": f"a {value} as the test wants it",
        "time": time.time(),
        "step": 3,
    }
    path = Path(os.environ["CAPSLOG_RUN_DIR"]) / "workers" / f"{member}.error.json"
    path.write_text(json.dumps(report))
    return {"step_refused": 4, "user": 2}.get(value, 1)


def crash(arguments: dict[str, Any], member: str, value: str) -> None:
    raise RuntimeError(value or "crashed")


def spawn(arguments: dict[str, Any], member: str, value: str) -> None:
    """Fork a child, as a data loader does, and write its pid into a file."""
    pid = os.fork()
    if pid == 0:
        time.sleep(100)
        os._exit(0)
    (Path(arguments["folder"]) / f"{member}.child").write_text(str(pid))


def backward(arguments: dict[str, Any], member: str, value: str) -> None:
    """Run a backward, which starts autograd's threads."""
    import torch

    weight = torch.ones(3, requires_grad=True)
    (weight * weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]


def ask(arguments: dict[str, Any], member: str, value: str) -> None:
    """Request a change of devices, as a workload's own code does."""
    from varuna_capslog.elastic import request_morph

    request_morph(int(value))


class Unsendable(CapslogError):
    """Error that pickle cannot restore: its `args` are not the arguments of its constructor."""

    exit_status = 5

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def called(action: str, value: Any) -> Any:
    """Entry that `ForkServer.call` calls in the child."""
    if action == "fail":
        raise DoesNotFit(value)
    if action == "fail oddly":
        raise Unsendable(1, 2)
    if action == "hang":
        Path(value).write_text(str(os.getpid()))
        time.sleep(100)
    if action == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return [value, os.getppid(), os.getpgid(0) == os.getpid()]
