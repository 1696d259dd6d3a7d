"""The help of the commands: options in panels, examples below each command, and one line per command."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

__all__ = [
    "BATCH",
    "DEVICES",
    "EXAMPLES",
    "FIRST_STEPS",
    "INFERENCE",
    "MODEL",
    "OUTPUT",
    "SEARCH",
    "SUMMARIES",
    "TRACE",
    "HelpCommand",
]

# panels of options, in the order of a command's help; an option without a panel is under "Options"
MODEL, DEVICES, BATCH, SEARCH = "Model", "Devices", "Batch", "Search"
INFERENCE, TRACE, OUTPUT = "Inference, with --for inference", "Spot machines, with --trace", "Output"
_PANELS = ("Arguments", MODEL, DEVICES, BATCH, SEARCH, INFERENCE, TRACE, OUTPUT, "Options")

FIRST_STEPS = """\b
First steps:
  capslog init                          copy configs and examples here
  capslog train configs/tiny.yaml       train ten steps on two workers
  capslog plan --model mine:net --input 'x=float32[8,3,224,224]' --devices 4
"""

SUMMARIES = {
    "init": "Copy configs, examples and launchers into a folder",
    "fits": "Say whether a model trains on these devices",
    "profile": "Measure or estimate memory and seconds of every layer",
    "variants": "Find the fastest kernels of every layer on this machine",
    "plan": "Find where to cut a model into stages that fit",
    "front": "Show the step time for every amount of memory",
    "largest": "Find the largest batch, image or sequence that fits",
    "compare": "Show planners side by side",
    "simulate": "Simulate a step of a plan, or a trace of preemptions",
    "export": "Write a plan or weights in the form of another system",
    "lint": "Judge a layout of another system beside our plan",
    "check": "Find what would stop a run or spoil its training",
    "train": "Profile, plan and train on this machine",
    "host": "Train on several machines that may come and go",
    "script": "Run a data-parallel program on workers that come and go",
    "morph": "Change the number of devices of a running training",
    "notice": "Announce to a running training that a host will leave",
    "evaluate": "Score the best checkpoint of a run",
    "predict": "Draw the predictions of a run on images",
    "report": "Write a page on a run",
}
"""The line of each command in `capslog --help`."""

EXAMPLES = {
    "init": ("capslog init", "capslog init myrun", "capslog init myrun --force"),
    "fits": (
        "capslog fits llama --devices '2x rtx4090'",
        "capslog fits mine:net --input 'x=float32[8,3,224,224]' --devices t4",
        "capslog fits --free",
    ),
    "profile": (
        "capslog profile configs/tiny.yaml --estimate -o profile.json",
        "capslog profile --model mine:net --input 'x=float32[8,3,224,224]'",
        "capslog profile --hf llama --device cuda:a100-80gb -o profile.json",
    ),
    "variants": (
        "capslog variants configs/tiny.yaml --numerics close",
        "capslog variants configs/tiny.yaml --numerics loose -o faster.yaml",
    ),
    "plan": (
        "capslog plan --model mine:net --input 'x=float32[8,3,224,224]' --devices 4",
        "capslog plan --hf llama --devices '2x a100-80gb' -o plan.json",
        "capslog plan --profile profile.json --devices 4 --capacity 16GiB",
    ),
    "front": (
        "capslog front --profile profile.json --devices 4 -o front.png",
        "capslog front --hf llama --devices '4x rtx4090'",
    ),
    "largest": (
        "capslog largest --hf llama --devices '4x rtx4090' sequence",
        "capslog largest configs/digits.yaml --capacity 2GiB microbatch",
    ),
    "compare": (
        "capslog compare configs/digits.yaml --estimate",
        "capslog compare --profile profile.json --devices 4 --planners budget,exact",
        "capslog compare --profile profile.json --devices 4 -o compared",
    ),
    "simulate": (
        "capslog simulate --profile profile.json --plan plan.json -o step",
        "capslog simulate configs/digits.yaml pipeline.bandwidth=1GiB/s",
        "capslog simulate --profile profile.json --trace spot.csv --devices 32",
    ),
    "export": (
        "capslog export plan.json --to torch-csv -o schedule.csv",
        "capslog export plan.json --to megatron --hf llama",
        "capslog export runs/digits --weights weights.safetensors",
    ),
    "lint": (
        "capslog lint 'Et*4|t*4|t*4|t*4L' --hf llama --devices '4x a100-80gb'",
        "capslog lint 16,16,16,13 --profile profile.json --devices 4 --plot layout.png",
        "capslog lint primus.yaml --from primus --hf llama --devices 8",
    ),
    "check": ("capslog check configs/digits.yaml", "capslog check configs/digits.yaml --json"),
    "train": (
        "capslog train configs/tiny.yaml",
        "capslog train configs/digits.yaml train.max_seconds=60",
        "capslog train configs/digits.yaml elastic.enabled=true pipeline.devices=3",
    ),
    "host": (
        "capslog host configs/digits.yaml --serve 10.0.0.5:29500 --nnodes 2",
        "capslog host configs/digits.yaml --store 10.0.0.5:29500",
    ),
    "script": ("capslog script train.py --epochs 3", "capslog script --nproc 4 train.py"),
    "morph": ("capslog morph runs/digits --devices 3",),
    "notice": (
        "capslog notice runs/digits --member vm-2 --seconds 30",
        "capslog notice runs/digits --host a --hint",
    ),
    "evaluate": ("capslog evaluate runs/digits",),
    "predict": ("capslog predict runs/digits a.jpg b.jpg -o pictures",),
    "report": ("capslog report runs/digits",),
}
"""Lines that show the use of each command."""


class HelpCommand(TyperCommand):
    """A command whose help shows its options in panels, and examples below them."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for every panel that has an argument or an option."""
        panels: dict[str, list[tuple[str, str]]] = {panel: [] for panel in _PANELS}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                panel = "Arguments" if parameter.param_type_name == "argument" else _panel_of(parameter)
                panels[panel].append(record)
        for panel, records in panels.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples."""
        if examples := EXAMPLES.get(self.name or ""):
            with formatter.section("Examples"):
                for line in examples:
                    formatter.write(f"  {line}\n")


def _panel_of(parameter: Any) -> str:
    return getattr(parameter, "rich_help_panel", None) or "Options"
