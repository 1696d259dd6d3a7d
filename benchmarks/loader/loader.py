"""Compares a rank's time for batches with many small targets from a loader process: ours and torch's DataLoader.

A batch has one dictionary of six small tensors (labels, boxes, ...) for each image. The same batch with its targets
stacked into one tensor per key shows the cost of packed targets. Prints the table of README.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from common import interleave, median_ratio, write_json

from varuna_capslog.own_data.loader import Loader
from varuna_capslog.own_data.reading import SampleReader

_CASES = {
    "8 images of 192 x 256, 50 boxes each": (8, 192, 256, 50),
    "64 images of 32 x 32, 50 boxes each": (64, 32, 32, 50),
}


class Boxes(Dataset[dict[str, Tensor]]):
    """Images and boxes in memory, so that reading takes no time."""

    def __init__(self, height: int, width: int, boxes: int) -> None:
        self._image = torch.rand(3, height, width)
        self._target = {
            "class_labels": torch.arange(boxes) % 3,
            "boxes": torch.rand(boxes, 4),
            "area": torch.rand(boxes),
            "iscrowd": torch.zeros(boxes, dtype=torch.int64),
            "image_id": torch.tensor([7]),
            "orig_size": torch.tensor([height, width]),
        }

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self._image, "target": self._target}


def many(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Collate a batch as detectors need it: targets by image. Every tensor is copied, as from a real data set."""
    targets = [{name: tensor.clone() for name, tensor in sample["target"].items()} for sample in samples]
    return {"images": torch.stack([sample["image"] for sample in samples]), "labels": targets}


def packed(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Collate the same batch with one target tensor for each key."""
    rows = [sample["target"] for sample in samples]
    targets = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return {"images": torch.stack([sample["image"] for sample in samples]), "labels": targets}


def _ours(case: tuple[int, int, int, int], collate: str) -> Callable[[], object]:
    images, *size = case
    arguments = dict(zip(("height", "width", "boxes"), size, strict=True))
    keys = {"dataset": "loader:Boxes", "arguments": arguments, "val": None, "val_arguments": {}, "given": None}
    keys |= {"collate": f"loader:{collate}"}
    loader = Loader(SampleReader(keys, 0), keys, 0, workers=1)
    ahead = [loader.begin("dataset", 0, range(images)) for _ in range(2)]

    def batch() -> object:
        ahead.append(loader.begin("dataset", 0, range(images)))
        return ahead.pop(0).result()

    return batch


def _torchs(case: tuple[int, int, int, int]) -> Callable[[], object]:
    images, height, width, boxes = case
    batches: Iterator[Any] = iter(
        DataLoader(Boxes(height, width, boxes), images, num_workers=1, collate_fn=many, multiprocessing_context="spawn")
    )
    return lambda: next(batches)


def main() -> None:
    """Measure batches of each case, interleaved."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="batches of each")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| batch | processor us of the rank, ours | targets stacked | DataLoader | ours / DataLoader (quartiles) |")
    print("|---" * 5 + "|")
    work_by_case = {}
    for name, case in _CASES.items():
        runs = {"ours": _ours(case, "many"), "stacked": _ours(case, "packed"), "DataLoader": _torchs(case)}
        times = interleave({key: _settled(run) for key, run in runs.items()}, arguments.rounds)
        work = {key: [1e6 * worked for _, worked in rows] for key, rows in times.items()}
        middle = {key: f"{statistics.median(rows):.0f}" for key, rows in work.items()}
        ratio = "{:.2f} ({:.2f}-{:.2f})".format(*median_ratio(work["ours"], work["DataLoader"]))
        print(f"| {name} | {middle['ours']} | {middle['stacked']} | {middle['DataLoader']} | {ratio} |", flush=True)
        work_by_case[name] = work
    write_json(arguments.output, work_by_case)


def _settled(run: Callable[[], object]) -> Callable[[], None]:
    """Return a run of a batch and a pause in which batches read ahead arrive, so that this run's time includes them."""

    def one() -> None:
        run()
        time.sleep(0.05)

    return one


if __name__ == "__main__":
    main()
