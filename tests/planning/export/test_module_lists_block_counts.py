"""Layouts and partitions, as their targets read them, match the plan."""

from __future__ import annotations

import random

import pytest

from tests.planning.export.models import BLOCKS, detr_names, named, names, plan_of, stages_of_blocks
from tests.planning.export.readers import layer_partition, megatron_layout
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planning.export import megatron, sglang, vllm
from varuna_capslog.plans.parts import Units
from varuna_capslog.plans.plan import Plan, stages_of_pipelines

CUTS = [(0,), (0, 3), (0, 2, 4), (0, 1, 2, 5)]


def expected_layout(cuts: tuple[int, ...], ranks: int) -> dict[tuple[int, int], list[str]]:
    rows = [[f"decoder {block}" for block in blocks] for blocks in stages_of_blocks(cuts)]
    rows[0] = ["embedding", *rows[0]]
    rows[-1] = [*rows[-1], "loss"]
    return {(stage % ranks, stage // ranks): row for stage, row in enumerate(rows)}


@pytest.mark.parametrize("model", ["gpt2", "tied gpt2", "vit", "decoder"])
@pytest.mark.parametrize("cuts", CUTS)
def test_megatron_builds_the_stages_of_the_plan(model: str, cuts: tuple[int, ...]) -> None:
    text = megatron(plan_of(*cuts), names(model))
    assert megatron_layout(text, len(cuts), BLOCKS) == expected_layout(cuts, len(cuts))


def test_megatron_interleaves_stages_of_a_rank() -> None:
    cuts = (0, 2, 3, 5)
    stages = stages_of_pipelines(BLOCKS + 2, cuts, 2, 4, [0, 1, 0, 1])
    text = megatron(Plan(BLOCKS + 2, stages, Units(4, 1, 4), "interleaved"), names("decoder"))
    assert text == "Et|t|t*2|L\n"
    assert megatron_layout(text, 2, BLOCKS) == expected_layout(cuts, 2)
    on_one = Plan(BLOCKS + 2, stages_of_pipelines(BLOCKS + 2, cuts, 1, 1, [0] * 4), Units(4, 1, 1), "interleaved")
    with pytest.raises(CapslogError, match="one rank runs 4 stages, but Megatron interleaves stages of two or more"):
        megatron(on_one, names("decoder"))


def test_the_reader_knows_the_layout_of_the_user_guide() -> None:
    guide = megatron_layout("Et*3|(tt|)*29,L\n".replace("(tt|)*29,", "(tt|)*30"), 16, 63)
    assert guide[0, 0] == ["embedding", "decoder 0", "decoder 1", "decoder 2"]
    assert guide[0, 1] == ["decoder 33", "decoder 34"]
    assert guide[15, 1] == ["loss"]


@pytest.mark.parametrize(
    ("write", "variable"), [(vllm, "VLLM_PP_LAYER_PARTITION"), (sglang, "SGLANG_PP_LAYER_PARTITION")]
)
@pytest.mark.parametrize("model", ["gpt2", "tied gpt2", "vit", "decoder"])
def test_partitions_hold_the_blocks_of_the_plan(write: object, variable: str, model: str) -> None:
    for cuts in [(0,), (0, 3), (0, 2, 4), (0, 2, 3, 4)]:
        text = write(plan_of(*cuts), names(model))  # type: ignore[operator]
        partition = layer_partition(text, variable, len(cuts), BLOCKS)
        assert [list(layers) for layers in partition] == stages_of_blocks(cuts)


def test_random_cuts_of_long_models_are_read_back() -> None:
    draw = random.Random(1)
    for _ in range(100):
        blocks = draw.randint(4, 90)
        model_names = named("embed", *(f"model.layers.{n}" for n in range(blocks)), "norm")
        ranks = draw.choice([n for n in (1, 2, 3, 4) if n <= blocks])
        cuts = (0, *sorted(draw.sample(range(2, blocks + 1), ranks - 1)))
        bounds = (*cuts[1:], blocks + 2)
        mine = [min(end - 1, blocks) - max(first - 1, 0) for first, end in zip(cuts, bounds, strict=True)]
        layout = megatron_layout(megatron(plan_of(*cuts, layers=blocks + 2), model_names), ranks, blocks)
        assert [sum("decoder" in layer for layer in layout[rank, 0]) for rank in range(ranks)] == mine
        text = vllm(plan_of(*cuts, layers=blocks + 2), model_names)
        assert [
            len(rank_layers) for rank_layers in layer_partition(text, "VLLM_PP_LAYER_PARTITION", ranks, blocks)
        ] == mine


def test_what_they_cannot_say_is_refused() -> None:
    with pytest.raises(CapslogError, match=r"lists of modules \(.*encoder\.\*, decoder\.\*"):
        megatron(plan_of(0, 5, layers=len(detr_names().layers)), detr_names())
    with pytest.raises(CapslogError, match="stage 0 holds no decoder block, and no rule of vLLM says"):
        vllm(plan_of(0, 1), names("gpt2"))
    with pytest.raises(CapslogError, match="stage 1 holds no decoder block, and no rule of SGLang says"):
        sglang(plan_of(0, 5), names("gpt2"))
    looped = Plan(6, stages_of_pipelines(6, [0, 2, 3, 4], 1, 1, [0, 1, 0, 1]), Units(2, 1, 1), "interleaved")
    with pytest.raises(CapslogError, match="each rank runs 2 stages, but vLLM has one stage per rank"):
        vllm(looped, names("gpt2"))
    with pytest.raises(CapslogError, match="the plan has 7 layers, but the model has 6; give the profile or the model"):
        megatron(plan_of(0, 3, layers=7), names("gpt2"))
