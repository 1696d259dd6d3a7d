"""Bytes that the caching allocator reserves and needs beyond the peak: replayed, published by others, and recorded."""

from __future__ import annotations

import json
import lzma
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from common import TransformerSize, token_loss, transformer_chain
from torch import Tensor

from varuna_capslog.api.fits import Question
from varuna_capslog.base.gpus import parse_devices
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.memory.costs import Headroom
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.workload import Workload
from varuna_capslog.profiling import rehearsal
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.estimate import StageEstimator
from varuna_capslog.profiling.estimation.allocator import (
    LARGE_SEGMENT,
    AllocatorPeaks,
    CachingAllocator,
    Event,
    least_capacity,
    replay,
)
from varuna_capslog.profiling.estimation.headroom import run_of_steps
from varuna_capslog.profiling.estimation.hollow import fake_step
from varuna_capslog.start.ordinary import with_choices_of

__all__ = ["compare_ranks", "compare_traces", "print_pairs", "replay_transformers"]

TRACES = Path(__file__).with_name("traces.json.xz")
SIZES = (
    TransformerSize(blocks=8, dim=768, sequence=1024, microbatch_size=4, heads=12, vocabulary=50304),
    TransformerSize(blocks=6, dim=2048, sequence=1024, microbatch_size=2, heads=16, vocabulary=32000),
    TransformerSize(blocks=4, dim=4096, sequence=2048, microbatch_size=1, heads=32, vocabulary=32000),
)


def print_pairs(folder: Path) -> list[float]:
    """Return reserved / allocated bytes of the runs that print both."""
    file = folder / "gpu-truth" / "bridge-cards-fit.json"
    pairs = []
    print("| model | run | allocated GiB | reserved GiB | ratio |\n|---|---|---|---|---|")
    for row in json.loads(file.read_text())["rows"]:
        if row["allocated_gib"] and row["reserved_gib"]:
            pairs.append(row["reserved_gib"] / row["allocated_gib"])
            numbers = f"{row['allocated_gib']:.1f} | {row['reserved_gib']:.1f} | {pairs[-1]:.3f}"
            print(f"| {row['model']} | {row['item']} | {numbers} |")
    print(f"{len(pairs)} pairs: {min(pairs):.3f} to {max(pairs):.3f}")
    return pairs


class Tokens(Workload):
    """Transformer whose microbatches all have one size."""

    name = "tokens"

    def __init__(self, size: TransformerSize) -> None:
        self.size = size

    def build_chain(self) -> Chain:
        return transformer_chain(self.size)

    def loss(self, outputs: Any, targets: Any, normalisers: Any) -> dict[str, Tensor]:
        return token_loss(outputs, targets, normalisers)

    def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
        return {"x": TensorSpec((microbatch_size, self.size.sequence), torch.int64)}

    def profile_targets(self, microbatch_size: int) -> tuple[Any, dict[str, float]]:
        shape = microbatch_size, self.size.sequence
        return torch.zeros(shape, dtype=torch.long), {"tokens": float(microbatch_size * self.size.sequence)}

    def train_data(self) -> Any:
        raise NotImplementedError


def replay_transformers() -> list[dict[str, Any]]:
    """Print reserved / predicted peak of two steps, of stages and of both ranks of a pipeline; return the rows."""
    print("| transformer | step | what | peak MiB | ratio | expandable |\n|---|---|---|---|---|---|")
    results = []
    for size in SIZES:
        for recompute, schedule in ((True, "varuna"), (False, "1f1b")):
            conditions = RunConditions(
                device="cuda", microbatch_size=size.microbatch_size, gpu="a100-80gb", recompute=recompute
            )
            estimator = StageEstimator(Tokens(size), conditions)
            end = len(estimator.chain)
            steps: list[tuple[str, Sequence[Event]]] = [
                (f"layers {first} to {stop - 1}", estimator.stage(first, stop).events)
                for first, stop in ((0, 1), (1, 2), (1, 3), (end - 2, end), (0, end))
            ]
            ranks = _rank_events(estimator, size, recompute, schedule)
            steps += [(f"rank {rank} of 2", events) for rank, events in enumerate(ranks)]
            cases = []
            for case, events in steps:
                peak, run = replay(events).allocated_bytes, run_of_steps([events], [0, 0])
                cases.append((case, peak, *(replay(run, rules).reserved_bytes / peak for rules in (False, True))))
            for case, peak, ratio, expandable in cases:
                how = f"{schedule}{', recompute' if recompute else ''}"
                results.append({"size": str(size), "step": how, "what": case, "ratio": ratio, "expandable": expandable})
                numbers = f"{peak / 2**20:.0f} | {ratio:.3f} | {expandable:.3f}"
                print(f"| {size.blocks} blocks, d={size.dim} | {how} | {case} | {numbers} |", flush=True)
    for rules in ("ratio", "expandable"):
        print(f"{rules}: {len(results)} rows, highest {max(row[rules] for row in results):.3f}")
    return results


def _rank_events(
    estimator: StageEstimator, size: TransformerSize, recompute: bool, schedule: str
) -> list[Sequence[Event]]:
    """Return the events of a step of each of two ranks."""
    steps: list[Sequence[Event]] = []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        steps.append((step := fake_step(*args, **kwargs))[1])
        return step

    end = len(estimator.chain)
    options = EngineOptions(size.num_microbatches, schedule=schedule, recompute=recompute)
    with mock.patch.object(rehearsal, "fake_step", recorded):
        rehearsal.rank_peaks(estimator, Layout.pipelines((0, end // 2), end), options)
    return steps


@dataclass(frozen=True)
class Trace:
    """Requests of a program on an H200 in order, and the peaks of its allocator.

    Attributes:
        before: bytes of earlier blocks at unknown addresses: workspaces of products.
        requests: bytes of an allocation, or -1 - n for the release of the n-th.
    """

    name: str
    expandable: bool
    before: Sequence[int]
    requests: Sequence[int]
    allocated: int
    reserved: int

    def replayed(self) -> AllocatorPeaks:
        """Return the peaks of these requests by the rules of `allocator`."""
        allocator, following = CachingAllocator(self.expandable), -len(self.before)
        for request in (*self.before, *self.requests):
            if request > 0:
                allocator.allocate(following, request)
                following += 1
            else:
                allocator.release(-1 - request)
        return allocator.peaks


def read_traces() -> list[Trace]:
    """Read the traces stored beside this file."""
    kept = json.loads(lzma.decompress(TRACES.read_bytes()))
    traces = []
    for row in kept["rows"]:
        requests = kept["requests"][row.pop("requests")]
        traces.append(Trace(requests=requests, **row))
    return traces


def compare_traces() -> list[dict[str, Any]]:
    """Compare the reserved bytes of replayed requests with the H200's; print a table and return its rows."""
    print("| program | segments | requests | allocated | reserved MB | measured MB | error |")
    print("|---|---|---|---|---|---|---|")
    results = []
    for trace in read_traces():
        peaks = trace.replayed()
        error = peaks.reserved_bytes / trace.reserved - 1
        off = "equal" if peaks.allocated_bytes == trace.allocated else f"{peaks.allocated_bytes - trace.allocated:+,} B"
        shown = "equal" if peaks.reserved_bytes == trace.reserved else f"{error:+.2%}"
        numbers = f"{peaks.reserved_bytes / 1e6:.1f} | {trace.reserved / 1e6:.1f}"
        rules = "expandable" if trace.expandable else "default"
        print(f"| {trace.name} | {rules} | {len(trace.requests)} | {off} | {numbers} | {shown} |")
        results.append({"name": trace.name, "rules": rules, "whole": not trace.before, "error": error})
    for from_start, words in ((True, "followed from their beginning"), (False, "followed after others")):
        errors = [row["error"] for row in results if row["whole"] is from_start]
        off = [f"{error:+.2%}" for error in sorted(errors) if error]
        print(f"{words}: {len(errors) - len(off)} of {len(errors)} equal, the others {', '.join(off)}")
    return results


_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "num_key_value_heads": 8}
_LLAMA |= {"max_position_embeddings": 8192, "vocab_size": 128256}
_FOLDERS: dict[str, tuple[dict[str, Any], str, int, int]] = {
    "8 layers of Llama-3-70B": (
        _LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 8},
        "2x h100-80gb",
        4096,
        8,
    ),
    "16 layers of Llama-3-8B": (
        _LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 16},
        "4x a100-80gb",
        4096,
        16,
    ),
    "4 layers of Mixtral": (
        {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "dtype": "bfloat16", "vocab_size": 32000}
        | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 4},
        "4x h100-80gb",
        4096,
        16,
    ),
    "GPT-2 XL": (
        {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50257}
        | {"n_embd": 1600, "n_head": 25, "n_layer": 48, "n_positions": 1024},
        "4x rtx4090",
        1024,
        32,
    ),
    "T5-large": (
        {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "vocab_size": 32128, "d_model": 1024}
        | {"d_ff": 4096, "d_kv": 64, "num_heads": 16, "num_layers": 24, "num_decoder_layers": 24}
        | {"decoder_start_token_id": 0},
        "4x a4000",
        512,
        32,
    ),
}
"""config.json, devices, tokens of a sequence, samples of a step."""
_VISION = {"convnext_base": "2x a4000", "vit_l_16": "2x a4000", "resnet101": "2x a4000", "swin_b": "4x a4000"}


def compare_ranks() -> list[dict[str, Any]]:
    """Compare what plans count for their ranks with the smallest device on which each rank's own step runs; print a
    table and return its rows.
    """
    import torchvision

    print("| model | devices | rank | allocated GiB | reserved | needed | counted beyond need |")
    print("|---|---|---|---|---|---|---|")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (fields, devices, sequence, batch) in _FOLDERS.items():
            path = Path(folder, name.replace(" ", "-"))
            path.mkdir()
            (path / "config.json").write_text(json.dumps(fields))
            question = Question(str(path), None, parse_devices(devices), sequence=sequence, batch=batch)
            results += _rank_rows(name, question)
    for name, devices in _VISION.items():
        sample = (torch.zeros(4, 3, 224, 224),)
        question = Question(getattr(torchvision.models, name)(), sample, parse_devices(devices), batch=64, microbatch=4)
        results += _rank_rows(name, question)
    over = [row["over"] for row in results]
    print(f"{len(results)} ranks: {min(over):+.1%} to {max(over):+.1%}")
    return results


def _rank_rows(name: str, question: Question) -> list[dict[str, Any]]:
    answer = question.answer()
    config = with_choices_of(answer.config, answer.plan)
    with mock.patch.object(rehearsal, "rank_peaks", rehearsal.rehearse_layout):  # whole steps, with their events
        ranks: Any = rehearsal.rehearse_plan(config, answer.plan, memo=answer.memo)
    headroom, rows = Headroom.of(answer.profile), list[dict[str, Any]]()
    known: set[tuple[int, int]] = set()
    for rank, step in enumerate(ranks):
        steps = run_of_steps([step.events], [0, 0])
        reserved, need = replay(steps).reserved_bytes, least_capacity([steps])
        if (step.peak_bytes, reserved) in known:
            continue
        known.add((step.peak_bytes, reserved))
        over = (headroom.reserved(step.peak_bytes) + LARGE_SEGMENT) / need - 1
        rows.append({"model": name, "rank": rank, "over": over})
        ratios = f"{reserved / step.peak_bytes:.3f} | {need / step.peak_bytes:.3f} | {over:+.1%}"
        kinds = question.devices.kinds
        print(f"| {name} | {len(kinds)}x {kinds[0]} | {rank} | {step.peak_bytes / 2**30:.2f} | {ratios} |", flush=True)
    return rows
