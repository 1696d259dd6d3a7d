"""Shared by the benchmarks of this folder: the configs at one size, and transformers' Trainer over the same images.

`half_hour` and `beside_trainer` import it. It measures nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler

from detr_pipeline.coco_task import CocoWorkload
from detr_pipeline.rt_detr.task import RtDetrSource, RtDetrWorkload
from varuna_capslog.config.reading import load_config
from varuna_capslog.config.settings import Config
from varuna_capslog.engine.recipe import LearningRate
from varuna_capslog.model.workload import load_workload
from varuna_capslog.training.feed import Feed

__all__ = ["BATCH", "SEED", "Outputs", "keys", "make_trainer", "model_outputs", "score"]

CONFIGS = Path(__file__).parents[2] / "configs"
BATCH, RATE, DECAY, CLIP, WARM_UP, SEED = 8, 4e-4, 1e-4, 0.1, 50, 1
_FINAL = 0.1

Outputs = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


def keys(config: str, size: Sequence[int], decay_steps: int, run_dir: Path) -> list[str]:
    """Return `key=value` overrides for `capslog train` with config bccd or bccd_rt_detr.

    One microbatch per step, so that batch norms and denoising queries see the same batch as in the Trainer. Crops keep
    their share of the image at any size.

    Args:
        size: (h, w) to which every image is resized.
        decay_steps: step at which the cosine of the learning rate ends.
    """
    height, width = size
    return [
        f"run_dir={run_dir}",
        f"data.augment.stretch=[{height}, {width}]",
        f"data.augment.crop_resize=[{height}, {height * 9 // 8}]",
        f"data.augment.crop_size=[{height * 3 // 4}, {height * 9 // 8}]",
        f"train.minibatch_size={BATCH}",
        f"train.microbatch_size={BATCH}",
        "train.epochs=null",
        "train.max_seconds=1000000",
        f"train.lr={RATE if config == 'bccd_rt_detr' else 2e-4}",
        f"train.weight_decay={DECAY}",
        f"train.warmup_steps={WARM_UP}",
        f"train.clip_norm={CLIP}",
        "train.lr_drop_epochs=null",
        "train.lr_schedule=cosine",
        f"train.lr_decay_steps={decay_steps}",
        f"train.lr_final_factor={_FINAL}",
        f"train.seed={SEED}",
        "train.threads=1",
        "pipeline.devices=1",
        "pipeline.cuts=[0]",
    ]


def settled(config: str, overrides: Sequence[str]) -> tuple[Config, CocoWorkload]:
    """Load a config with these overrides, and its workload."""
    settings = load_config(CONFIGS / f"{config}.yaml", overrides)
    workload = load_workload(settings)
    assert isinstance(workload, CocoWorkload)
    return settings, workload


class _Pictures(Dataset[dict[str, Any]]):
    """Images in the order of our run, decoded and augmented alike, with labels in the format of transformers."""

    def __init__(self, config: Config, source: RtDetrSource) -> None:
        self._source = source
        self._feed = Feed(source, BATCH, BATCH, config.train.seed, local=())
        self._per_epoch = self._feed.steps_per_epoch * BATCH
        self._order: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return self._per_epoch * 10_000

    def __getitem__(self, index: int) -> dict[str, Any]:
        epoch, place = divmod(index, self._per_epoch)
        if epoch not in self._order:
            steps = range(epoch * self._feed.steps_per_epoch + 1, (epoch + 1) * self._feed.steps_per_epoch + 1)
            recipes = [self._feed.minibatch(step).recipes[0].pictures for step in steps]
            self._order = {epoch: [sample for pictures in recipes for sample, _ in pictures]}
        minibatch = self._source.pictures.minibatch([[self._order[epoch][place]]], epoch)
        target = minibatch.targets[0][0]
        labels = {"class_labels": target["labels"], "boxes": target["boxes"]}
        return {"pixel_values": self._source.pictures.load(minibatch, 0)["images"][0], "labels": labels}


def _collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "pixel_values": torch.stack([sample["pixel_values"] for sample in samples]),
        "labels": [sample["labels"] for sample in samples],
    }


def make_trainer(config: Config, workload: RtDetrWorkload, output: Path, callback: Any) -> Any:
    """Return transformers' Trainer with our run's initial weights, images, batch, optimizer and learning rate.

    Args:
        callback: a `TrainerCallback` that ends the training.
    """
    from transformers import Trainer, TrainingArguments

    class Ordered(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return SequentialSampler(train_dataset or self.train_dataset)

    torch.manual_seed(config.train.seed)
    model = workload.build_model()
    source = workload.train_data()
    assert isinstance(source, RtDetrSource)
    train = config.train
    rate = LearningRate(
        train.lr, train.warmup_steps, None, 0.1, train.lr_schedule, train.lr_decay_steps or 0, train.lr_final_factor
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=train.lr, weight_decay=train.weight_decay, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: rate.at(done + 1) / rate.base)
    arguments = TrainingArguments(
        output_dir=str(output),
        per_device_train_batch_size=BATCH,
        max_grad_norm=train.clip_norm,
        max_steps=1_000_000,
        logging_steps=50,
        save_strategy="no",
        report_to=[],
        remove_unused_columns=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        seed=train.seed,
    )
    return Ordered(
        model=model,
        args=arguments,
        train_dataset=_Pictures(config, source),
        data_collator=_collate,
        optimizers=(optimizer, schedule),
        callbacks=[callback],
    )


def model_outputs(workload: RtDetrWorkload, model: Any) -> Outputs:
    """Return a function with the predictions of transformers' model for images, under the names of our chain."""
    last = workload.architecture.decoder_layers - 1

    def outputs(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        predicted = model(inputs["images"])
        return {f"logits_{last}": predicted.logits, f"boxes_{last}": predicted.pred_boxes}

    return outputs


@torch.no_grad()
def score(workload: CocoWorkload, outputs: Outputs) -> dict[str, Any]:
    """Return pycocotools' metrics on all validation images."""
    data, evaluator = workload.val_data(), workload.evaluator()
    assert data is not None
    assert evaluator is not None
    evaluator.detections_path = None  # type: ignore[attr-defined]
    results: list[Any] = []
    for first in range(0, len(data), BATCH):
        minibatch = data.minibatch([list(range(first, min(first + BATCH, len(data))))], 0)
        results += evaluator.collect(outputs(data.load(minibatch, 0)), minibatch, 0)
    return evaluator.summarize(results)
