"""Compares estimated with measured seconds of GPUs: published steps and layers, and our own of an H200.

Prints the tables of README.md. CAPSLOG_DATA names the folder with other people's measurements; traces are kept, so that
a second run takes a few minutes. `--only` chooses parts.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import torch
from fitting import PULL, Constants, by_table, errors, fitted, seconds_by
from measured import model_rows, operator_rows
from plans import CARD, DEVICES, MICROBATCHES, changes
from torch import nn
from torch.nn import functional as F
from tracing import Cache, count, trace
from truths import Row, hf_rows, layer_rows, llama_row, speed_of_card, timm_rows, truth

from varuna_capslog.base.gpus import GPUS
from varuna_capslog.profiling.estimation.rates import CLASSES, HOST_SECONDS

HERE = Path(__file__).resolve().parent
PARTS = ("timm", "layers", "hf", "h200", "cards", "constants", "plans")
LAYOUTS = ("nchw", "nhwc")


def drawn(cache: Cache, number: int, seed: int, everything: bool) -> tuple[list[Row], set[str]]:
    """Return the rows of `number` random models of each family, or of all models, and the names of the drawn models.

    Models that timm no longer has are skipped; a family may have fewer.
    """
    models = truth("timm-train-fit")
    random.Random(seed).shuffle(models)
    rows: list[Row] = []
    names: dict[str, list[str]] = {}
    for model in models:
        chosen = names.setdefault(model["family"], [])
        if len(chosen) < number or everything:
            model_steps = list(timm_rows(cache, model, LAYOUTS))
            rows += model_steps
            if model_steps and len(chosen) < number:
                chosen.append(model["model"])
    lacking = [f"{family} ({len(chosen)})" for family, chosen in sorted(names.items()) if len(chosen) < number]
    print(f"Of {len(names)} families these have fewer models that timm still builds: {', '.join(lacking) or 'none'}")
    return rows, {name for chosen in names.values() for name in chosen}


def without_families(rows: Sequence[Row], of: Sequence[Row], pull: float = PULL) -> dict[tuple[str, str], float]:
    """Return the seconds of each row (group, name) of `of` by constants that were fitted without its family."""
    predictions = {}
    for family in sorted({row.family for row in of}):
        constants = fitted([row for row in rows if not (row.group.startswith("timm") and row.family == family)], pull)
        for row in of:
            if row.family == family:
                predictions[row.group, row.name] = seconds_by(constants, row)
    return predictions


def timm_part(rows: Sequence[Row], draw: set[str]) -> None:
    """Print the errors of timm's steps by the library's constants and by three fits."""
    images = [row for row in rows if row.group.startswith("timm")]
    fitting_rows = [row for row in rows if row.fits]
    everything = fitted(fitting_rows)
    apart, hardly = without_families(fitting_rows, images), without_families(fitting_rows, images, PULL / 10)
    print(f"\n## timm: {len({row.family for row in images})} families\n")
    print("| layout | models | constants | rows | median | p90 | rank |\n|---|---|---|---|---|---|---|")
    for layout in LAYOUTS:
        layout_rows = [row for row in images if row.group == f"timm {layout}"]
        few = [row for row in layout_rows if row.name in draw]
        which_ones = {"drawn": few} if len(few) == len(layout_rows) else {"all": layout_rows, "drawn": few}
        for which, some in which_ones.items():
            for text, predict in (
                ("of the library", by_table),
                ("fitted with all", lambda row: seconds_by(everything, row)),
                ("fitted without its family", lambda row: apart[row.group, row.name]),
                ("the same, a tenth of the pull", lambda row: hardly[row.group, row.name]),
            ):
                print(f"| {layout} | {which} | {text} | {errors(some, predict)} |")
        worst = sorted(layout_rows, key=lambda row: -abs(apart[row.group, row.name] / row.seconds - 1))[:8]
        ratios = ", ".join(f"{row.name} {apart[row.group, row.name] / row.seconds:.2f}" for row in worst)
        print(f"\nFarthest off in {layout} without their family (estimated / measured): {ratios}\n")
    print(f"drawn: {', '.join(sorted(draw))}")


def head_ratios(rows: Sequence[Row], predict: Callable[[Row], float]) -> list[float]:
    """Relative errors of head : block within a model, one for each card and number of samples."""
    pairs: dict[str, dict[str, Row]] = {}
    for row in rows:
        kind = "head" if "head and loss" in row.name else "block"
        pairs.setdefault(row.name.replace("head and loss", "").replace("block", ""), {})[kind] = row
    relative_errors = []
    for pair in pairs.values():
        if len(pair) == 2:
            head, block = pair["head"], pair["block"]
            relative_errors.append(abs(predict(head) / predict(block) / (head.seconds / block.seconds) - 1))
    return relative_errors


def layers_part(rows: Sequence[Row]) -> None:
    """Print the errors of layers by the library's constants and by constants that were fitted without their card."""
    layers = [row for row in rows if row.group == "layers"]
    fitting_rows = [row for row in rows if row.fits]
    cards = sorted({row.card for row in layers})
    without = {card: fitted([row for row in fitting_rows if row.card != card]) for card in cards}
    print("\n## Layers of OPT and Llama, forward and backward\n")
    print("| card | constants | rows | median | p90 | rank | head : block median | p90 |")
    print("|---|---|---|---|---|---|---|---|")
    ways: list[tuple[str, Callable[[Row], float]]] = [
        ("of the library", by_table),
        ("fitted without this card", lambda row: seconds_by(without[row.card], row)),
    ]
    for card in (*cards, "all"):
        selected = [row for row in layers if card in (row.card, "all")]
        for text, predict in ways:
            ratios = head_ratios(selected, predict)
            middle, high = np.median(ratios), np.quantile(ratios, 0.9)
            print(f"| {card} | {text} | {errors(selected, predict)} | {middle:.1%} | {high:.1%} |")
    print()
    for model in sorted({row.family for row in layers}):
        for card in cards:
            selected = [row for row in layers if row.family == model and row.card == card]
            if selected:
                off = ", ".join(f"{by_table(row) / row.seconds:.2f}" for row in selected)
                print(f"{model} on {card}, estimated / measured: {off}")


def hf_part(cache: Cache) -> None:
    """Steps of Hugging Face's tables, with floors of the host; and Llama-3.1-8B."""
    rows = list(hf_rows(cache))
    print("\n## Hugging Face's steps\n")
    print("| model | seconds of the host for an operator | rows | median | p90 | rank |\n|---|---|---|---|---|---|")
    for family in ("pythia", "bert", "both"):
        family_rows = [row for row in rows if family in (row.family, "both")]
        shortest = min(row.seconds / row.work["launch"] for row in family_rows)
        for host in (0.0, HOST_SECONDS, shortest):
            which = {0.0: "none", HOST_SECONDS: f"{host * 1e6:.0f} us, assumed"}.get(
                host, f"{host * 1e6:.1f} us, of the row with the fewest"
            )
            at_least = lambda row, host=host: max(by_table(row), host * row.work["launch"])  # noqa: E731
            print(f"| {family} | {which} | {errors(family_rows, at_least)} |")
    llama = llama_row(cache)
    estimated = by_table(llama)
    print(f"\n{llama.name} on {llama.card}: {estimated:.2f} s, printed {llama.seconds:.2f}: ", end="")
    print(f"{estimated / llama.seconds - 1:+.0%}")


def h200_part(rows: Sequence[Row]) -> None:
    """Operators and whole models of the H200 by the library's constants."""
    print("\n## H200: whole models\n\n| models | rows | median | p90 | rank |\n|---|---|---|---|---|")
    models = [row for row in rows if row.group == "h200 models"]
    print(f"| all | {errors(models, by_table)} |")
    print(f"| launched in less than 60 % of the step | {errors([row for row in models if row.fits], by_table)} |")
    hosted = {row.name: max(by_table(row), row.host) for row in models}
    print(f"| all, at least the seconds of the host as measured | {errors(models, lambda row: hosted[row.name])} |")
    print("\n| model, mode, inputs | measured ms | estimated ms | host ms |\n|---|---|---|---|")
    for row in models:
        print(f"| {row.name} | {row.seconds * 1e3:.1f} | {by_table(row) * 1e3:.1f} | {row.host * 1e3:.1f} |")
    print("\n## H200: operators of 15 us and more\n\n| operators | fitted to | rows | median | p90 | rank | ", end="")
    print("estimated / measured, median |\n|---|---|---|---|---|---|---|")
    operators = [row for row in rows if row.group == "h200 operators" and row.seconds >= 15e-6]
    for family in dict.fromkeys(row.family for row in operators):
        chosen = [row for row in operators if row.family == family]
        middle = statistics.median(by_table(row) / row.seconds for row in chosen)
        print(f"| {family} | {'yes' if chosen[0].fits else 'no'} | {errors(chosen, by_table)} | {middle:.2f} |")


class Perceptron(nn.Module):
    """Two products of one width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


def cards_part() -> None:
    """16 bits beside float32: a perceptron of 4,096 wide layers on 4,096 samples, and one of 64 on as many."""

    def step_of(width: int, amp: bool) -> Callable[[nn.Module], None]:
        def step(model: nn.Module) -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                loss = model(torch.empty(4096, width)).float().square().mean()
            loss.backward()

        return step

    print("\n## 16 bits : float32, forward and backward in autocast\n")
    print("| card | type | sheet | 4,096 wide | 64 wide | between the sheet's and 1 |\n|---|---|---|---|---|---|")
    missed = []
    traces = {
        (width, amp): trace(lambda width=width: Perceptron(width), step_of(width, amp), "a100-80gb")
        for width in (4096, 64)
        for amp in (False, True)
    }
    for card, gpu in GPUS.items():
        speed, half = speed_of_card(card), torch.bfloat16 if gpu.has_bfloat16 else torch.float16
        seconds = {key: speed.seconds(count(speed, traced, half)) for key, traced in traces.items()}
        sheet = gpu.float32_flops / gpu.half_flops
        wide, narrow = (seconds[width, True] / seconds[width, False] for width in (4096, 64))
        if not sheet <= wide <= 1:
            missed.append(card)
        name = str(half).removeprefix("torch.")
        print(f"| {card} | {name} | {sheet:.2f} | {wide:.2f} | {narrow:.2f} | {sheet <= wide <= 1} |")
    print(f"\n{len(GPUS) - len(missed)} of {len(GPUS)} cards between; not: {', '.join(missed) or 'none'}")


def constants_part(rows: Sequence[Row]) -> None:
    """Print the number of constants, and the constants that these rows give."""
    special = sum(len(op_class.by_architecture) for op_class in CLASSES.values())
    print("\n## Constants\n")
    print(
        f"{len(CLASSES)} classes, {special} constants of one architecture beside them: {len(CLASSES) + special} in all,"
    )
    constants: Constants = fitted([row for row in rows if row.fits])
    print(f"and the seconds of the host. {len(constants)} have rows here:\n")
    print("| class | architecture | library | fitted here |\n|---|---|---|---|")
    for (kind, architecture), constant in sorted(constants.items()):
        of_library = CLASSES[kind].by_architecture.get(architecture, CLASSES[kind].factor)
        print(f"| {kind} | {architecture} | {of_library:.3g} | {constant:.3g} |")


def plans_part() -> None:
    """Print the plans by the old seconds and by today's: of one pipeline, and where stages may have replicas."""
    print(f"\n## Plans for {DEVICES} x {CARD}, {MICROBATCHES} microbatches\n")
    print("| model | precision | layers | cuts before | cuts now | step before | step now | gain |", end="")
    print(" with replicas before | now | step now | gain over the cuts before |\n|" + 12 * "---|")
    for change in changes():
        cuts = " | ".join(", ".join(map(str, cuts)) for cuts in (change.old, change.new))
        steps = f"{change.old_step:.3f} | {change.new_step:.3f} | {change.old_step / change.new_step - 1:+.1%}"
        free = f"{change.free_old} | {change.free_new} | {change.free_step:.3f}"
        gain = f"{change.old_step / change.free_step - 1:+.1%}"
        row = f"| {change.model} | {change.precision} | {change.layers} | {cuts} | {steps} | {free} | {gain} |"
        print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=2, help="of each family of timm (default: 2)")
    parser.add_argument("--all", action="store_true", help="all models of timm, the drawn ones also by themselves")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts (default: all)")
    parser.add_argument(
        "--cache", type=Path, default=HERE.parents[1] / "build" / "gpu_seconds", help="folder of the traces"
    )
    arguments = parser.parse_args()
    cache, parts = Cache(arguments.cache), arguments.only
    # corrections from profiles measured on this machine must not change the estimates
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    rows: list[Row] = []
    if {"timm", "layers", "h200", "constants"} & set(parts):
        rows += [*model_rows(cache), *operator_rows(cache)]
    if {"timm", "layers", "constants"} & set(parts):
        images, draw = drawn(cache, arguments.models, arguments.seed, arguments.all)
        rows += [*images, *layer_rows(cache)]
    if "timm" in parts:
        timm_part(rows, draw)
    if "layers" in parts:
        layers_part(rows)
    if "hf" in parts:
        hf_part(cache)
    if "h200" in parts:
        h200_part(rows)
    if "cards" in parts:
        cards_part()
    if "constants" in parts:
        constants_part(rows)
    if "plans" in parts:
        plans_part()


if __name__ == "__main__":
    main()
