"""A plan as a `device_map` of Hugging Face accelerate: module -> device, for a model that one process runs.

Rules as in accelerate 1.15 (`check_device_map`, `dispatch_model`): keys are names of modules, every tensor of the state
dict lies below a key, and inputs follow a module to its device. A module whose own code adds tensors of its children
must therefore be on one device; only those that hold lists of blocks may be on several.
"""

from __future__ import annotations

import json

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.names import ModelNames
from varuna_capslog.planning.export.stage_line import held_modules, stage_line
from varuna_capslog.plans.plan import Plan

__all__ = ["device_map"]


def device_map(plan: Plan, names: ModelNames) -> str:
    """The device map as JSON: the names of modules -> the number of the rank, one line each, in order of use.

    Of several equal pipelines it is the first one's. A module is named as a whole where all of it is on one device; a
    list of modules is named item by item.

    names: of a captured model. Tensors of the model that no layer uses are not in the map; accelerate asks for them.

    Raises CapslogError for a plan or a model that a device map cannot say.
    """
    system = "a device map"
    line = stage_line(plan, system)
    held = held_modules(names, plan, system)
    rank_of = {
        layer: line.ranks[stage % len(line.ranks)]
        for stage, (first, end) in enumerate(line.stages)
        for layer in range(first, end)
    }
    for name, layers in names.shared:
        ranks = sorted({rank_of[layer] for layer in layers})
        if len(ranks) > 1:
            raise CapslogError(
                f"the parameter {name!r} is used on ranks {ranks}, but accelerate wants tied parameters on one device; "
                f"choose cuts and ranks that put layers {list(layers)} on one rank"
            )
    tensors = {
        name: rank_of[layer] for layer, modules in enumerate(held) for name in (*modules.parameters, *modules.buffers)
    }
    rank_of_module: dict[str, int] = {}
    _name_modules("", tensors, rank_of_module)
    return json.dumps(rank_of_module, indent=1) + "\n"


def _name_modules(module: str, tensors: dict[str, int], rank_of_module: dict[str, int]) -> None:
    """Put `module`, or the modules below it, into `rank_of_module`; tensors: name below the module -> rank."""
    children: dict[str, dict[str, int]] = {}
    own_tensors = [name for name in tensors if "." not in name]
    for name, rank in tensors.items():
        if "." in name:
            child, _, suffix = name.partition(".")
            children.setdefault(child, {})[suffix] = rank
    ranks = sorted(set(tensors.values()))
    is_list = all(child.isdigit() for child in children) and not own_tensors
    if len(ranks) == 1 and (own_tensors or (module and not is_list)):
        rank_of_module[module] = ranks[0]
        return
    is_block = module.rpartition(".")[2].isdigit()
    if (
        module
        and not is_list
        and (is_block or not any(piece.isdigit() for name in tensors for piece in name.split(".")))
    ):
        raise CapslogError(
            f"{module!r} lies on ranks {ranks}, but its own code needs all of it on one device; move the cut before or "
            "behind it"
        )
    if own_tensors:
        where = f"the module {module!r}" if module else "the model itself"
        raise CapslogError(
            f"the tensor {own_tensors[0]!r} belongs to {where}, which lies on ranks {ranks}, but a device map names "
            "modules only; put the tensor into a module of its own"
        )
    for child, below in children.items():
        _name_modules(f"{module}.{child}" if module else child, below, rank_of_module)
