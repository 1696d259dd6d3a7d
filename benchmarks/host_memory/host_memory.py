"""Measures the host memory of a rank whose chain is built at once, or from a factory per layer.

Every worker of a `capslog train` writes the system's figures for its process whenever it describes a minibatch: before
step 1 its engine is built, and nothing has been trained.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from varuna_capslog.config.settings import Config
from varuna_capslog.model.chain import Chain, Layer, LayerFactory, TensorSpec
from varuna_capslog.model.workload import Minibatch, Workload

ROOT = Path(__file__).resolve().parents[2]


class Told:
    """Synthetic samples; every requested minibatch records the memory of its process."""

    def __init__(self, run_dir: Path, width: int) -> None:
        self._run_dir, self._width = run_dir, width

    def __len__(self) -> int:
        return 64

    def minibatch(self, groups: Sequence[Sequence[int]], epoch: int) -> Minibatch:
        lines = Path("/proc/self/status").read_text().splitlines()
        bytes_of = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.endswith(" kB")}
        with open(self._run_dir / f"memory-{os.getpid()}.jsonl", "a") as file:
            file.write(json.dumps([bytes_of["VmHWM"], bytes_of["VmRSS"]]) + "\n")
        return Minibatch(
            [{"x": TensorSpec((len(group), self._width))} for group in groups],
            [None] * len(groups),
            {"count": float(len(groups))},
            [list(group) for group in groups],
        )

    def load(self, minibatch: Minibatch, microbatch: int) -> dict[str, Tensor]:
        spec = minibatch.inputs[microbatch]["x"]
        return {"x": torch.full(spec.shape, 0.5)}


class Bulky(Workload):
    """`model.layers` square layers of `model.width`, `model.made` of "factories" or "at once"."""

    name = "bulky"

    def __init__(self, config: Config) -> None:
        self._config, self._width = config, int(config.model["width"])

    def build_chain(self) -> Chain:
        make = functools.partial(nn.Linear, self._width, self._width, bias=False)
        layers = [LayerFactory(f"layer.{k}", make) for k in range(self._config.model["layers"])]
        if self._config.model["made"] == "factories":
            return Chain.from_factories(layers, name=self.name)
        return Chain([Layer(factory.name, factory.make()) for factory in layers], name=self.name)

    def loss(self, outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
        return {"loss": outputs["x"].square().mean() / normalisers["count"]}

    def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
        return {"x": TensorSpec((microbatch_size, self._width))}

    def profile_targets(self, microbatch_size: int) -> tuple[Any, dict[str, float]]:
        return None, {"count": 1.0}

    def train_data(self) -> Told:
        return Told(Path(self._config.run_dir), self._width)


def workload(config: Config) -> Bulky:
    """Return the workload that the benchmark's configs name."""
    return Bulky(config)


def measured(made: str, layers: int, width: int, elastic: bool) -> dict[str, float]:
    """Return MiB of the largest process: peak when its engine is built, and memory and peak at its last step."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        run_dir.mkdir()
        config = {
            "workload": "benchmarks.host_memory.host_memory:workload",
            "run_dir": str(run_dir),
            "device": "cpu",
            "model": {"layers": layers, "width": width, "made": made},
            "train": {"max_steps": 4, "minibatch_size": 4, "microbatch_size": 1, "threads": 1},
            "pipeline": {"devices": layers, "cuts": list(range(layers)), "timeout_seconds": 120},
            # wait for all members, so that none begins with more than one layer
            "elastic": {"enabled": elastic, "redundancy": 0, "patience_seconds": 120},
        }
        file = Path(folder) / "run.yaml"
        file.write_text(json.dumps(config))
        command = [sys.executable, "-c", "from varuna_capslog.cli import program; program()", "train", str(file)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{made}: the run ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
        rows = [[json.loads(line) for line in path.open()] for path in run_dir.glob("memory-*.jsonl")]
        return {
            "processes": len(rows),
            "built_mib": max(row[0][0] for row in rows) / (1 << 20),
            "resident_mib": max(row[-1][1] for row in rows) / (1 << 20),
            "peak_mib": max(row[-1][0] for row in rows) / (1 << 20),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=4096, help="a layer holds 4 x width x width bytes")
    arguments = parser.parse_args()
    layers, width = arguments.layers, arguments.width
    print(f"{layers} layers of {4 * width * width / (1 << 20):.0f} MiB on {layers} ranks; MiB of the largest process")
    print("| run | chain | peak when its engine is built | in the last step | peak of the run |\n|---|---|---|---|---|")
    for elastic in (False, True):
        for made in ("at once", "factories"):
            mib = measured(made, layers, width, elastic)
            cells = [f"{mib[name]:.0f}" for name in ("built_mib", "resident_mib", "peak_mib")]
            print(f"| {'elastic' if elastic else 'ordinary'} | {made} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
