"""Sums results.jsonl: faults of all chaos runs by outcome and fault class, and the replayed traces."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

__all__ = ["totals"]

HERE = Path(__file__).parent


def totals(lines: list[dict]) -> dict:
    """Return the sums over the runs drawn from a seed; faults of failed runs are counted separately."""
    runs = [line for line in lines if "trace" not in line]
    passed = [line for line in runs if line["outcome"] == "passed"]
    classes: Counter[str] = Counter()
    for line in passed:
        classes.update({row["kind"]: row["count"] for row in line["classes"]})
    sums = {name: sum(line[name] for line in passed) for name in ("faults", "joins", "generations", "steps")}
    return {
        "passed": len(passed),
        "failed": len(runs) - len(passed),
        **sums,
        "faults_of_failed_runs": sum(line["faults"] for line in runs if line["outcome"] != "passed"),
        "store_losses": sum(line["store_losses"] for line in passed),
        "hours": round(sum(line["seconds"] for line in passed) / 3600, 2),
        "layouts": sorted({size for line in passed for size in line["layouts"]}),
        "classes": dict(sorted(classes.items())),
        "traces": [
            {name: line[name] for name in ("trace", "scale", "outcome", "lost_nodes", "share_of_ideal")}
            | {"share_at_own_pace": line["share_at_own_pace"]}
            for line in lines
            if "share_of_ideal" in line
        ],
    }


def main() -> None:
    """Prints the sums of a file as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=HERE / "results.jsonl")
    lines = [json.loads(line) for line in parser.parse_args().file.read_text().splitlines()]
    print(json.dumps(totals(lines), indent=2))


if __name__ == "__main__":
    main()
