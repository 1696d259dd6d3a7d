"""Forms of a plan for other systems: lists of modules, counts of repeated blocks, a small Python file."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.tables import printable
from varuna_capslog.model.names import LayerModules, ModelNames
from varuna_capslog.plans.parts import MemoryInterval, PlanStage, with_memory
from varuna_capslog.plans.plan import Plan
from varuna_capslog.schedules import RunShape, from_strings

__all__ = [
    "StageLine",
    "automodel",
    "block_counts",
    "block_pattern",
    "check_names",
    "deepspeed",
    "device_map",
    "held_modules",
    "megatron",
    "number_of",
    "refuse_shared",
    "run_of",
    "sglang",
    "stage_line",
    "torchtitan",
    "vllm",
]


# -- A plan as other systems see it: one pipeline of consecutive stages, and equal copies of it.
#
# All exporters except that of torch's schedules start here. Fields that no other system has are refused by name.


@dataclass(frozen=True)
class StageLine:
    """Pipeline of a plan, and the number of its equal replicas.

    stages: (first layer, layer behind the last one) of each stage, which follow one another.
    ranks: of this pipeline in the plan; stage s runs on ranks[s % len(ranks)].
    """

    stages: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]
    replicas: int

    @property
    def stages_per_rank(self) -> int:
        """Stages of every rank."""
        return len(self.stages) // len(self.ranks)


def stage_line(plan: Plan, system: str, one_stage_per_rank: bool = False, intervals: bool = False) -> StageLine:
    """Return the pipeline that a plan is. Raises CapslogError for a plan that is anything else than equal pipelines
    whose stages go round their ranks.

    system: for messages. one_stage_per_rank: it has no several stages on a rank.
    intervals: the exporter itself writes, or refuses, the memory intervals.
    """
    _refuse_fields(plan, system, intervals)
    paths = plan.paths()
    first, *others = [[plan.stages[number] for number in path] for path in paths]
    used = [rank for path in paths for rank in {plan.stages[number].rank for number in path}]
    alike = [(stage.layers, stage.memory) for stage in first]
    shares = {len(blocks) for blocks in paths.values()}
    unequal = any([(stage.layers, stage.memory) for stage in path] != alike for path in others)
    if unequal or len(shares) > 1 or len(set(used)) < len(used):
        raise CapslogError(
            f"the plan has {len(paths)} ways through its stages that are not equal pipelines on ranks of their own, "
            f"but {system} has equal replicas only; export a plan whose replicas have the same cuts, shares and memory"
        )
    pipelines = [_pipeline(path, len(paths), system) for path in (first, *others)]
    line = pipelines[0]
    if any(len(pipeline.ranks) != len(line.ranks) for pipeline in pipelines):
        raise CapslogError(
            f"the plan's pipelines have {sorted({len(pipeline.ranks) for pipeline in pipelines})} ranks, but {system} "
            "has equal replicas only; give every pipeline as many ranks"
        )
    if one_stage_per_rank and line.stages_per_rank > 1:
        raise CapslogError(
            f"each rank runs {line.stages_per_rank} stages, but {system} has one stage per rank; plan with "
            "pipeline.stages_per_rank=1"
        )
    return line


def run_of(plan: Plan, run: RunShape) -> RunShape:
    """Return the run with the schedule that the plan names."""
    return dataclasses.replace(run, schedule=plan.schedule or run.schedule)


def number_of(count: int, noun: str) -> str:
    """Return a count with its noun: 1 layer, 2 layers."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def held_modules(names: ModelNames, plan: Plan, system: str) -> tuple[LayerModules, ...]:
    """Return the modules that each layer holds. Raises CapslogError where only the layers' own names are known."""
    check_names(names, plan)
    if names.held is None:
        raise CapslogError(
            f"{system} speaks of the model's modules, of which only the names of the layers are known; give the "
            "ordinary module itself with --model PACKAGE.MODULE:FUNCTION, or a run or config that captures one"
        )
    return names.held


def check_names(names: ModelNames, plan: Plan) -> None:
    """Raise CapslogError where the names are those of another model."""
    if len(names.layers) != plan.num_layers:
        raise CapslogError(
            f"the plan has {number_of(plan.num_layers, 'layer')}, but the model has {len(names.layers)}; give the "
            "profile or the model that the plan was made for"
        )


def refuse_shared(names: ModelNames, line: StageLine, system: str) -> None:
    """Raise CapslogError for a parameter that layers of several stages use."""
    for name, layers in names.shared:
        stages = sorted({stage for stage, (a, b) in enumerate(line.stages) if any(a <= layer < b for layer in layers)})
        if len(stages) > 1:
            raise CapslogError(
                f"the parameter {name!r} is used by stages {stages}, but {system} has no parameters that several "
                f"stages share; choose cuts that keep layers {list(layers)} in one stage, or untie the parameter"
            )


def _refuse_fields(plan: Plan, system: str, intervals: bool) -> None:
    if plan.routes != "relay":
        raise CapslogError(
            f"routes is {plan.routes!r}, but in {system} each stage hands on to the next one; export a plan with "
            "routes relay"
        )
    if plan.variants:
        raise CapslogError(f"the plan has variants of layers, which {system} does not know; export one without")
    for number, stage in enumerate(plan.stages):
        where = f"stage {number} ({stage.describe()})"
        if len(stage.ranks) > 1:
            raise CapslogError(
                f"{where} is split by {stage.parallel['kind']}, which the form for {system} cannot say; export a plan "
                f"without splits, and set the degree in {system} itself"
            )
        if stage.grain > 1:
            raise CapslogError(
                f"{where} takes {stage.grain} units in one call, but in {system} all stages take the same microbatch; "
                "export a plan of grain 1"
            )
        if stage.moments:
            raise CapslogError(
                f"{where} keeps the optimizer's moments of some layers elsewhere, which the form for {system} cannot "
                "say; export a plan without moments"
            )
        if stage.memory and not intervals:
            raise CapslogError(
                f"{where} has the memory interval {_shown(stage)}, which the form for {system} cannot say; export a "
                "plan that keeps everything (pipeline.recompute=false) or leaves memory null"
            )


def _shown(stage: PlanStage) -> str:
    interval = (stage.memory or ())[0]
    return f"[{interval.first}, {interval.end}, {interval.kind}]"


def _pipeline(path: list[PlanStage], replicas: int, system: str) -> StageLine:
    if any(before.end != after.first for before, after in pairwise(path)):
        raise CapslogError(f"the plan's stages do not follow one another as the layers do, as they must in {system}")
    ranks = tuple(dict.fromkeys(stage.rank for stage in path))
    for number, stage in enumerate(path):
        if stage.rank != ranks[number % len(ranks)] or len(path) % len(ranks):
            raise CapslogError(
                f"the stages run on the ranks {[stage.rank for stage in path]}, but {system} deals them out in turn, "
                "as many to each rank; plan with pipeline.stages_per_rank, or one stage for each rank"
            )
    return StageLine(tuple((stage.first, stage.end) for stage in path), ranks, replicas)


# -- Counts of a model's repeated blocks per stage, for systems that take numbers of decoder layers.
#
# Repeated blocks are the modules of one list, `transformer.h.0`, `transformer.h.1` and so on. All before the first
# block is the embedding, all after the last block is the head (norms, the output projection, the loss).


def block_counts(names: ModelNames, line: StageLine, system: str, pattern: str | None = None) -> list[int]:
    """Return stage -> number of its repeated blocks; the embedding is then in the first stage, the head in the last.

    pattern: the blocks' names, with one `*` for their number, such as `transformer.h.*`; it may leave out the
        beginning. None: found among the names.

    Raises CapslogError where the names do not tell the blocks, and where a border between two stages lies in a block,
    in the embedding or in the head.
    """
    pattern = block_pattern(names.layers, pattern)
    blocks = _blocks_of_layers(names, pattern)
    holding = [layer for layer, numbers in enumerate(blocks) if numbers]
    before, behind = holding[0], holding[-1] + 1
    owner: dict[int, int] = {}
    counts = []
    for stage, (first, end) in enumerate(line.stages):
        held = sorted({number for numbers in blocks[first:end] for number in numbers})
        for number in held:
            if owner.setdefault(number, stage) != stage:
                raise CapslogError(
                    f"the border between stages {owner[number]} and {stage} lies in the block "
                    f"{pattern.replace('*', str(number))!r}, which {system} keeps whole; move the cut before or behind "
                    "it"
                )
        counts.append(len(held))
    if line.stages[0][1] < before:
        raise _several_stages("the embedding", names.layers[:before], f"the first stage of {system}")
    if line.stages[-1][0] > behind:
        raise _several_stages("the head", names.layers[behind:], f"the last stage of {system}")
    return counts


def block_pattern(layers: Sequence[str], pattern: str | None = None) -> str:
    """Return the whole pattern of the repeated blocks' names: completed from `pattern`, or of the only list of modules.

    A list's items are the first whole numbers in names (`encoder.layer.3`); only where there are none, numbers behind
    an underscore (`encoder_layer_3`). Raises CapslogError where `pattern` names no layer, and where there is not
    exactly one list.
    """
    if pattern is not None:
        if pattern.count("*") != 1:
            raise CapslogError(f"the names of the blocks, {pattern!r}, must have one * in the place of the number")
        full = rf"((?:.*?\.)?){_expression(pattern)}"
        patterns = dict.fromkeys(f"{hit[1]}{pattern}" for name in layers if (hit := re.fullmatch(full, name)))
        if not patterns:
            raise CapslogError(f"no layer's name is of the form {pattern!r}; the layers are {_some(layers)}")
        return _only(layers, patterns)
    patterns = {}
    for expression in (r"(?:(.*?)\.)?(\d+)(?:\..*)?", r"(.*?_)(\d+)(?:\..*)?"):
        for name in layers:
            if match := re.fullmatch(expression, name):
                before = match[1] or ""
                patterns[f"{before}*" if before.endswith("_") or not before else f"{before}.*"] = None
        if patterns:
            break
    return _only(layers, patterns)


def _only(layers: Sequence[str], patterns: Collection[str]) -> str:
    if len(patterns) == 1:
        return next(iter(patterns))
    which = f"name {len(patterns)} lists of modules ({', '.join(patterns)})" if patterns else "name no list of modules"
    raise CapslogError(
        f"the names of the layers, {_some(layers)}, {which}, so that they do not tell the repeated blocks; say them "
        "with --block-names 'PREFIX.*'"
    )


def _expression(pattern: str) -> str:
    """Regular expression for the names of the blocks and of their parts; its group is the number."""
    before, after = (re.escape(part) for part in pattern.split("*"))
    return rf"{before}(\d+){after}(?:\..*)?"


def _blocks_of_layers(names: ModelNames, pattern: str) -> list[list[int]]:
    """Return layer -> the numbers of the blocks of which it holds a part."""
    blocks, reached, last, expression = [], -1, "", _expression(pattern)
    for layer, name in enumerate(names.layers):
        modules = (name,) if names.held is None else names.held[layer].modules
        numbers = list(dict.fromkeys(int(match[1]) for path in modules if (match := re.fullmatch(expression, path))))
        if numbers and numbers[0] > reached + 1 and names.held is None:
            raise CapslogError(
                f"no layer is named after the block {pattern.replace('*', str(reached + 1))!r}, but {name!r} follows "
                f"{last!r}: a layer holds several blocks; give the model itself with --model"
            )
        for number in numbers:
            if number not in (reached, reached + 1):
                raise CapslogError(
                    f"layer {name!r} holds the block {pattern.replace('*', str(number))!r} behind block {reached} of "
                    "that list; the blocks must stand in their own order"
                )
            reached = number
        blocks.append(numbers)
        last = name
    holding = [layer for layer, numbers in enumerate(blocks) if numbers]
    if not holding:
        raise CapslogError(f"no layer holds a module of the form {pattern!r}; say what the blocks are called")
    for layer in range(holding[0], holding[-1]):
        if not blocks[layer]:
            raise CapslogError(
                f"layer {names.layers[layer]!r} stands between blocks and belongs to none of {pattern!r}; name the "
                "blocks with --block-names"
            )
    return blocks


def _several_stages(part: str, layers: Sequence[str], where: str) -> CapslogError:
    return CapslogError(
        f"{part} (layers {', '.join(layers)}) lies in several stages, but all of it belongs to {where}; move the cut"
    )


def _some(layers: Sequence[str]) -> str:
    shown = list(layers) if len(layers) < 7 else [*layers[:3], "...", *layers[-2:]]
    return ", ".join(shown)


# -- Forms that count decoder layers: Megatron's pipeline layout, and the layer partitions of vLLM and SGLang.
#
# Rules as published in August 2026: Megatron-LM `megatron/core/transformer/pipeline_parallel_layer_layout.py` and its
# user guide; `get_pp_indices` of vLLM and SGLang, which reads the variable that `vllm` or `sglang` writes.


def megatron(plan: Plan, names: ModelNames, pattern: str | None = None) -> str:
    """Return the line for Megatron-LM's `--pipeline-model-parallel-layout`, such as `Et*7|t*9|t*9|t*7L`.

    E is the embedding, t a decoder layer, L the loss with the output layer, | the border of a stage. Stage s is on rank
    s % ranks of a pipeline. Megatron Bridge reads the string as `model.pipeline_model_parallel_layout`.

    Raises CapslogError for a plan that a layout cannot express. names, pattern: as for `block_counts`.
    """
    system = "Megatron"
    line = stage_line(plan, system)
    if line.stages_per_rank > 1 and len(line.ranks) == 1:
        raise CapslogError(
            f"one rank runs {line.stages_per_rank} stages, but {system} interleaves stages of two or more ranks "
            "only; plan for more devices, or for one stage"
        )
    check_names(names, plan)
    if names.tokens is False:
        raise CapslogError(
            f"the model reads no token ids, but the layout is for GPT models of {system}, which begin with them; "
            "export the plan to torchtitan or torch-csv"
        )
    counts = block_counts(names, line, system, pattern)
    stages = ["t" if count == 1 else f"t*{count}" if count else "" for count in counts]
    stages[0] = f"E{stages[0]}"
    stages[-1] = f"{stages[-1]}L"
    return "|".join(stages) + "\n"


def vllm(plan: Plan, names: ModelNames, pattern: str | None = None) -> str:
    """Return the environment variable with vLLM's decoder layers per pipeline rank: `VLLM_PP_LAYER_PARTITION=11,13`.

    Raises CapslogError for a plan that it cannot express. names, pattern: as for `block_counts`.
    """
    return f"VLLM_PP_LAYER_PARTITION={_partition(plan, names, pattern, 'vLLM')}\n"


def sglang(plan: Plan, names: ModelNames, pattern: str | None = None) -> str:
    """Return the same for SGLang: `SGLANG_PP_LAYER_PARTITION=11,13`."""
    return f"SGLANG_PP_LAYER_PARTITION={_partition(plan, names, pattern, 'SGLang')}\n"


def _partition(plan: Plan, names: ModelNames, pattern: str | None, system: str) -> str:
    line = stage_line(plan, system, one_stage_per_rank=True)
    check_names(names, plan)
    counts = block_counts(names, line, system, pattern)
    if 0 in counts:
        # get_pp_indices itself takes a 0; whether a worker without a KV cache runs is nowhere said
        raise CapslogError(
            f"stage {counts.index(0)} holds no decoder block, and no rule of {system} says that a rank may have none; "
            "move a block there"
        )
    return ",".join(map(str, counts))


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

    The modules of a Hugging Face decoder get torchtitan's names; other models keep theirs. A module without parameters
    whose results several layers read (rotary position embeddings) is in every part, since there each part computes its
    own.

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
    for part in parts:  # a module that only holds others of the list is kept with them
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

    Of several equal pipelines it is the first one's. A module is named as a whole where all of it is on one device; a
    list of modules is named item by item. Tensors that no layer uses are not in the map; accelerate asks for them.

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
# (`deepspeed/runtime/pipe/module.py`). `PipelineModule._partition_layers` is the one place where it decides, so that
# the exported class overrides it. The user's own list of layers must have an entry for each layer of the chain.


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

# DeepSpeed's default function, the reentrant one, gives no gradient to a first stage whose inputs are token numbers.
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
    """Layers recomputed together, counted from the first of each stage; 0: none. DeepSpeed has one number for all."""
    actions = None if plan.actions is None else from_strings(plan.actions)
    stages = with_memory(plan.stages, run_of(plan, run), actions)
    intervals = {stage.first: stage.memory or () for stage in stages}  # replicas are equal
    memory = [intervals[first] for first, _ in line.stages]
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
        f"stage {stage} has the memory intervals {[[part.first, part.end, part.kind] for part in memory[stage]]}, but "
        "DeepSpeed recomputes equal numbers of layers, in all stages, and offloads none; export a plan that keeps "
        "everything, or whose stages recompute as a whole"
    )
