"""Options and outcome of a chaos run."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.rig.machines.links import LinkShape
from tests.rig.tally import Hit, by_class
from varuna_capslog.base.version import __version__

__all__ = ["ChaosOptions", "ChaosOutcome"]

FORMAT = "varuna-capslog/chaos/1"


@dataclass(frozen=True)
class ChaosOptions:
    """Options of a chaos run.

    Attributes:
        faults: number of faults; None: as many as `seconds` allow.
        seconds: after which no further fault is begun; None: no limit.
        mean_seconds: mean time between a recovery and the next fault.
        weights: of the fault classes, see `schedule.weights_of`.
        hosts, workers: machines, and workers of each.
        network: "loopback", "relay" or "namespaces"; see `MachineNetwork`.
        links: delay, loss and bandwidth of the ways between namespaces.
        store: "tcp", or "etcd": three servers, of which the class `store` kills one.
        plans: every generation runs a plan of any rectangles, drawn by its founder.
        hang_seconds: a run hangs, and has failed, if it has not finished a step within this time after a fault.
    """

    seed: int = 0
    faults: int | None = 20
    seconds: float | None = None
    mean_seconds: float = 0.5
    weights: Mapping[str, float] = field(default_factory=dict)
    hosts: int = 2
    workers: int = 2
    network: str = "loopback"
    links: LinkShape = field(default_factory=LinkShape)
    store: str = "tcp"
    plans: bool = False
    hang_seconds: float = 60.0


@dataclass
class ChaosOutcome:
    """Outcome of a chaos run.

    Attributes:
        breaches: sentences about what is wrong; empty where the run passed.
        joins: members that joined an existing generation.
        steps: the step that the run ended with.
        repeated: steps that were made again after they had been taken back.
        store_losses: number of `hits` that ended in a new start.
        regresses: generations that went back to a checkpoint, as more was lost than the redundancy covers.
        sizes: the numbers of members that made steps.
        causes: number of losses reported with the injected cause, and a sentence for each of the others.
        packets: between namespaces: carried, lost, dropped.
    """

    options: ChaosOptions
    breaches: list[str]
    hits: list[Hit]
    joins: int
    generations: int
    steps: int
    repeated: int
    store_losses: int
    regresses: int
    seconds: float
    sizes: list[int]
    redundancy: int
    protection: str
    causes: tuple[int, list[str]] = (0, [])
    packets: Mapping[str, int] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.breaches

    def to_json(self) -> dict[str, Any]:
        """A line of a results file."""
        import torch

        options = self.options
        return {
            "format": FORMAT,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seed": options.seed,
            "versions": {
                "varuna_capslog": __version__,
                "commit": _commit(),
                "torch": torch.__version__,
                "python": platform.python_version(),
                "system": f"{platform.system()} {platform.release()}, {os.cpu_count()} cores",
            },
            "outcome": "passed" if self.passed else "failed",
            "breaches": self.breaches,
            "hosts": options.hosts,
            "workers": options.workers,
            "network": options.network,
            "links": asdict(options.links),
            "packets": dict(self.packets),
            "store": options.store,
            "plans": options.plans,
            "mean_seconds": options.mean_seconds,
            "faults": len(self.hits),
            "joins": self.joins,
            "generations": self.generations,
            "layouts": self.sizes,
            "steps": self.steps,
            "steps_made_again": self.repeated,
            "store_losses": self.store_losses,
            "regresses": self.regresses,
            "redundancy": self.redundancy,
            "protection": self.protection,
            "seconds": round(self.seconds, 1),
            "causes": {"right": self.causes[0], "wrong": self.causes[1]},
            "classes": by_class(self.hits),
        }


def _commit() -> str | None:
    """Commit of the source; None outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
