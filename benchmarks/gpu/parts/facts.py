"""Facts of this machine: versions, GPUs with their free memory, or the reason why there are none."""

from __future__ import annotations

import os
import platform
import time
from typing import Any

import torch
import torchvision

__all__ = ["found", "no_cuda"]

_ACTIONS = {
    "out of memory": "; end what fills the GPU, or choose another one with CUDA_VISIBLE_DEVICES",
    "too old": "; update the driver, or install a torch for an older CUDA",
    "no NVIDIA driver": "; install one where there is a GPU",
    "No CUDA GPUs": "; CUDA_VISIBLE_DEVICES may hide them",
}
"""By a word of torch's own text."""


def found() -> dict[str, Any]:
    """Return the facts as an object for the JSON; `no_cuda` is empty where a GPU can be used."""
    why = no_cuda()
    facts: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "cuda": torch.version.cuda,
        "cores": os.cpu_count(),
        "no_cuda": why,
        "gpus": [],
    }
    if not why:
        facts["cudnn"] = torch.backends.cudnn.version()
        facts["nccl"] = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
        for number in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(number)
            sizes = {"free_bytes": free, "total_bytes": total}
            hopper = torch.cuda.get_device_capability(number)[0] >= 9
            facts["gpus"].append({"name": torch.cuda.get_device_name(number), "hopper": hopper, **sizes})
    return facts


def no_cuda() -> str:
    """Return a sentence why no GPU can be used; empty where one can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA; install a build with CUDA"
    try:
        torch.cuda.init()
        torch.zeros(1, device="cuda").item()
    except (RuntimeError, AssertionError) as error:  # no GPU, no driver, a driver too old, a GPU without memory
        cause = str(error).splitlines()[0].split(". ")[0]
        action = next((action for word, action in _ACTIONS.items() if word in cause), "")
        return f"torch {torch.__version__} can use no GPU here: {cause}{action}"
    return ""
