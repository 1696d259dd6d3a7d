"""Published layouts whose measured memory or time was printed, beside what `capslog lint` predicts for them.

Each row states the run as its source prints it; nothing is fitted. Rows whose print leaves out what an estimate needs
are in README.md with the reason. Prints rows for README.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Print:
    """Run of a published layout, and what was printed of it.

    kind: class of the model's config in transformers, without `Config`; sizes: keys that differ from the class's.
    layout: as published, for `capslog lint`; flags, keys: its options and keys of a config, which state the run.
    printed_gb: peak of the last rank as allocated, in 10^9 bytes. printed_seconds: of a step.
    """

    row: str
    kind: str
    sizes: dict[str, Any]
    layout: str
    flags: tuple[str, ...]
    keys: tuple[str, ...]
    printed_gb: float | None = None
    printed_seconds: float | None = None


_ENDS = "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2"
_GPT = {"n_layer": 12, "n_embd": 512, "n_head": 8, "vocab_size": 50304, "tie_word_embeddings": False}
_GPT |= {"attn_implementation": "eager"}
_PROXY = {"num_hidden_layers": 14, "vocab_size": 258560, "n_routed_experts": 64, "num_nextn_predict_layers": 1}

_GPT_RUN = ("--minibatch=32", "--sequence=1024", "--parallel=data=2")
_PROXY_RUNS = (
    ("Et*2|(tt|)*5t|tmL", "--devices=4x h100-80gb", "--parallel=tensor=2,expert=16,data=8,zero=1", 46.6, 12.03, 1),
    ("Et*7|t*7mL", "--devices=2x gb200", "--parallel=tensor=2,expert=8,data=8,zero=1", 100.9, 7.66, 4),
)
_OF_STATES = ("train.precision=bf16-master",)

PRINTS = (
    *(
        Print("37", "GPT2", _GPT, _ENDS, (f"--devices=4x {kind}", *_GPT_RUN), (*_OF_STATES, "train.microbatch_size=4"),
              printed_gb, printed_seconds)
        for kind, printed_gb, printed_seconds in (("a100-80gb", 2.386, 0.195), ("h100-80gb", 2.416, 0.143))
    ),
    *(
        Print("35", "DeepseekV3", _PROXY, layout, (devices, "--minibatch=512", "--sequence=4096", parallel, *dtype),
              (*keys, f"train.microbatch_size={size}"), printed_gb, printed_seconds)
        for layout, devices, parallel, printed_gb, printed_seconds, size in _PROXY_RUNS
        for keys, dtype in ((_OF_STATES, ()), ((), ("--model-arg=dtype=bfloat16",)))
    ),
    Print(
        "9",
        "DeepseekV4",
        {},
        "Et*11|t*11|t*11|t*10mL",
        ("--devices=4x gb200", "--minibatch=128", "--sequence=1024", "--parallel=context=2,expert=8,data=8,zero=1"),
        (*_OF_STATES, "pipeline.recompute=true"),
        printed_seconds=13.81,
    ),
)  # fmt: skip


def write_config(row: Print, folder: Path) -> None:
    """Write the config.json of a row's model."""
    import transformers

    config = getattr(transformers, f"{row.kind}Config")(**row.sizes, architectures=[_CLASSES[row.kind]])
    config.save_pretrained(folder)


_CLASSES = {"GPT2": "GPT2LMHeadModel", "DeepseekV3": "DeepseekV3ForCausalLM", "DeepseekV4": "DeepseekV4ForCausalLM"}


def predicted(row: Print) -> dict[str, Any]:
    """Return the judged plan of the published layout; {"error": ...} where lint refuses."""
    with tempfile.TemporaryDirectory() as folder:
        write_config(row, Path(folder))
        (Path(folder) / "layout.txt").write_text(row.layout)
        words = ["lint", f"{folder}/layout.txt", *row.keys, "--hf", folder, *row.flags, "--json"]
        command = [sys.executable, "-m", "varuna_capslog", *words]
        run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    if not run.stdout:
        return {"error": run.stderr.splitlines()[-1]}
    plan: dict[str, Any] = json.loads(run.stdout)["layout"]
    return plan


def line(row: Print) -> str:
    """Return the table's row."""
    plan = predicted(row)
    if "error" in plan:
        return f"| {row.row} | {row.layout} | {plan['error']} |"
    sizes = [rank["bytes"] for rank in plan.get("ranks", [])] or plan["stage_bytes"]
    peak, step = sizes[-1] / 1e9, plan["step_seconds"]
    types = "bfloat16 with masters" if _OF_STATES[0] in row.keys else "all bfloat16"
    cells = [row.row, row.layout.replace("|", "\\|"), row.flags[0].partition("=")[2], types]
    for printed, ours, digits in ((row.printed_gb, peak, 1), (row.printed_seconds, step, 3)):
        cells += [f"{ours:.{digits}f}"]
        cells += ["-", "-"] if printed is None else [f"{printed:.{digits}f}", f"{100 * (ours / printed - 1):+.0f} %"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=sorted({row.row for row in PRINTS}))
    args = parser.parse_args()
    print("| row | layout | devices | types | ours [GB] | printed | | ours [s] | printed | |\n" + "|---" * 10 + "|")
    for row in PRINTS:
        if row.row in args.rows:
            print(line(row), flush=True)


if __name__ == "__main__":
    main()
