"""A complete small workload around the tiny chain, or around one of the graphs: data by index, loss, scores. Also
`tests.engine.workload:workload`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.engine import models
from varuna_capslog.config.settings import Config
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.workload import Minibatch, Workload


class TinyData:
    """Images whose size follows from their index, or all have the size `even`; `poison` is an index whose targets
    are not finite, `far` one whose targets are so far away that gradients of float16 overflow.

    `pause` seconds make a minibatch, and so a step, as long as wished; they change no number.
    """

    def __init__(
        self,
        count: int,
        poison: int | None = None,
        pause: float = 0.0,
        even: tuple[int, int] | None = None,
        far: int | None = None,
    ) -> None:
        self._count, self._poison, self._pause, self._even, self._far = count, poison, pause, even, far

    def __len__(self) -> int:
        return self._count

    def minibatch(self, groups: Sequence[Sequence[int]], epoch: int) -> Minibatch:
        time.sleep(self._pause)
        inputs, targets = [], []
        for group in groups:
            height, width = self._even or (4 + 2 * (group[0] % 3), 6 + 2 * (group[0] % 2))
            inputs.append(
                {"x": TensorSpec((len(group), 3, height, width)), "sizes": TensorSpec((len(group), 2), torch.int64)}
            )
            generator = torch.Generator().manual_seed(1000 * epoch + group[0])
            targets.append(torch.randn(len(group), 4, 3, generator=generator))
            if self._poison in group:
                targets[-1][0, 0, 0] = float("inf")
            if self._far in group:
                targets[-1][0, 0, 0] = 1e15
        count = float(sum(map(len, groups)))
        return Minibatch(
            inputs, targets, {"count": count}, [list(group) for group in groups], [list(g) for g in groups]
        )

    def load(self, minibatch: Minibatch, microbatch: int) -> dict[str, Tensor]:
        spec = minibatch.inputs[microbatch]["x"]
        generator = torch.Generator().manual_seed(minibatch.recipes[microbatch][0])
        cells = (spec.shape[2] // 2) * (spec.shape[3] // 2)
        sizes = torch.tensor([[cells - sample % 2, 1] for sample in minibatch.recipes[microbatch]])
        return {"x": torch.randn(spec.shape, generator=generator), "sizes": sizes}


class GraphData:
    """Microbatches of two samples for one of `models.GRAPHS`, drawn from the index of the first."""

    def __init__(self, graph: models.Graph, count: int) -> None:
        self._graph, self._count = graph, count

    def __len__(self) -> int:
        return self._count

    def draw(self, first: int) -> tuple[dict[str, Tensor], Tensor]:
        return self._graph.draw(first % 3, torch.Generator().manual_seed(first))

    def minibatch(self, groups: Sequence[Sequence[int]], epoch: int) -> Minibatch:
        drawn = [self.draw(group[0]) for group in groups]
        names = [list(group) for group in groups]
        inputs = [{name: TensorSpec.of(tensor) for name, tensor in values.items()} for values, _ in drawn]
        return Minibatch(inputs, [target for _, target in drawn], {"count": float(2 * len(groups))}, names, names)

    def load(self, minibatch: Minibatch, microbatch: int) -> dict[str, Tensor]:
        return self.draw(minibatch.recipes[microbatch][0])[0]


class MeanOutput:
    """Scores a set by the mean of all outputs, so that a test can compute it in one line."""

    def __init__(self, name: str = "outputs") -> None:
        self._name = name

    def collect(self, outputs: Mapping[str, Tensor], minibatch: Minibatch, microbatch: int) -> list[Any]:
        output = outputs[self._name]
        mean = (output[-1] if output.dim() > 3 else output).flatten(1).mean(dim=1).tolist()
        return list(zip(minibatch.sample_ids[microbatch], mean, strict=True))

    def summarize(self, results: list[Any]) -> dict[str, Any]:
        return {
            "mean": sum(value for _, value in sorted(results)) / len(results),
            "samples": sorted(i for i, _ in results),
        }


class TinyWorkload(Workload):
    """Its keys: `model.chain` (a function of `models`), `model.dropout`, `data.samples`, `data.poison`, `data.far`,
    `data.pause_seconds` and `data.even`.
    """

    name = "tiny"

    def __init__(self, config: Config) -> None:
        self._config = config

    def build_chain(self) -> Chain:
        model = self._config.model
        build = getattr(models, model.get("chain", "build_chain"))
        return build(model.get("dropout", 0.1), seed=self._config.train.seed)

    def loss(self, outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
        return models.loss(outputs, targets, normalisers)

    def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
        return {"x": TensorSpec((microbatch_size, 3, 8, 8)), "sizes": TensorSpec((microbatch_size, 2), torch.int64)}

    def profile_targets(self, microbatch_size: int) -> tuple[Any, dict[str, float]]:
        return torch.zeros(microbatch_size, 4, 3), {"count": float(microbatch_size)}

    def train_data(self) -> TinyData:
        data = self._config.data
        pause, even, far = data.get("pause_seconds", 0.0), data.get("even"), data.get("far")
        return TinyData(data.get("samples", 24), data.get("poison"), pause, even, far)

    def val_data(self) -> TinyData:
        return TinyData(7)

    def evaluator(self) -> MeanOutput:
        return MeanOutput()


class GraphWorkload(Workload):
    """Its key `model.graph` names one of `models.GRAPHS`; `model.dropout` and `data.samples` are as in `TinyWorkload`.
    Microbatches are of two samples.
    """

    name = "graph"

    def __init__(self, config: Config) -> None:
        self._config = config
        self._graph = models.GRAPHS[config.model["graph"]]

    def build_chain(self) -> Chain:
        return self._graph.build_chain(self._config.model.get("dropout", 0.1), seed=self._config.train.seed)

    def loss(self, outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
        return self._graph.loss(outputs, targets, normalisers)

    def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
        inputs, _ = GraphData(self._graph, 2).draw(0)
        return {name: TensorSpec.of(tensor) for name, tensor in inputs.items()}

    def profile_targets(self, microbatch_size: int) -> tuple[Any, dict[str, float]]:
        return GraphData(self._graph, 2).draw(0)[1], {"count": 2.0}

    def train_data(self) -> GraphData:
        return GraphData(self._graph, self._config.data.get("samples", 24))

    def val_data(self) -> GraphData:
        return GraphData(self._graph, 14)

    def evaluator(self) -> MeanOutput:
        return MeanOutput(self._graph.outputs[0])


def workload(config: Config) -> Workload:
    """Return the workload that a config's `workload: tests.engine.workload:workload` asks for."""
    return GraphWorkload(config) if "graph" in config.model else TinyWorkload(config)
