"""Compares predicted bytes with those of real GPUs: published peaks, and our own measurements on an H200.

No GPU is used. Published numbers are read from the folder that the variable CAPSLOG_DATA names
(`gpu-truth/*.json` in it); without it the parts hf, saved, plans and pairs are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from common import write_json
from following import summary

HERE = Path(__file__).resolve().parent
ENVIRONMENT = HERE.parents[1] / "build" / "gpu_bytes" / "transformers-4.42.4"
PACKAGES = ("transformers==4.42.4", "tokenizers==0.19.1", "huggingface_hub==0.23.5", "numpy==1.26.4")
"""All that differs from the environment of this process, whose torch and other packages are used."""
PARTS = ("hf", "h200", "saved", "plans", "pairs", "dense", "ranks", "traces")


def old_transformers() -> Path:
    """Return the Python of an environment with the tables' version of transformers; the first call creates it."""
    python = ENVIRONMENT / "bin" / "python"
    done = ENVIRONMENT / "made"
    if not done.exists():
        venv.create(ENVIRONMENT, clear=True, with_pip=True)
        site_packages = sysconfig.get_path("purelib", vars={"base": str(ENVIRONMENT)})
        # a package of the environment comes before one of the same name outside
        (Path(site_packages) / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *PACKAGES], check=True)
        done.touch()
    return python


def compare_hugging_face(folder: Path) -> list[dict[str, Any]]:
    """Print a table of the rows of `hf-memory-fit.json`, and return them."""
    command = [str(old_transformers()), str(HERE / "hf_rows.py"), str(folder / "gpu-truth" / "hf-memory-fit.json")]
    print("| model | card | attention | batch x tokens | predicted MB | printed MB | error |")
    print("|---|---|---|---|---|---|---|")
    results = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            row = json.loads(line)
            results.append(row)
            printed, predicted = row["peak_mb_1e6"], row["predicted"] / 1e6
            shown = "out of memory | -" if row["oom"] else f"{printed:.1f} | {predicted / printed - 1:+.3%}"
            card, sizes = row["gpu"].split(" 16GB")[0], f"{row['batch']} x {row['seq']}"
            cells = f"{row['model'].split('/')[-1]} | {card} | {row['attention']} | {sizes} | {predicted:.1f}"
            print(f"| {cells} | {shown} |", flush=True)
    if running.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {running.returncode}")
    print(summary([row["predicted"] / 1e6 / row["peak_mb_1e6"] - 1 for row in results if not row["oom"]]))
    lost = [row["predicted"] for row in results if row["oom"]]
    print(f"out of memory on 16 GB: predicted {', '.join(f'{value / 1e9:.1f} GB' for value in sorted(lost))}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: the parts are {', '.join(PARTS)}")
    import h200  # imports torchvision and the library, which --help does not need
    import reserved
    import sailor

    data = os.environ.get("CAPSLOG_DATA")
    folder = Path(data or ".")
    calls = {
        "hf": lambda: compare_hugging_face(folder),
        "h200": h200.compare_peaks,
        "saved": lambda: sailor.compare_saved(folder),
        "plans": lambda: sailor.compare_plans(folder),
        "pairs": lambda: reserved.print_pairs(folder),
        "dense": reserved.replay_transformers,
        "ranks": reserved.compare_ranks,
        "traces": reserved.compare_traces,
    }
    results = {}
    for part in arguments.parts or PARTS:
        if part in ("hf", "saved", "plans", "pairs") and data is None:
            print(f"\n{part}: left out, CAPSLOG_DATA names no folder")
            continue
        print(f"\n{part}\n")
        results[part] = calls[part]()
    write_json(arguments.json, results)


if __name__ == "__main__":
    main()
