"""Seconds to import `varuna_capslog`, to print `capslog --help`, to plan from a profile, and the slowest modules.

Every round starts a new interpreter for each of the commands in turn, and a bare interpreter as a reference. Modules
are compiled once, into a folder of the benchmark, as those of an installed package are.
Prints the table of README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from varuna_capslog.profiles.record import LayerProfile, Profile, write_profile

PYTHON = sys.executable
LAYERS = 24
AIM_SECONDS = {"capslog --help": 0.2, "capslog plan --profile": 0.5}


def commands_of(profile: Path) -> dict[str, list[str]]:
    """Return the measured commands by name; `profile` is the profile to plan from."""
    run = "import sys; from varuna_capslog.cli import main; main(sys.argv[1:])"
    plan = ["plan", "--profile", str(profile), "--devices", "4", "--capacity", "16GiB"]
    return {
        "python -c pass": [PYTHON, "-c", "pass"],
        "import varuna_capslog": [PYTHON, "-c", "import varuna_capslog"],
        "capslog --help": [PYTHON, "-c", run, "--help"],
        "capslog plan --profile": [PYTHON, "-c", run, *plan],
    }


def write_example(path: Path) -> None:
    """Write a profile in its short form, with seconds; layers of three sizes."""
    sizes = [(1 + number % 3) << 28 for number in range(LAYERS)]
    rows = [
        LayerProfile(f"l{number}", size, size // 2 if number else None, forward_seconds=1e-3, backward_seconds=2e-3)
        for number, size in enumerate(sizes)
    ]
    write_profile(path, Profile(tuple(rows)))


def run(command: list[str]) -> tuple[float, float]:
    """Run a process; return its (seconds, processor seconds) from start to end."""
    before, began = os.times(), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds, after = time.perf_counter() - began, os.times()
    worked = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, worked


def slowest_imports(command: list[str], count: int) -> tuple[list[tuple[float, float, str]], bool]:
    """Return (own ms, ms with its imports, module) of the slowest modules, and True where torch was imported."""
    lines = subprocess.run(
        [command[0], "-X", "importtime", *command[1:]], check=True, capture_output=True, text=True
    ).stderr.splitlines()
    modules = []
    for line in lines:
        fields = line.removeprefix("import time:").split("|")
        if len(fields) == 3 and fields[0].strip().isdigit():
            modules.append((int(fields[0]) / 1e3, int(fields[1]) / 1e3, fields[2].strip()))
    return sorted(modules, reverse=True)[:count], any(name == "torch" for _, _, name in modules)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--imports", type=int, default=12, help="how many of the slowest imports to list")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(Path(folder) / "compiled")
        profile = Path(folder) / "profile.json"
        write_example(profile)
        measure(arguments, commands_of(profile))


def measure(arguments: argparse.Namespace, commands: dict[str, list[str]]) -> None:
    """Run the commands in turn and print the tables."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for number in range(arguments.rounds + 1):
        for name, command in commands.items():
            taken = run(command)
            if number > 0:  # the first round fills the disk cache
                times[name].append(taken)
    print("| command | median s | fastest s | median processor s | aim s |")
    print("|---|---|---|---|---|")
    rows = []
    for name, taken in times.items():
        seconds, worked = [t[0] for t in taken], [t[1] for t in taken]
        row = {
            "command": name,
            "median_seconds": statistics.median(seconds),
            "fastest_seconds": min(seconds),
            "median_cpu_seconds": statistics.median(worked),
        }
        rows.append(row)
        cells = " | ".join(f"{row[key]:.3f}" for key in list(row)[1:])
        print(f"| {name} | {cells} | {AIM_SECONDS.get(name, '')} |")
    slowest = {}
    for command in AIM_SECONDS:
        listing, torch_imported = slowest_imports(commands[command], arguments.imports)
        slowest[command] = {"imports": listing, "torch": torch_imported}
        print(f"\n{command} imports torch: {'yes' if torch_imported else 'no'}; its slowest imports:\n")
        print("| module | own ms | with its imports ms |")
        print("|---|---|---|")
        for own_ms, total, name in listing:
            print(f"| {name} | {own_ms:.1f} | {total:.1f} |")
    if arguments.output is not None:
        result = {"python": platform.python_version(), "rows": rows, "slowest": slowest}
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
