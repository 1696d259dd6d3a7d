"""Layouts and partitions, as their targets read them, match the plan."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.planning.export.models import BLOCKS, detr_names, named, names, plan_of, stages_of_blocks
from tests.planning.export.readers import (
    diffusion_pipe_entries,
    layer_partition,
    megatron_layout,
    primus_split,
    uneven_ends,
)
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.names import ModelNames
from varuna_capslog.planning.export import diffusion_pipe, megatron, primus, sglang, slime, verl, vllm, vllm_ascend
from varuna_capslog.plans.parts import MemoryInterval, Units
from varuna_capslog.plans.plan import Plan, stages_of_pipelines
from varuna_capslog.schedules import RunShape

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


def long_names(blocks: int) -> ModelNames:
    return named("embed", *(f"model.layers.{n}" for n in range(blocks)), "norm")


@pytest.mark.parametrize("write", [verl, slime])
def test_numbers_of_the_first_and_the_last_stage_are_read_back(write: Callable[..., str]) -> None:
    draw = random.Random(2)
    for _ in range(50):
        ranks, first, between, last = draw.randint(2, 6), draw.randint(1, 9), draw.randint(1, 9), draw.randint(1, 9)
        counts = [first, *[between] * (ranks - 2), last]
        cuts = (0, *(1 + sum(counts[:stage]) for stage in range(1, ranks)))
        blocks = sum(counts)
        text = write(plan_of(*cuts, layers=blocks + 2), long_names(blocks))
        assert [len(layers) for layers in uneven_ends(text, ranks, blocks)] == counts
    assert slime(plan_of(0, 3, layers=7), long_names(5)) == (
        "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 3\n"
    )


def test_uneven_stages_between_the_ends_are_refused() -> None:
    with pytest.raises(CapslogError, match=r"between the first and the last have \[1, 2\] blocks, but slime takes"):
        slime(plan_of(0, 2, 3, 5, layers=8), long_names(6))
    with pytest.raises(CapslogError, match="the plan has 1 stage, of which verl needs no numbers of layers"):
        verl(plan_of(0, layers=8), long_names(6))


@pytest.mark.parametrize("model", ["gpt2", "vit", "decoder"])
def test_diffusion_pipe_cuts_its_list_where_the_plan_does(model: str) -> None:
    for cuts in [(0,), (0, 3), (0, 2, 4)]:
        stages = diffusion_pipe_entries(diffusion_pipe(plan_of(*cuts), names(model)), BLOCKS)
        expected = [[f"block {number}" for number in blocks] for blocks in stages_of_blocks(cuts)]
        expected[0] = ["initial", *expected[0]]
        expected[-1] = [*expected[-1], "final"]
        assert stages == expected


def test_diffusion_pipe_refuses_blocks_of_two_kinds() -> None:
    flux = named("embed", "double.0", "double.1", "single.0", "single.1", "out")
    with pytest.raises(CapslogError, match=r"name 2 lists of modules \(double\.\*, single\.\*\)"):
        diffusion_pipe(plan_of(0, 3), flux)
    with pytest.raises(CapslogError, match=r"layer 'double\.0' is an item of another list than the blocks"):
        diffusion_pipe(plan_of(0, 4), flux, "single.*")


def test_vllm_ascend_tells_the_decode_nodes() -> None:
    config = json.loads(vllm_ascend(plan_of(0, 2, 4), names("decoder")))["kv_connector_extra_config"]["prefill"]
    partition = layer_partition(f"X={config['pp_layer_partition']}\n", "X", config["pp_size"], BLOCKS)
    assert [list(layers) for layers in partition] == stages_of_blocks((0, 2, 4))


KEEPS = RunShape(recompute=False, schedule="1f1b")


def test_primus_takes_the_layout_of_megatron() -> None:
    """Its own list of layers, which was written before, only switches a check off there since November 2025."""
    built, again = primus_split(primus(plan_of(0, 2, 4), KEEPS, names("decoder")), 3, BLOCKS)
    assert [built[rank, 0] for rank in range(3)] == stages_of_blocks((0, 2, 4))
    assert again == []
    cuts = (0, 2, 5, 7)
    looped = Plan(9, stages_of_pipelines(9, cuts, 2, 4, [0, 1, 0, 1]), Units(4, 1, 4), "interleaved")
    text = primus(looped, KEEPS, long_names(7))
    assert text == 'pipeline_model_parallel_layout: "Et|t*3|t*2|tL"\n'
    assert primus_split(text, 2, 7)[0] == {(0, 0): [0], (1, 0): [1, 2, 3], (0, 1): [4, 5], (1, 1): [6]}


def test_primus_recomputes_the_blocks_of_the_plan() -> None:
    first, second = plan_of(0, 4, layers=8).stages
    memory = (MemoryInterval(0, 2, "recompute"), MemoryInterval(3, 4, "recompute"))
    plan = Plan(8, (replace(first, memory=memory), replace(second, memory=())), Units(2, 1, 1), "1f1b")
    text = primus(plan, KEEPS, long_names(6))
    assert primus_split(text, 2, 6)[1] == [0, 2]
    assert "# the plan also recomputes embed, which Primus keeps" in text
    assert primus_split(primus(plan_of(0, 4, layers=8), replace(KEEPS, recompute=True), long_names(6)), 2, 6)[1] == [
        *range(6)
    ]
    offloads = replace(second, memory=(MemoryInterval(4, 5, "offload"),))
    with pytest.raises(CapslogError, match="layers 4 to 4 are to be treated by offload, but Primus only recomputes"):
        primus(replace(plan, stages=(first, offloads)), KEEPS, long_names(6))
    halves = named("embed", "h.0.attention", "h.0.mlp", "h.1", "norm")
    part = Plan.of_cuts(5, (0, 3), schedule="1f1b")
    stage = replace(part.stages[0], memory=(MemoryInterval(1, 2, "recompute"),))
    with pytest.raises(CapslogError, match="the plan recomputes a part of block 0, but Primus recomputes whole blocks"):
        primus(Plan(5, (stage, replace(part.stages[1], memory=())), Units(2, 1, 1), "1f1b"), KEEPS, halves)
    with pytest.raises(CapslogError, match="Primus splits a model over two or more ranks, but the plan has one"):
        primus(plan_of(0), KEEPS, names("decoder"))
    assert primus(plan_of(0, 1), KEEPS, names("gpt2")).startswith('pipeline_model_parallel_layout: "E|t*')


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
