"""Writes the tables of the READMEs beside this file from their results.jsonl: python benchmarks/morph/tables.py

A table stands between the lines `<!-- results -->` and `<!-- end -->`; the other text of a README stays.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BEGIN, END = "<!-- results -->\n", "<!-- end -->"

Row = Mapping[str, Any]


def table(head: list[str], rows: list[list[object]]) -> str:
    lines = [head, ["---"] * len(head), *[[str(cell) for cell in row] for row in rows]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def quantiles(summary: Mapping[str, Any], digits: int = 1) -> list[object]:
    if not summary.get("count"):
        return ["0", "-", "-", "-", "-"]
    return [summary["count"], *(f"{summary[name]:.{digits}f}" for name in ("p50", "p90", "p99", "max"))]


def when(row: Row) -> str:
    """Return date, commit, seed and load of a measurement; the load is the machine's at its end."""
    early = "; ended early: " + row["ended_early"].splitlines()[0][:80] if row.get("ended_early") else ""
    seed = f"seed {row['seed']}, " if "seed" in row else ""
    return f"{row['date'][:16].replace('T', ' ')}, {row['commit']}, {seed}load {row['load'][0]:g}{early}"


QUANTILES = ["count", "p50", "p90", "p99", "largest"]


def planned(rows: list[Row]) -> str:
    head = ["run", "ms", *QUANTILES]
    names = [
        ("pause of a leave, net of a step", "leave_net_ms"),
        ("the same with the step", "leave_whole_ms"),
        ("pause of the joins between, net", "join_net_ms"),
        ("a step", "step_ms"),
    ]
    lines: list[list[object]] = []
    for row in rows:
        lines += [[when(row) if key == "leave_net_ms" else "", name, *quantiles(row[key])] for name, key in names]
        lines.append(["", "search", *quantiles(row["search_ms"], 2)])
        lines.append(["", f"steps computed again: {row['steps_computed_again']}", *[""] * 5])
    return table(head, lines)


def crash(rows: list[Row]) -> str:
    head = ["run", "", *QUANTILES]
    lines: list[list[object]] = []
    for row in rows:
        lines.append([when(row), "SIGKILL to the end of the next step, ms", *quantiles(row["kill_to_step_ms"])])
        lines.append(["", "a step, ms", *quantiles(row["step_ms"])])
        lines.append(["", "steps taken back", *quantiles(row["steps_taken_back"], 0)])
        lines.append(["", "changes of generation per kill", *quantiles(row["changes_per_kill"], 0)])
        ranks = ", ".join(f"{value:g}" for value in row["by_rank_p50_ms"])
        lines.append(["", f"p50 by the rank that is killed, ms: {ranks}", *[""] * 5])
    return table(head, lines)


def join(rows: list[Row]) -> str:
    head = ["run", "", *QUANTILES]
    lines: list[list[object]] = []
    for row in rows:
        title = f"{row['joins']} joins, {row['failed']} failed; stall of who trains, net of a step, ms"
        lines.append([when(row), title, *quantiles(row["stall_net_ms"])])
        lines.append(["", "order to the newcomer's first step, s", *quantiles(row["order_to_first_step_s"], 2)])
        ratio = quantiles(row["steps_while_loading_to_before"], 2)
        lines.append(["", "steps while it loads, as a multiple of those before", *ratio])
    return table(head, lines)


def equality(rows: list[Row]) -> str:
    head = ["run", "morphs", "layouts", "steps", "losses that differ", "tensors that differ", "steps off once"]

    def layouts(row: Row) -> str:
        if "plans" not in row:
            return f"{row['layouts']} ({row['layouts_with_replicas']} of several replicas)"
        kinds = [f"{count} {name.replace('_', ' ')}" for name, count in row["plans"].items() if name != "plans"]
        description = f" of {Path(row['config']).stem}, {', '.join(row['overrides'][1:])}"
        model = "" if row["config"] == "small.yaml" else description
        return f"{row['plans']['plans']} drawn plans{model} ({', '.join(kinds)})"

    lines: list[list[object]] = [
        [
            when(row),
            f"{row['morphs']} ({', '.join(f'{count} {kind}' for kind, count in sorted(row['kinds'].items()))})",
            layouts(row),
            row["steps"],
            row["losses_that_differ"],
            f"{row['tensors_that_differ']} of {row['tensors']}",
            row["steps_with_a_sample_not_used_once"],
        ]
        for row in rows
    ]
    names = [
        ("pause of a leave, net of a step", "leave_net_ms"),
        ("of a join", "join_net_ms"),
        ("of both", "planned_net_ms"),
        ("of a kill", "kill_net_ms"),
        ("search", "search_ms"),
        ("transfer", "transfer_ms"),
    ]
    pauses: list[list[object]] = [
        [when(row) if not number else "", name, *quantiles(row[key])]
        for row in rows
        if "plans" in row
        for number, (name, key) in enumerate(entry for entry in names if entry[1] in row)
    ]
    return table(head, lines) + ("\n" + table(["run", "ms", *QUANTILES], pauses) if pauses else "")


def steady(rows: list[Row]) -> str:
    head = ["run", "", "step, ms", "CPU of a step, ms", "time to `off`", "CPU time to `off`"]
    lines: list[list[object]] = []
    for row in rows:
        size = (
            f"{row['copied_bytes_per_step'] / 1e6:.2f} MB of gradients a step, state {row['state_bytes'] / 1e6:.1f} MB"
        )
        for name in row["step_ms"]:
            first = name == row["base"]
            configuration = " ".join([row["config"], *row["overrides"]])
            title = f"{configuration}, {row['rounds']} rounds, {size}; {when(row)}" if first else ""
            ratios = ["1", "1"] if first else [spread(row[key][name]) for key in ("time_ratio", "cpu_ratio")]
            lines.append([title, f"`{name}`", row["step_ms"][name], row["step_cpu_ms"][name], *ratios])
    return table(head, lines)


def spread(quartiles: list[float]) -> str:
    low, middle, high = quartiles
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def recipes(rows: list[Row]) -> str:
    head = ["optimizer", "schedule", "EMA", "groups", "cut lists", "most replicas", "leaves, joins", "SIGKILLs"]
    lines: list[list[object]] = [
        [
            *row["recipe"],
            *(row[key] for key in ("cut_lists", "replicas")),
            f"{row['leaves']}, {row['joins']}",
            *(row[key] for key in ("kills", "steps", "losses_that_differ")),
            f"{row['tensors_that_differ']} of {row['tensors']}",
            f"{row['date'][:16].replace('T', ' ')}, load {row['load'][0]:g}",
        ]
        for row in rows
    ]
    return table([*head, "steps", "losses that differ", "tensors that differ", "run"], lines)


TABLES: dict[str, Callable[[list[Row]], str]] = {
    "planned": planned,
    "crash": crash,
    "join": join,
    "equality": equality,
    "steady": steady,
    "recipes": recipes,
}
_NEWEST = {"planned": 3, "crash": 3, "join": 3, "equality": 1000, "steady": 10, "recipes": 1000}


def fill(readme: Path, tables: str) -> None:
    """Write tables between a README's marks."""
    before, begin_mark, tail = readme.read_text().partition(BEGIN)
    _, end_mark, after = tail.partition(END)
    if not begin_mark or not end_mark:
        raise SystemExit(f"{readme} has no lines {BEGIN.strip()} and {END}: put them where the table shall stand")
    readme.write_text(f"{before}{BEGIN}\n{tables}\n{END}{after}")


def main() -> None:
    for claim, make in TABLES.items():
        results, readme = HERE / claim / "results.jsonl", HERE / claim / "README.md"
        if not results.exists():
            continue
        rows = [json.loads(line) for line in results.read_text().splitlines()]
        newest = rows[-_NEWEST[claim] :]
        count = f"The last {len(newest)} of {len(rows)} lines of results.jsonl:\n\n" if len(newest) < len(rows) else ""
        fill(readme, count + make(newest))
        sys.stdout.write(f"{readme.relative_to(HERE)}: {len(newest)} runs\n")


if __name__ == "__main__":
    main()
