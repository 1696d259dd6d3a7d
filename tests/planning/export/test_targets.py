"""What the text for a target leaves unsaid is said beside it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from tests.planning.export.models import BLOCKS, named, plan_of
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planning.export import TARGETS, Request, names_in, notes, written
from varuna_capslog.plans.parts import Units
from varuna_capslog.plans.pipelines import stages_of_pipelines
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import LayerProfile, Profile, SharedParameter
from varuna_capslog.schedules import RunShape

KEEPS = RunShape(recompute=False, schedule="1f1b")


def test_notes_of_a_plain_plan() -> None:
    plan = plan_of(0, 3)
    assert notes("megatron", plan, KEEPS) == ["Megatron also needs --pipeline-model-parallel-size 2"]
    assert notes("torch-csv", plan, KEEPS) == notes("deepspeed", plan, KEEPS) == []
    [first, second] = notes("sglang", plan, KEEPS)
    assert first == "SGLang also needs --pp-size 2"
    assert second.startswith("the plan was made for training steps; what SGLang holds")


def test_notes_name_what_is_left_out() -> None:
    recomputing = notes("torchtitan", plan_of(0, 3), replace(KEEPS, recompute=True))
    assert "set the recomputation of torchtitan itself" in recomputing[-1]
    stages = stages_of_pipelines(6, [0, 3], 2, 4, [1, 0])
    said = notes("megatron", Plan(6, stages, Units(4, 1, 4), "zb-h1"), KEEPS)
    assert "set the data parallelism of Megatron to 2" in said[1]
    assert "pipeline rank r of Megatron is the plan's rank [1, 0][r]" in said[2]
    assert "the plan's schedule zb-h1 is not a part of the text: Megatron works in an order of its own" in said[3]
    one, other = stages_of_pipelines(6, [0, 3], 1, 1)
    limited = Plan(6, (replace(one, in_flight=1), other), Units(4, 1, 1), "1f1b")
    assert "limit of 1 call in flight on stage 0 is not a part" in notes("automodel", limited, KEEPS)[1]
    assert "export it with --to torch-csv" in notes("automodel", limited, KEEPS)[1]
    recomputing = notes("automodel", limited, replace(KEEPS, recompute=True))[1]
    assert "NeMo AutoModel works in an order of its own" in recomputing  # which torch's lists do not say
    listed = Plan(6, (one, other), Units(1, 1, 1), actions=(("0F0", "0B0"), ("1F0", "1B0")))
    assert "the plan's list of actions is not a part of the text" in notes("deepspeed", listed, KEEPS)[0]


def test_a_plan_for_inference_goes_to_those_who_serve() -> None:
    plan = replace(plan_of(0, 3), purpose="inference", schedule=None)
    request = Request(plan, names=named("embed", *(f"h.{n}" for n in range(BLOCKS)), "norm"))
    assert written("vllm", request) == "VLLM_PP_LAYER_PARTITION=2,2\n"
    assert notes("vllm", plan, KEEPS) == ["vLLM also needs --pipeline-parallel-size 2"]
    assert notes("device-map", plan, KEEPS) == []
    for target in ("megatron", "torchtitan", "automodel", "deepspeed", "torch-csv"):
        with pytest.raises(CapslogError, match=r"is for inference, but the form for .* says how a model is trained"):
            written(target, request)
        assert written("megatron", replace(request, plan=plan_of(0, 3))) == "Et*2|t*2L\n"


def test_exports_import_no_torch() -> None:
    code = "import sys, varuna_capslog.planning.export; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_come_from_a_profile() -> None:
    rows = tuple(LayerProfile(name, 1, 1 if n else None) for n, name in enumerate(("e", "h.0", "h.1", "n")))
    known = names_in(Profile(rows, shared=(SharedParameter("e.weight", 4, (0, 3)),)))
    assert known.layers == ("e", "h.0", "h.1", "n")
    assert known.shared == (("e.weight", (0, 3)),)
    assert TARGETS["megatron"].write(Request(plan_of(0, 2, layers=4), names=known)) == "Et|tL\n"
    with pytest.raises(CapslogError, match="a plan does not hold the names of the model's layers; give its profile"):
        TARGETS["megatron"].write(Request(plan_of(0, 2, layers=4)))
