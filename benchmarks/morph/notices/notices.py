"""Times a notice from its source to the callback, and the cost of listening; sources are stand-ins on loopback.

Each trial waits a random time, so that it falls anywhere between two polls, then announces a new notice.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import queue
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from varuna_capslog.elastic.notices.clouds import AwsListener, AzureListener, GcpListener
from varuna_capslog.elastic.notices.gather import CallbackListener, Gathering, detect_cloud
from varuna_capslog.elastic.notices.interface import Listener
from varuna_capslog.elastic.notices.signals import FileListener, SignalListener, plain

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.elastic.metadata_servers import FakeAws, FakeAzure, FakeGcp, MetadataServer

RESULTS = Path(__file__).with_name("results.json")
AIMS = {"aws": 1.0, "gcp": 0.1, "azure": 1.0, "file": 1.0, "signal": 1.0, "program": 1.0}
SERVERS: dict[str, Callable[[], MetadataServer]] = {"aws": FakeAws, "gcp": FakeGcp, "azure": FakeAzure}
NOWHERE = "http://192.0.2.1"  # RFC 5737: reserved, never routed


def listener_at(name: str, url: str) -> Listener:
    """Return a cloud's listener with its default times."""
    return {"aws": AwsListener, "gcp": GcpListener, "azure": AzureListener}[name]("here", endpoint=url)  # type: ignore


def latencies(
    source: Listener,
    announce: Callable[[int], Any],
    trials: int,
    draw: random.Random,
    prepare: Callable[[], Any] = lambda: None,
) -> list[float]:
    """Return the seconds from the announcement to the callback. `announce(trial)` makes a new notice.

    Args:
        prepare: called before the random wait that precedes an announcement.
    """
    callbacks: queue.Queue[float] = queue.Queue()
    with Gathering([source], lambda _: callbacks.put(time.perf_counter())):
        time.sleep(1.0)
        seconds = []
        for trial in range(trials):
            prepare()
            time.sleep(draw.uniform(0.1, 0.8))
            began = time.perf_counter()
            announce(trial)
            seconds.append(callbacks.get(timeout=30.0) - began)
    return seconds


def of_cloud(name: str, trials: int, draw: random.Random) -> list[float]:
    """Return the latencies against a cloud's stand-in in this process."""
    with SERVERS[name]() as server:

        def announce(trial: int) -> None:
            if isinstance(server, FakeAws):
                server.interrupt(seconds=60.0 + 2 * trial)
            elif isinstance(server, FakeGcp):
                server.preempt()
            elif isinstance(server, FakeAzure):
                server.schedule()

        def prepare() -> None:
            if isinstance(server, FakeGcp):
                server.set("preempted", "FALSE")

        return latencies(listener_at(name, server.url), announce, trials, draw, prepare)


def of_others(trials: int, draw: random.Random) -> dict[str, list[float]]:
    """Return the latencies of the sources that need no server."""
    program = CallbackListener("here")
    by_source = {"program": latencies(program, lambda _: program.announce(), trials, draw)}
    by_source["signal"] = latencies(
        SignalListener(plain(), "here"), lambda _: os.kill(os.getpid(), signal.SIGUSR1), trials, draw
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "leave"

        def announce(trial: int) -> None:
            (Path(folder) / "new").write_text(json.dumps({"detail": f"trial {trial}"}))
            os.replace(Path(folder) / "new", path)

        by_source["file"] = latencies(FileListener(path, "here"), announce, trials, draw)
    return by_source


def _serve(name: str, urls: Any, ended: Any) -> None:
    with SERVERS[name]() as server:
        urls.put(server.url)
        ended.wait()


def cost(name: str, seconds: float) -> float:
    """Return the share of one core that an idle listener takes; the stand-in runs in a separate process."""
    context = multiprocessing.get_context("spawn")
    urls, ended = context.Queue(), context.Event()
    process = context.Process(target=_serve, args=(name, urls, ended), daemon=True)
    process.start()
    source = listener_at(name, urls.get(timeout=60.0))
    source.start(lambda _: None)
    time.sleep(1.0)
    began = time.process_time()
    time.sleep(seconds)
    share = (time.process_time() - began) / seconds
    source.stop()
    ended.set()
    process.join()
    return share


def main() -> None:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cost-seconds", type=float, default=10.0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    by_source = {name: of_cloud(name, options.trials, draw) for name in SERVERS}
    by_source.update(of_others(options.trials, draw))
    rows = {
        name: {
            "median": statistics.median(seconds),
            "p99": statistics.quantiles(seconds, n=100, method="inclusive")[98],
            "worst": max(seconds),
            "aim": AIMS[name],
        }
        for name, seconds in by_source.items()
    }
    costs = {name: cost(name, options.cost_seconds) for name in SERVERS}
    began = time.perf_counter()
    cloud = detect_cloud(1.0, NOWHERE)
    detection = time.perf_counter() - began
    print("| source | median | p99 | worst | aim |\n|---|---|---|---|---|")
    for name, row in rows.items():
        print(
            f"| {name} | " + " | ".join(f"{row[key] * 1e3:.1f} ms" for key in ("median", "p99", "worst", "aim")) + " |"
        )
    print("\nshare of one core:", {name: f"{share:.2%}" for name, share in costs.items()})
    print(f"search for a cloud where there is none: {detection:.2f} s, found {cloud}")
    result = {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "trials": options.trials,
        "seed": options.seed,
        "seconds": rows,
        "share_of_a_core": costs,
        "detection_seconds": detection,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
