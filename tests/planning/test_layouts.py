"""Published layouts are read, and mean the cuts that their systems make of them."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.names import LayerModules, ModelNames
from varuna_capslog.planning.export import TARGETS, Request, export_text
from varuna_capslog.planning.layouts import count_blocks, layout_cuts, read_layout
from varuna_capslog.plans.parts import Units
from varuna_capslog.plans.plan import Plan, stages_of_pipelines
from varuna_capslog.schedules import RunShape, dealt_out


def names_of_blocks(blocks: int) -> ModelNames:
    return ModelNames(("embed", *(f"model.layers.{n}" for n in range(blocks)), "norm", "lm_head"))


PUBLISHED = [
    ("Et*2|(t*2|)*34,t*3|(t*2|)*3,tL", 80, 8, "megatron", [10, 10, 10, 11, 10, 10, 10, 9], 0),
    ("Et*4|(tttt|)*14tmL", 61, 4, "megatron", [16, 16, 16, 13], 1),
    ("Et*3|(tt|)*29,m|L", 61, 16, "megatron", None, 1),
    ("6,4,4,4,4,4,4,4,4,4,1", 43, 11, "vllm", [6, 4, 4, 4, 4, 4, 4, 4, 4, 4, 1], 0),
    ("VLLM_PP_LAYER_PARTITION=31,31,31", 93, 3, "vllm", [31, 31, 31], 0),
    ('SGLANG_PP_LAYER_PARTITION="15,15,15,16"', 61, 4, "sglang", [15, 15, 15, 16], 0),
    ('"prefill": {"pp_size": 2, "pp_layer_partition": "33,28"}', 61, 2, "vllm-ascend", [33, 28], 0),
    ("--decoder-last-pipeline-num-layers 18 --tensor-model-parallel-size 8", 78, 4, "slime", [20, 20, 20, 18], 0),
    ("++x.num_layers_in_first_pipeline_stage=5\n++x.num_layers_in_last_pipeline_stage=5", 94, 16, "verl",
     [5, *[6] * 14, 5], 0),
    ("decoder_pipeline_manual_split_list: [7, 8, 9, 8]", 32, 4, "primus", [7, 8, 9, 8], 0),
    ("partition_method = 'manual'\npartition_split = [16]", 40, 2, "diffusion-pipe", [15, 25], 0),
    ("layout = [['embedding'] + ['decoder'] * 3, ['decoder'], ['decoder'] * 2, ['mtp', 'loss']]  # [1]", 6, 2,
     "megatron", [5, 1], 1),
    ('[["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "norm"]]', 3, 2, "torchtitan", [1, 2], 0),
]  # fmt: skip


@pytest.mark.parametrize(("text", "blocks", "ranks", "system", "of_ranks", "prediction"), PUBLISHED)
def test_published_layouts_are_read(
    text: str, blocks: int, ranks: int, system: str, of_ranks: list[int] | None, prediction: int
) -> None:
    layout = read_layout(text, blocks, ranks)
    assert (layout.system, len(layout.prediction_stages), layout.faults) == (system, prediction, ())
    if of_ranks is not None:
        assert [sum(layout.counts[rank::ranks]) for rank in range(ranks)] == of_ranks
    assert read_layout(text, blocks, ranks, system) == layout


def test_what_is_exported_is_read_back() -> None:
    draw = random.Random(3)
    for _ in range(60):
        blocks, ranks = draw.randint(4, 70), draw.choice([2, 3, 4])
        names = names_of_blocks(blocks)
        cuts = [0, *sorted(draw.sample(range(2, blocks + 1), ranks - 1))]
        plan = Plan.of_cuts(blocks + 3, cuts, schedule="1f1b")
        request = Request(plan, RunShape(recompute=False), names=names)
        for target in ("megatron", "primus", "vllm", "sglang", "vllm-ascend", "diffusion-pipe", "verl", "slime"):
            try:
                text = export_text(target, request)
            except CapslogError:
                assert target in ("verl", "slime")
                assert ranks > 2  # the stages between the ends are unequal
                continue
            layout = read_layout(text, blocks, ranks)
            assert (layout.system, layout.faults) == ("megatron" if target == "primus" else target, ())
            assert layout_cuts(layout, names) == cuts
    assert TARGETS.keys() > {"megatron", "primus"}


def test_empty_chunks_are_exported_and_read_back() -> None:
    """A rank that is passed over has an empty chunk in the layout, and no stage in the plan."""
    names, draw = names_of_blocks(12), random.Random(4)
    exported = 0
    for _ in range(100):
        ranks, rounds = draw.randint(2, 3), draw.randint(2, 3)
        placement = [0, *(place % ranks for place in range(1, ranks * rounds - 1) if draw.random() < 0.7)]
        placement = [*placement, ranks - 1] if placement[-1] != ranks - 1 else placement
        cuts = [0, *sorted(draw.sample(range(2, 13), len(placement) - 1))]
        plan = Plan(15, stages_of_pipelines(15, cuts, 1, 1, placement), Units(12, 1, 1), "interleaved")
        dealt = dealt_out(placement)
        if dealt is None or dealt[0] != list(range(ranks)):
            continue
        text = export_text("megatron", Request(plan, RunShape(recompute=False), names=names))
        exported += 1
        layout = read_layout(text, 12, ranks)
        read = layout_cuts(layout, names)
        filled = [stage for stage, (first, end) in enumerate(pairwise((*read, 15))) if first < end]
        assert [read[stage] for stage in filled] == cuts
        assert [stage % ranks for stage in filled] == placement
        primus = export_text("primus", Request(plan, RunShape(recompute=False), names=names))
        assert primus == f'pipeline_model_parallel_layout: "{text.strip()}"\n'
    assert exported > 20
    for placement, last in (([0, 1, 0], 1), ([1, 0, 1], 0)):
        plan = Plan(15, stages_of_pipelines(15, [0, 4, 9], 1, 1, placement), Units(12, 1, 1), "interleaved")
        sentence = f"Megatron begins on the first and ends on the last of them; end the plan on rank {last}$"
        with pytest.raises(CapslogError, match=sentence):
            export_text("megatron", Request(plan, RunShape(recompute=False), names=names))


def test_cuts_of_chunks_embedding_and_head() -> None:
    names = names_of_blocks(4)
    assert layout_cuts(read_layout("E|t|ttt|L", 4, 2), names) == [0, 1, 2, 5]
    assert layout_cuts(read_layout("decoder_pipeline_manual_split_list: [1, 1, 1, 1]", 4, 2), names) == [0, 2, 3, 4]
    split = read_layout("decoder_pipeline_manual_split_list: [1, 2, 3, 1]", 7, 2)
    assert split.counts == (1, 3, 2, 1)  # rank 0 holds stages 0 and 2
    assert layout_cuts(read_layout("Et||ttt|L", 4, 4), names) == [0, 2, 2, 5]  # stage 1 is empty
    assert count_blocks(names) == 4


def test_layers_for_multi_token_prediction_stand_where_the_layout_says() -> None:
    """The norm before them is with the last block, as Megatron has it; the head is behind them."""
    names = ModelNames(
        ("embed", *(f"model.layers.{n}" for n in range(4)), "model.norm", "prediction_0", "prediction_1", "head")
    )
    assert layout_cuts(read_layout("Ett|ttmmL", 4, 2, num_predictions=2), names) == [0, 3]
    assert layout_cuts(read_layout("Ett|tt|mm|L", 4, 4, num_predictions=2), names) == [0, 3, 6, 8]
    assert layout_cuts(read_layout("Ett|tt||mmL", 4, 4, num_predictions=2), names) == [0, 3, 6, 6]
    assert layout_cuts(read_layout("2,2,0", 4, 3, num_predictions=2), names) == [0, 3, 6]  # it says nothing
    assert read_layout("Ett|ttmL", 4, 2, num_predictions=2).faults == (
        "it has 1 layers for multi-token prediction (m), the model 2",
    )
    assert "are in stages [2, 3], not in one" in read_layout("Ett|tt|m|mL", 4, 4).faults[0]
    assert "not in the last chunk of its rank" in read_layout("Ett|ttm||L", 4, 2).faults[0]


def test_exports_of_layers_for_multi_token_prediction_are_read_back() -> None:
    names = ModelNames(("embed", *(f"model.layers.{n}" for n in range(4)), "model.norm", "prediction_0", "head"))

    def exported(target: str, cuts: list[int]) -> str:
        plan = Plan.of_cuts(8, cuts, schedule="1f1b")
        return export_text(target, Request(plan, RunShape(recompute=False), names=names)).strip()

    assert exported("megatron", [0, 3]) == "Et*2|t*2mL"
    assert exported("megatron", [0, 3, 6, 7]) == "Et*2|t*2|m|L"
    assert exported("slime", [0, 3]) == "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2"
    layout = read_layout("Et*2|t*2|m|L", 4, 4, num_predictions=1)
    assert (layout_cuts(layout, names), layout.faults) == ([0, 3, 6, 7], ())
    with pytest.raises(CapslogError, match="'prediction_0' is not in the last stage, where vLLM puts"):
        exported("vllm", [0, 3, 4, 7])
    with pytest.raises(CapslogError, match="what torchtitan calls the layers for multi-token prediction is not known"):
        exported("torchtitan", [0, 3])


def test_a_layer_that_holds_all_layers_for_multi_token_prediction_counts_each() -> None:
    """--hf joins them, since Megatron has them in one stage; the export counted one, and lint refused two."""
    blocks = tuple(f"model.layers.{n}" for n in range(4))
    known = {"joined": {"prediction_0": ["prediction_1"]}}
    captured = [LayerModules((name,)) for name in ("embed", *blocks, "norm")]
    captured += [LayerModules(("prediction_0.projection", "prediction_1.projection")), LayerModules(("head",))]
    for more in (known, {"held": tuple(captured)}):
        names = ModelNames(("embed", *blocks, "norm", "prediction_0", "head"), **more)
        assert names.num_predictions == 2
        plan = Plan.of_cuts(8, [0, 3], schedule="1f1b")
        text = export_text("megatron", Request(plan, RunShape(recompute=False), names=names)).strip()
        assert text == "Et*2|t*2mmL"
        assert layout_cuts(read_layout(text, 4, 2, num_predictions=2), names) == [0, 3]
        assert layout_cuts(read_layout("Ett|tt|mm|L", 4, 4, num_predictions=2), names) == [0, 3, 6, 7]


@pytest.mark.parametrize(
    ("text", "blocks", "ranks", "fault"),
    [
        ("20,20,20,25", 78, 4, "it has 85 decoder blocks, the model 78"),
        ("Et*4|t*4L", 8, 4, "its 2 stages are no multiple of 4 ranks"),
        ("t*4|t*4L", 8, 2, "it does not begin with one E, the embedding"),
        ("Et*4|t*4", 8, 2, "it does not end with one L, the loss"),
        ("Et*4|mt*4L", 8, 2, "a layer for multi-token prediction (m) stands before a block (t)"),
        ("--decoder-last-pipeline-num-layers 5", 12, 3, "the 7 blocks of the other stages do not share evenly among 2"),
        ("--decoder-last-pipeline-num-layers 15", 12, 2, "it has 15 decoder blocks, the model 12"),
        ("decoder_pipeline_manual_split_list: [8, 0]", 8, 2, "Primus wants at least one block in every stage"),
        ("partition_split = [9, 4]", 8, 3, "the bounds of partition_split do not rise"),
        ('[["layers.1", "layers.0"], ["layers.2"]]', 3, 2, "the blocks are not listed once each, in their order"),
    ],
)
def test_faults_are_named(text: str, blocks: int, ranks: int, fault: str) -> None:
    assert fault in read_layout(text, blocks, ranks).faults


def test_texts_that_are_no_layout_are_refused() -> None:
    with pytest.raises(CapslogError, match="no system is known that writes a layout such as 'evenly'"):
        read_layout("evenly", 8, 2)
    with pytest.raises(CapslogError, match=r"the layout 'Et\*x\|tL' cannot be read behind 'Et'"):
        read_layout("Et*x|tL", 8, 2, "megatron")
    with pytest.raises(CapslogError, match=r"partition_split is 'x' there; write it out, such as \[7, 8, 9\]"):
        read_layout("partition_split = x", 8, 2)
    with pytest.raises(CapslogError, match=r"the text has no list partition_split: \[N, \.\.\.\]"):
        read_layout("--split 8", 8, 2, "diffusion-pipe")
    with pytest.raises(CapslogError, match="unknown system"):
        read_layout("4,4", 8, 2, "vlm")
    for lists, reason in (
        ("[['embedding', 't'], ['loss']]", "'t' is no layer of Megatron's lists"),
        ("[['embedding'] * 10**9, ['loss']]", "no product of a list with less than 1000"),
        ("[['embedding'], run()]", r"'run\(\)' is no list"),
        ("[['embedding']", "never closed"),
    ):
        with pytest.raises(CapslogError, match=rf"{reason}"):
            read_layout(lists, 8, 2)
