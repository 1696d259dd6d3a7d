"""Layouts as people paste them: from pages, threads, scripts and configs, with what is written around them."""

from __future__ import annotations

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planning.layouts import read_layout

UNEVEN = [11, *[12] * 6, 11]

PASTED = {
    "a table of Markdown": (r"| PP layout | `Et*2\|(tt\|)*5t\|tmL` | 8 stages |", 14, [*[2] * 6, 1, 1]),
    "the cell alone": (r"`\"Et\|(tt\|)*30L\"`", 61, [1, *[2] * 30, 0]),
    "a cell of HTML": ("&quot;Et&#124;(tt&#124;)*30L&quot;", 61, [1, *[2] * 30, 0]),
    "typographic quotes": ("“Et*7|t*7mL”", 14, [7, 7]),
    "quotes that do not match (Megatron-LM#1852)": (
        " --pipeline-model-parallel-layout \"Et|(tt|)*30L' for a 61 stage DeepSeek model", 61, [1, *[2] * 30, 0]
    ),
    "an empty chunk (Megatron-LM#1852)": ('"Et|(tt|)*29|L"', 59, [1, *[2] * 29, 0, 0]),
    "commas between letters (ISEEKYAN/Megatron-LM#53)": ('"E|t*5|t*6|t,m,L"', 12, [0, 5, 6, 1]),
    "a border before its letters (ms-swift#9827)": ("`E(|tt)*30,|mL`", 60, [0, *[2] * 30, 0]),
    "a shell's array, with other layouts in comments (Primus, Qwen3-235B)": (
        """    # FEATURE_ARGS+=("--pipeline_model_parallel_layout" "'Et*7|(t*8|)*10,t*7,L'")
        # 1+6+1 = 8 chunks
        FEATURE_ARGS+=("--pipeline_model_parallel_layout" "'Et*11|(t*12|)*6,t*11,L'")
        # FEATURE_ARGS+=("--pipeline_model_parallel_layout" "'Et*47|t*47,L'")
        VPP=1""", 94, UNEVEN
    ),
    "YAML, with keys that begin with its letters (Primus, MiniMax-M2.5)": (
        "pipeline_model_parallel_layout: Et*7|t*8|t*8|t*8|t*8|t*8|t*8|t*7,L\nmoe_layer_freq: 1\ntp: 1",
        62, [7, *[8] * 6, 7]
    ),
    "one line of a launcher (Megatron Bridge, DeepSeek-V4-Flash)": (
        "  'model.pipeline_model_parallel_layout=Et*11|t*11|t*11|t*10mL' \\\n  model.tensor_model_parallel_size=1 \\",
        43, [11, 11, 11, 10]
    ),
    "lines of a shell": ("--pipeline-model-parallel-layout 'Et*2|\\\n  (tt|)*2\\\n  tL' \\\n  --lr 1", 7, [2, 2, 2, 1]),
    "a comment alone": ("""   # FEATURE_ARGS+=("--pipeline_model_parallel_layout" 'Et|(tt|)*2L')""", 5, [1, 2, 2, 0]),
    "an argument (Megatron Bridge)": (
        'set_deepseek_v3_pipeline_model_parallel_layout(cfg.model, "Et*4|(tttt|)*14tmL")', 61, [*[4] * 15, 1]
    ),
    "a comparison in Python": ('assert cfg.model["pipeline_model_parallel_layout"] == "Et*2|t*2L"', 4, [2, 2]),
    "a variable's default": (
        'LAYOUT=${LAYOUT:-"Et*6|t*6|t*5L"}\n torchrun --pipeline-model-parallel-layout ${LAYOUT} x.py', 17, [6, 6, 5]
    ),
    "lists in Python, one empty (Megatron-LM's tests)": (
        """"pipeline_model_parallel_layout": [
            ["embedding"] + ["decoder"] * 2,
            ["decoder"] * 3,
            [],
            ["decoder"] * 3 + ["loss"],
        ]""", 8, [2, 3, 0, 3]
    ),
    "lists in YAML (verl)": ("pipeline_model_parallel_layout: [[embedding, decoder], [decoder, loss,],]", 2, [1, 1]),
    "lists with dashes": (
        "pipeline_model_parallel_layout:\n  - - embedding\n    - decoder\n  - [Decoder, loss]\nlr: 1", 2, [1, 1]
    ),
}  # fmt: skip

OTHERS = {
    "Primus#69": ("The split list could be decoder_pipeline_manual_split_list: [3,4, 4,4, 5,4, 4,4]", 32, 4,
                  [3, 4, 5, 4, 4, 4, 4, 4]),
    "ltp-megatron-lm#48": ("--decoder-pipeline-manual-split-list 7 8 9 8 --lr 1", 32, 4, [7, 8, 9, 8]),
    "Primus with dashes": ("decoder_pipeline_manual_split_list:\n  - 7\n  - 8\n  - 9\n  - 8\n", 32, 4, [7, 8, 9, 8]),
    "diffusion-pipe's example, whose comments have other splits": (
        """partition_method = 'manual'
# layers between GPUs. For example, with two GPUs, partition_split=[10] puts layers 0-9 on GPU 0.
partition_split = [
  16,  # blocks
]""", 40, 2, [15, 25]),
    "vllm-ascend#4892": (
        """export VLLM_PP_LAYER_PARTITION=33,28
        "kv_connector_extra_config": {"use_ascend_direct": true,
        "prefill": {"dp_size": 1, "tp_size": 8, "pp_size": 2, "pp_layer_partition": "33,28"}}""", 61, 2, [33, 28]),
    "the same numbers in two forms": (
        "VLLM_PP_LAYER_PARTITION=33,28\npp_layer_partition: [33, 28]", 61, 2, [33, 28]),
    "JSON in a shell": (r'--kv-transfer-config "{\"prefill\": {\"pp_layer_partition\": \"32,29\"}}"', 61, 2, [32, 29]),
    "a server's command": ('SGLANG_PP_LAYER_PARTITION="15, 15, 15, 16" python3 -m sglang.launch_server --nnodes 4',
                           61, 4, [15, 15, 15, 16]),
    "Megatron-Bridge#5551": ("- GLM-4.5 355B: `[10, 12, 12, 12, 12, 12, 12, 10]`", 92, 8, None),
    "its numbers": ("`[10, 12, 12, 12, 12, 12, 12, 10,]`", 92, 8, [10, *[12] * 6, 10]),
    "verl, DeepSeek-V3": (
        """LAST_LAYER=${LAST_LAYER:-6}
    +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=${LAST_LAYER} \\
    trainer.nnodes=12""", 61, 12, [*[5] * 11, 6]),
    "slime, GLM-5.2": (
        "PERF_ARGS=(\n   --decoder-first-pipeline-num-layers 14\n   --decoder-last-pipeline-num-layers 16\n"
        "   --context-parallel-size 8", 78, 8, [14, *[8] * 6, 16]),
    "torchtitan's documentation": (
        "module_fqns_per_model_part = [['tok_embeddings', 'layers.0'], ['layers.1', 'layers.2'],\n"
        "  ['layers.3', 'layers.4', 'norm', 'output'],]", 5, 3, [1, 2, 2]),
    "torchtitan's list with dashes": (
        "module_fqns_per_model_part:\n- - tok_embeddings\n  - layers.0\n- - layers.1\n  - norm\n", 2, 2, [1, 1]),
}  # fmt: skip


@pytest.mark.parametrize("where", PASTED)
def test_megatron_layouts(where: str) -> None:
    text, blocks, counts = PASTED[where]
    layout = read_layout(text, blocks, len(counts))
    assert (layout.system, list(layout.counts), layout.faults) == ("megatron", counts, ())


@pytest.mark.parametrize("where", OTHERS)
def test_layouts_of_others(where: str) -> None:
    text, blocks, ranks, counts = OTHERS[where]
    if counts is None:
        with pytest.raises(CapslogError, match="no system is known that writes a layout such as"):
            read_layout(text, blocks, ranks)
        return
    layout = read_layout(text, blocks, ranks)
    assert (list(layout.counts), layout.faults) == (counts, ())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("--pipeline_model_parallel_layout=$PP_LAYOUT", r"layout is '\$PP_LAYOUT' there; write it out, such as Et\*4"),
        ("x.num_layers_in_last_pipeline_stage=${LAST}", r"stage is '\$\{LAST\}' there; write it out, such as 7"),
        ("layout: E", "no system is known that writes a layout such as 'layout: E'; give Megatron's layout string or"),
        ("Et|(tt|)L", r"the layout 'Et\|\(tt\|\)L' cannot be read behind 'Et\|'"),
        (
            "--pipeline-model-parallel-layout Et|tL or --pipeline-model-parallel-layout 'Ett|L'",
            r"the text has 2 layouts, 'Et\|tL' and 'Ett\|L'; give one of them",
        ),
        ("take --pipeline-model-parallel-layout to set it", "names pipeline-model-parallel-layout, but gives no value"),
        ("VLLM_PP_LAYER_PARTITION=null", "names PP_LAYER_PARTITION, but gives no value such as 16,16,16,13 behind it"),
        ("pipeline_model_parallel_layout = [['embedding'], last_layer]", "'last_layer' is no list"),
        ("pipeline_model_parallel_layout = [[embedding, t], [loss]]", "'t' is no layer of Megatron's lists"),
        ("--pipeline_layer_partition=4,8,6,6", "no system is known that writes a layout such as '--pipeline_layer"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(CapslogError, match=sentence) as refused:
        read_layout(text, 4, 2)
    assert "\n" not in str(refused.value)


def test_long_texts_are_read_at_once() -> None:
    """Patterns of letters in repeated groups took time that doubled with every letter."""
    for text in ("M" * 5000 + "x", "Et" * 5000 + "x", " " * 20000 + "x", "1," * 5000 + "x", "[" * 150):
        with pytest.raises(CapslogError):
            read_layout(text, 4, 2)
