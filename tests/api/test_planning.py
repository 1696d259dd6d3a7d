"""`capslog.plan` and `capslog.estimate` on objects: same plan as the command, model unchanged, pictures, refusals."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import nn

import varuna_capslog as capslog
from tests.planning import asking
from varuna_capslog import cli
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.gpus import gpu_of
from varuna_capslog.profiles.record import LayerProfile, Profile

NET = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return x + self.norm(self.down(self.up(x).relu()))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for width in (8, 64, 8, 16))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""
X = torch.zeros(4, 8)
ONE_BLOCK = {"train.accumulation_blocks": 1, "pipeline.schedule": "gpipe"}
"""Nothing for replicas to share, and a schedule that other planners do not have."""
KINDS = ("rtx4090", "rtx3090")


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("nets")
    (folder / "nets_of_planning.py").write_text(NET)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        import nets_of_planning

        yield nets_of_planning


@pytest.fixture(scope="module")
def plan(nets) -> capslog.ModelPlan:
    return capslog.plan(nets.Net(), X, devices=2, capacity="1MiB", device="cpu", settings=ONE_BLOCK)


def test_an_object_is_planned_as_the_command_plans_its_function(nets, plan, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    arguments = [
        "plan",
        "train.accumulation_blocks=1",
        "pipeline.schedule=gpipe",
        "--model",
        "nets_of_planning:Net",
        "--devices",
        "2",
    ]
    arguments += ["--input", "x=float32[4,8]"]
    assert cli._run([*arguments, "--device", "cpu", "--capacity", "1MiB", "-o", str(out)]) == 0
    command = json.loads(out.read_text())
    assert isinstance(plan, capslog.Plan)
    assert list(plan.cuts) == command["cuts"]
    assert list(plan.stage_bytes) == [stage["bytes"] for stage in command["stages"]]
    assert [rank.capacity_bytes for rank in plan.ranks] == [rank["capacity_bytes"] for rank in command["ranks"]]
    assert {rank.capacity_bytes for rank in plan.ranks} == {1 << 20}
    plan.save(tmp_path / "saved.json")
    assert capslog.read_plan(tmp_path / "saved.json").to_json() == plan.to_json()


@pytest.mark.parametrize("planner", [None, "exact"])
def test_an_estimate_in_place_of_its_model_gives_the_same_plan(nets, planner: str | None) -> None:
    """Documentation promises the same plan, but a step had one microbatch per device for a model and four for its
    estimate.
    """
    costs = capslog.estimate(nets.Net(), X, device="cpu")
    plans = [
        capslog.plan(model, *sample, devices=3, planner=planner, minibatch_size=size, capacity=capacity, **device)
        for size, capacity in ((None, None), (8, "1GiB"))
        for model, sample, device in ((nets.Net(), (X,), {"device": "cpu"}), (costs, (), {}))
    ]
    assert [plan.num_microbatches for plan in plans] == [12, 12, 2, 2]
    for model_plan, costs_plan in zip(plans[::2], plans[1::2], strict=True):
        assert (model_plan.cuts, model_plan.units, model_plan.schedule, model_plan.planner) == (
            costs_plan.cuts,
            costs_plan.units,
            costs_plan.schedule,
            costs_plan.planner,
        )
        assert model_plan.step_seconds == pytest.approx(costs_plan.step_seconds)


def test_an_estimate_for_a_kind_of_gpu_is_planned_within_its_memory(nets) -> None:
    costs = capslog.estimate(nets.Net(), X, device="cuda:t4")
    plans = capslog.plan(nets.Net(), X, devices=2, device="cuda:t4"), capslog.plan(costs, devices=2)
    assert [plan.capacities_of([0, 1]) for plan in plans] == [[gpu_of("cuda:t4").memory_bytes] * 2] * 2


def test_a_plan_of_an_estimate_has_the_smallest_peak_of_all_cuts(nets) -> None:
    costs = capslog.estimate(nets.Net(), "x=float32[4,8]", device="cpu")
    plan = capslog.plan(costs, devices=3, planner="exact")
    cut_lists = ((0, *inner) for inner in combinations(range(1, costs.num_layers), 2))
    peaks = {cuts: asking.plan(costs, 3, cuts=cuts).peak_bytes for cuts in cut_lists}
    assert plan.peak_bytes == min(peaks.values()) == peaks[plan.cuts]


def test_the_model_is_not_changed(nets) -> None:
    """Mode, weights, running statistics and gradients stay as they were; weights on the meta device are enough."""
    net = nets.Net().eval()
    net.blocks[0].train()
    net(X).sum().backward()
    before, gradients = copy.deepcopy(net), [parameter.grad.clone() for parameter in net.parameters()]
    costs = capslog.estimate(net, (X,), device="cpu")
    assert [module.training for module in net.modules()] == [module.training for module in before.modules()]
    assert all(torch.equal(tensor, net.state_dict()[name]) for name, tensor in before.state_dict().items())
    pairs = zip(net.parameters(), gradients, strict=True)
    assert all(torch.equal(parameter.grad, gradient) for parameter, gradient in pairs)
    with torch.device("meta"):
        meta_net = nets.Net()
    assert capslog.estimate(meta_net, {"x": X}, device="cpu").column("isolated_bytes") == costs.column("isolated_bytes")


def test_a_plan_shows_itself_as_text_table_and_picture(plan, tmp_path: Path) -> None:
    for shown in (str(plan), plan._repr_html_()):
        assert "blocks" in shown
        assert "budget: 2 stages of 4 layers" in shown
    assert plan._repr_html_().count("<tr>") == 3
    assert repr(plan).startswith("ModelPlan(cuts=(0, ")
    for kind in ("step", "layers"):
        picture = plan.plot(tmp_path / "new" / f"{kind}.png", kind)
        assert picture._repr_png_() == (tmp_path / "new" / f"{kind}.png").read_bytes()
        assert picture.png.startswith(b"\x89PNG")
    assert plan.simulate().step_seconds == pytest.approx(plan.step_seconds)
    with pytest.raises(capslog.CapslogError, match="unknown picture 'memory'"):
        plan.plot(what="memory")


def test_layers_are_drawn_for_a_plan_of_replicas_too(plan, tmp_path: Path) -> None:
    """The default plan of a small model is replicas, whose picture of layers ended with "it has no cut list"."""
    replicas = capslog.plan(plan.profile, devices=2, settings={"pipeline.planner": "joint"})
    assert replicas.cuts is None
    assert replicas.plot(tmp_path / "layers.png", "layers").png.startswith(b"\x89PNG")


def test_a_plan_that_does_not_fit_is_an_answer(plan) -> None:
    tight_plan = capslog.plan(plan.profile, devices=2, capacity=["2KiB", "3KiB"])
    assert tight_plan.fits is False
    assert "does not fit" in str(tight_plan) or "nothing fits" in str(tight_plan)


def test_settings_are_keys_of_a_config(nets) -> None:
    plan = capslog.plan(
        nets.Net(), X, devices=2, device="cpu", minibatch_size=16, settings={"pipeline.schedule": "1f1b"}
    )
    assert (plan.schedule, plan.num_microbatches, plan.microbatch_size) == ("1f1b", 4, 4)
    with pytest.raises(capslog.CapslogError, match=r"pipeline.scedule is not a known key; did you mean"):
        capslog.estimate(nets.Net(), X, settings={"pipeline.scedule": "1f1b"})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((nn.ReLU, X), "the model is the class ReLU, not an object of it; give an nn.Module"),
        ((nn.ReLU(),), "the sample is missing; give a tensor"),
        ((nn.ReLU(), 3), "the sample is a int; give"),
        ((nn.ReLU(), torch.tensor(1.0)), "holds no tensor whose first size is a batch"),
        ((nn.Linear(8, 8), (X, X)), "2 example inputs, but the model takes 1: input"),
        ((nn.Linear(8, 8), {"y": X}), "has no input 'y'"),
        ((nn.Linear(8, 8), torch.zeros(4, 9)), "cannot"),
        (("nets_of_planning:Net", X), "say the shapes of its inputs as text"),
        (("nets_of_planning:Nett", "x=float32[4,8]"), "did you mean 'Net'"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_sentence(nets, arguments, sentence) -> None:
    with pytest.raises(capslog.CapslogError, match=sentence) as error:
        capslog.plan(*arguments, devices=1, device="cpu")
    assert "\n" not in str(error.value).strip()


def test_an_object_is_not_measured(nets) -> None:
    """The measuring processes were forked with the model and failed with an error about torch's threads."""
    with pytest.raises(capslog.CapslogError, match="a model that is given as an object is estimated"):
        capslog.plan(nets.Net(), X, devices=2, device="cpu", settings={"profile.source": "measured"})


def test_a_profile_takes_no_sample(plan) -> None:
    with pytest.raises(capslog.CapslogError, match="sample goes with a model"):
        capslog.plan(plan.profile, X, devices=2)
    with pytest.raises(capslog.CapslogError, match="5 devices but only 4 layers"):
        capslog.plan(plan.profile, devices=5, planner="exact")
    shared = capslog.plan(plan.profile, devices=5)
    assert (shared.num_ranks, shared.fits) == (5, True)
    assert "budget has none: 5 devices but only 4 layers" in shared.notes[-1]


def test_devices_are_a_number_or_kinds(nets) -> None:
    mixed = capslog.plan(nets.Net(), X, devices="1x rtx4090, rtx3090")
    assert (mixed.num_ranks, mixed.profile.conditions["gpu"]) == (2, "rtx4090")
    assert [rank.capacity_bytes for rank in mixed.ranks] == [gpu_of(f"cuda:{kind}").memory_bytes for kind in KINDS]
    assert mixed.ranks[0].speed in (None, 1.0)
    assert mixed.ranks[1].speed is not None
    assert mixed.ranks[1].speed < 1
    same = capslog.plan(mixed.profile, devices="rtx4090, rtx3090")
    assert same.step_seconds == pytest.approx(mixed.step_seconds)
    for arguments, sentence in (
        ({"capacity": "1GiB"}, "capacity is given too"),
        ({"device": "cuda:t4"}, "device is given too"),
        ({"devices": "2x rtx9090"}, "rtx9090"),
    ):
        with pytest.raises(capslog.CapslogError, match=sentence):
            capslog.plan(nets.Net(), X, **{"devices": "2x t4", **arguments})


def test_a_plan_from_a_profile_needs_no_torch_and_a_picture_names_its_extra(plan, tmp_path: Path) -> None:
    plan.profile.save(tmp_path / "profile.json")
    samples = plan.num_microbatches * plan.microbatch_size
    code = f"""
import sys
sys.modules["torch"] = sys.modules["matplotlib"] = None  # an import of them fails
import varuna_capslog as capslog
costs = capslog.read_profile({str(tmp_path / "profile.json")!r})
found = capslog.plan(costs, devices=2, capacity="1MiB", minibatch_size={samples}, settings={ONE_BLOCK})
print(found.cuts)
try:
    found.plot()
except capslog.CapslogError as error:
    print(error)
from varuna_capslog import cli
cli.main(["plan", "--profile", {str(tmp_path / "profile.json")!r}, "--devices", "2"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cuts, sentence, *table = done.stdout.splitlines()
    assert cuts == str(plan.cuts)
    assert sentence.endswith(
        "the extra 'report' brings it: pip install 'varuna-capslog[report]', or -e '.[report]' in a clone"
    )
    assert len(table) > 4


def test_a_capacity_in_bytes_may_be_small() -> None:
    """On the command line a capacity of 16 lacks its unit; in Python it means 16 bytes."""
    profile = Profile([LayerProfile(name, 10, 4 if number else None) for number, name in enumerate("abc")])
    assert capslog.plan(profile, devices=2, capacity=16).fits
    assert not capslog.plan(profile, devices=2, capacity=[9, 16]).fits
    with pytest.raises(CapslogError, match="without a unit; write 16GiB"):
        capslog.plan(profile, devices=2, capacity="16")
