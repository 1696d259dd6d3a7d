"""Forms that list modules, and a small Python file: torchtitan, NeMo AutoModel, accelerate and DeepSpeed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.tables import printable
from varuna_capslog.model.names import LayerModules, ModelNames
from varuna_capslog.planning.export.layer_counts import block_counts, block_pattern
from varuna_capslog.planning.export.stage_line import (
    StageLine,
    check_names,
    held_modules,
    memory_of_stages,
    number_of,
    refuse_shared,
    stage_line,
)
from varuna_capslog.plans.parts import MemoryInterval
from varuna_capslog.plans.plan import Plan
from varuna_capslog.schedules import RunShape

__all__ = ["automodel", "deepspeed", "device_map", "torchtitan"]


# -- Lists of modules per stage, for torchtitan and NeMo AutoModel.
#
# Both copy the model for each stage and drop what is not listed. torchtitan looks one level deep: children of the
# model, and items of its ModuleLists. AutoModel goes down to any depth, but splits only Hugging Face decoders whose
# blocks are `model.layers`, or the `layers` of a text model below `model`. Rules as of August 2026, from torchtitan's
# file distributed/pipeline_parallel.py and AutoModel's components/distributed/pipelining/functional.py.


_TORCHTITAN_NAMES: Mapping[str, str] = {
    "model.embed_tokens": "tok_embeddings",
    "model.layers": "layers",
    "model.norm": "norm",
    "model.rotary_emb": "rotary_emb",
}
"""Names of the parts of a Hugging Face decoder in torchtitan's own models and in its Hugging Face backend."""


def torchtitan(plan: Plan, names: ModelNames) -> str:
    """Return torchtitan's `parallelism.module_fqns_per_model_part` as JSON, one line per stage.

    The modules of a Hugging Face decoder get torchtitan's names; other models keep their names. A module without
    parameters whose results several layers read (rotary position embeddings) is in every part, since in torchtitan each
    part computes it.

    names: of a captured model. Raises CapslogError for a plan that the list cannot express, and for a border inside a
    module that torchtitan keeps whole.
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
    return _text(_parts(held, line, names, unit, system, advice))


def automodel(plan: Plan, names: ModelNames, pattern: str | None = None) -> str:
    """Return NeMo AutoModel's `module_fqns_per_model_part` as JSON (which YAML reads), one line per stage.

    names: of a captured Hugging Face decoder; pattern: as for `block_counts`. Raises CapslogError for a plan that the
    list cannot express, and for a model that AutoModel does not split.
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

    return _text(
        _parts(held, line, names, unit, system, "AutoModel keeps or drops a module below the lists as a whole")
    )


def _parts(
    held: Sequence[LayerModules],
    line: StageLine,
    names: ModelNames,
    unit: Callable[[str], str | None],
    system: str,
    rule: str,
) -> list[list[str]]:
    """Return stage -> list of its modules, in order of use; unit: a module's name -> its name in the list."""
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
    for part in parts:  # a module that only holds other listed modules is kept with them
        for module in [name for name in part if any(inner.startswith(f"{name}.") for inner in listed)]:
            del part[module]
    for number, part in enumerate(parts):
        for module in part:
            if any(module in later for later in parts[number + 1 :]):
                raise CapslogError(f"a cut lies inside {module!r}, but {rule}; move the cut before or behind it")
    outside = {
        name: stage
        for stage, ((first, end), part) in enumerate(zip(line.stages, parts, strict=True))
        for layer in held[first:end]
        for name in layer.parameters
        if not _is_below(unit(name.rpartition(".")[0]), part)
    }
    if outside and len(line.stages) > 1:
        # torch.distributed.checkpoint writes one copy of a name, chosen by how much each rank writes
        named = ", ".join(f"{name!r} (stage {stage})" for name, stage in outside.items())
        raise CapslogError(
            f"{named}: {system} copies parameters of the model itself into every stage, and a checkpoint may keep an "
            f"untrained copy; put {'it' if len(outside) == 1 else 'each'} into a submodule"
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
    """Return the device map as JSON: module name -> number of the rank, one line each, in order of use.

    Of several equal pipelines, the map describes the first. A module is named as a whole where all of it is on one
    device; a list of modules is named item by item. Tensors that no layer uses are left out; accelerate reports them.

    names: of a captured model. Raises CapslogError for a plan or a model that a device map cannot express.
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


# -- A plan as a small Python file for DeepSpeed: a `PipelineModule` whose stages are the plan's.
#
# DeepSpeed 0.19 has no option for a list of cuts: `partition_method` knows uniform, by parameters, and by type
# (`deepspeed/runtime/pipe/module.py`). Only `PipelineModule._partition_layers` decides the cuts, so the exported class
# overrides it. The user's own list of layers must have an entry for each layer of the chain.


_FILE = '''"""The stages of a plan of varuna-capslog for DeepSpeed. Written by `capslog export --to deepspeed`.

{stages}
"""

from deepspeed.pipe import PipelineModule
{imports}
PARTS = {parts}
"""Stage s holds the layers PARTS[s] to PARTS[s + 1] - 1 of the list that is given to PlannedPipelineModule."""


class PlannedPipelineModule(PipelineModule):
    """A PipelineModule of {layers} in {count}; takes what PipelineModule takes, without partition_method."""

    def __init__(self, layers, **options):
        layers = list(layers)
        if len(layers) != PARTS[-1]:
            raise ValueError(f"the plan is for {{PARTS[-1]}} layers, but {{len(layers)}} are given")
        if options.get("topology") is None:
            options.setdefault("num_stages", len(PARTS) - 1)
{defaults}        super().__init__(layers, **options)

    def _partition_layers(self, method=None):
        if self._topo.get_dim("pipe") != len(PARTS) - 1:
            raise ValueError(f"the plan has {{len(PARTS) - 1}} stages, but the topology {{self._topo.get_dim('pipe')}}")
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = list(PARTS)
        self._set_bounds(start=PARTS[stage], stop=PARTS[stage + 1])
'''

# DeepSpeed's default function is reentrant, and gives no gradient to a first stage whose inputs are token numbers.
_RECOMPUTING = """        options.setdefault("activation_checkpoint_interval", {interval})
        options.setdefault("activation_checkpoint_func", non_reentrant_checkpoint)
"""


def deepspeed(plan: Plan, run: RunShape, names: ModelNames | None = None) -> str:
    """Return the text of a Python file with the class `PlannedPipelineModule`.

    A plan that recomputes gets DeepSpeed's `activation_checkpoint_interval`: layers of a stage to recompute at a time.
    run: for stages whose memory the plan leaves open. names: for comments; None: not known. Raises CapslogError for a
    plan that DeepSpeed cannot run.
    """
    system = "DeepSpeed"
    line = stage_line(plan, system, one_stage_per_rank=True, intervals=True)
    interval = _checkpoint_interval(plan, line, run)
    labels = [f"{number}" for number in range(plan.num_layers)]
    lines = []
    if names is not None:
        check_names(names, plan)
        labels = [f"{number} ({_in_docstring(name)})" for number, name in enumerate(names.layers)]
        lines = [
            f"Layers {', '.join(map(str, layers))} share the parameter {_in_docstring(name)}: give them as "
            "TiedLayerSpec of one key."
            for name, layers in names.shared
        ]
    stages = [
        f"stage {stage}: layer {labels[first]}" + (f" to layer {labels[end - 1]}" if end > first + 1 else "")
        for stage, (first, end) in enumerate(line.stages)
    ]
    imported = "from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint\n"
    return _FILE.format(
        stages="\n".join([*stages, *lines]),
        imports=imported if interval else "",
        parts=[first for first, _ in line.stages] + [plan.num_layers],
        layers=number_of(plan.num_layers, "layer"),
        count=number_of(len(line.stages), "stage"),
        defaults=_RECOMPUTING.format(interval=interval) if interval else "",
    )


def _in_docstring(name: str) -> str:
    """Escape a name so that it cannot end the docstring around it."""
    return printable(json.dumps(name, ensure_ascii=False)[1:-1])


def _checkpoint_interval(plan: Plan, line: StageLine, run: RunShape) -> int:
    """Number of layers recomputed together, from the first of each stage on; 0: none. All stages have one number."""
    memory = memory_of_stages(plan, line, run)
    if not any(memory):
        return 0
    sizes = [end - first for first, end in line.stages]
    for interval in range(1, max(sizes) + 1):
        expected = [
            tuple(MemoryInterval(at, min(at + interval, end), "recompute") for at in range(first, end, interval))
            for first, end in line.stages
        ]
        if memory == expected:
            return interval
    stage = next(number for number, row in enumerate(memory) if row)
    raise CapslogError(
        f"stage {stage} has the memory intervals {[part.entries for part in memory[stage]]}, but "
        "DeepSpeed recomputes equal numbers of layers, in all stages, and offloads none; export a plan that keeps "
        "everything, or whose stages recompute as a whole"
    )
