"""Runs the live benchmarks one after the other within `--minutes`, then writes the tables of their READMEs.

    python benchmarks/morph/all.py --minutes 20
    python benchmarks/morph/all.py --minutes 8 rn50        # RN50-E6's steady cost, which is not part of the above

Every script appends a line to its results.jsonl, also one that ended early; `tables.py` reads the newest.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent

SHARES = {"planned": 0.19, "crash": 0.19, "join": 0.22, "equality": 0.19, "steady": 0.21}
"""Shares of the minutes; the time that each script needs besides (to start, to compare) is subtracted."""

SCRIPTS = {
    "planned": ["planned/planned.py", "--full"],
    "crash": ["crash/crash.py", "--full"],
    "join": ["join/join.py", "--full"],
    "equality": ["equality/equality.py", "--full"],
    "steady": ["steady/steady.py"],
    "rn50": [
        "steady/steady.py",
        f"--config={HERE / 'steady/rn50_e6.yaml'}",
        "--steps=3",
        "--runs",
        "off",
        "none",
        "sync",
    ],
}

_BESIDE_SECONDS = 15.0
_LATE_SECONDS = 240.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("claims", nargs="*", choices=[*SCRIPTS, []], help="only these, with the whole time")
    args = parser.parse_args()
    claims = args.claims or list(SHARES)
    total = sum(SHARES.get(claim, 0.2) for claim in claims)
    failed = []
    for claim in claims:
        seconds = max(30.0, 60 * args.minutes * SHARES.get(claim, 0.2) / total - _BESIDE_SECONDS)
        if claim == "equality":
            seconds *= 0.75  # the plain run that it is compared with comes after
        script, *arguments = SCRIPTS[claim]
        command = [sys.executable, str(HERE / script), f"--minutes={seconds / 60:.2f}", *arguments]
        if "steady" not in script:
            command.append(f"--seed={args.seed}")
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {' '.join(command[1:])}\n")
        try:
            status = subprocess.run(command, check=False, timeout=seconds + _LATE_SECONDS).returncode
        except subprocess.TimeoutExpired:
            status = -1
        if status:
            failed.append(f"{claim} ended with {status}")
    subprocess.run([sys.executable, str(HERE / "tables.py")], check=True)
    if failed:
        raise SystemExit("; ".join(failed))


if __name__ == "__main__":
    main()
