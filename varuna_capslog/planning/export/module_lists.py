"""Forms that list the modules of every stage: torchtitan's and NeMo AutoModel's `module_fqns_per_model_part`.

Both copy the model for each stage and drop what is not listed. torchtitan looks one level deep: children of the model,
and items of its ModuleLists. AutoModel goes down to any depth, but splits only Hugging Face decoders whose blocks are
`model.layers`, or the `layers` of a text model below `model`. Rules as of August 2026, from torchtitan's file
distributed/pipeline_parallel.py and AutoModel's components/distributed/pipelining/functional.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.names import LayerModules, ModelNames
from varuna_capslog.planning.export.repeated_blocks import block_counts, block_pattern
from varuna_capslog.planning.export.stage_line import StageLine, held_modules, refuse_shared, stage_line
from varuna_capslog.plans.plan import Plan

__all__ = ["automodel", "device_map", "torchtitan"]


_TORCHTITAN_NAMES: Mapping[str, str] = {
    "model.embed_tokens": "tok_embeddings",
    "model.layers": "layers",
    "model.norm": "norm",
    "model.rotary_emb": "rotary_emb",
}
"""Names of the parts of a Hugging Face decoder in torchtitan's own models and in its Hugging Face backend."""


def torchtitan(plan: Plan, names: ModelNames) -> str:
    """torchtitan's `parallelism.module_fqns_per_model_part` as JSON, one line per stage.

    The modules of a Hugging Face decoder get torchtitan's names; a model that has other names keeps them. A module
    without parameters whose results several layers read (rotary position embeddings) is in every part, since there each
    part computes its own.

    names: of a captured model.

    Raises CapslogError for a plan that the list cannot say, and for a border inside something that torchtitan keeps
    whole.
    """
    system = "torchtitan"
    line = stage_line(plan, system)
    held = held_modules(names, plan, system)
    refuse_shared(names, line, system)
    decoder = any(path.startswith("model.layers.") for layer in held for path in layer.modules)
    renamed = _TORCHTITAN_NAMES if decoder else {}

    lists = {renamed.get(path, path) for path in names.lists}

    def unit(path: str) -> str | None:
        if any(key.startswith(f"{path}.") for key in renamed):
            return None  # what a renamed container computes itself, such as a mask
        prefix = path
        while prefix and prefix not in renamed:
            prefix = prefix.rpartition(".")[0]
        pieces = (renamed[prefix] + path[len(prefix) :] if prefix else path).split(".")
        return ".".join(pieces[: 2 if pieces[0] in lists else 1])

    advice = "torchtitan splits only between a model's own children and the items of its ModuleLists"
    return _text(_parts(held, line, names, unit, advice))


def automodel(plan: Plan, names: ModelNames, pattern: str | None = None) -> str:
    """NeMo AutoModel's `module_fqns_per_model_part` as JSON (which YAML reads), one line per stage.

    names: of a captured Hugging Face decoder; pattern: as for `repeated_blocks.block_counts`.

    Raises CapslogError for a plan that the list cannot say, and for a model that AutoModel does not split.
    """
    system = "NeMo AutoModel"
    line = stage_line(plan, system)
    held = held_modules(names, plan, system)
    blocks = block_pattern(names.layers, pattern)
    if not re.fullmatch(r"model\.(?:\w+\.)*layers\.\*", blocks):
        raise CapslogError(
            f"the model's blocks are {blocks!r}, but {system} splits Hugging Face decoders only, whose blocks are "
            "'model.layers.*'; name them with --block-names if they are"
        )
    block_counts(names, line, system, blocks)
    refuse_shared(names, line, system)

    def unit(path: str) -> str | None:
        pieces = path.split(".")
        number = next((place for place, piece in enumerate(pieces) if piece.isdigit()), len(pieces))
        return ".".join(pieces[: number + 1])

    return _text(_parts(held, line, names, unit, "AutoModel keeps or drops a module below the lists as a whole"))


def _parts(
    held: Sequence[LayerModules],
    line: StageLine,
    names: ModelNames,
    unit: Callable[[str], str | None],
    rule: str,
) -> list[list[str]]:
    """stage -> what is listed for it, in order of use; unit: a module's name -> what the list calls it."""
    parts: list[dict[str, None]] = []
    everywhere: dict[str, None] = {}
    for first, end in line.stages:
        part: dict[str, None] = {}
        for layer in held[first:end]:
            for path in layer.modules:
                if path and (module := unit(path)) is not None:
                    (everywhere if path in names.copied else part)[module] = None
        parts.append(part)
    listed = [module for part in parts for module in part]
    for part in parts:  # a module that only holds others of the list is kept with them
        for module in [name for name in part if any(inner.startswith(f"{name}.") for inner in listed)]:
            del part[module]
    for number, part in enumerate(parts):
        for module in part:
            if any(module in later for later in parts[number + 1 :]):
                raise CapslogError(f"a cut lies inside {module!r}, but {rule}; move the cut before or behind it")
    for (first, end), part in zip(line.stages, parts, strict=True):
        for name in (name for layer in held[first:end] for name in layer.parameters):
            if not _is_below(unit(name.rpartition(".")[0]), part):
                raise CapslogError(
                    f"the parameter {name!r} belongs to no module of its stage's list, so that every stage would have "
                    f"one of its own, since {rule}; put it into a module of its own"
                )
    return [[*part, *(module for module in everywhere if module not in part)] for part in parts]


def _is_below(module: str | None, part: Iterable[str]) -> bool:
    return bool(module) and any(module == listed or str(module).startswith(f"{listed}.") for listed in part)


def _text(parts: Sequence[Sequence[str]]) -> str:
    return "[" + ",\n ".join(json.dumps(part) for part in parts) + "]\n"


# -- A plan as a `device_map` of Hugging Face accelerate: module -> device, for a model that one process runs.
#
# Rules as in accelerate 1.15 (`check_device_map`, `dispatch_model`): keys are names of modules, every tensor of the
# state dict lies below a key, and inputs follow a module to its device. A module whose own code adds tensors of its
# children must therefore be on one device; only those that hold lists of blocks may be on several.


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
