"""AmoebaNet-D, the network that GPipe and DawnPiper train (Real et al., AAAI 2019, Figure 2; the cells as published).

A cell reads the outputs of the two cells before it. It computes five sums of two branches; a branch reads one of the
two inputs or an earlier sum. Sums that no branch reads are concatenated.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["AmoebaNetD", "Imaged"]

NORMAL = (
    ((1, "1x1"), (1, "max3")),
    ((1, "same"), (0, "1x7_7x1")),
    ((0, "1x1"), (0, "1x7_7x1")),
    ((2, "max3"), (2, "same")),
    ((1, "avg3"), (5, "1x1")),
)
REDUCTION = (
    ((0, "max2"), (0, "max3")),
    ((2, "same"), (1, "3x3")),
    ((2, "1x7_7x1"), (2, "max3")),
    ((3, "same"), (1, "max2")),
    ((2, "avg3"), (3, "1x1")),
)
NORMAL_ENDS, REDUCTION_ENDS = (0, 3, 4, 6), (4, 5, 6)


def convolved(before: int, after: int, size: tuple[int, int], stride: tuple[int, int] | int = 1) -> nn.Sequential:
    """Return ReLU, convolution and batch norm."""
    padding = (size[0] // 2, size[1] // 2)
    return nn.Sequential(nn.ReLU(), nn.Conv2d(before, after, size, stride, padding, bias=False), nn.BatchNorm2d(after))


def branch(kind: str, width: int, stride: int) -> nn.Module:
    """Return an operation on `width` channels; stride 2 halves the sides."""
    if kind == "same":
        return nn.Identity() if stride == 1 else convolved(width, width, (1, 1), 2)
    if kind == "max3":
        return nn.MaxPool2d(3, stride, 1)
    if kind == "max2":
        return nn.MaxPool2d(2, stride)
    if kind == "avg3":
        return nn.AvgPool2d(3, stride, 1, count_include_pad=False)
    if kind == "1x1":
        return convolved(width, width, (1, 1), stride)
    narrow = width // 4
    sizes = [((1, 7), (1, stride)), ((7, 1), (stride, 1))] if kind == "1x7_7x1" else [((3, 3), stride)]
    parts = [convolved(width, narrow, (1, 1))]
    parts += [convolved(narrow, narrow, size, step) for size, step in sizes]  # type: ignore[arg-type]
    return nn.Sequential(*parts, convolved(narrow, width, (1, 1)))


class Cell(nn.Module):
    """(input of the previous cell, its output) -> (output of the previous cell, output of this cell)."""

    def __init__(self, before: tuple[int, int], width: int, reduces: bool, shrinks: bool) -> None:
        super().__init__()
        self.older = convolved(before[0], width, (1, 1), 2 if shrinks else 1)
        self.newer = convolved(before[1], width, (1, 1))
        self.cell, self.ends = (REDUCTION, REDUCTION_ENDS) if reduces else (NORMAL, NORMAL_ENDS)
        self.branches = nn.ModuleList(
            branch(kind, width, 2 if reduces and at < 2 else 1) for pair in self.cell for at, kind in pair
        )
        self.width = width * len(self.ends)

    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        older, newer = both
        states = [self.older(older), self.newer(newer)]
        for number, (first, second) in enumerate(self.cell):
            first_branch, second_branch = self.branches[2 * number], self.branches[2 * number + 1]
            states.append(first_branch(states[first[0]]) + second_branch(states[second[0]]))
        return newer, torch.cat([states[at] for at in self.ends], 1)


class AmoebaNetD(nn.Module):
    """Images [B, 3, 224, 224] -> logits [B, 1000].

    Two reduction cells behind the stem, then three groups of `layers` / 3 normal cells with a reduction cell between.
    `width` is that of the cells in the first group; it doubles with every further reduction.
    """

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width // 4, 3, 2, 1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width // 4)
        cells: list[Cell] = []
        before, channels, shrinks = (width // 4, width // 4), width // 4, False
        kinds = [True, True] + ([False] * (layers // 3) + [True]) * 3
        for reduces in kinds[:-1]:
            channels *= 2 if reduces else 1
            cell = Cell(before, channels, reduces, shrinks)
            cells.append(cell)
            before, shrinks = (before[1], cell.width), reduces
        self.cells = nn.ModuleList(cells)
        self.head = nn.Linear(before[1], 1000)

    def forward(self, images: Tensor) -> Tensor:
        features = self.stem_norm(self.stem(images))
        both = features, features
        for cell in self.cells:
            both = cell(both)
        return self.head(both[1].mean((2, 3)))


class Imaged(nn.Module):
    """Images and labels [B] -> {"loss": ...}."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.model(images), labels)}
