"""Reproduces the CAPSlog paper's Table 7 and Figures 8 to 13 (`python benchmarks/paper/paper.py`), in minutes on a CPU.

Writes results/tables.md, results/results.json and a PNG per figure beside this file: our numbers next to the printed
ones, every row marked with its source. The head of tables.md lists the assumptions.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import numbers_of_figures as numbers  # noqa: E402 (found beside this file)
import torch  # noqa: E402
from published import GPUS, MEMORY_BYTES, REDUCTIONS  # noqa: E402

from varuna_capslog.reports.style import ALARM, AMBER, BLUE, GREY, INK, LINES, SKY, picture  # noqa: E402

ASSUMPTIONS = """\
- Pictures of 1333 x 1333 pixels: what DETR's augmentation pads a minibatch of one landscape and one portrait picture
  to. The paper prints no size; this one is inferred from its own 13.3 and 6.2 GB.
- Cut layout `heads_last` (24, 41, 47 cut points); attention with explicit maps (`eager`), as the published DETR had it;
  float32, AdamW, frozen BatchNorm, stem and layer1 frozen, 92 outputs.
- Varuna's schedule: recomputation, stage inputs in host memory, so that one graph is alive on a GPU.
- Varuna hands every rank the whole padded minibatch; its 8 pictures and masks (0.17 GB) are added to every peak.
- GB means 2^30 bytes. Allocated bytes, not reserved ones, as the paper's code reads them.
- Seconds are those of an RTX A4000 by class (see `varuna_capslog/profiling/estimation/rates.py`), and no link is
  printed: both ends of what it may have been are shown.
- Marks: *estimated* (fake tensors, each range of layers by itself), *predicted* (M_i + sum of M_a), *simulated*,
  *measured* (clocked here), *counted*, *extrapolated* (from the seconds of one cut list), *printed* (by the paper)."""


def main() -> int:
    """Compute and write all tables and figures; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=HERE / "results", help="folder for tables and pictures")
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 6, 8, 10, 12, 16, 20, 24], help="of Fig. 11")
    parser.add_argument("--bo-devices", type=int, nargs="*", default=[4, 8, 16], help="where mcap-bo is run as well")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    torch.set_num_threads(1)

    models = numbers.load(say)
    bayesian: dict[tuple[str, int], tuple[float, float]] = {}
    if args.bo_devices and importlib.util.find_spec("skopt") is not None:
        say("Bayesian optimisation, half a minute for each number of GPUs")
        bayesian = numbers.bayesian_search(models, args.bo_devices)
    results: dict[str, Any] = {"made": made()}
    parts: list[tuple[str, str, Callable[[], numbers.Rows]]] = [
        ("table_7", "Table 7 (printed as Fig. 7): configurations", lambda: numbers.table_7(models)),
        ("figure_8", "Figure 8: peak of every GPU for RN50-D-E6, GB", lambda: numbers.figure_8(models)),
        ("figure_9", "Figure 9: largest peak of any GPU, GB", lambda: numbers.figure_9(models)),
        ("figure_10", "Figure 10: seconds of a step, throughput over Varuna's cuts", lambda: numbers.figure_10(models)),
        (
            "figure_11",
            "Figure 11: seconds of a recommendation",
            lambda: numbers.figure_11(models, args.devices, bayesian),
        ),
        ("figure_12", "Figure 12: profiling", lambda: numbers.figure_12(models)),
        (
            "figure_13",
            "Figure 13: predicted peak of each recommendation for RN101-D-E12, GB",
            lambda: numbers.figure_13(models, args.devices, bayesian),
        ),
    ]
    text = ["# The paper's figures again", "", f"Made by `python benchmarks/paper/paper.py`: {results['made']}", ""]
    text += ["Assumptions:", "", ASSUMPTIONS, ""]
    for key, title, work in parts:
        say(title)
        results[key] = rows = work()
        text += [f"## {title}", "", table(rows), ""]
        if key in DRAWINGS:
            DRAWINGS[key](args.output / f"{key}.png", rows)
            text += [f"![{title}]({key}.png)", ""]
        text += [note for note in [NOTES[key](rows) if key in NOTES else ""] if note] + [""]
    if not bayesian:
        text += ["mcap-bo is left out: scikit-optimize (the extra `bo`) is not installed, or was not asked for.", ""]
    results["seconds"] = round(time.perf_counter() - begun, 1)
    text.append(f"All of this took {results['seconds']:.0f} s.")
    (args.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (args.output / "tables.md").write_text("\n".join(text).replace("\n\n\n", "\n\n") + "\n")
    say(f"{args.output / 'tables.md'}")
    return 0


def say(text: str) -> None:
    """Print a line of progress."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def made() -> str:
    """Return the time and the versions of this run."""
    return f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, torch {torch.__version__}, one thread"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table with a column per key."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(name.strip() for name in names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(shown(name, row.get(name)) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def shown(name: str, value: Any) -> str:
    """Return a cell of the table."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {number}" for key, number in value.items())
    if isinstance(value, tuple):
        return "-".join(str(number) for number in value)
    if isinstance(value, float):
        if "reduction" in name:
            return f"{100 * value:.1f} %"
        return f"{value:.2e}" if value and not 0.01 <= abs(value) < 1e5 else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


# -- notes below the tables


def note_8(rows: numbers.Rows) -> str:
    """Return a note of the largest peaks, ours and printed."""
    varuna = max(row["Varuna (estimated)"] for row in rows)
    capslog = max(row["CAPSlog (estimated)"] for row in rows)
    return f"Largest: Varuna {varuna:.2f}, CAPSlog {capslog:.2f}; printed 13.3 and 6.2."


def note_9(rows: numbers.Rows) -> str:
    """Return a note of the range of reductions, and whether every outcome is as printed."""
    reductions = [100 * row["reduction"] for row in rows if not row["Varuna runs out of 16 GB"]]
    same = all(row["Varuna runs out of 16 GB"] == row["printed: runs out"] and row["CAPSlog trains"] for row in rows)
    return (
        f"Reductions where both train: {min(reductions):.1f} to {max(reductions):.1f} %; printed {REDUCTIONS[0]} to "
        f"{REDUCTIONS[1]} %. Out-of-memory outcomes {'all as printed' if same else 'differ from those printed'}."
    )


def note_10(rows: numbers.Rows) -> str:
    """Return a note of the range of our ratios."""
    lines = []
    for link in dict.fromkeys(row["link"] for row in rows):
        mine = [row for row in rows if row["link"] == link]
        capslog, ours = ([row[key] for row in mine] for key in ("CAPSlog over Varuna", "ours over Varuna"))
        lines.append(
            f"{link}: CAPSlog over Varuna {min(capslog):.2f} to {max(capslog):.2f}, ours {min(ours):.2f} to "
            f"{max(ours):.2f}"
        )
    return "; ".join(lines) + "; printed 1.24 to 2.82."


NOTES: dict[str, Callable[[numbers.Rows], str]] = {"figure_8": note_8, "figure_9": note_9, "figure_10": note_10}


# -- pictures


def draw_8(path: Path, rows: numbers.Rows) -> None:
    """Draw bars per GPU."""
    names = [name for name in rows[0] if name != "GPU"]
    with picture(path, 3.2) as figure:
        axes = figure.add_subplot()
        for index, (name, colour) in enumerate(zip(names, (AMBER, BLUE, SKY), strict=True)):
            places = [row["GPU"] + 0.27 * (index - 1) for row in rows]
            axes.bar(places, [row[name] for row in rows], 0.25, color=colour, label=name)
        for value, name in ((13.3, "printed: Varuna 13.3"), (6.2, "printed: CAPSlog 6.2")):
            axes.axhline(value, color=INK, linewidth=0.8, linestyle=":")
            axes.text(-0.45, value + 0.15, name, fontsize=7.5, color=INK)
        axes.set_xticks(range(GPUS))
        axes.set_xlabel("GPU")
        axes.set_ylabel("peak [GB]")
        figure.legend(loc="outside upper right", ncols=3)


def draw_9(path: Path, rows: numbers.Rows) -> None:
    """Draw bars per configuration."""
    with picture(path, 3.2) as figure:
        axes = figure.add_subplot()
        columns = (("Varuna (estimated)", AMBER), ("CAPSlog (estimated)", BLUE), ("ours (estimated)", SKY))
        for index, (name, colour) in enumerate(columns):
            places = [place + 0.27 * (index - 1) for place in range(len(rows))]
            axes.bar(places, [row[name] for row in rows], 0.25, color=colour, label=name)
        axes.axhline(MEMORY_BYTES / numbers.GB, color=ALARM, linewidth=1.0, linestyle="--")
        axes.text(-0.45, MEMORY_BYTES / numbers.GB + 0.3, "memory of the paper's GPUs", fontsize=7.5, color=ALARM)
        axes.set_xticks(range(len(rows)), [row["configuration"] for row in rows])
        axes.set_ylabel("largest peak [GB]")
        axes.legend(loc="upper left")


def draw_10(path: Path, rows: numbers.Rows) -> None:
    """Draw ratios per configuration, a panel per link."""
    links = list(dict.fromkeys(row["link"] for row in rows))
    with picture(path, 3.0) as figure:
        for index, link in enumerate(links):
            axes = figure.add_subplot(1, len(links), index + 1)
            mine = [row for row in rows if row["link"] == link]
            for shift, key, colour in ((-0.2, "CAPSlog over Varuna", BLUE), (0.2, "ours over Varuna", SKY)):
                places = [place + shift for place in range(len(mine))]
                axes.bar(places, [row[key] for row in mine], 0.38, color=colour, label=key if index == 0 else None)
            printed = "printed for CAPSlog" if index == 0 else None
            axes.axhspan(*mine[0]["printed range"], color=GREY, alpha=0.2, linewidth=0, zorder=0, label=printed)
            axes.axhline(1.0, color=INK, linewidth=0.8)
            axes.set_xticks(range(len(mine)), [row["configuration"].replace("-", "\n", 1) for row in mine], fontsize=7)
            axes.set_title(link)
            axes.set_ylabel("throughput over Varuna's cuts")
        figure.legend(loc="outside upper right", ncols=3)


def draw_11(path: Path, rows: numbers.Rows) -> None:
    """Draw seconds by number of GPUs, a panel per configuration."""
    names = list(dict.fromkeys(row["configuration"] for row in rows))
    kinds = [kind for kind in ("capslog", "capslog-tb", "exact", "mcap-bo", "mcap-bf") if kind in rows[0]]
    with picture(path, 3.2) as figure:
        first = None
        for index, name in enumerate(names):
            axes = figure.add_subplot(1, len(names), index + 1, sharey=first)
            first = first or axes
            mine = [row for row in rows if row["configuration"] == name]
            for kind, colour in zip(kinds, LINES, strict=False):
                drawn = [row for row in mine if row[kind] is not None]
                counts = [row["GPUs"] for row in drawn]
                axes.plot(counts, [row[kind] for row in drawn], "o-", color=colour, label=kind, ms=3)
            axes.set_yscale("log")
            axes.set_title(name)
            axes.set_xlabel("GPUs")
        first.set_ylabel("seconds (mcap-bf beyond 1e8 cut lists extrapolated)")
        first.legend()


def draw_13(path: Path, rows: numbers.Rows) -> None:
    """Draw the predicted peak by number of GPUs."""
    kinds = list(dict.fromkeys(name for row in rows for name in row if name != "GPUs"))
    with picture(path, 3.0) as figure:
        axes = figure.add_subplot()
        for kind, colour in zip(kinds, LINES, strict=False):
            mine = [row for row in rows if kind in row]
            axes.plot([row["GPUs"] for row in mine], [row[kind] for row in mine], "o-", color=colour, label=kind, ms=4)
        axes.set_xlabel("GPUs")
        axes.set_ylabel("predicted peak [GB]")
        axes.legend()


def draw_12(path: Path, rows: numbers.Rows) -> None:
    """Draw launches per configuration and method."""
    columns = (
        ("mCAP runs (counted)", AMBER),
        ("CAPSlog runs (counted)", BLUE),
        ("our rounds on 8 workers (counted)", SKY),
    )
    with picture(path, 2.8) as figure:
        axes = figure.add_subplot()
        for index, (name, colour) in enumerate(columns):
            places = [place + 0.27 * (index - 1) for place in range(len(rows))]
            axes.bar(places, [row[name] for row in rows], 0.25, color=colour, label=name)
        axes.set_xticks(range(len(rows)), [row["configuration"] for row in rows])
        axes.set_ylabel("profiling runs")
        axes.legend()


DRAWINGS: dict[str, Callable[[Path, numbers.Rows], None]] = {
    "figure_8": draw_8,
    "figure_9": draw_9,
    "figure_10": draw_10,
    "figure_11": draw_11,
    "figure_12": draw_12,
    "figure_13": draw_13,
}


if __name__ == "__main__":
    sys.exit(main())
