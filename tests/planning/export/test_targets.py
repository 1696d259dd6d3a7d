"""Notes beside an exported text name everything of the plan that the text leaves out."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planning.export.models import BLOCKS, made, named, names, plan_of, stages_of_blocks
from tests.planning.export.readers import (
    automodel_part,
    device_of_tensors,
    diffusion_pipe_entries,
    layer_partition,
    megatron_layout,
    primus_split,
    torchtitan_part,
    uneven_ends,
)
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.parallel import Divisors
from varuna_capslog.planning.export import TARGETS, Request, export_text, names_in, notes
from varuna_capslog.plans.parts import MemoryInterval, Units
from varuna_capslog.plans.plan import Plan, stages_of_pipelines
from varuna_capslog.profiles.record import LayerProfile, Profile, SharedParameter
from varuna_capslog.schedules import RunShape

KEEPS = RunShape(recompute=False, schedule="1f1b")


def test_notes_of_a_plain_plan() -> None:
    plan = plan_of(0, 3)
    assert notes("megatron", Request(plan, KEEPS)) == [
        "for GPT models of Megatron: --pipeline-model-parallel-layout takes it, in quotes; Megatron also needs "
        "--pipeline-model-parallel-size 2"
    ]
    assert notes("torch-csv", Request(plan, KEEPS)) == notes("deepspeed", Request(plan, KEEPS)) == []
    [first, second] = notes("sglang", Request(plan, KEEPS))
    assert first == "SGLang also needs --pp-size 2"
    assert second.startswith("the plan was made for training steps; what SGLang holds")


def parted(plan: Plan, *rows: tuple[int, int, tuple[str, ...]]) -> Plan:
    """Return the plan in which these parts of layers [first, end) run again."""
    stages = [
        replace(
            stage,
            memory=tuple(
                MemoryInterval(max(first, stage.first), min(end, stage.end), "recompute", parts)
                for first, end, parts in rows
                if max(first, stage.first) < min(end, stage.end)
            ),
        )
        for stage in plan.stages
    ]
    return Plan(plan.num_layers, tuple(stages), Units(4, 1, 1), "1f1b")


def test_megatron_recomputes_the_same_parts_of_every_block() -> None:
    """Its names are in `TransformerConfig.recompute_modules` of Megatron core; selective uses all layers there."""
    plan, layers = plan_of(0, 3), named("embed", *(f"layers.{n}" for n in range(4)), "norm")
    again = parted(plan, (1, 5, ("attention", "norms")))
    request = Request(again, KEEPS, names=layers)
    assert export_text("megatron", request) == export_text("megatron", replace(request, plan=plan))
    assert notes("megatron", Request(again, KEEPS))[1] == (
        "the plan recomputes parts of every block; Megatron does so with --recompute-granularity selective "
        "--recompute-modules core_attn layernorm"
    )
    experts = notes("megatron", Request(parted(plan, (1, 5, ("mlp", "experts"))), KEEPS))[1]
    assert experts.endswith("--recompute-modules mlp moe (the whole layer of experts, with its router)")
    for rows, message in {
        ((1, 4, ("mlp",)),): "recomputes no part of layer 'layers.3', but Megatron recomputes the same",
        (
            (1, 3, ("mlp",)),
            (3, 5, ("norms",)),
        ): "recomputes norms of layer 'layers.2', but .*, here mlp; export",
        ((1, 6, ("norms",)),): "recomputes norms of layer 'norm', but Megatron recomputes",
    }.items():
        with pytest.raises(CapslogError, match=message):
            export_text("megatron", replace(request, plan=parted(plan, *rows)))
    for target in TARGETS.keys() - {"megatron", "torch-csv"}:
        with pytest.raises(CapslogError, match=r"\[1, 3, recompute, \[attention, norms\]\], which the form"):
            export_text(target, replace(request, names=names("decoder")))
    with pytest.raises(CapslogError, match=r"stage 0 .* recomputes parts of its layers, which a schedule"):
        export_text("torch-csv", request)


def test_notes_say_how_the_target_divides_stages() -> None:
    plan = replace(plan_of(0, 3), parallel=Divisors(tensor=4, context=2, expert=8, data=2, zero=1))
    assert notes("megatron", Request(plan, KEEPS))[1] == (
        "the plan divides each stage by tensor=4,context=2,expert=8,data=2,zero=1; Megatron does so with "
        "--tensor-model-parallel-size 4 --sequence-parallel --context-parallel-size 2 --expert-model-parallel-size 8 "
        "--expert-tensor-parallel-size 1 --use-distributed-optimizer (data-parallel size 2)"
    )
    plan = replace(plan, parallel=Divisors(tensor=4, data=2, zero=3))
    assert notes("torchtitan", Request(plan, KEEPS))[1].endswith(
        "torchtitan does so with parallelism.tensor_parallel_degree=4, parallelism.data_parallel_shard_degree=2, "
        "parallelism.fsdp_reshard_after_forward=always"
    )
    assert notes("verl", Request(plan, KEEPS))[1].endswith("set that in verl itself")


def test_notes_name_what_is_left_out() -> None:
    recomputing = notes("torchtitan", Request(plan_of(0, 3), replace(KEEPS, recompute=True)))
    assert "set the recomputation of torchtitan itself" in recomputing[-1]
    stages = stages_of_pipelines(6, [0, 3], 2, 4, [1, 0])
    megatron_notes = notes("megatron", Request(Plan(6, stages, Units(4, 1, 4), "zb-h1"), KEEPS))
    assert "set the data parallelism of Megatron to 2" in megatron_notes[1]
    assert "pipeline rank r of Megatron is the plan's rank [1, 0][r]" in megatron_notes[2]
    assert (
        "the plan's schedule zb-h1 is not a part of the text: Megatron works in an order of its own"
        in megatron_notes[3]
    )
    first, second = stages_of_pipelines(6, [0, 3], 1, 1)
    limited = Plan(6, (replace(first, in_flight=1), second), Units(4, 1, 1), "1f1b")
    assert "limit of 1 call in flight on stage 0 is not a part" in notes("automodel", Request(limited, KEEPS))[1]
    assert "export it with --to torch-csv" in notes("automodel", Request(limited, KEEPS))[1]
    recomputing = notes("automodel", Request(limited, replace(KEEPS, recompute=True)))[1]
    assert "NeMo AutoModel works in an order of its own" in recomputing  # which torch's lists do not say
    listed = Plan(6, (first, second), Units(1, 1, 1), actions=(("0F0", "0B0"), ("1F0", "1B0")))
    assert "the plan's list of actions is not a part of the text" in notes("deepspeed", Request(listed, KEEPS))[0]


def test_a_plan_for_inference_goes_to_those_who_serve() -> None:
    plan = replace(plan_of(0, 3), purpose="inference", schedule=None)
    request = Request(plan, names=named("embed", *(f"h.{n}" for n in range(BLOCKS)), "norm"))
    assert export_text("vllm", request) == "VLLM_PP_LAYER_PARTITION=2,2\n"
    assert notes("vllm", Request(plan, KEEPS)) == ["vLLM also needs --pipeline-parallel-size 2"]
    assert notes("device-map", Request(plan, KEEPS)) == []
    for target in ("megatron", "torchtitan", "automodel", "deepspeed", "torch-csv"):
        with pytest.raises(CapslogError, match=r"is for inference, but the form for .* says how a model is trained"):
            export_text(target, request)
        assert export_text("megatron", replace(request, plan=plan_of(0, 3))) == "Et*2|t*2L\n"


def test_exports_import_no_torch() -> None:
    code = "import sys, varuna_capslog.planning.export; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_come_from_a_profile() -> None:
    rows = tuple(LayerProfile(name, 1, 1 if n else None) for n, name in enumerate(("e", "h.0", "h.1", "n")))
    model_names = names_in(Profile(rows, shared=(SharedParameter("e.weight", 4, (0, 3)),)))
    assert model_names.layers == ("e", "h.0", "h.1", "n")
    assert model_names.shared == (("e.weight", (0, 3)),)
    assert TARGETS["megatron"].write(Request(plan_of(0, 2, layers=4), names=model_names)) == "Et|tL\n"
    with pytest.raises(CapslogError, match="a plan does not hold the names of the model's layers; give its profile"):
        TARGETS["megatron"].write(Request(plan_of(0, 2, layers=4)))


MODELS = ("gpt2", "vit", "decoder", "titan")
REFUSALS = {"torchtitan": ("gpt2", "vit"), "automodel": ("gpt2", "vit", "titan")}
"""target -> the models whose cuts it cannot express; every other one is read back in the tests of its form."""


def readers_stages(target: str, text: str, model: str, cuts: tuple[int, ...]) -> list[list[int]]:
    """The blocks of each stage, as a reader of the target finds them."""
    if target == "megatron":
        rows = megatron_layout(text, len(cuts), BLOCKS).values()
        return [[int(piece.split()[1]) for piece in row if piece.startswith("decoder")] for row in rows]
    if target == "primus":
        return [blocks for _, blocks in sorted(primus_split(text, len(cuts), BLOCKS)[0].items())]
    if target in ("verl", "slime"):
        return [list(layers) for layers in uneven_ends(text, len(cuts), BLOCKS)]
    if target == "diffusion-pipe":
        stages = diffusion_pipe_entries(text, BLOCKS)
        return [[int(entry.split()[1]) for entry in stage if entry.startswith("block")] for stage in stages]
    if target == "vllm-ascend":
        prefill = json.loads(text)["kv_connector_extra_config"]["prefill"]
        partition = layer_partition(f"P={prefill['pp_layer_partition']}", "P", prefill["pp_size"], BLOCKS)
        return [list(layers) for layers in partition]
    if target in ("vllm", "sglang"):
        return [
            list(layers) for layers in layer_partition(text, f"{target.upper()}_PP_LAYER_PARTITION", len(cuts), BLOCKS)
        ]
    if target == "deepspeed":
        space: dict[str, object] = {}
        exec(text.partition("\nPARTS")[1] + text.partition("\nPARTS")[2].partition("\n")[0], space)
        parts = space["PARTS"]
        assert isinstance(parts, list)
        assert parts == [*cuts, BLOCKS + 2]
        return stages_of_blocks(tuple(parts[:-1]))
    if target == "device-map":
        placed = device_of_tensors(made(model)[0], json.loads(text))
    elif target == "torchtitan":  # a part's list of blocks counts from 0 again, so that only the names tell them
        assert [len(torchtitan_part(made("titan")[0], listed).layers) for listed in json.loads(text)] == [
            len(blocks) for blocks in stages_of_blocks(cuts)
        ]
        placed = {name: stage for stage, listed in enumerate(json.loads(text)) for name in listed}
    else:
        parts = [automodel_part(made(model)[0], listed) for listed in json.loads(text)]
        placed = {name: stage for stage, part in enumerate(parts) for name in part.state_dict()}
    block_numbers: list[set[int]] = [set() for _ in cuts]
    for name, stage in placed.items():
        number = next((int(piece) for piece in name.split(".") if piece.isdigit()), None)
        if number is not None:
            block_numbers[stage].add(number)
    return [sorted(numbers) for numbers in block_numbers]


@pytest.mark.parametrize("cuts", [(0, 3), (0, 2, 4)])
@pytest.mark.parametrize("target", [name for name in TARGETS if name != "torch-csv"])
def test_every_format_for_every_model_is_read_back_or_refused(target: str, cuts: tuple[int, ...]) -> None:
    """torch-csv says nothing of the model; its own tests have torch read it."""
    for model in MODELS:
        request = Request(plan_of(*cuts), KEEPS, names=names(model))
        if model in REFUSALS.get(target, ()):
            with pytest.raises(CapslogError, match=TARGETS[target].system):
                export_text(target, request)
        else:
            assert readers_stages(target, export_text(target, request), model, cuts) == stages_of_blocks(cuts), model


def test_the_page_lists_what_is_refused() -> None:
    page = (Path(__file__).parents[3] / "docs" / "export.md").read_text()
    refused = "; ".join(f"`{target}` {', '.join(models)}" for target, models in REFUSALS.items())
    assert f"Refused of these: {refused}." in page
