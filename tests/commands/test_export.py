"""`capslog export`: the source of the names, the output, and the one-sentence error of every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.planning.export.models import plan_of
from varuna_capslog import cli
from varuna_capslog.config.reading import Config, dump_config, section
from varuna_capslog.model.model_workload import config_values
from varuna_capslog.plans.plan import write_plan
from varuna_capslog.profiles.record import LayerProfile, Profile, write_profile

DECODER = "tests.planning.export.models:CausalLM"
TOKENS = "x=int64[1,6]:11"
FACTORIES = ("--model", "examples.factories:model", "--input", TOKENS)


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", *map(str, words)])
    return int(ended.value.code or 0)


def write_names(path: Path, *names: str) -> None:
    write_profile(path, Profile(tuple(LayerProfile(name, 1, 1 if n else None) for n, name in enumerate(names))))


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    write_plan(tmp_path / "plan.json", plan_of(0, 3))
    return tmp_path / "plan.json"


def test_names_come_from_a_profile_or_a_model(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_names(plan.parent / "profile.json", "embed", *(f"h.{n}" for n in range(4)), "norm")
    assert run(plan, "--to", "megatron", "--profile", plan.parent / "profile.json") == 0
    captured = capsys.readouterr()
    assert captured.out == "Et*2|t*2L\n"
    (note,) = captured.err.splitlines()
    assert note.startswith("note: for GPT models of Megatron: --pipeline-model-parallel-layout takes it, in quotes")
    assert note.endswith("Megatron also needs --pipeline-model-parallel-size 2")
    assert run(plan, "--to", "vllm", *FACTORIES) == 0
    assert capsys.readouterr().out == "VLLM_PP_LAYER_PARTITION=2,2\n"
    assert run(plan, "--to", "automodel", "--model", DECODER, "--input", TOKENS, "-o", plan.parent / "parts.json") == 0
    parts = json.loads((plan.parent / "parts.json").read_text())
    assert parts[0] == ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.rotary_emb"]


def test_a_run_has_its_names_and_its_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = section(Config, config_values(DECODER, [TOKENS], None, 2), "")
    config.run_dir = tmp_path
    (tmp_path / "config.yaml").write_text(dump_config(config))
    write_plan(tmp_path / "plan-0.json", plan_of(0, 2))
    assert run(tmp_path, "--to", "sglang", "--trust") == 0  # no profile: the model is built
    assert capsys.readouterr().out == "SGLANG_PP_LAYER_PARTITION=1,3\n"
    assert run(tmp_path, "--to", "sglang", *FACTORIES, "--block-names", "block.*") == 0  # the given model
    assert capsys.readouterr().out == "SGLANG_PP_LAYER_PARTITION=1,3\n"
    write_names(tmp_path / "profile.json", *"abcdef")
    assert run(tmp_path, "--to", "deepspeed") == 0
    text = capsys.readouterr().out
    assert "PARTS = [0, 2, 6]" in text
    assert "stage 1: layer 2 (c) to layer 5 (f)" in text
    assert 'setdefault("activation_checkpoint_interval", 4)' in text  # the run's config recomputes
    assert run(tmp_path, "--to", "deepspeed", "--no-recompute") == 0
    assert "activation_checkpoint" not in capsys.readouterr().out
    assert run(tmp_path, "--to", "megatron") == 2  # the profile's names take precedence over those of the run's model
    assert "name no list of modules" in capsys.readouterr().err
    assert run(tmp_path, "--to", "megatron", *FACTORIES) == 0
    assert capsys.readouterr().out == "Et|t*3L\n"
    assert run(tmp_path, "--to", "device-map", "--trust") == 0  # needs the modules themselves
    assert json.loads(capsys.readouterr().out)["model.layers.1"] == 1


class Pixels(nn.Module):
    """Stack of equal blocks on pictures, with a parameter of its own as a ViT has it."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.cls = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.layers, self.head = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x) + self.cls
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


PIXELS = ("--model", "tests.commands.test_export:Pixels", "--input", "x=float32[8,4]")


def test_deepspeeds_comments_have_the_names_of_the_given_model(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--to deepspeed --model M` wrote "layer 0 to layer 2", as without --model."""
    assert run(plan, "--to", "deepspeed", *PIXELS) == 0
    assert "stage 0: layer 0 (patches) to layer 2 (layers.1)" in capsys.readouterr().out
    assert run(plan, "--to", "deepspeed") == 0
    assert "stage 0: layer 0 to layer 2\n" in capsys.readouterr().out


def test_a_stack_of_blocks_that_reads_no_tokens_is_no_gpt(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A layout for Megatron's GPT was written for a ViT, without a word."""
    assert run(plan, "--to", "megatron", *PIXELS) == 2
    error = capsys.readouterr().err
    assert "the model reads no token ids, but the layout is for GPT models of Megatron" in error
    assert len(error.splitlines()) == 1
    assert run(plan, "--to", "megatron", "--model", DECODER, "--input", TOKENS) == 0
    assert capsys.readouterr().out == "Et*2|t*2L\n"
    write_names(plan.parent / "profile.json", "patches", *(f"layers.{n}" for n in range(4)), "head")
    assert run(plan, "--to", "megatron", "--profile", plan.parent / "profile.json") == 0, "names tell no inputs"


def test_torchtitans_refusal_of_a_parameter_says_what_to_do(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It took 60 words. torchtitan keeps parameters of the model itself in every stage, and saves any one copy."""
    assert run(plan, "--to", "torchtitan", *PIXELS) == 2
    error = capsys.readouterr().err
    assert "'cls' (stage 0): torchtitan copies parameters of the model itself into every stage" in error
    assert error.endswith("put it into a submodule\n")
    assert len(error.split()) < 30


def test_mistakes_are_one_sentence(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in [
        (["--to", "megatrom"], "unknown form 'megatrom'; did you mean 'megatron'?"),
        (["--to", "megatron"], "a plan does not hold the names of the model's layers; give its profile with --profile"),
        (["--to", "torchtitan", *FACTORIES], "torchtitan speaks of the model's modules, of which only"),
        (["--to", "vllm", *FACTORIES, "--config", "c.yaml"], "both --config and --model are given"),
        (["--to", "vllm", "--input", TOKENS], "--input and --cut-points describe the model of --model"),
        (["--to", "vllm", *FACTORIES, "--block-names", "g.*"], "no layer's name is of the form 'g.*'"),
    ]:
        assert run(plan, *words) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1
