"""Published layouts beside our fastest cuts for the same ranks and chunks, judged by an evaluator of its own.

For each row the model is estimated for H100s from its published sizes, `capslog lint` gives our cuts, and the evaluator
plays both: plain or interleaved 1F1B in Megatron's order, messages free, every activation kept, and the bytes of each
rank as weights and states plus what is saved by the microbatches in flight. It shares no code with planner or fold.
Prints rows for README.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "models_2026"))

from sizes import write_config

ROWS = (
    ("1", "Llama-3-70B", 8, "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL"),
    ("3", "DeepSeek-V3 with m", 4, "Et*4|(tttt|)*14tmL"),
    ("7", "DeepSeek-V3", 12, "--decoder-last-pipeline-num-layers 6"),
    ("13", "GLM-4.5 with m", 8, "decoder_first_pipeline_num_layers: 10, decoder_last_pipeline_num_layers: 10"),
    ("13", "GLM-4.5-Air with m", 4, "decoder_first_pipeline_num_layers: 11, decoder_last_pipeline_num_layers: 11"),
    ("17", "Qwen3-235B-A22B", 4, "23,24,24,23"),
    ("17", "Qwen3-235B-A22B", 4, "--decoder-last-pipeline-num-layers 22"),
    ("17", "Qwen3-235B-A22B", 8, "decoder_first_pipeline_num_layers: 11, decoder_last_pipeline_num_layers: 11"),
    ("17", "Qwen3-235B-A22B", 16, "decoder_first_pipeline_num_layers: 5, decoder_last_pipeline_num_layers: 5"),
    ("19", "MiniMax-M2.5", 4, "decoder_pipeline_manual_split_list: [7, 8, 8, 8, 8, 8, 8, 7]"),
)
"""Row of the study, model (with m: and its layer for multi-token prediction), ranks, layout as it was published."""


def order_of(rank: int, ranks: int, chunks: int, microbatches: int) -> list[tuple[str, int, int]]:
    """Return the calls of a rank, (F or B, microbatch, chunk), in Megatron's order of (interleaved) 1F1B."""
    total, group = microbatches * chunks, ranks * chunks

    def call(number: int, backward: bool) -> tuple[str, int, int]:
        chunk = number % group // ranks
        microbatch = number // group * ranks + number % ranks
        return ("B", microbatch, chunks - 1 - chunk) if backward else ("F", microbatch, chunk)

    warm = ranks - 1 - rank if chunks == 1 else 2 * (ranks - 1 - rank) + (chunks - 1) * ranks
    warm = min(warm, total)
    calls = [call(number, False) for number in range(warm)]
    for number in range(warm, total):
        calls += [call(number, False), call(number - warm, True)]
    return calls + [call(number, True) for number in range(total - warm, total)]


def judged(layers: list[dict[str, Any]], cuts: list[int], ranks: int, microbatches: int) -> tuple[float, float]:
    """Return the seconds of a step, and the bytes of the fullest rank."""
    bounds, chunks = [*cuts, len(layers)], len(cuts) // ranks

    def total(stage: int, key: str) -> float:
        return float(sum(layer[key] for layer in layers[bounds[stage] : bounds[stage + 1]]))

    orders = [order_of(rank, ranks, chunks, microbatches) for rank in range(ranks)]
    done: dict[tuple[str, int, int], float] = {}
    places, clocks, held, peaks = [0] * ranks, [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
    moved = True
    while moved:
        moved = False
        for rank in range(ranks):
            while places[rank] < len(orders[rank]):
                kind, microbatch, chunk = orders[rank][places[rank]]
                stage = chunk * ranks + rank
                before = stage - 1 if kind == "F" else stage + 1
                needs = [("F", microbatch, stage)] if kind == "B" else []
                if 0 <= before < len(cuts):
                    needs.append((kind, microbatch, before))
                if any(need not in done for need in needs):
                    break
                begin = max([clocks[rank], *(done[need] for need in needs)])
                clocks[rank] = begin + total(stage, "forward_seconds" if kind == "F" else "backward_seconds")
                done[kind, microbatch, stage] = clocks[rank]
                held[rank] += total(stage, "saved_bytes") * (1 if kind == "F" else -1)
                peaks[rank] = max(peaks[rank], held[rank])
                places[rank] += 1
                moved = True
    assert all(place == len(order) for place, order in zip(places, orders, strict=True)), "the order is impossible"
    static = [sum(total(stage, "static_bytes") for stage in range(rank, len(cuts), ranks)) for rank in range(ranks)]
    return max(clocks), max(peak + more for peak, more in zip(peaks, static, strict=True))


def capslog(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "varuna_capslog", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])


def cuts_of(plan: dict[str, Any]) -> list[int]:
    return plan.get("cuts") or [stage["layers"][0][0] for stage in plan["stages"]]


def line(row: tuple[str, str, int, str], profile: Path, microbatches: int) -> str:
    """Return the table's row of one layout."""
    number, model, ranks, layout = row
    text = profile.with_name("layout.txt")
    text.write_text(layout)
    flags = ["--profile", str(profile), "--devices", str(ranks), "--minibatch", str(microbatches)]
    flags += ["--capacity", "1000TiB", "--json"]  # the layouts divide experts and matrices over more cards
    run = capslog("lint", str(text), *flags)
    if not run.stdout:
        return f"| {number} | {model} | {run.stderr.splitlines()[-1]} |"
    answer, layers = json.loads(run.stdout), json.loads(profile.read_text())["layers"]
    cuts = [cuts_of(answer[whose]) for whose in ("layout", "ours")]
    (step, peak), (our_step, our_peak) = (judged(layers, some, ranks, microbatches) for some in cuts)
    played = [answer[whose]["step_seconds"] for whose in ("layout", "ours")]
    return (
        f"| {number} | {model} | {ranks} x {len(cuts[0]) // ranks} | {step:.3f} | {our_step:.3f} | "
        f"{100 * (our_step / step - 1):+.1f} % | {100 * (our_peak / peak - 1):+.1f} % | "
        f"{100 * (played[1] / played[0] - 1):+.1f} % |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--models", nargs="*", default=sorted({model for _, model, _, _ in ROWS}))
    args = parser.parse_args()
    print(
        "| row | model | ranks x chunks | theirs [s] | ours [s] | step | peak | step, our play |\n" + "|---" * 8 + "|"
    )
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            name, with_prediction, _ = model.partition(" with m")
            write_config(name, Path(folder))
            if with_prediction:
                config = Path(folder) / "config.json"
                config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 1}))
            profile = Path(folder) / "profile.json"
            device = ["--device", "cuda:h100-80gb", "--sequence", "4096", "--model-arg", "dtype=bfloat16"]
            run = capslog("profile", "--hf", folder, *device, "-o", str(profile))
            if run.returncode:
                print(f"| - | {model} | {run.stderr.splitlines()[-1][:200]} |")
                continue
            for row in ROWS:
                if row[1] == model:
                    print(line(row, profile, args.microbatches), flush=True)


if __name__ == "__main__":
    main()
