"""Plans in the forms of other systems: pure functions from a plan, and the names of its layers, to text.

One file per family of forms; `targets` lists them for `capslog export`. Nothing here imports torch.
"""

from varuna_capslog.planning.export.deepspeed_file import deepspeed
from varuna_capslog.planning.export.module_lists import automodel, device_map, torchtitan
from varuna_capslog.planning.export.repeated_blocks import megatron, sglang, vllm
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
