"""Hybrid models (state spaces, delta nets, attention) as Megatron's hybrid patterns, written and read."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from varuna_capslog import cli
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.names import LayerModules, ModelNames, hybrid_letters
from varuna_capslog.planning.export import Request, export_text, notes
from varuna_capslog.planning.export.layer_counts import block_letters
from varuna_capslog.planning.layouts import count_blocks, layout_cuts, read_layout
from varuna_capslog.plans.parts import Units
from varuna_capslog.plans.plan import Plan, stages_of_pipelines, write_plan
from varuna_capslog.profiles.record import read_profile
from varuna_capslog.schedules import RunShape

KEEPS = RunShape(recompute=False)
TINY = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
TINY |= {"vocab_size": 64}
MAMBA = {"mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}


def letters_of(name: str, **sizes: object) -> tuple[tuple[str, ...], object]:
    """Letters of the blocks of a model of transformers, and its config."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**TINY, **sizes)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    parameters: dict[str, list[str]] = {}
    for path, _ in model.named_parameters():
        parameters.setdefault(".".join(path.split(".")[:3]), []).append(path)
    layers = [LayerModules((), tuple(row)) for block, row in parameters.items() if ".layers." in block]
    return hybrid_letters(layers), config


def test_letters_are_those_of_the_configs_of_transformers() -> None:
    kinds = ["linear_attention", "mlp", "linear_attention", "moe", "full_attention", "mlp"]
    letters, config = letters_of("NemotronH", layers_block_type=kinds, n_routed_experts=4)
    assert "".join(letters) == config.hybrid_override_pattern == "M-ME*-"
    letters, _ = letters_of("Bamba", num_hidden_layers=3, attn_layer_indices=[1], **MAMBA)
    assert letters == ("M-", "*-", "M-")
    kinds = ["linear_attention", "full_attention"]
    granite, _ = letters_of("GraniteMoeHybrid", num_hidden_layers=2, layer_types=kinds, num_local_experts=0, **MAMBA)
    assert granite == ("M-", "*-")
    letters, config = letters_of("Qwen3Next", num_hidden_layers=4, num_experts=4, mlp_only_layers=[1])
    mixers = ["*" if kind == "full_attention" else "G" for kind in config.layer_types]
    assert [row[0] for row in letters] == mixers == ["G", "G", "G", "*"]
    assert [row[1:] for row in letters] == ["E", "-", "E", "E"]


def test_models_without_a_pattern() -> None:
    """Mamba of the first kind, mixers side by side, and models that Megatron builds as GPT models."""
    jamba, _ = letters_of("Jamba", num_hidden_layers=2, attn_layer_offset=1, attn_layer_period=2, num_experts=2)
    assert "?" in jamba[0]
    falcon, _ = letters_of("FalconH1", num_hidden_layers=1, mamba_d_ssm=32, **MAMBA)
    assert falcon == ("?",)
    assert letters_of("Llama", num_hidden_layers=1)[0] == ()


class Mixer(nn.Module):
    """Module with the parameters of a Mamba-2, but not its work."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log, self.D, self.dt_bias = (nn.Parameter(torch.ones(4)) for _ in range(3))
        self.in_proj, self.out_proj = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.out_proj(self.in_proj(x) * self.A_log + self.D * self.dt_bias))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(torch.relu(self.up_proj(x))))


class Block(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.norm, self.parts = nn.LayerNorm(4), len(parts)
        for number, part in enumerate(parts):
            setattr(self, f"part_{number}", part)

    def forward(self, x: Tensor) -> Tensor:
        for number in range(self.parts):
            x = x + getattr(self, f"part_{number}")(self.norm(x))
        return x


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.layers = nn.ModuleList([Block(FeedForward(), Mixer()), Block(Mixer()), Block(FeedForward())])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        return cast(Tensor, self.head(x))


def stack() -> nn.Module:
    return Stack()


def test_a_profile_keeps_the_letters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the capture of a model to the pattern; parts of a block may be made in any order."""
    model = ["--model", f"{__name__}:stack", "--input", "tokens=int64[1,6]:9", "--device", "cuda:h100-80gb"]
    profile, saved = tmp_path / "profile.json", tmp_path / "plan.json"
    assert cli._run(["profile", *model, "-o", str(profile)]) == 0
    write_plan(saved, Plan.of_cuts(read_profile(profile).num_layers, [0, 2], schedule="1f1b"))
    capsys.readouterr()
    for source in (["--profile", str(profile)], model[:4]):
        assert cli._run(["export", str(saved), *source, "--to", "megatron"]) == 0
        assert capsys.readouterr().out == "M-|M-\n"


def names_of_letters(blocks: list[str], predictions: int = 0) -> ModelNames:
    """Names of an embedding, blocks of these letters, a norm, a layer of all predictions, and a head."""
    layers = ["embed", *(f"model.layers.{n}" for n in range(len(blocks))), "norm"]
    more = [f"prediction_{number}" for number in range(predictions)]
    joined = {"prediction_0": more[1:]} if predictions > 1 else {}
    letters = ("", *blocks, *[""] * (2 + bool(predictions)))
    return ModelNames((*layers, *more[:1], "lm_head"), joined=joined, letters=letters)


def drawn() -> Iterator[tuple[ModelNames, int, list[int], str]]:
    """Names of hybrid models, ranks, first layers of stages, and the exported pattern."""
    draw = random.Random(7)
    for number in range(40):
        sort = draw.choice([["M", "-", "*", "E"], ["M-", "*-"], ["GE", "G-", "*E"], ["M", "*-"]])
        blocks = [draw.choice(sort) for _ in range(draw.randint(6, 30))]
        names = names_of_letters(blocks, predictions=number % 3)
        ranks, rounds = draw.choice([2, 3]), draw.choice([1, 2])
        cuts = [0, *sorted(draw.sample(range(2, len(blocks) + 1), ranks * rounds - 1))]
        stages = stages_of_pipelines(len(names.layers), cuts, 1, 1, [*range(ranks)] * rounds)
        plan = Plan(len(names.layers), stages, Units(12, 1, 1), "interleaved" if rounds > 1 else "1f1b")
        yield names, ranks, cuts, export_text("megatron", Request(plan, KEEPS, names=names)).strip()


def test_exported_patterns_are_read_back() -> None:
    for names, ranks, cuts, text in drawn():
        known, num_blocks = block_letters(names), count_blocks(names)
        layout = read_layout(text, num_blocks, ranks, None, names.num_predictions, known)
        assert (layout.system, layout.faults, layout_cuts(layout, names)) == ("megatron", (), cuts)
        assert len(layout.prediction_stages) == names.num_predictions
        assert text.split("/")[1:] == [known[-1]] * names.num_predictions
        if len(set(map(len, known))) == 1:  # then the letters need not be known
            assert read_layout(text, num_blocks, ranks).counts == layout.counts


def test_megatron_reads_the_patterns() -> None:
    """By megatron-core's own parser (0.19.2); versions before 0.17 have none for |."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    allocation = pytest.importorskip(
        "megatron.core.models.hybrid.hybrid_layer_allocation", reason="megatron-core has no models.hybrid (0.19 has)"
    )
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for names, ranks, cuts, text in drawn():
            parsed = allocation.parse_hybrid_pattern(text)
            assert parsed.mtp_num_depths == names.num_predictions
            assert parsed.mtp_pattern in (None, names.letters[len(block_letters(names))])
            assert allocation.get_hybrid_total_pipeline_segment_count(text) == len(cuts)
            assert len(cuts) % ranks == 0
            for stage, (first, end) in enumerate(zip(cuts, [*cuts[1:], len(names.layers)], strict=True)):
                groups = dict.fromkeys(("tp_group", "dp_cp_group"), torch.distributed.group.WORLD)
                layers, offset = allocation.select_pipeline_segment(parsed.main_pattern, None, stage, **groups)
                assert "".join(layers) == "".join(names.letters[first:end])
                assert offset == len("".join(names.letters[:first]))
        draw = random.Random(11)
        for _ in range(300):  # legal or not as lint says
            text = "".join(draw.choice("MM*-E|D+/") for _ in range(draw.randint(2, 9)))
            try:
                size = allocation.get_hybrid_total_layer_count(text)
                parsed = allocation.parse_hybrid_pattern(text)
                legal = bool(parsed.main_pattern) and size > 0
            except ValueError:
                legal = False
            assert _is_legal(text) == legal, text
    finally:
        torch.distributed.destroy_process_group()


def _is_legal(text: str) -> bool:
    """True where lint takes a pattern for a model of as many blocks as its letters."""
    blocks = sum(letter not in "|" for letter in text.split("/")[0])
    try:
        return blocks > 0 and read_layout(f"--hybrid-layer-pattern '{text}'", blocks, 1).faults == ()
    except CapslogError:
        return False


def test_published_patterns() -> None:
    """Of Megatron-LM's functional tests (two virtual stages of two ranks), and of Nemotron-3 Nano in one stage."""
    text = "  --hybrid-layer-pattern: M-M-M-M*-M-|M-M-M*-M-M-|M-M*-M-M-M-|M*-M-M-M-M-\n  --spec: x"
    assert read_layout(text, 44, 2).counts == (11, 11, 11, 11)
    nano = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    layout = read_layout(f"--hybrid-layer-pattern {nano} \\\n --spec x", 52, 1, letters=list(nano))
    assert (layout.counts, layout.faults) == ((52,), ())
    assert read_layout(rf"`{nano[:26]}\|{nano[26:]}/*E`", 52, 2, None, 1, list(nano)).prediction_stages == (1,)
    assert read_layout(nano, 52, 2).counts == (26, 26)  # without |, as Megatron splits it


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("M-M|*-M", "it has the layers M-M*-M, the model M-M-*-: they differ at layer 3"),
        ("M-M-|*-M-", "it has the layers M-M-*-M-, the model M-M-*-: they differ at layer 6"),
        ("M-M-*-", "it has no |, and its 6 layers do not share evenly among 4 ranks"),
        ("M-M-|*-/E/EE", "the layers for multi-token prediction, behind each /, are not alike and without |"),
        ("M-+-|*-", "it has attention (*) and latent attention (D or +)"),
        ("M-M-|*-|M", "its 3 stages are no multiple of 4 ranks"),
    ],
)
def test_faults_are_named(text: str, fault: str) -> None:
    assert fault in read_layout(text, 6, 4, letters=list("M-M-*-")).faults


def test_what_a_pattern_or_a_plan_cannot_say() -> None:
    with pytest.raises(CapslogError, match=r"begins inside a block, behind layer 2; our plans keep blocks whole"):
        read_layout("M-M|-*-", 3, 2, letters=["M-", "M-", "*-"])
    with pytest.raises(CapslogError, match=r"cannot be read behind 'M-M\|'; Megatron's letters are M, G, "):
        read_layout("--hybrid-layer-pattern='M-M|t'", 4, 2)
    names = names_of_letters(["M", "?", "*"])
    plan = Plan.of_cuts(6, [0, 2], schedule="1f1b")
    with pytest.raises(CapslogError, match=r"layer 'model.layers.1' is no mixer, no feed-forward and no mixer before"):
        export_text("megatron", Request(plan, KEEPS, names=names))
    early = Plan.of_cuts(7, [0, 2, 6], schedule="1f1b")
    with pytest.raises(CapslogError, match="where a hybrid model of Megatron puts the layers for multi-token predict"):
        export_text("megatron", Request(early, KEEPS, names=names_of_letters(["M", "-", "*"], 1)))


def test_notes_name_the_option() -> None:
    plan = Plan.of_cuts(6, [0, 2], schedule="1f1b")
    hybrid = Request(plan, KEEPS, names=names_of_letters(["M", "-", "*"]))
    assert export_text("megatron", hybrid) == "M|-*\n"
    assert notes("megatron", hybrid) == [
        "for hybrid models of Megatron (megatron-core 0.17 and later): --hybrid-layer-pattern takes it, in quotes, "
        "without any other option for layers of stages; Megatron also needs --pipeline-model-parallel-size 2"
    ]
    delta = Request(plan, KEEPS, names=names_of_letters(["GE", "GE", "*E"]))
    assert export_text("megatron", delta) == "GE|GE*E\n"
    assert notes("megatron", delta)[1] == (
        "where Megatron builds this model as a GPT model, as Megatron Bridge builds Qwen3-Next, "
        "--pipeline-model-parallel-layout takes Et|t*2L"
    )
