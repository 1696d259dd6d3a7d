"""Attacks every port of a live run as an unauthenticated client: 1,000 messages of each kind, then 10,000 connections.

Three members on one host, the small model of `../morph` with blocks that sleep. While they train, the client sends to
the store's port and the members' ports; then a client with the secret poses as a member of an old generation; then the
unauthenticated client sends to gloo's ports. At the end the losses are compared bit by bit with an undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "morph"))

from live import HERE, Live, append_result, losses

from tests.rig.stranger import KINDS, Answers, Stranger, addresses, recorded
from varuna_capslog.base import files
from varuna_capslog.base.processes import logged
from varuna_capslog.base.secret import run_secret
from varuna_capslog.elastic.member.inbox import Peers

MODEL = ("model.blocks=8", "model.block_seconds=0.004", "train.epochs=null", "profile.source=estimated")
CROWD = """
import sys, time
from tests.rig.stranger import Answers, Stranger
ports, count = [int(port) for port in sys.argv[1].split(",")], int(sys.argv[2])
answers, held = Answers(), []
for number, port in enumerate(ports):
    held += Stranger(number, {}).crowd(port, count // len(ports), answers)
print(answers.sent, answers.refused, flush=True)
time.sleep(5)
"""


def pids(live: Live) -> dict[str, int]:
    """Return the process ids of the present members."""
    return {name: int(files.read_json(live.folder / f"workers/{name}.json")["pid"]) for name in live.members}


def own_ports(live: Live) -> dict[int, str]:
    """Return the run's own ports, each with the purpose that the key of its connections is derived for."""
    store = live.host.link.store
    ports = {int(store.address.rpartition(":")[2]): "store"}
    for member in live.members:
        ports[int(str(store.get(f"address/{member}")).rpartition(":")[2])] = f"peers {store.identity}"
    return ports


def most(live: Live) -> tuple[int, int]:
    """Return the most threads, and the most descriptors, that a member has now."""
    tasks, descriptors = zip(
        *((len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))) for pid in pids(live).values()),
        strict=True,
    )
    return max(tasks), max(descriptors)


def measured(live: Live, kind: str, speak: Callable[[], Iterator[Answers]]) -> dict[str, object]:
    """Send a kind of message while the run trains; print and return the answers and the effects on the run."""
    log, generation = len(live.host.link.store.history()), live.generation
    began, steps, answers, tasks = time.monotonic(), len(live.marks()), Answers(), (0, 0)
    for number, latest in enumerate(speak()):
        answers = latest
        if number % 200 == 0:
            tasks = max(tasks, most(live))
    report = {
        "kind": kind,
        "messages": answers.sent,
        "challenge_only": answers.challenges,
        "refused": answers.refused,
        "answered_otherwise": answers.more,
        "seconds": round(time.monotonic() - began, 1),
        "steps_meanwhile": (len(live.marks()) - steps) // max(1, len(live.members)),
        "entries_written_meanwhile": len(live.host.link.store.history()) - log,
        "generations_meanwhile": live.generation - generation,
        "threads": tasks[0],
        "descriptors": tasks[1],
    }
    print(json.dumps(report), flush=True)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, default=1000, help="messages of each kind")
    parser.add_argument("--crowd", type=int, default=10_000, help="connections at once")
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    rows = []
    with Live(HERE / "small.yaml", [*MODEL, "train.max_steps=100000"], 3) as live:
        live.wait_steps(3, 5, 240)
        secret, purposes = run_secret(live.folder), own_ports(live)
        records = {
            port: recorded(port, secret.key(purpose), lambda friend: friend.send_message(b'{"sender": "nobody"}'))
            for port, purpose in purposes.items()
        }
        ports = list(purposes)

        def spoken(kind: str, ports: list[int], seconds: float = 5.0) -> Iterator[Answers]:
            answers, stranger = Answers(), Stranger(1, records, seconds)
            for number in range(args.each):
                stranger.speak(kind, ports[number % len(ports)], answers)
                yield answers

        def crowded() -> Iterator[Answers]:
            command = [sys.executable, "-c", CROWD, ",".join(map(str, ports)), str(args.crowd)]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            crowd = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            assert crowd.stdout is not None
            sent, refused = map(int, crowd.stdout.readline().split())
            for _ in range(400):
                yield Answers(sent, 0, refused)
                if crowd.poll() is not None:
                    return
                time.sleep(0.05)

        def old_member() -> Iterator[Answers]:
            store, answers = live.host.link.store, Answers()
            key = secret.key(f"peers {store.identity}")
            peers = Peers("old", key, lambda name: store.get(f"address/{name}"), print, lambda name: None, logged)
            for number in range(args.each):
                kind = ("value", "layer", "update", "plan", "farewell")[number % 5]
                peers.send(live.members[number % 3], kind, generation=0, value="{}", layers=[], step=1)
                answers.sent += 1
                yield answers
            peers.close(10.0)

        rows += [measured(live, kind, lambda kind=kind: spoken(kind, ports)) for kind in KINDS]
        rows.append(measured(live, "crowd", crowded))
        rows.append(measured(live, "member of an old generation", old_member))
        for member, pid in pids(live).items():
            gloo = [port for port in addresses([pid]) if port not in purposes]
            kind = f"garbage at gloo's ports of {member}"
            rows.append(measured(live, kind, lambda gloo=gloo: spoken("garbage", gloo, 0.01)))
        live.wait_steps(3, 5, 60)
        live.host.stop()
        live._thread.join(30)
        heard = losses(live.folder)
        text = (live.folder / "secret").read_bytes().strip()
        others = [path for path in live.folder.rglob("*") if path.is_file() and path.name != "secret"]
        seen = [path for path in others if text in path.read_bytes()]
    last = max(heard)
    with Live(HERE / "small.yaml", [*MODEL, "model.block_seconds=0", f"train.max_steps={last}"], 3) as undisturbed:
        undisturbed.finish(600)
        truth = losses(undisturbed.folder)
    wrong = [step for step in range(1, last + 1) if heard.get(step) != truth[step]]
    result = {"rows": rows, "steps": last, "steps_with_another_loss": len(wrong), "files_with_the_secret": len(seen)}
    append_result("../stranger", result)
    print(f"{last} steps, {len(wrong)} with another loss than undisturbed; the secret is in {len(seen)} other files")
    if wrong or seen:
        sys.exit(1)


if __name__ == "__main__":
    main()
