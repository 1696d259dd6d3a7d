"""Counts of a model's repeated blocks per stage, for systems that are told numbers of decoder layers.

The names of the layers tell it. Repeated blocks are the modules of one list, `transformer.h.0`, `transformer.h.1` and
so on. What stands before the first block is the embedding, and what stands behind the last one is the head (norms, the
output projection, the loss).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.names import ModelNames
from varuna_capslog.planning.export.stage_line import StageLine, check_names, stage_line
from varuna_capslog.plans.plan import Plan

__all__ = ["block_counts", "block_pattern", "megatron", "sglang", "vllm"]


def block_counts(names: ModelNames, line: StageLine, system: str, pattern: str | None = None) -> list[int]:
    """stage -> the repeated blocks that it holds. The embedding is then in the first stage, the head in the last one.

    pattern: the blocks' names, with one `*` in the place of their number, such as `transformer.h.*`; it may leave out
        the beginning. None: found among the names.
    system: for messages.

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
    an underscore (`encoder_layer_3`).

    Raises CapslogError where `pattern` names no layer, and where there is no list or are several.
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
    """The only pattern."""
    if len(patterns) == 1:
        return next(iter(patterns))
    which = f"name {len(patterns)} lists of modules ({', '.join(patterns)})" if patterns else "name no list of modules"
    raise CapslogError(
        f"the names of the layers, {_some(layers)}, {which}, so that they do not tell the repeated blocks; say them "
        "with --block-names 'PREFIX.*'"
    )


def _expression(pattern: str) -> str:
    """The names of the blocks and of their parts as a regular expression; its group is the number."""
    before, after = (re.escape(part) for part in pattern.split("*"))
    return rf"{before}(\d+){after}(?:\..*)?"


def _blocks_of_layers(names: ModelNames, pattern: str) -> list[list[int]]:
    """layer -> the numbers of the blocks of which it holds a part."""
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
    """The layout for Megatron-LM's `--pipeline-model-parallel-layout`, such as `Et*7|t*9|t*9|t*7L`, and a line feed.

    E is the embedding, t a decoder layer, L the loss with the output layer, | the border of a stage. Stage s is on
    rank s % ranks of a pipeline. Megatron Bridge reads the same string as `model.pipeline_model_parallel_layout`.

    names, pattern: as for `block_counts`.

    Raises CapslogError for a plan that a layout cannot say.
    """
    system = "Megatron"
    line = stage_line(plan, system)
    if line.stages_per_rank > 1 and len(line.ranks) == 1:
        raise CapslogError(
            f"one rank runs {line.stages_per_rank} stages, but {system} interleaves stages of two or more ranks "
            "only; plan for more devices, or for one stage"
        )
    check_names(names, plan)
    counts = block_counts(names, line, system, pattern)
    stages = ["t" if count == 1 else f"t*{count}" if count else "" for count in counts]
    stages[0] = f"E{stages[0]}"
    stages[-1] = f"{stages[-1]}L"
    return "|".join(stages) + "\n"


def vllm(plan: Plan, names: ModelNames, pattern: str | None = None) -> str:
    """The environment variable with vLLM's decoder layers per pipeline rank: `VLLM_PP_LAYER_PARTITION=11,13`.

    names, pattern: as for `block_counts`.

    Raises CapslogError for a plan that it cannot say.
    """
    return f"VLLM_PP_LAYER_PARTITION={_partition(plan, names, pattern, 'vLLM')}\n"


def sglang(plan: Plan, names: ModelNames, pattern: str | None = None) -> str:
    """The same for SGLang: `SGLANG_PP_LAYER_PARTITION=11,13`."""
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
