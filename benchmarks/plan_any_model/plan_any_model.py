"""Seconds and memory of `capslog plan --model` from the start of the process to the verdict, for well-known models.

Every model is planned in a separate process with an empty cache, as on a new user's first call. Where other programs
share the cores, processor seconds are more reliable than wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import write_json  # noqa: E402

IMAGES = ["x=float32[8,3,224,224]"]
MODELS = {
    "convnext_b": (IMAGES, 4, "a100-80gb"),
    "swin_b": (IMAGES, 4, "a100-80gb"),
    "vit_l": (IMAGES, 4, "a100-80gb"),
    "bert_large": (["input_ids=int64[8,512]:30522", "labels=int64[8,512]:30522"], 4, "a100-80gb"),
    "gpt2_medium": (["input_ids=int64[4,1024]:50257", "labels=int64[4,1024]:50257"], 4, "a100-80gb"),
    "t5_large": (["input_ids=int64[4,512]:32128", "labels=int64[4,512]:32128"], 4, "a100-80gb"),
    "rt_detr": (["pixel_values=float32[4,3,640,640]"], 4, "a100-80gb"),
    "llama_70b": (["input_ids=int64[1,4096]:128256", "labels=int64[1,4096]:128256"], 32, "h100-80gb"),
}
"""Inputs, devices and their kind."""


def plan(name: str) -> dict[str, Any]:
    """Plan a model, and return the plan's figures, time and memory."""
    inputs, devices, kind = MODELS[name]
    command = [sys.executable, "-m", "varuna_capslog.cli", "plan", "--model", f"models:{name}", "--json"]
    command += ["--devices", str(devices), "--device", f"cuda:{kind}"]
    command += [text for spec in inputs for text in ("--input", spec)]
    with tempfile.TemporaryDirectory() as cache:
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = os.environ | {"XDG_CACHE_HOME": cache, "PYTHONPATH": str(HERE.parents[1])}
        process = subprocess.Popen(
            command, cwd=HERE, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        answer, _ = process.communicate()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    verdict = json.loads(answer)
    return {
        "layers": verdict["num_layers"],
        "devices": devices,
        "kind": kind,
        "fits": verdict["fits"],
        "peak_gib": round(verdict["peak_bytes"] / 2**30, 2),
        "seconds": round(time.perf_counter() - began, 1),
        "processor_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        # peak of the largest child so far: list the models by increasing memory
        "memory_gib": round(after.ru_maxrss / 2**20, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = {}
    print("| model | layers | devices | largest peak GiB | fits | seconds | processor seconds | memory GiB |")
    print("|---|---|---|---|---|---|---|---|")
    for name in arguments.models:
        row = rows[name] = plan(name)
        cells = (f"{row['devices']} x {row['kind']}", *(row[key] for key in ("peak_gib", "fits", "seconds")))
        print(f"| {name} | {row['layers']} | {' | '.join(map(str, cells))} | ", end="")
        print(f"{row['processor_seconds']} | {row['memory_gib']} |", flush=True)
    write_json(arguments.json, {"models": rows})


if __name__ == "__main__":
    main()
