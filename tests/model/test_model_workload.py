"""An ordinary model as a workload: specs in, chain, made-up data and loss out."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import Config, load_config, section
from varuna_capslog.model.chain import Chain, Layer, TensorSpec
from varuna_capslog.model.model_workload import InputSpec, ModelWorkload, config_values, parse_input, workload
from varuna_capslog.model.workload import load_workload
from varuna_capslog.profiling.trim import skeleton
from varuna_capslog.training.run_setup import initialise

HERE = "tests.model.test_model_workload"


class Scorer(nn.Module):
    """Two inputs, a flag, and a loss computed in its forward."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 11)

    def forward(self, tokens: Tensor, labels: Tensor, scale: Tensor, double: bool = False) -> dict[str, Tensor]:
        hidden = self.embed(tokens) * scale
        for block in self.blocks:
            hidden = block(hidden).tanh()
        scores = self.head(hidden)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
        return {"scores": scores, "loss": 2 * loss if double else loss}


def scorer(width: int = 8) -> nn.Module:
    return Scorer(width)


def scorer_with_example() -> tuple[nn.Module, dict[str, Any]]:
    tokens = torch.arange(10).view(2, 5)
    return Scorer(), {"tokens": tokens, "labels": tokens, "scale": torch.ones(5, 1), "double": True}


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 3))


def chain() -> Chain:
    return Chain([Layer("a", nn.Linear(6, 6)), Layer("b", nn.Linear(6, 2))])


def nothing() -> int:
    return 3


SPECS = ["tokens=int64[2,5]:11", "labels=int64[2,5]:11", "scale=float32[5,1]:=0.5"]


def configured(run_dir: Path | None = None, **model: Any) -> ModelWorkload:
    train = {"minibatch_size": 4, "microbatch_size": 2}
    values = {"workload": "varuna_capslog.model.model_workload:workload", "model": model, "train": train}
    if run_dir is not None:
        values["run_dir"] = str(run_dir)
    model_workload = load_workload(section(Config, values, ""))
    assert isinstance(model_workload, ModelWorkload)
    return model_workload


def test_input_specs_are_read() -> None:
    assert parse_input("x=float32[1, 3,8,8]") == InputSpec("x", torch.float32, (1, 3, 8, 8))
    assert parse_input("ids=int64[4,9]:100") == InputSpec("ids", torch.int64, (4, 9), high=100)
    assert parse_input("mask=int64[4,9]:=1").value == 1.0
    ids = parse_input("ids=int64[4,9]:100").make((50, 9), 3)
    assert ids.min() >= 0
    assert 90 < ids.max() < 100
    assert torch.equal(ids, parse_input("ids=int64[4,9]:100").make((50, 9), 3))
    assert not torch.equal(ids, parse_input("ids=int64[4,9]:100").make((50, 9), 4))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x", "not of the form"),
        ("x=float[2]]", "not of the form"),
        ("x=flot32[2,3]", "unknown dtype 'flot32'"),
        ("x=float32[]", "at least one size"),
        ("x=float32[2,0]", "size of 0"),
        ("x=float32[2,9..4]", "does not rise from at least 2"),
        ("x=float32[2,1..4]", "does not rise from at least 2"),
        ("x=float32[2,4..]", "at least one size"),
        ("x=float32[2,4..6..8]", "at least one size"),
        ("x=float32[2,6/4]", "do not rise"),
        ("x=float32[2,4/]", "at least one size"),
        ("x=float32[2]:7", "integer dtypes only"),
        ("x=int64[2]:0.5", "whole number"),
    ],
)
def test_bad_input_specs_get_one_sentence(text: str, reason: str) -> None:
    with pytest.raises(CapslogError, match=reason):
        parse_input(text)


def test_microbatches_with_made_up_data_add_up_to_the_minibatch() -> None:
    made = configured(factory=f"{HERE}:scorer", inputs=SPECS)
    torch.manual_seed(0)
    built = made.build_chain()
    assert [layer.name for layer in built.layers] == ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert built.outputs == ("loss",)
    data = made.train_data()
    minibatch = data.minibatch([[3, 1], [7, 2]], 0)
    total = torch.zeros(())
    everything: list[dict[str, Tensor]] = []
    for index in range(2):
        inputs = data.load(minibatch, index)
        for name, spec in minibatch.inputs[index].items():
            assert (tuple(inputs[name].shape), inputs[name].dtype) == (spec.shape, spec.dtype)
        everything.append(inputs)
        total = total + made.loss(built.run(inputs), None, minibatch.normalisers)["loss"]
    torch.manual_seed(0)
    expected = scorer()(
        torch.cat([part["tokens"] for part in everything]), torch.cat([part["labels"] for part in everything]),
        everything[0]["scale"],
    )  # fmt: skip
    assert torch.allclose(total, expected["loss"])
    assert torch.equal(
        data.load(data.minibatch([[0, 1]], 0), 0)["tokens"][1], data.load(data.minibatch([[1, 5]], 9), 0)["tokens"][0]
    )


def test_the_factorys_example_gives_shapes_ranges_and_flags() -> None:
    made = configured(factory=f"{HERE}:scorer_with_example")
    specs = made.profile_inputs(2)
    assert {name: spec.shape for name, spec in specs.items()} == {"tokens": (2, 5), "labels": (2, 5), "scale": (5, 1)}
    inputs = made.train_data().load(made.train_data().minibatch([[0, 1]], 0), 0)
    assert torch.equal(inputs["tokens"], torch.arange(10).view(2, 5)), "a model may count certain tokens"
    assert not torch.equal(inputs["scale"], torch.ones(5, 1))
    others = made.train_data().load(made.train_data().minibatch([[3, 4]], 0), 0)
    assert torch.equal(others["labels"], torch.arange(10).view(2, 5).flip(0))
    torch.manual_seed(0)
    loss = made.build_chain().run(inputs)["loss"]
    torch.manual_seed(0)
    assert torch.equal(loss, Scorer()(**inputs, double=True)["loss"])
    with pytest.raises(CapslogError, match=r"captured for microbatches of 2, asked for 3; set train.microbatch_size=3"):
        made.profile_inputs(3)


@pytest.mark.parametrize(
    ("values", "shape", "seed", "expected"),
    [
        (torch.arange(6).view(2, 3), (2, 3), 0, [[0, 1, 2], [3, 4, 5]]),
        (torch.arange(6).view(2, 3), (3, 3), 0, [[0, 1, 2], [3, 4, 5], [0, 1, 2]]),
        (torch.arange(6).view(2, 3), (3,), 5, [3, 4, 5]),
        (torch.tensor([True, False]), (), 1, False),
        (torch.tensor(7), (), 3, 7),
        (torch.arange(6).view(2, 3) + 9, (2, 4), 0, None),
        (torch.tensor(7), (2,), 0, None),
    ],
)
def test_whole_numbers_of_an_example_are_kept_where_their_size_is(
    values: Tensor, shape: tuple[int, ...], seed: int, expected: Any
) -> None:
    made = InputSpec("x", values.dtype, tuple(values.shape), high=3, values=values).make(shape, seed)
    assert tuple(made.shape) == shape
    assert made.tolist() == expected if expected is not None else int(made.max()) < 3


def test_sequential_and_chain_factories_take_any_microbatch_and_the_mean_square_loss() -> None:
    for factory in ("sequential", "chain"):
        made = configured(
            factory=f"{HERE}:{factory}", inputs={"anything" if factory == "sequential" else "x": "float32[1,6]"}
        )
        built = made.build_chain()
        assert made.profile_inputs(5)["x"].shape == (5, 6)
        x = torch.randn(3, 6)
        outputs = built.run({"x": x})
        assert torch.equal(made.loss(outputs, None, {"microbatches": 2.0})["loss"], outputs["x"].square().mean() / 2)


def test_cut_points_and_arguments_are_used_and_the_skeleton_has_no_weights() -> None:
    made = configured(factory=f"{HERE}:scorer", inputs=SPECS, cut_points=["head"], arguments={"width": 16})
    built = made.build_chain()
    assert [layer.name for layer in built.layers] == ["embed", "head"]
    assert built.named_parameters()["embed.embed.weight"].shape == (11, 16)
    assert all(parameter.is_meta for parameter in skeleton(made).named_parameters().values())


def test_a_chain_for_training_only_makes_the_same_step_and_refuses_to_evaluate() -> None:
    made = configured(factory=f"{HERE}:scorer", inputs=SPECS)
    specs = made.profile_inputs(2)
    torch.manual_seed(0)
    both = made.build_chain()
    torch.manual_seed(0)
    training = made.build_training_chain()
    inputs = {name: torch.ones(spec.shape, dtype=spec.dtype) for name, spec in specs.items()}
    assert torch.equal(both.run(inputs)["loss"], training.run(inputs)["loss"])
    training.layers[1].module.eval()
    with pytest.raises(CapslogError, match="captured for training only: nobody asked for its eval mode"):
        training.run(inputs)


def test_weights_of_the_model_itself_are_imported(tmp_path: Path) -> None:
    made = configured(factory=f"{HERE}:scorer", inputs=SPECS)
    model = scorer()
    torch.save({**model.state_dict(), "more": torch.zeros(1)}, tmp_path / "weights.pt")
    weights, skipped = made.import_weights(tmp_path / "weights.pt")
    assert skipped == ["more"]
    assert weights.keys() == made.build_chain().named_parameters().keys()
    assert torch.equal(weights["blocks.1.blocks.1.weight"], model.blocks[1].weight)


def test_a_run_begins_from_a_safetensors_file(tmp_path: Path) -> None:
    """The package that reads these files was imported, but no requirement installed it."""
    made = configured(factory=f"{HERE}:scorer", inputs=SPECS)
    model = scorer()
    save_file({**model.state_dict(), "more": torch.zeros(1)}, tmp_path / "weights.safetensors")
    built = made.build_chain()
    assert initialise(built, made, tmp_path / "weights.safetensors", []) == ["more"]
    assert torch.equal(built.named_parameters()["blocks.1.blocks.1.weight"], model.blocks[1].weight)


def test_lengths_of_a_range_are_those_of_the_specs_and_one_capture_runs_them() -> None:
    inputs = ["tokens=int64[2,3..9]:11", "labels=int64[2,3..9]:11", "scale=float32[3..9,1]:=0.5"]
    made = configured(factory=f"{HERE}:scorer", inputs=inputs, samples=16)
    chain = made.build_chain()
    assert made.profile_inputs(2)["tokens"].shape == (2, 9)  # a plan is for the longest length
    assert [sample["tokens"].shape[1] for sample in made.sampled_inputs(2, 9)] == [3, 5, 7, 9]
    minibatch = made.minibatch([[at, at + 1] for at in range(0, 16, 2)], 0)
    lengths = set()
    for number, specs in enumerate(minibatch.inputs):
        loaded = made.load(minibatch, number)
        assert {name: TensorSpec.of(tensor) for name, tensor in loaded.items()} == specs
        lengths.add(loaded["tokens"].shape[1])
        assert loaded["scale"].shape == (loaded["tokens"].shape[1], 1)
        assert torch.isfinite(chain.run(loaded)["loss"])
    assert len(lengths) > 2


class Tabled(nn.Module):
    """Model whose code builds a table from the length."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tensor([[float(at % 3)] for at in range(int(x.shape[1]))])
        for block in self.blocks:
            x = block(x)
        return x


def tabled() -> nn.Module:
    return Tabled()


@pytest.mark.parametrize(("length", "lengths"), [("3..9", [3, 5, 7, 9]), ("4/6/9", [4, 6, 9])])
def test_lengths_that_the_model_fixes_are_captured_one_by_one(
    length: str, lengths: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def made() -> ModelWorkload:
        return configured(factory=f"{HERE}:tabled", inputs=[f"x=float32[2,{length},8]"], samples=32, run_dir=tmp_path)

    first, again = made(), made()
    first.hand_over()
    messages = [record.getMessage() for record in caplog.records]
    assert sum("It is captured for each of 4 sizes instead" in message for message in messages) == (length == "3..9")
    caplog.clear()
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "captured").iterdir()}
    again.build_training_chain()
    chain = again.build_chain()
    assert not caplog.records, "read, and not captured here"
    assert written == {path: path.stat().st_mtime_ns for path in (tmp_path / "captured").iterdir()}
    assert again.profile_inputs(2)["x"].shape == (2, lengths[-1], 8)
    assert [sample["x"].shape[1] for sample in again.sampled_inputs(2, 9)] == lengths
    minibatch = again.minibatch([[at, at + 1] for at in range(0, 32, 2)], 0)
    seen = set()
    for number in range(16):
        loaded = again.load(minibatch, number)
        seen.add(loaded["x"].shape[1])
        (out,) = chain.run(loaded).values()
        assert out.shape == loaded["x"].shape
    assert seen == set(lengths)
    with pytest.raises(CapslogError, match=r"was captured for .* of shape \[2, 9, 8\] but got \[2, 8, 8\]"):
        chain.run({"x": torch.zeros(2, 8, 8)})


def test_values_of_sizes_that_change_go_together() -> None:
    inputs = ["tokens=int64[2,3/4]:11", "labels=int64[2,3/4/5]:11", "scale=float32[5,1]"]
    with pytest.raises(CapslogError, match="the sizes that change have 2 and 3 values"):
        configured(factory=f"{HERE}:scorer", inputs=inputs).build_chain()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"factory": f"{HERE}:scorer"}, "--input or model.inputs"),
        ({"factory": f"{HERE}:nothing", "inputs": SPECS}, "returned int"),
        ({"factory": f"{HERE}:absent", "inputs": SPECS}, "no function 'absent'"),
        ({"factory": "no_such_package:model", "inputs": SPECS}, "there is no module 'no_such_package'; install"),
        ({"factory": "os:system", "inputs": SPECS}, "the model 'os:system' failed with TypeError"),
        ({"factory": f"{HERE}:scorer", "inputs": SPECS, "cut_points": ["heat"]}, "did you mean 'head'"),
        ({"factory": f"{HERE}:chain", "inputs": ["x=float32[1,6]", "y=float32[1,6]"]}, "not the model's"),
        ({"factory": f"{HERE}:scorer", "imputs": SPECS}, "imputs"),
    ],
)
def test_bad_models_get_one_sentence(model: dict[str, Any], reason: str) -> None:
    with pytest.raises(CapslogError, match=reason):
        configured(**model).build_chain()


def test_flags_stand_for_a_config() -> None:
    values = config_values(f"{HERE}:scorer", SPECS, ["head"], devices=3)
    config = section(Config, values, "")
    assert (config.train.microbatch_size, config.train.minibatch_size, config.pipeline.devices) == (2, 24, 3)
    assert len(workload(config).build_chain()) == 2


@pytest.mark.timeout(500)
def test_train_runs_captured_layers_and_its_loss_is_the_unsplit_models(tmp_path: Path, programs: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "workload: varuna_capslog.model.model_workload:workload\n"
        f"model: {json.dumps({'factory': f'{HERE}:scorer', 'inputs': SPECS, 'samples': 4})}\n"
        "train: {max_steps: 1, minibatch_size: 4, microbatch_size: 2, evaluate_every: null}\n"
        f"pipeline: {{devices: 1, cuts: [0, 2]}}\nrun_dir: {tmp_path / 'run'}\ndevice: cpu\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [programs / "capslog", "train", str(config), "--nproc", "1"],
        cwd=root, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}, capture_output=True, text=True,
        timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [line] = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    # the model was captured before the worker started, once with and once without its eval mode
    assert len(list((tmp_path / "run" / "captured").glob("*.pt"))) == 2
    assert "captured here" not in done.stdout + (tmp_path / "run" / "workers" / "0.log").read_text()
    settings = load_config(config)
    made = workload(settings)
    torch.manual_seed(settings.train.seed)
    built = made.build_chain()
    data = made.train_data()
    # the minibatch is the whole data set, so its loss does not depend on the order of the samples
    minibatch = data.minibatch([[0, 1], [2, 3]], 0)
    parts = [made.loss(built.run(data.load(minibatch, index)), None, minibatch.normalisers) for index in range(2)]
    loss = sum(part["loss"].item() for part in parts)
    assert json.loads(line)["loss"] == pytest.approx(loss, rel=1e-5)
