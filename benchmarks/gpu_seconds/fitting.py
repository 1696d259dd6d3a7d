"""Fits the constants of `rates.CLASSES` to rows, and reports the errors of the seconds that constants predict.

A constant belongs to a class or, where the table of `rates` has a constant of an architecture, to class and
architecture. The fit pulls each constant a little towards its expected value, so that a constant without rows has a
value. It is a least-squares fit of the relative errors, reweighted iteratively until it is nearly the sum of absolute
logarithms. Every family of rows has the same weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from truths import Row

from varuna_capslog.base.gpus import GPUS, Gpu
from varuna_capslog.profiling.estimation.rates import CLASSES, Speed

__all__ = ["Errors", "by_table", "errors", "fitted", "rank", "seconds_by"]

EXPECTED = {
    "product half": 1.15, "product half even": 3.5, "product half odd": 7.0, "product tf32": 1.2,
    "product tf32 columns": 1.2, "product float32": 1.1, "product bytes": 0.2, "attention flash": 1.2,
    "attention cudnn": 0.9, "attention efficient": 2.0, "attention float32": 1.0, "scores": 0.08,
    "convolution half": 1.8, "convolution tf32": 2.5, "convolution float32": 2.0, "grouped last": 6.5,
    "conversion": 0.3, "conversion bytes": 2.5, "depthwise": 25.0, "depthwise cudnn": 9.0, "depthwise last": 12.0,
    "depthwise last half": 5.0, "bytes": 1.25, "batch norm": 0.5, "batch norm last": 0.3, "batch norm backward": 1.0,
    "batch norm backward last": 0.3, "batch norm bfloat16": 1.6, "batch norm bfloat16 last": 1.2,
    "batch norm backward bfloat16": 2.6, "batch norm backward bfloat16 last": 0.6, "norm": 0.15,
    "norm backward": 0.48, "softmax": 0.2, "reduced": 0.4, "indexed": 0.5, "strided": 0.9, "broadcast": 0.3,
    "launch": 5e-6,
}  # fmt: skip
"""Of a class, whatever the card: rounded values of single kernels on an H200 and of first fits."""
PULL = 0.3
"""What a constant's expectation weighs, beside a thirtieth of all rows."""
WEIGHTS = {"timm nchw": 1.0, "timm nhwc": 0.5, "layers": 1.0, "h200 models": 1.0, "h200 operators": 0.35}
FASTEST = 0.9
"""The least constant of a class of FLOPs by the sheet: cards run above the sheet's clock, but not by more."""

Constants = dict[tuple[str, str], float]
"""(class, architecture or "" where all share one) -> parts of the sheet's seconds."""


def _key(kind: str, gpu: Gpu) -> tuple[str, str]:
    return kind, gpu.architecture if gpu.architecture in CLASSES[kind].by_architecture else ""


def _by_sheet(row: Row) -> dict[tuple[str, str], float]:
    """Return the seconds of each constant's class as if the constant were 1."""
    gpu = GPUS[row.card]
    units = Speed.of_gpu(row.card, gpu).seconds_of
    sheet_seconds: dict[tuple[str, str], float] = {}
    for kind, amount in row.work.items():
        op_class = CLASSES[kind]
        sheet_seconds[_key(kind, gpu)] = (
            amount * units[kind] / op_class.by_architecture.get(gpu.architecture, op_class.factor)
        )
    return sheet_seconds


def seconds_by(constants: Constants, row: Row) -> float:
    """The seconds of a row's device, without a floor of the host."""
    return sum(seconds * constants.get(key, EXPECTED[key[0]]) for key, seconds in _by_sheet(row).items())


def by_table(row: Row) -> float:
    """The seconds of a row's device by the library's constants, without a floor of the host."""
    seconds_of = Speed.of_gpu(row.card, GPUS[row.card]).seconds_of
    return sum(amount * seconds_of[kind] for kind, amount in row.work.items())


def fitted(rows: Sequence[Row], pull: float = PULL) -> Constants:
    """The constants of the classes that these rows have."""
    sheets = [_by_sheet(row) for row in rows]
    keys, pairs = sorted({key for sheet in sheets for key in sheet}), list(zip(sheets, rows, strict=True))
    shares = np.array([[sheet.get(key, 0.0) / row.seconds for key in keys] for sheet, row in pairs])
    families: dict[tuple[str, str], int] = {}
    for row in rows:
        families[row.group, row.family] = families.get((row.group, row.family), 0) + 1
    base = np.array([WEIGHTS[row.group] / families[row.group, row.family] ** 0.5 for row in rows])
    hopes = np.array([EXPECTED[kind] for kind, _ in keys])
    least = np.array([_least(kind) for kind, _ in keys])
    pulls = (2 * pull) ** 2 * float(base @ base) / 30 / hopes**2
    constants, weights = hopes.copy(), base
    for _ in range(30):
        weighted = shares * weights[:, None]
        square = weighted.T @ weighted + np.diag(pulls)
        wanted = weighted.T @ weights + pulls * hopes
        constants = _descent(square, wanted, constants, least)
        ratios = np.maximum(shares @ constants, 1e-9)
        far = np.sqrt(np.maximum(np.abs(np.log(ratios)), 0.05))
        weights = base / np.maximum(ratios, 0.3) / far
    return dict(zip(keys, map(float, constants), strict=True))


def _least(kind: str) -> float:
    ours = kind.startswith(("product", "convolution")) and CLASSES[kind].unit in ("half", "tf32", "float32")
    return FASTEST if ours else 0.0


def _descent(square: np.ndarray, wanted: np.ndarray, start: np.ndarray, least: np.ndarray) -> np.ndarray:
    """Minimize a convex quadratic within lower bounds by coordinate descent."""
    solution = np.maximum(start, least)
    for _ in range(300):
        before = solution.copy()
        for place in range(len(solution)):
            residual = wanted[place] - square[place] @ solution + square[place, place] * solution[place]
            solution[place] = max(residual / square[place, place], least[place])
        if np.all(np.abs(solution - before) <= 1e-5 * np.abs(solution)):
            break
    return solution


@dataclass(frozen=True)
class Errors:
    """Errors of predicted seconds: median and 90th percentile of the relative errors, and the rank correlation."""

    number: int
    median: float
    p90: float
    rank: float

    def __str__(self) -> str:
        return f"{self.number} | {self.median:.1%} | {self.p90:.1%} | {self.rank:.3f}"


def errors(rows: Sequence[Row], predict: Callable[[Row], float] | Mapping[str, float]) -> Errors:
    """Return the errors of predictions, which a function computes or a mapping holds by row name."""
    predicted = np.array([predict(row) if callable(predict) else predict[row.name] for row in rows])
    truth = np.array([row.seconds for row in rows])
    off = np.abs(predicted / truth - 1)
    return Errors(len(rows), float(np.median(off)), float(np.quantile(off, 0.9)), rank(truth, predicted))


def rank(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's rank correlation; equal values take their order."""
    if len(first) < 2:
        return float("nan")
    places = [np.argsort(np.argsort(values, kind="stable")) for values in (first, second)]
    return float(np.corrcoef(*places)[0, 1])
