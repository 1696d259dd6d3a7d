"""Forms that count decoder layers: Megatron's pipeline layout, and the layer partitions of vLLM and SGLang.

Rules as published in August 2026: Megatron-LM `megatron/core/transformer/pipeline_parallel_layer_layout.py` and its
user guide; `get_pp_indices` of vLLM and SGLang, which reads the variable that `vllm` or `sglang` writes.
"""

from __future__ import annotations

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.names import ModelNames
from varuna_capslog.planning.export.repeated_blocks import block_counts
from varuna_capslog.planning.export.stage_line import check_names, stage_line
from varuna_capslog.plans.plan import Plan

__all__ = ["megatron", "sglang", "vllm"]


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
