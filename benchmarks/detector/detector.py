"""RT-DETR of transformers: our one-stage run beside a plain loop of the same model, on the photographs of blood cells.

The two take turns on the same images, decoded anew in every step. The plain loop calls transformers' model with
labels, so that denoising queries, loss and matching are transformers' own; batching, clipping and AdamW are equal.
`--train STEPS` trains each alone instead and scores both. Prints the tables of README.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import interleave, median_ratio, run_ranks, write_json

from detr_pipeline.rt_detr.task import RtDetrWorkload, match
from varuna_capslog.config.reading import load_config
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.recipe import EngineOptions, LearningRate, Recipe
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.workload import load_workload

CONFIG = Path(__file__).parents[2] / "configs" / "bccd_rt_detr.yaml"
RATE, DECAY, CLIP, WARM_UP = 4e-4, 1e-4, 0.1, 20


class Both:
    """Workload of the config, its samples in one order, and a step of each contender."""

    def __init__(self, communicator: Communicator) -> None:
        config = load_config(CONFIG, [])
        workload = load_workload(config)
        assert isinstance(workload, RtDetrWorkload)
        self.workload, self.source = workload, workload.train_data()
        self._size, self._count = config.train.microbatch_size, config.num_microbatches
        torch.manual_seed(0)
        self.model: Any = workload.build_model().train()
        torch.manual_seed(0)
        self.chain = workload.build_chain()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=DECAY, fused=True)
        recipe = Recipe(LearningRate(RATE, warmup_steps=WARM_UP), weight_decay=DECAY)
        options = EngineOptions(self._count, schedule="1f1b", recompute=False, clip_norm=CLIP, recipe=recipe)
        layout = Layout.pipelines((0,), len(self.chain))
        self._engine = PipelineEngine(self.chain, workload.loss, layout, options, communicator, torch.device("cpu"))
        self.losses: dict[str, list[float]] = {"ours": [], "plain": []}

    def groups(self, step: int) -> tuple[list[list[int]], int]:
        """Return the samples of each microbatch of a step, and its epoch."""
        per_epoch = len(self.source) // (self._size * self._count)
        epoch, place = divmod(step - 1, per_epoch)
        order = torch.randperm(len(self.source), generator=torch.Generator().manual_seed(epoch)).tolist()
        first = place * self._size * self._count
        return [order[first + k * self._size : first + (k + 1) * self._size] for k in range(self._count)], epoch

    def ours(self) -> None:
        step = len(self.losses["ours"]) + 1
        minibatch = self.source.minibatch(*self.groups(step))
        done = train_step(self._engine, step, minibatch, lambda index: self.source.load(minibatch, index))
        self.losses["ours"].append(done.parts["loss"])

    def plain(self) -> None:
        step = len(self.losses["plain"]) + 1
        minibatch, total = self.source.minibatch(*self.groups(step)), 0.0
        for index, targets in enumerate(minibatch.targets):
            images = self.source.load(minibatch, index)["images"]
            labels = [{"class_labels": target["labels"], "boxes": target["boxes"]} for target in targets]
            share = sum(len(target["labels"]) for target in targets) / minibatch.normalisers["boxes"]
            loss = self.model(images, labels=labels).loss * share
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for group in self._optimizer.param_groups:
            group["lr"] = RATE * min(1.0, step / WARM_UP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses["plain"].append(total)

    def score(self, outputs_of: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> dict[str, Any]:
        """Return COCO's metrics on the validation images."""
        data = self.workload.val_data()
        evaluator: Any = self.workload.evaluator()
        assert data is not None
        assert evaluator is not None
        evaluator.detections_path = None
        results = []
        for first in range(0, len(data), self._size):
            minibatch = data.minibatch([list(range(first, min(first + self._size, len(data))))], 0)
            with torch.no_grad():
                results += evaluator.collect(outputs_of(data.load(minibatch, 0)), minibatch, 0)
        return evaluator.summarize(results)

    def scores(self) -> dict[str, Any]:
        """Return the scores of both contenders after their training so far."""
        last = self.workload.architecture.decoder_layers - 1
        self.model.eval()
        for layer in self._engine.layers:
            layer.layer.module.eval()

        def of_chain(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            values: dict[str, Tensor] = dict(inputs)
            for layer in self._engine.layers:
                values.update(layer.layer(values))
            return values

        def of_model(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            predicted = self.model(inputs["images"])
            return {f"logits_{last}": predicted.logits, f"boxes_{last}": predicted.pred_boxes}

        return {"ours": self.score(of_chain), "plain": self.score(of_model)}

    def matcher(self, times: int) -> float:
        """Return the processor seconds of the matching of one step in the engine."""
        minibatch = self.source.minibatch(*self.groups(1))
        settings, seconds = self.workload.architecture, 0.0
        layers, queries = settings.decoder_layers + 1, settings.num_queries
        for _ in range(times):
            for targets in minibatch.targets:
                logits = torch.randn(layers, len(targets), queries, self.workload.num_classes)
                boxes = torch.rand(layers, len(targets), queries, 4) * 0.5 + 0.2
                begun = time.process_time()
                match(logits, boxes, targets, settings)
                seconds += time.process_time() - begun
        return seconds / times


def measure(communicator: Communicator, rounds: int) -> dict[str, Any]:
    """Return the times of both contenders, measured in turns."""
    both = Both(communicator)
    times = interleave({"ours": both.ours, "plain": both.plain}, rounds)
    return {"times": times, "losses": both.losses, "matcher": both.matcher(10), "images": both._size * both._count}


def trained(communicator: Communicator, steps: int) -> dict[str, Any]:
    """Train each contender for `steps` steps and return their scores."""
    both, spent = Both(communicator), {"ours": 0.0, "plain": 0.0}
    for name, step in (("ours", both.ours), ("plain", both.plain)):
        begun = time.process_time()
        for _ in range(steps):
            step()
        spent[name] = time.process_time() - begun
    return {"scores": both.scores(), "losses": both.losses, "cpu_seconds": spent}


def main() -> None:
    """Measure times or scores, by the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="pairs of steps")
    parser.add_argument("--train", type=int, metavar="STEPS", help="train both alone for so many steps and score them")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    arguments = parser.parse_args()
    if arguments.train is not None:
        result = run_ranks(trained, 1, arguments.train)[0]
        print("| | processor s | first loss | last loss | AP | AP50 |\n|---|---|---|---|---|---|")
        for name, scores in result["scores"].items():
            losses, spent = result["losses"][name], result["cpu_seconds"][name]
            print(f"| {name} | {spent:.0f} | {losses[0]:.3f} | {losses[-1]:.3f} | {scores['AP']} | {scores['AP50']} |")
        write_json(arguments.output, result)
        return
    result = run_ranks(measure, 1, arguments.rounds)[0]
    work = {run: [times[1] for times in result["times"][run]] for run in ("ours", "plain")}
    images, ours = result["images"], statistics.median(work["ours"])
    plain = statistics.median(work["plain"])
    ratio = "{:.3f} ({:.3f}-{:.3f})".format(*median_ratio(work["ours"], work["plain"]))
    print("| processor ms per image, ours | plain loop | ours / plain (quartiles) | matching, share of our step |")
    print("|---|---|---|---|")
    share = result["matcher"] / ours
    print(f"| {1e3 * ours / images:.1f} | {1e3 * plain / images:.1f} | {ratio} | {100 * share:.2f} % |")
    write_json(arguments.output, result)


if __name__ == "__main__":
    main()
