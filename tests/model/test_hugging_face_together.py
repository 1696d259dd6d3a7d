"""Decoder blocks that no system parts, by rules of config.json: no planner does, and lint says so of a layout."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from varuna_capslog import cli
from varuna_capslog.model import hugging_face
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.solve import solve
from varuna_capslog.profiles.record import Profile, read_profile
from varuna_capslog.schedules import RunShape

transformers = pytest.importorskip("transformers")

BLOCKS = 5
SIZES = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": BLOCKS}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 8}
SIZES |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2}
SIZES |= {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2, "vocab_size": 64, "first_k_dense_replace": 1}
SHARING = ["full", "shared", "shared", "full", "full"]
BEGINS = [0, 1, 4, 5, 6]
"""Layers that may begin a stage, of embedding, blocks and norm with head, by SHARING."""


def config(predictions: int = 0) -> transformers.GlmMoeDsaConfig:
    more = {"num_nextn_predict_layers": predictions, "architectures": ["GlmMoeDsaForCausalLM"]}
    return transformers.GlmMoeDsaConfig(**SIZES, indexer_types=SHARING, **more)


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Profile, Profile]:
    """The profile's file as --hf makes it, read, and that of every block by itself."""
    folder = tmp_path_factory.mktemp("model")
    config().save_pretrained(folder)
    flags = ["--hf", str(folder), "--device", "cuda:h100-80gb", "--sequence", "8"]
    cuts = [f"model.layers.{number}" for number in range(BLOCKS)]
    assert cli._run(["profile", *flags, "-o", str(folder / "profile.json")]) == 0
    assert cli._run(["profile", *flags, "--cut-points", ",".join([*cuts, "model.norm"]), "-o", f"{folder}/fine"]) == 0
    return folder / "profile.json", read_profile(folder / "profile.json"), read_profile(folder / "fine")


def test_no_planner_parts_them(profiles: tuple[Path, Profile, Profile]) -> None:
    """The fastest cuts are those of all lists of cuts that the rule allows in a chain of single blocks."""
    _, coarse, fine = profiles
    assert (coarse.num_layers, fine.num_layers) == (len(BEGINS), BLOCKS + 2)
    run = RunShape(8, "1f1b", recompute=False, microbatch_size=1)
    lists = [(0, *cuts) for cuts in itertools.combinations(BEGINS[1:], 2)]
    steps = [solve(Problem.of(fine, 3, run=run, cuts=cuts), "exact").step_seconds or 0.0 for cuts in lists]
    answer = solve(Problem.of(coarse, 3, run=run), "throughput")
    assert answer.step_seconds == pytest.approx(min(steps), rel=1e-6)
    free = solve(Problem.of(fine, 3, run=run), "throughput").step_seconds or 0.0
    assert free < min(steps) * 0.999  # the rule binds
    names = {layer.name for layer in coarse.layers}
    assert names.isdisjoint(f"model.layers.{n}" for n, kind in enumerate(SHARING) if kind == "shared")
    assert coarse.conditions["joined_parts"]["model.layers.0"] == ["model.layers.1", "model.layers.2"]


def test_a_layout_that_parts_them_is_illegal(
    profiles: tuple[Path, Profile, Profile], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--profile", str(profiles[0]), "--devices", "2", "--minibatch", "8"]
    assert cli._run(["lint", "4,1", *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"]["cuts"] == [0, 3]
    assert cli._run(["lint", "2,3", *flags]) == 3
    sentence = "stage 1 begins with block 2, but blocks 0 to 2 are one layer, 'model.layers.0', which cannot be parted"
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("count", [1, 3])
def test_routers_that_read_the_token_ids_lie_with_the_embedding(count: int) -> None:
    kinds = ["hash_moe"] * count + ["moe"] * (4 - count)
    with torch.device("meta"):
        small = {"hidden_size": 16, "num_hidden_layers": 4, "vocab_size": 64, "n_routed_experts": 4}
        sizes = transformers.DeepseekV4Config(**small, mlp_layer_types=kinds)
        assert list(hugging_face._not_parted(transformers.DeepseekV4ForCausalLM(sizes))) == [
            f"model.layers.{number}" for number in range(count)
        ]


def test_the_first_blocks_lie_with_the_tower_that_adds_to_them() -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": 64}
    tower = {"depth": 3, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 16}
    sizes = transformers.Qwen3VLConfig(text_config=small, vision_config=tower | {"deepstack_visual_indexes": [0, 2]})
    with torch.device("meta"):
        names = set(hugging_face._not_parted(transformers.Qwen3VLForConditionalGeneration(sizes)))
    assert {"model.language_model.layers.0", "model.language_model.layers.1", "model.visual.blocks.2"} <= names
    assert "model.language_model.layers.2" not in names


def test_layers_for_multi_token_prediction_are_one(tmp_path: Path) -> None:
    """Megatron has all of them in one stage."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 64, "num_nextn_predict_layers": 2}
    transformers.LlamaConfig(**sizes, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    flags = ["--hf", str(tmp_path), "--device", "cuda:h100-80gb", "--sequence", "8"]
    assert cli._run(["profile", *flags, "-o", str(tmp_path / "profile.json")]) == 0
    profile = read_profile(tmp_path / "profile.json")
    assert [layer.name for layer in profile.layers][-2:] == ["prediction_0", "head"]
    assert profile.conditions["joined_parts"] == {"prediction_0": ["prediction_1"]}
