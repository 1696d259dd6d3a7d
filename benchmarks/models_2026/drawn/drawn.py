"""Plans each of the 60 drawn models through the command line, and compares the plan's layers with the model.

A row is `capslog plan --hf FOLDER` or `--model small_models:model`, for two H100 of 80 GB, in a process of its own with
an empty cache and a limit of time. Then, uncounted: parameters of all layers, and torch's count of FLOPs of a forward
and backward of the layers beside those of the module run whole, both on fake tensors of the meta device.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from draw_models import DRAWN, read_drawn
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from varuna_capslog import cli
from varuna_capslog.model.capture.export import input_tensors, named_leaves
from varuna_capslog.model.capture.python_calls import PythonCall
from varuna_capslog.model.known_values import KnownValues
from varuna_capslog.profiling.estimate import StageEstimator

HEADINGS = ("library", "model", "answer", "layers", "processor", "GiB", "parameters", "FLOPs")
_PICTURE = "pixel_values=float32[1,3,224,224]"
INPUTS: dict[str, list[str]] = {kind: [_PICTURE] for kind in ("resnet", "slanet", "dinov3_convnext", "tipsv2_dpt")} | {
    "pp_ocrv6_small_det": ["pixel_values=float32[1,3,640,640]"],
    "rf_detr": ["pixel_values=float32[1,3,560,560]"],
    "vitmatte": ["pixel_values=float32[1,4,224,224]"],
}
"""Model type -> the inputs that `--hf` asks for by its sentence."""
SEQUENCES = {"owlvit": 16, "clipseg": 77}
"""Model type -> its longest text, where that is below 128 tokens."""
REPLACED: dict[str, str] = {"cohere_compass": "transformers cannot build it from its class's default config"}
"""Name of a drawn model that its own library cannot build -> why."""


def main() -> None:
    """Run the rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="libraries, or names of models")
    parser.add_argument("--limit", type=int, default=60, help="seconds of the processor for one row")
    parser.add_argument("--results", type=Path, help="file to which a line of JSON is added for each row")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.row:
        _child(*flags.row)
        return
    print("| " + " | ".join(HEADINGS) + " |\n" + "|---" * len(HEADINGS) + "|")
    counts: dict[str, int] = {}
    for library, name in rows():
        if flags.only and not {library, name} & set(flags.only):
            continue
        row = {"library": library, "model": name, **_measured(library, name, flags.limit)}
        kind = row["answer"].split(":")[0]
        counts[kind] = counts.get(kind, 0) + 1
        print("| " + " | ".join(str(row.get(key, "")) for key in HEADINGS) + " |", flush=True)
        if flags.results:
            with flags.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    print("\n" + ", ".join(f"{kind}: {count}" for kind, count in sorted(counts.items())))


def rows() -> list[tuple[str, str]]:
    """Return library and name of the 60 models: the first of each shuffle, without the replaced ones."""
    return [
        (library, name)
        for library, names in read_drawn().items()
        for name in [name for name in names if name not in REPLACED][: DRAWN[library][0]]
    ]


def _measured(library: str, name: str, limit: int) -> dict[str, Any]:
    """Return the row of one model, from a process that ends after `limit` seconds of the processor."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--row", library, name]
        surroundings = {**os.environ, "XDG_CACHE_HOME": folder, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

        def limit_processor() -> None:
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))

        run = subprocess.run(
            command, capture_output=True, text=True, env=surroundings, cwd=folder, preexec_fn=limit_processor
        )
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    if lines:
        row: dict[str, Any] = json.loads(lines[-1])
        return row
    if run.returncode < 0:
        return {"answer": f"time: not done in {limit} s of the processor"}
    return {"answer": f"crashed: {run.stderr[-300:]}".replace("\n", " ")}


def _child(library: str, name: str) -> None:
    """Plan in this process, and print the row as JSON: first the plan, then again with what was compared."""
    folder = Path(tempfile.mkdtemp())
    here = str(Path(__file__).parent)
    sys.path.insert(0, here)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    if library == "transformers":
        from small_models import write_folder

        write_folder(name, folder)
        inputs = [part for text in INPUTS.get(name, []) for part in ("--input", text)]
        model = ["--hf", str(folder), *(inputs or ("--sequence", str(SEQUENCES.get(name, 128))))]
    else:
        model = ["--model", "small_models:model", "--model-arg", f"library={library}", "--model-arg", f"name={name}"]
    row = _planned(model, folder / "plan.json")
    print(json.dumps(row), flush=True)
    chain = _CHAINS[0] if _CHAINS else None
    if row["answer"] == "planned" and chain is not None:
        row |= _compared(chain)
        print(json.dumps(row), flush=True)


_CHAINS: list[Any] = []
"""The chain that the plan is of, and the workload that it is from."""


def _planned(model: list[str], plan: Path) -> dict[str, Any]:
    """Run `capslog plan` on a model, and keep the chain that it makes."""
    make: Callable[..., Any] = StageEstimator.__init__

    def keeps(estimator: Any, *args: Any, **kwargs: Any) -> None:
        make(estimator, *args, **kwargs)
        if not _CHAINS:
            _CHAINS.extend([estimator.chain, estimator.workload])

    StageEstimator.__init__ = keeps
    sys.argv = ["capslog", "plan", *model, "--devices", "2", "--device", "cuda:h100-80gb", "-o", str(plan)]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        cli.main()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    row = {"processor": f"{usage.ru_utime + usage.ru_stime:.1f}", "GiB": f"{usage.ru_maxrss / (1 << 20):.2f}"}
    if plan.exists():
        return {"answer": "planned", "layers": len(_CHAINS[0]), **row}
    sentence = " ".join(said.getvalue().split("capslog: ")[-1].split())[:500]
    return {"answer": f"refused: {sentence}", **row}


def _compared(chain: Any) -> dict[str, Any]:
    """Return whether the layers hold all parameters, and torch's FLOPs of layers and module."""
    workload = _CHAINS[1]
    made = workload._made()  # as the capture gets it: the model and its example
    model = made[0] if isinstance(made, tuple) else made
    held = {id(parameter): parameter.numel() for parameter in chain.named_parameters().values()}
    wanted = sum(parameter.numel() for parameter in model.parameters())
    row = {"parameters": f"{wanted:,}" if sum(held.values()) == wanted else f"{sum(held.values()):,} of {wanted:,}"}
    calls = (part for layer in chain.layers for part in layer.module.modules() if isinstance(part, PythonCall))
    by_values = any(call.shape.values for call in calls)
    try:
        arguments = workload._examples(1.0)
        with FakeTensorMode(allow_non_fake_inputs=True), KnownValues() as known:

            def run_whole() -> Mapping[str, Any]:
                with known.learning() if by_values else contextlib.nullcontext():
                    return dict(named_leaves(model(**_fake(arguments, known))))

            whole = _flops(model, run_whole, chain.outputs)
            layers = nn.ModuleList(layer.module for layer in chain.layers)
            inputs = {
                key: leaf for name, value in arguments.items() for key, leaf in input_tensors(name, value).items()
            }
            parts = _flops(layers, lambda: chain.run(_fake(inputs, known)), chain.outputs)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return {**row, "FLOPs": f"not counted ({type(error).__name__}, {Path(last.filename).name}:{last.lineno})"}
    return {**row, "FLOPs": f"{whole:.3e}" + (f" {100 * (parts / whole - 1):+.3g} %" if parts != whole else "")}


def _fake(arguments: Mapping[str, Any], known: KnownValues) -> dict[str, Any]:
    """Return inputs without values; `known` has them, for code that decides by them."""

    def fake(tensor: Tensor) -> Tensor:
        made = torch.empty_like(tensor)
        known.add(made, tensor)
        return made

    return pytree.tree_map_only(Tensor, fake, dict(arguments))


def _flops(module: nn.Module, run: Callable[[], Mapping[str, Any]], outputs: Sequence[str]) -> float:
    """Return torch's FLOPs of a forward, and of the backward from the sum of those outputs that the chain has."""
    module.to_empty(device="cpu").train()
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    counted = {torch.ops.aten._grouped_mm: _of_experts, fused: _of_attention}
    counted[torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward] = _of_its_backward
    with FlopCounterMode(display=False, custom_mapping=counted) as counter:
        made = run()
        leaves = [made[name] for name in outputs if isinstance(made.get(name), Tensor) and made[name].requires_grad]
        sum((leaf.float().sum() for leaf in leaves), torch.zeros(())).backward()
    return float(counter.get_total_flops())


def _of_attention(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _of_its_backward(output: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **k: Any) -> int:
    return sdpa_backward_flop_count(output, query, key, value)


def _of_experts(first: Any, second: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Return FLOPs of a product of experts: every row of the first meets one expert of the second."""
    batch = first[0] if len(first) == len(second) == 3 else 1
    return int(2 * batch * first[-2] * first[-1] * second[-1])


if __name__ == "__main__":
    main()
