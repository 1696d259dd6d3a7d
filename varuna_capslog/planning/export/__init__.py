"""Plans in the forms of other systems: pure functions from a plan and its layer names to text. Imports no torch."""

from varuna_capslog.planning.export.module_lists import (
    automodel,
    deepspeed,
    device_map,
    megatron,
    sglang,
    torchtitan,
    vllm,
)
from varuna_capslog.planning.export.targets import TARGETS, Request, names_in, notes, torch_csv, written

__all__ = [
    "TARGETS",
    "Request",
    "automodel",
    "deepspeed",
    "device_map",
    "megatron",
    "names_in",
    "notes",
    "sglang",
    "torch_csv",
    "torchtitan",
    "vllm",
    "written",
]
