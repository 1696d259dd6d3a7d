"""Step overhead of `fit` on one device, beside `torch.utils.checkpoint` per block and torch's own memory budget.

measure: 2-layer models, real steps on this machine. Peaks are those of the CPU allocator; seconds are ratios of
    interleaved runs (processor time) to the module without recomputation.
rotor: the same models and deeper ones, estimated: rotor's optimum (nested segments) beside flat segments.
floors: static bytes of these models, which no choice changes, and the smallest budget within which `fit` stays.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torchvision
import transformers
from common import interleave, write_json
from rotor import Layers, best_seconds
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from varuna_capslog import fit
from varuna_capslog.base.errors import DoesNotFit
from varuna_capslog.engine.probe import PeakProbe
from varuna_capslog.fitting.module import _differentiated, _leaving
from varuna_capslog.fitting.search import Loop, StepSearch
from varuna_capslog.model.chain import Chain, TensorSpec

SHARES = (0.8, 0.6, 0.4)
ACTIVATIONS = (0.5, 0.3, 0.2, 0.15, 0.1, 0.07)
"""Shares of the peak's activations without recomputation: without parameters, gradients and moments."""
TORCH_BUDGETS = (1.0, 0.6, 0.4, 0.2, 0.0)


class Logits(nn.Module):
    """Wrapper of a model of transformers that returns the logits."""

    def __init__(self, inner: nn.Module, blocks: str) -> None:
        super().__init__()
        self.inner, self.blocks = inner, blocks

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map token ids [batch, tokens] to logits."""
        logits: Tensor = self.inner(input_ids=input_ids, return_dict=False)[0]
        return logits


def gpt2(layers: int, width: int, tokens: int, batch: int) -> tuple[nn.Module, Tensor]:
    config = transformers.GPT2Config(
        vocab_size=1000,
        n_positions=tokens,
        n_embd=width,
        n_layer=layers,
        n_head=max(1, width // 64),
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    ids = torch.randint(0, 1000, (batch, tokens))
    return Logits(transformers.GPT2LMHeadModel(config), "inner.transformer.h"), ids


def bert(layers: int, width: int, tokens: int, batch: int) -> tuple[nn.Module, Tensor]:
    config = transformers.BertConfig(
        vocab_size=1000, max_position_embeddings=tokens, hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64), intermediate_size=4 * width,
    )  # fmt: skip
    return Logits(transformers.BertForMaskedLM(config), "inner.bert.encoder.layer"), torch.randint(
        0, 1000, (batch, tokens)
    )


def vit(layers: int, width: int, tokens: int, batch: int) -> tuple[nn.Module, Tensor]:
    side = 16 * round(tokens**0.5)
    model = torchvision.models.VisionTransformer(
        side, 16, layers, max(1, width // 64), width, 4 * width, dropout=0.1, num_classes=100
    )
    model.blocks = "encoder.layers"
    return model, torch.randn(batch, 3, side, side)


MODELS: dict[str, Callable[..., tuple[nn.Module, Tensor]]] = {"GPT-2": gpt2, "BERT": bert, "ViT": vit}
CUTS = {
    "GPT-2": ("ln_1", "attn", "ln_2", "mlp"),
    "BERT": ("attention", "intermediate", "output"),
    "ViT": ("ln_1", "self_attention", "dropout", "ln_2", "mlp"),
}


def loss_of(logits: Tensor) -> Tensor:
    return logits.float().logsumexp(-1).mean()


def cut_points(name: str, model: nn.Module) -> list[str]:
    """Return cut points before each part of each block, and before the module after the blocks."""
    blocks, parts = model.get_submodule(model.blocks), CUTS[name]
    return [f"{model.blocks}.{block}.{part}" for block, _ in blocks.named_children() for part in parts]


def stepper(module: nn.Module, x: Tensor, run: Any = None) -> Callable[[], None]:
    def step() -> None:
        module.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        outputs = (module if run is None else run)(x)
        loss_of(outputs).backward()

    return step


def peak_of(module: nn.Module, x: Tensor, step: Callable[[], None]) -> int:
    """Return the peak bytes of a step, after a first one that compiles or fits."""
    step()
    module.zero_grad(set_to_none=True)
    moments = [torch.zeros_like(parameter) for parameter in module.parameters() for _ in range(2)]
    with PeakProbe(torch.device("cpu"), [*module.parameters(), *module.buffers(), *moments, x]) as probe:
        step()
    return probe.peak_bytes


class Checkpointed(nn.Module):
    """Block under activation checkpointing."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure peaks, predictions and time ratios of a model under `fit`, checkpointing and torch's budgets."""
    torch.manual_seed(0)
    model, x = MODELS[name](2, arguments.width, arguments.tokens, arguments.batch)
    model.train()
    plain = copy.deepcopy(model)
    steps = {"keep": stepper(plain, x)}
    peaks: dict[str, Any] = {"keep": peak_of(plain, x, steps["keep"])}
    predicted, refused, chosen = {}, {}, {}
    keep = peaks["keep"]
    for share in SHARES:
        trial, label = copy.deepcopy(model), f"fit {share:.0%}"
        try:
            fitted = fit(trial, (x,), int(share * keep), loss=loss_of, cut_points=cut_points(name, trial))
        except DoesNotFit as error:
            refused[label] = str(error)
            least = int(str(error).partition("smallest budget that does is ")[2].partition(" ")[0])
            label = f"fit {least / keep:.1%}"
            trial = copy.deepcopy(model)
            fitted = fit(trial, (x,), least, loss=loss_of, cut_points=cut_points(name, trial))
        predicted[label] = fitted.fits[0].peak_bytes
        chosen[label] = (
            [(interval.first, interval.end) for interval in fitted.fits[0].intervals],
            len(fitted.fits[0].names),
        )
        steps[label] = stepper(fitted, x)
        peaks[label] = peak_of(fitted, x, steps[label])
    trial = copy.deepcopy(model)
    blocks = trial.get_submodule(trial.blocks)
    for key, block in list(blocks._modules.items()):
        blocks._modules[key] = Checkpointed(block)
    steps["checkpoint per block"] = stepper(trial, x)
    peaks["checkpoint per block"] = peak_of(trial, x, steps["checkpoint per block"])
    timings = interleave(steps, arguments.rounds, warmup=2)
    ratios = {label: _ratio(times, timings["keep"]) for label, times in timings.items()}
    for budget in TORCH_BUDGETS if arguments.compile else ():
        label = f"torch budget {budget}"
        torch._dynamo.reset()  # else the compiled program of another budget is used
        with torch._functorch.config.patch(activation_memory_budget=budget, enable_autograd_cache=False):
            try:
                trial = copy.deepcopy(model)
                step = stepper(trial, x, torch.compile(trial, backend="aot_eager_decomp_partition", dynamic=False))
                peaks[label] = peak_of(trial, x, step)
            except Exception as error:
                refused[label] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                continue
            timings |= (pair := interleave({label: step, "again": steps["keep"]}, arguments.rounds, warmup=1))
            ratios[label] = _ratio(pair[label], pair["again"])
    seconds = {label: statistics.median(wall for wall, _ in times) for label, times in timings.items()}
    return {
        "peak_bytes": peaks, "predicted_bytes": predicted, "ratio": ratios, "seconds": seconds, "refused": refused,
        "intervals": chosen,
    }  # fmt: skip


def _ratio(times: list[tuple[float, float]], base: list[tuple[float, float]]) -> float:
    """Return the median ratio of processor seconds, round by round."""
    return statistics.median(run[1] / reference[1] for run, reference in zip(times, base, strict=True))


def _search_of(name: str, layers: int, device: str, sizes: tuple[int, int, int]) -> StepSearch:
    """Return `fit`'s search, on estimates for a device."""
    with torch.device("meta"):
        model, x = MODELS[name](layers, *sizes)
    x = torch.zeros(x.shape, dtype=x.dtype)
    model.train()
    points = cut_points(name, model) if layers <= 2 else None
    chain = Chain.from_module(model, points, (x,), evaluates=False)
    searched = Chain([*chain.layers, _leaving(chain)], chain.inputs, chain.outputs, name)
    reads = {chain.inputs[0]: TensorSpec.of(x)}
    return StepSearch(searched, reads, _differentiated(chain, loss_of), torch.device(device), Loop())


def floor_row(name: str, layers: int, arguments: argparse.Namespace, sizes: tuple[int, int, int]) -> dict[str, Any]:
    """Return lower bounds of a step's memory, as shares of the peak without recomputation: the static bytes, which no
    choice changes, and the smallest budget that `fit` can meet.
    """
    search = _search_of(name, layers, arguments.device, sizes)
    keep, (least, _) = search.peak_bytes(()), search._least()
    return {"model": name, "layers": layers, "floor": search.static_bytes / keep, "smallest": least / keep}


def rotor_rows(
    name: str, layers: int, arguments: argparse.Namespace, sizes: tuple[int, int, int]
) -> list[dict[str, Any]]:
    """Return seconds of nested and flat segments relative to no recomputation, at shares of that step's peak."""
    search = _search_of(name, layers, arguments.device, sizes)
    ranges, profile, end = search._ranges, search._profile, search._end
    forward, backward = (profile.column(f"{way}_seconds")[:end] for way in ("forward", "backward"))
    cuts = list(ranges.crossing[: end + 1])
    saved = [max(cuts[k + 1], ranges.saved(k, k + 1) - cuts[k] + cuts[k + 1]) for k in range(end)]
    more_f = [max(0, ranges.forward(k, k + 1) - cuts[k] - saved[k]) for k in range(end)]
    more_b = [
        max(0, ranges.backward(k, k + 1).peak - ranges.saved(k, k + 1) - ranges.gradient[k + 1] - cuts[k])
        for k in range(end)
    ]
    numbers = Layers(forward, backward, cuts, saved, more_f, more_b)
    keep, rows = search.peak_bytes(()), []
    base, static = sum(forward) + sum(backward), search.static_bytes
    budgets = [int(share * keep) for share in SHARES]
    if layers > 2:
        budgets += [static + int(share * (keep - static)) for share in ACTIVATIONS]
    inner = [max(1, budget - static - cuts[0]) for budget in budgets]
    nested, flat = (best_seconds(numbers, inner, kind) for kind in (False, True))
    for budget, *optima in zip(budgets, nested, flat, strict=True):
        row: dict[str, Any] = {"model": name, "layers": layers, "share": budget / keep}
        row["activations"] = (budget - static) / (keep - static)
        seconds = [None if optimum == float("inf") else optimum / base for optimum in optima]
        row |= dict(zip(("rotor", "flat"), seconds, strict=True))
        try:
            row["fit"] = 1 + search.fit(budget).again_seconds / base
        except DoesNotFit:
            row["fit"] = None
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "rotor", "floors"])
    parser.add_argument("--models", default="GPT-2,BERT,ViT")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=196)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--device", default="cpu", help="rotor, floors: what is estimated")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = arguments.models.split(",")
    if arguments.what == "measure":
        result: dict[str, Any] = {}
        for name in names:
            result[name] = measured = measure(name, arguments)
            keep = measured["peak_bytes"]["keep"]
            print(f"\n{name}: keep {keep / 2**20:.1f} MiB, {measured['seconds']['keep']:.3f} s\n")
            print("| way | peak, share of keep | predicted / measured | seconds, ratio |\n|---|---|---|---|")
            for label, peak in measured["peak_bytes"].items():
                predicted = measured["predicted_bytes"].get(label)
                text = "" if predicted is None else f"{predicted / peak:.4f}"
                print(f"| {label} | {peak / keep:.3f} | {text} | {measured['ratio'][label]:.3f} |")
            for label, why in measured["refused"].items():
                print(f"{label}: {why}")
            print(measured["intervals"], flush=True)
        write_json(arguments.json, {"models": result})
        return
    rows: list[dict[str, Any]] = []
    for name in names:
        shapes = {
            2: (arguments.width, arguments.tokens, arguments.batch),
            24: (1024, 512 if name != "ViT" else 196, 4 if name != "ViT" else 16),
        }
        for layers, sizes in shapes.items():
            if arguments.what == "floors":
                rows.append(floor_row(name, layers, arguments, sizes))
            else:
                rows += rotor_rows(name, layers, arguments, sizes)
    if arguments.what == "floors":
        print("| model | blocks | static floor | smallest budget |\n|---|---|---|---|")
        for row in rows:
            print(f"| {row['model']} | {row['layers']} | {row['floor']:.1%} | {row['smallest']:.1%} |")
        write_json(arguments.json, {"rows": rows})
        return
    print("| model | blocks | of the peak | of activations | fit | flat | rotor |\n|---|---|---|---|---|---|---|")
    for row in rows:
        shown = [("-" if row[key] is None else f"{row[key]:.3f}") for key in ("fit", "flat", "rotor")]
        parts = [f"{row[key]:.0%}" if row[key] > 0 else "-" for key in ("share", "activations")]
        print(f"| {row['model']} | {row['layers']} | {' | '.join(parts + shown)} |")
    write_json(arguments.json, {"rows": rows})


if __name__ == "__main__":
    main()
