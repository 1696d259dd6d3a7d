"""Forms that count decoder layers: layouts, partitions and numbers of layers for trainers and servers."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.names import ModelNames
from varuna_capslog.planning.export.stage_line import StageLine, check_names, memory_of_stages, stage_line
from varuna_capslog.plans.parts import recomputed_parts
from varuna_capslog.plans.plan import Plan
from varuna_capslog.schedules import RunShape

__all__ = [
    "block_counts",
    "block_letters",
    "block_pattern",
    "blocks_of_layers",
    "diffusion_pipe",
    "megatron",
    "megatron_parts",
    "primus",
    "sglang",
    "slime",
    "verl",
    "vllm",
    "vllm_ascend",
]


# -- Counts of a model's repeated blocks per stage, for systems that take numbers of decoder layers.
#
# Repeated blocks are the modules of one list, `transformer.h.0`, `transformer.h.1` and so on. All before the first
# block is the embedding, all after the last block is the head (norms, the output projection, the loss).


def block_counts(names: ModelNames, line: StageLine, system: str, pattern: str | None = None) -> list[int]:
    """Return stage -> number of its repeated blocks. The first stage must hold the embedding, the last one the head.

    pattern: the blocks' names, with one `*` for their number, such as `transformer.h.*`; it may leave out the
        beginning. None: found among the names.

    Raises CapslogError where the names do not show the blocks, and where a border between two stages lies in a block,
    in the embedding or in the head.
    """
    pattern = block_pattern(names.layers, pattern)
    blocks = blocks_of_layers(names, pattern)
    holding = [layer for layer, numbers in enumerate(blocks) if numbers]
    before, behind = holding[0], max((*names.predictions, holding[-1])) + 1
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
    """Return the full pattern of the repeated blocks' names: `pattern` completed, or that of the only list of modules.

    An item's number is the first part of a name that is a number (`encoder.layer.3`); if no name has such a part, the
    number after an underscore (`encoder_layer_3`). Raises CapslogError where `pattern` names no layer, and where the
    names do not show exactly one list.
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


def blocks_of_layers(names: ModelNames, pattern: str) -> list[list[int]]:
    """Return layer -> the numbers of the blocks that lie in the layer, wholly or in part."""
    blocks, reached, last, expression = [], -1, "", _expression(pattern)
    for layer, name in enumerate(names.layers):
        modules = (name, *names.joined.get(name, ())) if names.held is None else names.held[layer].modules
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


def block_letters(names: ModelNames, pattern: str | None = None) -> list[str]:
    """Return the letters of each block of a hybrid model in Megatron's patterns; [] where they are not known."""
    letters: list[str] = []
    blocks = blocks_of_layers(names, block_pattern(names.layers, pattern))
    for text, numbers in zip(names.letters, blocks, strict=False):
        size = len(text) // max(1, len(numbers))
        letters += [text[place * size : (place + 1) * size] for place in range(len(numbers))]
    return [] if "?" in "".join(letters) else letters


def _check_predictions(names: ModelNames, line: StageLine, system: str) -> None:
    if any(stage < len(line.stages) - 1 for stage in _stages_of_predictions(names, line)):
        raise CapslogError(
            f"{names.layers[names.predictions[0]]!r} is not in the last stage, where {system} puts the layers for "
            "multi-token prediction; move the cut before it, or export to megatron"
        )


def _stages_of_predictions(names: ModelNames, line: StageLine) -> list[int]:
    """Stage of each layer for multi-token prediction."""
    return [
        stage for number in names.predictions for stage, (first, end) in enumerate(line.stages) if first <= number < end
    ]


def _several_stages(part: str, layers: Sequence[str], where: str) -> CapslogError:
    return CapslogError(
        f"{part} (layers {', '.join(layers)}) lies in several stages, but all of it belongs to {where}; move the cut"
    )


def _some(layers: Sequence[str]) -> str:
    shown = list(layers) if len(layers) < 7 else [*layers[:3], "...", *layers[-2:]]
    return ", ".join(shown)


# -- Forms that count decoder layers.
#
# Rules as published in August 2026: Megatron-LM `megatron/core/transformer/pipeline_parallel_layer_layout.py`, its user
# guide, `megatron/core/models/hybrid/hybrid_layer_allocation.py`, and its numbers of layers in the first and the last
# stage (`transformer_block.py`), which verl and slime pass on; Primus, which takes Megatron's layout since November
# 2025 (its own list of layers only switches a check off since then), and its patch for recomputed layers;
# diffusion-pipe `utils/pipeline.py`; `get_pp_indices` of vLLM and SGLang, which reads the variable that `vllm` or
# `sglang` writes; the connectors of vllm-ascend.


def megatron(plan: Plan, names: ModelNames, pattern: str | None = None) -> str:
    """Return the line for Megatron-LM's `--pipeline-model-parallel-layout`, such as `Et*7|t*9|t*9|t*7L`; for a hybrid
    model that for `--hybrid-layer-pattern`, such as `M-M-|M-M*-`, in whose place it takes no layout.

    E is the embedding, t a decoder layer, L the loss with the output layer, | the border of a stage. Stage s is on rank
    s % ranks of a pipeline. Megatron Bridge reads the string as `model.pipeline_model_parallel_layout` or
    `model.hybrid_layer_pattern`.

    Raises CapslogError for a plan that the string, with the options of `megatron_parts`, cannot express. names,
    pattern: as for `block_counts`.
    """
    system = "Megatron"
    line = stage_line(plan, system, empty=True, parts=True)
    check_names(names, plan)
    if any(recomputed := [recomputed_parts(stage) for stage in plan.stages]):
        _check_parts(dict(row for rows in recomputed for row in rows), names, pattern, system)
    return _layout(line, names, pattern, system) + "\n"


def _layout(line: StageLine, names: ModelNames, pattern: str | None, system: str) -> str:
    """Return the layout string of a pipeline, or the pattern of a hybrid model."""
    if line.stages_per_rank > 1 and len(line.ranks) == 1:
        raise CapslogError(
            f"one rank runs {line.stages_per_rank} stages, but {system} interleaves stages of two or more ranks "
            "only; plan for more devices, or for one stage"
        )
    if names.tokens is False:
        raise CapslogError(
            f"the model reads no token ids, but the layout is for GPT models of {system}, which begin with them; "
            "export the plan to torchtitan or torch-csv"
        )
    counts = block_counts(names, line, system, pattern)
    if names.letters:
        return _hybrid_pattern(line, names, block_pattern(names.layers, pattern))
    stages = ["t" if count == 1 else f"t*{count}" if count else "" for count in counts]
    with_predictions = _stages_of_predictions(names, line)
    if len(set(with_predictions)) > 1 or any(stage < len(stages) - len(line.ranks) for stage in with_predictions):
        raise CapslogError(
            f"the layers for multi-token prediction are in stages {with_predictions}, but {system} wants them in one, "
            "the last of its rank; move the cuts near the head"
        )
    for stage in set(with_predictions):
        stages[stage] += "m" * names.num_predictions
    stages[0] = f"E{stages[0]}"
    stages[-1] = f"{stages[-1]}L"
    return "|".join(stages)


def _hybrid_pattern(line: StageLine, names: ModelNames, pattern: str) -> str:
    """Return the letters of each stage, and after a / those of each layer for multi-token prediction, which are the
    letters of the last block.
    """
    _check_predictions(names, line, "a hybrid model of Megatron")
    blocks = blocks_of_layers(names, pattern)
    letters = [text if numbers else "" for text, numbers in zip(names.letters, blocks, strict=False)]
    if (unknown := next((layer for layer, text in enumerate(letters) if "?" in text), None)) is not None:
        raise CapslogError(
            f"layer {names.layers[unknown]!r} is no mixer, no feed-forward and no mixer before a feed-forward that the "
            "letters of Megatron's hybrid patterns (M, G, *, D, +, - and E) describe, so that no pattern says where it "
            "is; export the plan to torch-csv or device-map"
        )
    stages = ["".join(letters[first:end]) for first, end in line.stages]
    return "/".join(["|".join(stages), *block_letters(names, pattern)[-1:] * names.num_predictions])


def _check_parts(
    recomputed: Mapping[int, tuple[str, ...]], names: ModelNames, pattern: str | None, system: str
) -> None:
    """Raise CapslogError unless the plan recomputes the same parts of all blocks, and nothing of other layers.
    recomputed: layer -> its parts.
    """
    blocks = blocks_of_layers(names, block_pattern(names.layers, pattern))
    first = next(iter(recomputed.values()))
    for layer, (name, numbers) in enumerate(zip(names.layers, blocks, strict=True)):
        if recomputed.get(layer, ()) != (first if numbers else ()):
            has = " and ".join(recomputed.get(layer, ())) or "no part"
            raise CapslogError(
                f"the plan recomputes {has} of layer {name!r}, but {system} recomputes the same parts of every block "
                f"and of nothing else, here {' and '.join(first)}; export a plan that does so"
            )


_MEGATRON_PARTS = {"attention": "core_attn", "mlp": "mlp", "norms": "layernorm", "experts": "moe"}


def megatron_parts(parts: Collection[str]) -> str:
    """Return the options with which Megatron recomputes parts of every block."""
    modules = " ".join(module for part, module in _MEGATRON_PARTS.items() if part in parts)
    more = " (the whole layer of experts, with its router)" if "experts" in parts else ""
    return f"--recompute-granularity selective --recompute-modules {modules}{more}"


def vllm(plan: Plan, names: ModelNames, pattern: str | None = None) -> str:
    """Return the environment variable with vLLM's decoder layers per pipeline rank: `VLLM_PP_LAYER_PARTITION=11,13`.

    Raises CapslogError for a plan that it cannot express. names, pattern: as for `block_counts`.
    """
    return f"VLLM_PP_LAYER_PARTITION={_partition(plan, names, pattern, 'vLLM')}\n"


def sglang(plan: Plan, names: ModelNames, pattern: str | None = None) -> str:
    """Return the environment variable of `vllm` for SGLang: `SGLANG_PP_LAYER_PARTITION=11,13`."""
    return f"SGLANG_PP_LAYER_PARTITION={_partition(plan, names, pattern, 'SGLang')}\n"


def vllm_ascend(plan: Plan, names: ModelNames, pattern: str | None = None) -> str:
    """Return, as JSON, the part of vllm-ascend's `--kv-transfer-config` by which decode nodes know the layers of
    prefill nodes. The prefill nodes themselves take the variable of `vllm`.
    """
    partition = _partition(plan, names, pattern, "vllm-ascend")
    prefill = {"pp_size": partition.count(",") + 1, "pp_layer_partition": partition}
    return json.dumps({"kv_connector_extra_config": {"prefill": prefill}}) + "\n"


def _partition(plan: Plan, names: ModelNames, pattern: str | None, system: str) -> str:
    return ",".join(map(str, _filled_counts(plan, names, pattern, system)))


def _filled_counts(plan: Plan, names: ModelNames, pattern: str | None, system: str) -> list[int]:
    """Blocks of each rank, which has one stage and at least one block."""
    line = stage_line(plan, system, one_stage_per_rank=True)
    check_names(names, plan)
    counts = block_counts(names, line, system, pattern)
    _check_predictions(names, line, system)
    if 0 in counts:
        # get_pp_indices itself takes a 0, but no source says that a worker without a KV cache runs
        raise CapslogError(
            f"stage {counts.index(0)} holds no decoder block, and no rule of {system} says that a rank may have none; "
            "move a block there"
        )
    return counts


def verl(plan: Plan, names: ModelNames, pattern: str | None = None) -> str:
    """Return the options of verl's Megatron engine with the decoder layers of the first and the last stage.

    Raises CapslogError for a plan whose other stages have unequal numbers. names, pattern: as for `block_counts`.
    """
    first, last = _ends(plan, names, pattern, "verl")
    key = "++actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_{}_pipeline_stage={}\n"
    return key.format("first", first) + key.format("last", last)


def slime(plan: Plan, names: ModelNames, pattern: str | None = None) -> str:
    """Return Megatron's options with the decoder layers of the first and the last stage, which slime passes on."""
    first, last = _ends(plan, names, pattern, "slime")
    return f"--decoder-first-pipeline-num-layers {first} --decoder-last-pipeline-num-layers {last}\n"


def _ends(plan: Plan, names: ModelNames, pattern: str | None, system: str) -> tuple[int, int]:
    """Decoder layers of the first and the last stage. Raises CapslogError where the others have unequal numbers."""
    counts = _filled_counts(plan, names, pattern, system)
    if len(counts) == 1:
        raise CapslogError(f"the plan has 1 stage, of which {system} needs no numbers of layers; plan for more devices")
    between = counts[1:-1]
    if len(set(between)) > 1:
        raise CapslogError(
            f"the stages between the first and the last have {between} blocks, but {system} takes the numbers of the "
            "first and the last stage and shares the rest evenly; export to megatron, whose layout says all of them"
        )
    return counts[0], counts[-1]


def diffusion_pipe(plan: Plan, names: ModelNames, pattern: str | None = None) -> str:
    """Return diffusion-pipe's settings of the stages, as TOML.

    It counts the entries of its own list: the model's part before the blocks, each block, and the part after
    them. Raises CapslogError for a plan that it cannot express, and for a model with blocks of several kinds, since
    most of its lists have one more entry between these. names, pattern: as for `block_counts`.
    """
    system = "diffusion-pipe"
    counts = _filled_counts(plan, names, pattern, system)
    blocks = blocks_of_layers(names, block_pattern(names.layers, pattern))
    for name, held in zip(names.layers, blocks, strict=True):
        if not held and re.fullmatch(r"(?:.*\.)?\d+(?:\..*)?", name):
            raise CapslogError(
                f"layer {name!r} is an item of another list than the blocks, and {system} counts such lists in its own "
                "way; set partition_split by hand"
            )
    ends = [1 + sum(counts[:stage]) for stage in range(1, len(counts))]
    return f"pipeline_stages = {len(counts)}\npartition_method = 'manual'\npartition_split = {ends}\n"


def primus(plan: Plan, run: RunShape, names: ModelNames, pattern: str | None = None) -> str:
    """Return Primus's YAML with Megatron's layout and the numbers of the recomputed decoder layers.

    A part that the plan recomputes and Primus does not, such as the embedding, is named in a comment.
    run: for stages whose memory the plan leaves open. names, pattern: as for `block_counts`.

    Raises CapslogError for a plan that Primus cannot express: as `megatron`; one stage, a block recomputed in part,
    offloading.
    """
    system = "Primus"
    line = stage_line(plan, system, intervals=True, empty=True)
    if len(line.ranks) == 1:
        raise CapslogError(f"{system} splits a model over two or more ranks, but the plan has one; plan for more")
    check_names(names, plan)
    key = "hybrid_layer_pattern" if names.letters else "pipeline_model_parallel_layout"
    lines = [f'{key}: "{_layout(line, names, pattern, system)}"']
    recomputed, other_layers = _recomputed_blocks(plan, line, run, names, pattern)
    if recomputed:
        lines += ["recompute_granularity: full", "recompute_method: null", f"recompute_layer_ids: {recomputed}"]
    if other_layers:
        lines.append(f"# the plan also recomputes {_some(other_layers)}, which {system} keeps")
    return "\n".join(lines) + "\n"


def _recomputed_blocks(
    plan: Plan, line: StageLine, run: RunShape, names: ModelNames, pattern: str | None
) -> tuple[list[int], list[str]]:
    """Numbers of the recomputed blocks, and names of the other recomputed layers."""
    recomputed: set[int] = set()
    for interval in (part for memory in memory_of_stages(plan, line, run) for part in memory):
        if interval.kind != "recompute":
            raise CapslogError(
                f"layers {interval.first} to {interval.end - 1} are to be treated by {interval.kind}, but Primus only "
                "recomputes; plan without a host tier"
            )
        recomputed.update(range(interval.first, interval.end))
    blocks = blocks_of_layers(names, block_pattern(names.layers, pattern))
    numbers = {number for layer in recomputed for number in blocks[layer]}
    kept = {number for layer in range(plan.num_layers) if layer not in recomputed for number in blocks[layer]}
    if numbers & kept:
        raise CapslogError(
            f"the plan recomputes a part of block {min(numbers & kept)}, but Primus recomputes whole blocks; plan with "
            "the blocks as layers (--cut-points)"
        )
    return sorted(numbers), [names.layers[layer] for layer in sorted(recomputed) if not blocks[layer]]
