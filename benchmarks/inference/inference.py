"""Compares inference plans with cuts by parameter bytes: the peak of every stage's forward, by the CPU's allocator.

    python benchmarks/inference/inference.py

The cuts by parameter bytes are those of accelerate (`infer_auto_device_map` within `get_balanced_memory`, as
`device_map="auto"` does); it must be installed. Each stage holds its weights, and the caches of the batch as tensors,
and runs one microbatch without graphs inside an `engine.probe.PeakProbe`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import infer_auto_device_map
from accelerate.utils import get_balanced_memory
from torch import Tensor, nn

from varuna_capslog.base.units import format_bytes
from varuna_capslog.engine.probe import PeakProbe
from varuna_capslog.memory.costs import NEVER, RangeCosts
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.inference_model import InferenceModel
from varuna_capslog.model.model_workload import ModelSection
from varuna_capslog.model.names import names_of
from varuna_capslog.planners.exact import exact_cuts
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.solve import solve
from varuna_capslog.profiles.conditions import CACHE_BYTES
from varuna_capslog.profiles.record import Profile
from varuna_capslog.profiling.inference import Served, estimate_inference


def llama() -> nn.Module:
    """Return a small decoder; all logits are returned, as for scoring text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192, hidden_size=256, intermediate_size=688, num_hidden_layers=12, num_attention_heads=8,
        num_key_value_heads=4,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def convnext() -> nn.Module:
    """Return a ConvNeXt: large activations and few parameters first, the reverse at the end."""
    from torchvision.models import convnext_tiny

    return convnext_tiny()


def gpt2() -> nn.Module:
    """Return a GPT-2: caches are large without grouped heads, and the last layer shares its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=384, n_layer=8, n_head=6, vocab_size=8192))


@dataclass(frozen=True)
class Case:
    """Row of the table: a model, a microbatch of its inputs, and the number of sequences served together."""

    factory: str
    inputs: str
    block: str
    microbatch: int
    batch: int
    devices: int


CASES = (
    Case("llama", "input_ids=int64[1,512]:8192", "LlamaDecoderLayer", 4, 32, 4),
    Case("gpt2", "input_ids=int64[1,512]:8192", "GPT2Block", 4, 64, 4),
    Case("convnext", "x=float32[1,3,288,288]", "CNBlock", 8, 8, 4),
)


def cuts_by_parameters(model: nn.Module, chain: Chain, case: Case) -> tuple[int, ...]:
    """Return the first layer of each device by accelerate's map; the first parameter of a layer decides its device."""
    blocks = [case.block]
    memory = get_balanced_memory(model, dict.fromkeys(range(case.devices), 1 << 50), no_split_module_classes=blocks)
    places = infer_auto_device_map(model, memory, no_split_module_classes=blocks)
    held = names_of(chain).held
    assert held is not None
    cuts, last = [0], case.devices  # it may leave devices empty
    for layer, held_names in enumerate(held):
        if not held_names.parameters:
            continue
        # the device of the longest name in the map that the parameter lies below
        devices = [
            places[key] for key in sorted(places, key=len) if f"{held_names.parameters[0]}.".startswith(f"{key}.")
        ]
        if devices[-1] > last:
            cuts.append(layer)
        last = devices[-1]
    return tuple(cuts)


def best_by_parameters(profile: Profile, devices: int) -> tuple[int, ...]:
    """Return the cuts that minimize the parameter bytes of the largest stage."""
    sizes = [layer.parameter_bytes or 0 for layer in profile.layers]
    ranges = [
        [sum(sizes[first:end]) if end > first else NEVER for end in range(len(sizes) + 1)]
        for first in range(len(sizes))
    ]
    return tuple(exact_cuts(RangeCosts(np.array(ranges)), devices))


def measured(chain: Chain, model: InferenceModel, profile: Profile, cuts: tuple[int, ...], case: Case) -> list[int]:
    """Return the peak of each stage."""
    values: dict[str, Tensor] = {name: spec.zeros() for name, spec in model.profile_inputs(case.microbatch).items()}
    caches, peaks = profile.conditions[CACHE_BYTES], []
    for first, end in zip(cuts, (*cuts[1:], len(chain)), strict=True):
        modules = [layer.module.eval() for layer in chain.layers[first:end]]
        held = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        held += [torch.zeros(size * case.batch, dtype=torch.uint8) for size in caches[first:end] if size]
        with torch.no_grad(), PeakProbe(torch.device("cpu"), held) as probe:
            # cloned inside the probe, which sees no release of tensors that existed before
            values = chain.run_stage(first, end, {name: tensor.clone() for name, tensor in values.items()})
        peaks.append(probe.peak_bytes)
        del held
    return peaks


def main() -> None:
    """Print a row per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(case.factory for case in CASES))
    chosen = parser.parse_args().cases.split(",")
    torch.set_num_threads(1)
    print("| model | largest peak: accelerate | best by parameters | ours | less | worst error | plan in |")
    print("|---|---|---|---|---|---|---|")
    for case in (case for case in CASES if case.factory in chosen):
        torch.manual_seed(0)
        settings = ModelSection(factory=f"inference:{case.factory}", inputs=[case.inputs])
        model = InferenceModel(settings, case.microbatch)
        began = time.perf_counter()
        profile = estimate_inference(model, Served(case.microbatch))
        ours = solve(Problem.of_serving(profile, case.devices, case.batch), "exact")
        seconds = time.perf_counter() - began
        chain = model.build_chain()
        cuts = [
            cuts_by_parameters(globals()[case.factory](), chain, case),
            best_by_parameters(profile, case.devices),
            ours.cut_list,
        ]
        guesses = [
            solve(Problem.of_serving(profile, len(cut_list), case.batch, cuts=cut_list), "exact").stage_bytes
            for cut_list in cuts
        ]
        real = [measured(chain, model, profile, cut_list, case) for cut_list in cuts]
        errors = [
            (guess - truth) / truth
            for guess_row, row in zip(guesses, real, strict=True)
            for guess, truth in zip(guess_row or (), row, strict=True)
        ]
        cells = [f"{format_bytes(max(row))} {list(cut_list)}" for row, cut_list in zip(real, cuts, strict=True)]
        print(
            f"| {case.factory} | {' | '.join(cells)} | {1 - max(real[-1]) / max(real[0]):.1%} | "
            f"{max(errors, key=abs):+.2%} of {len(errors)} stages | {seconds:.1f} s |",
            flush=True,
        )


if __name__ == "__main__":
    main()
