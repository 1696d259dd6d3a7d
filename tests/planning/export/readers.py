"""Readers of the exported forms, written from the target systems' documentation and not from our exporters.

Each gives back which decoder blocks a stage or a rank holds, and refuses what the target's rules refuse.
"""

from __future__ import annotations

import ast
import copy
import re
from itertools import pairwise
from typing import Any

import yaml
from torch import nn


def megatron_layout(text: str, ranks: int, num_layers: int) -> dict[tuple[int, int], list[str]]:
    """Return (pipeline rank, virtual rank) -> the parts that it builds: "embedding", "decoder 0", ..., "loss".

    By the user guide of Megatron Core, "Custom Pipeline Model Parallel Layout": stages split by |, E, t and L, x*n and
    (...)*n, commas without meaning; stage number = virtual rank * ranks + rank.
    """

    def parse(at: int, closing: bool) -> tuple[str, int]:
        layout = ""
        while at < len(text):
            if text[at] == ")":
                assert closing, "a ) without a ("
                return layout, at + 1
            assert text[at] in "Etm|(L,", f"unknown character {text[at]!r}"
            piece, at = parse(at + 1, True) if text[at] == "(" else (text[at].strip(","), at + 1)
            count = ""
            if at < len(text) and text[at] == "*":
                at += 1
                while at < len(text) and text[at].isdigit():
                    count, at = count + text[at], at + 1
            layout += piece * int(count or 1)
        assert not closing
        return layout, at

    assert text.endswith("\n")
    text = text[:-1]
    stages = parse(0, False)[0].split("|")
    assert len(stages) % ranks == 0
    flat = "".join(stages)
    assert (flat[0], flat[-1]) == ("E", "L")
    assert [flat.count(letter) for letter in "EtL"] == [1, num_layers, 1]
    built, decoder = {}, 0
    for number, stage in enumerate(stages):
        row = []
        for letter in stage:
            row.append({"E": "embedding", "L": "loss", "t": f"decoder {decoder}"}[letter])
            decoder += letter == "t"
        built[number % ranks, number // ranks] = row
    return built


def layer_partition(text: str, variable: str, ranks: int, num_layers: int) -> list[range]:
    """Return the decoder layers of each pipeline rank, read from vLLM's or SGLang's environment variable."""
    name, _, value = text.removesuffix("\n").partition("=")
    assert name == variable
    counts = [int(part) for part in value.split(",")]
    assert len(counts) == ranks
    assert sum(counts) == num_layers
    return [range(sum(counts[:rank]), sum(counts[: rank + 1])) for rank in range(ranks)]


def primus_split(text: str, ranks: int, num_layers: int) -> tuple[dict[tuple[int, int], list[int]], list[int]]:
    """Return (pipeline rank, virtual rank) -> the decoder layers that it builds, and the recomputed layers.

    By Primus's configs, whose `pipeline_model_parallel_layout` is Megatron's; `recompute_layer_ids` counts the layers
    of the whole model.
    """
    settings = yaml.safe_load(text)
    assert ranks > 1
    stages = megatron_layout(settings["pipeline_model_parallel_layout"] + "\n", ranks, num_layers)
    built = {
        place: [int(piece.split()[1]) for piece in row if piece.startswith("decoder")] for place, row in stages.items()
    }
    again = settings.get("recompute_layer_ids", [])
    if again:
        assert settings["recompute_granularity"] == "full"
        assert settings["recompute_method"] is None
        assert set(again) <= set(range(num_layers))
    return built, again


def uneven_ends(text: str, ranks: int, num_layers: int) -> list[range]:
    """Return the decoder layers of each rank by Megatron's rule: the stages between the first and the last share evenly
    what these leave.
    """
    first, last = (int(part.split("=")[-1]) for part in re.findall(r"(?:=| )\d+", text.replace("\n", " ")))
    between = num_layers - first - last
    assert between % (ranks - 2 or 1) == 0
    assert ranks > 2 or between == 0
    counts = [first, *[between // (ranks - 2)] * (ranks - 2), last] if ranks > 2 else [first, last]
    return [range(sum(counts[:rank]), sum(counts[: rank + 1])) for rank in range(ranks)]


def diffusion_pipe_entries(text: str, num_layers: int) -> list[list[str]]:
    """Return the entries of each stage: diffusion-pipe cuts the list of initial layer, blocks and final layer behind
    the numbers of `partition_split`.
    """
    settings = {key: ast.literal_eval(setting) for key, setting in (row.split(" = ") for row in text.splitlines())}
    assert settings["partition_method"] == "manual"
    entries = ["initial", *(f"block {number}" for number in range(num_layers)), "final"]
    bounds = [0, *settings["partition_split"], len(entries)]
    assert len(bounds) == settings["pipeline_stages"] + 1
    return [entries[start:stop] for start, stop in pairwise(bounds)]


def torchtitan_part(model: nn.Module, listed: list[str]) -> nn.Module:
    """Return a copy of the model with the listed children and ModuleList items; all other children are None."""
    part = copy.deepcopy(model)
    for name, child in list(part.named_children()):
        if isinstance(child, nn.ModuleList):
            setattr(part, name, nn.ModuleList(block for n, block in enumerate(child) if f"{name}.{n}" in listed))
        elif name not in listed:
            setattr(part, name, None)
    return part


def automodel_part(model: nn.Module, listed: list[str]) -> nn.Module:
    """Return such a copy for names at any depth: listed modules stay whole, owners of listed modules stay."""
    part = copy.deepcopy(model)

    def prune(owner: nn.Module, path: str) -> None:
        for name, child in list(owner.named_children()):
            below = f"{path}{name}"
            if below in listed:
                continue
            if not any(key.startswith(f"{below}.") for key in listed):
                setattr(owner, name, nn.ModuleDict() if isinstance(child, nn.ModuleList) else None)
            elif isinstance(child, nn.ModuleList):
                kept = {str(n): block for n, block in enumerate(child) if f"{below}.{n}" in listed}
                setattr(owner, name, nn.ModuleDict(kept))
            else:
                prune(child, f"{below}.")

    prune(part, "")
    return part


def device_of_tensors(model: nn.Module, device_map: dict[str, int]) -> dict[str, int]:
    """Return the device of each state-dict tensor. Each is below one key; keys are modules, as accelerate checks."""
    assert set(device_map) <= dict(model.named_modules()).keys()
    devices = {}
    for tensor in model.state_dict():
        keys = [key for key in device_map if key in ("", tensor) or tensor.startswith(f"{key}.")]
        assert len(keys) == 1, (tensor, keys)
        devices[tensor] = device_map[keys[0]]
    return devices


class FakeTopology:
    """Topology with the methods that DeepSpeed's PipelineModule calls."""

    def __init__(self, stages: int) -> None:
        self.stages = stages

    def get_dim(self, axis: str) -> int:
        assert axis == "pipe"
        return self.stages

    def get_coord(self, rank: int) -> Any:
        return type("Coordinates", (), {"pipe": rank})


class FakePipelineModule:
    """DeepSpeed's PipelineModule as far as it decides which layers a rank builds (deepspeed 0.19.8)."""

    rank = 0

    def __init__(
        self,
        layers: Any,
        num_stages: int | None = None,
        topology: FakeTopology | None = None,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Any = None,
    ) -> None:
        assert num_stages is not None or topology is not None
        self._topo = topology or FakeTopology(num_stages or 0)
        self._layer_specs = list(layers)
        self.global_rank = self.rank
        self._partition_layers(method=partition_method)
        self.interval, self.function = activation_checkpoint_interval, activation_checkpoint_func

    def _partition_layers(self, method: str = "uniform") -> None:
        raise NotImplementedError

    def _set_bounds(self, start: int | None = None, stop: int | None = None) -> None:
        self.built = self._layer_specs[start:stop]
