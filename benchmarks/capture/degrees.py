"""Bytes of a stage on 1 to 16 devices: ours and CAPTURE's printed fit beside the allocator's: see README.md."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from torch import nn

from tests.profiling.workloads import Equal
from varuna_capslog.config.reading import load_config
from varuna_capslog.config.settings import Config
from varuna_capslog.model.chain import Chain, Layer, TensorSpec
from varuna_capslog.planners.replicas.fitted import FittedPeaks
from varuna_capslog.profiling.degrees import SharedStages, Sharing, with_degrees
from varuna_capslog.profiling.estimate import Memo, estimate_config

SAMPLES, DIM, LENGTH = 16, 64, 32
DEGREES, MEASURED = (1, 2, 4, 8, 16), 8


class Encoder(Equal):
    """Three encoder layers of torch with 16 heads, without dropout."""

    name = "encoder"

    def __init__(self, config: Config) -> None:
        super().__init__()

    def build_chain(self) -> Chain:
        layers = [nn.TransformerEncoderLayer(DIM, 16, 16 * DIM, 0.0, batch_first=True) for _ in range(3)]
        return Chain([Layer(f"layer.{number}", layer) for number, layer in enumerate(layers)], name=self.name)

    def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
        return {"x": TensorSpec((microbatch_size, LENGTH, DIM))}


class Columns(Encoder):
    """Three layers of two wide linear maps, whose weights weigh more than their activations."""

    name = "columns"

    def build_chain(self) -> Chain:
        layers = [nn.Sequential(nn.Linear(DIM, 4096), nn.GELU(), nn.Linear(4096, DIM)) for _ in range(3)]
        return Chain([Layer(f"layer.{number}", layer) for number, layer in enumerate(layers)], name=self.name)

    def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
        return {"x": TensorSpec((microbatch_size, DIM))}


def config_of(workload: str) -> Config:
    """Return the config of a run with `SAMPLES` samples in a microbatch."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(f"workload: benchmarks.capture.degrees:{workload}\ndevice: cpu\n")
        file.write(f"train: {{microbatch_size: {SAMPLES}, minibatch_size: {4 * SAMPLES}}}\n")
        file.flush()
        return load_config(Path(file.name), [])


def main() -> None:
    """Print the table: a stage of all three layers."""
    print("| model | kind | devices | allocator | ours | printed |\n|---|---|---|---|---|---|")
    for name in ("Encoder", "Columns"):
        config, memo = config_of(name), Memo()
        fitted = FittedPeaks(with_degrees(config, estimate_config(config, memo=memo), [1, 2, 4]))
        for kind in ("data", "tensor"):
            for degree in DEGREES[kind == "tensor" :]:
                stages = SharedStages(config, Sharing(kind, degree, SAMPLES), memo)
                ours = truth = stages.estimated(0, 3).peak_bytes
                if degree <= MEASURED:
                    truth = stages.measured([(0, 3)])[0].peak_bytes
                printed = fitted.of(0, 3, kind, degree, SAMPLES)
                told = f"{truth / 2**20:.2f} MiB", f"{ours / truth - 1:+.2%}" if degree <= MEASURED else "rehearsed"
                print(f"| {name} | {kind} | {degree} | {' | '.join(told)} | {printed / truth - 1:+.2%} |", flush=True)


if __name__ == "__main__":
    main()
