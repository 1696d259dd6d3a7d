"""Plans in the forms of other systems: pure functions from a plan and its layer names to text. Imports no torch."""

from varuna_capslog.planning.export.layer_counts import (
    diffusion_pipe,
    megatron,
    primus,
    sglang,
    slime,
    verl,
    vllm,
    vllm_ascend,
)
from varuna_capslog.planning.export.module_lists import automodel, deepspeed, device_map, torchtitan
from varuna_capslog.planning.export.targets import TARGETS, Request, export_text, names_in, notes, torch_csv

__all__ = [
    "TARGETS",
    "Request",
    "automodel",
    "deepspeed",
    "device_map",
    "diffusion_pipe",
    "export_text",
    "megatron",
    "names_in",
    "notes",
    "primus",
    "sglang",
    "slime",
    "torch_csv",
    "torchtitan",
    "verl",
    "vllm",
    "vllm_ascend",
]
