"""`capslog.train`: the config that a file, dict, workload name or function stands for. Workers are stand-ins."""

from __future__ import annotations

import contextlib
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import varuna_capslog as capslog
from tests.starters import starter_of
from varuna_capslog.api.training import script_module
from varuna_capslog.model.workload import load_workload
from varuna_capslog.start import local_run

TOY = """
from torch import nn
from varuna_capslog import Chain, Layer, Workload

class Toy(Workload):
    name = "toy"
    def build_chain(self):
        return Chain([Layer(f"l{i}", nn.Linear(2, 2)) for i in range(4)], name="toy")
    def loss(self, outputs, targets, normalisers): ...
    def profile_inputs(self, microbatch_size): ...

def workload(config):
    return Toy()
"""
WORKER = """
import json, os, sys
if os.environ["RANK"] == "0":
    with open(sys.argv[1] + "/metrics.jsonl", "w") as file:
        for step in (1, 2):
            file.write(json.dumps({"step": step, "loss": 1 / step, "samples_per_second": 4.0}) + "\\n")
"""
CUTS = {"pipeline.devices": 2, "pipeline.cuts": [0, 2]}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    (tmp_path / "toy_of_api.py").write_text(TOY)
    (tmp_path / "toy.yaml").write_text("workload: toy_of_api:workload\nrun_dir: here\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def starter(config, *flags):
        worker_starter = starter_of([sys.executable, "-S", "-c", WORKER, str(config.run_dir)])
        worker_starter.server = None  # this process has torch, and plans itself
        return contextlib.nullcontext(worker_starter)

    monkeypatch.setattr(local_run, "worker_starter", starter)
    import toy_of_api

    return toy_of_api


@pytest.mark.parametrize(
    ("run", "folder"),
    [
        ("toy.yaml", "here"),
        ({"workload": "toy_of_api:workload", "train": {"max_steps": 1}}, "runs/toy_of_api"),
        ("toy_of_api:workload", "runs/toy_of_api"),
        ("function", "runs/toy_of_api"),
        ("config", "here"),
    ],
    ids=["file", "dict", "name", "function", "config"],
)
def test_every_form_of_a_run_is_trained(toy, run, folder, capsys) -> None:
    forms = {"function": toy.workload, "config": capslog.load_config("toy.yaml")}
    source = forms.get(run, run) if isinstance(run, str) else run
    done = capslog.train(source, CUTS | {"train.max_steps": 2})
    assert done.run_dir == Path(folder)
    assert done.losses == [1.0, 0.5]
    assert done.plan is not None
    assert done.plan.cuts == (0, 2)
    assert done.record.config is not None
    assert done.record.config.train.max_steps == 2
    assert "last loss" in str(done)
    assert "0.5" in done._repr_html_()
    assert "2 stages of 4 layers" in capsys.readouterr().out


def test_nothing_is_printed_where_nothing_is_to_be_shown(toy, capsys) -> None:
    capslog.train(toy.workload, CUTS, show=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (3, "nothing to train in a int"),
        (lambda config: None, "cannot import '<lambda>'"),
        ("absent.yaml", "absent.yaml cannot be read"),
        ({"train": {}}, "workload is missing"),
        ({"workload": "toy_of_api:workload", "trian": {}}, "did you mean train"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_a_sentence(toy, run, sentence) -> None:
    with pytest.raises(capslog.CapslogError, match=sentence):
        capslog.train(run, CUTS)


OWN = """
import torch
from torch import nn

class Data(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        return torch.ones(2) * index, torch.tensor(index % 2)

def model():
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Tanh())

def data():
    return Data(12)

def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs, batch[1])

if __name__ != "__main__":
    handed = model()
"""


@pytest.fixture
def own(toy, tmp_path: Path) -> types.ModuleType:
    (tmp_path / "own_of_api.py").write_text(OWN)
    sys.modules.pop("own_of_api", None)
    import own_of_api

    return own_of_api


@pytest.mark.parametrize("form", ["objects", "functions", "names"])
def test_a_model_and_a_data_set_reach_every_process_of_the_run(own, form) -> None:
    forms = {
        "objects": (own.handed, own.Data(12), own.loss),
        "functions": (own.model, own.data, own.loss),
        "names": ("own_of_api:model", "own_of_api:data", "own_of_api:loss"),
    }
    model, dataset, loss = forms[form]
    done = capslog.train(model, dataset, CUTS, loss=loss, val=own.Data(2), show=False)
    assert done.run_dir == Path("runs/Sequential" if form == "objects" else "runs/own_of_api")
    config = capslog.load_config(done.run_dir / "config.yaml")
    train = config.train
    # all 12 samples, in microbatches of 2 since there are 2 validation samples; none of DETR's values
    assert (train.optimizer, train.lr, train.clip_norm) == ("adamw", 1e-3, 0)
    assert (train.minibatch_size, train.microbatch_size) == (12, 2)
    workload = load_workload(config)
    source, val = workload.train_data(), workload.val_data()
    assert (len(source), val and len(val)) == (12, 2)
    (inputs,) = source.load(source.minibatch([[3]], 0), 0).values()
    assert inputs.tolist() == [[3.0, 3.0]]
    weights = workload.build_chain().named_tensors().values()
    if form == "objects":
        assert all(map(torch.equal, weights, own.handed.state_dict().values()))


def test_a_script_is_found_by_the_name_of_its_file(toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def named(file: Path) -> str:
        monkeypatch.setitem(sys.modules, "__main__", types.SimpleNamespace(__spec__=None, __file__=str(file)))
        return script_module("loss")

    assert named(tmp_path / "script.py") == "script"
    assert named(tmp_path / "deeper" / "script.py") == "deeper.script"
    for absent in (tmp_path / "of-me.py", tmp_path.parent / "script.py"):
        with pytest.raises(capslog.CapslogError, match="put it into a file whose name is a Python name"):
            named(absent)


def test_a_script_that_trains_while_it_is_imported_is_told_to_guard_the_call(own, tmp_path: Path) -> None:
    call = "import varuna_capslog as capslog\ncapslog.train(model, data, loss=loss, show=False)"
    (tmp_path / "unguarded.py").write_text(f"{OWN}\n{call}\n")
    with pytest.raises(capslog.CapslogError, match='put the call under if __name__ == "__main__"'):
        capslog.train("unguarded:model", own.data, CUTS, loss=own.loss, show=False)


@pytest.mark.parametrize(
    ("given", "data", "sentence"),
    [
        (("own_of_api:model", "own_of_api:data"), {"los": "mse"}, "did you mean data.loss"),
        (("own_of_api:model",), {"loss": "mse"}, "loss goes with a dataset, and there is none"),
        (
            ("own_of_api:model", "own_of_api:data"),
            {"on_stp": print},
            "unknown callback 'on_stp'; did you mean 'on_step'",
        ),
        ((3, "own_of_api:data"), {}, "the model is a int"),
        (("own_of_api:model", lambda: 3), {}, "cannot import '<lambda>'"),
        (("own_of_api:model", (letter for letter in "ab")), {}, "the dataset is a generator that cannot be handed"),
        (
            ("own_of_api:model", {"train": torch.zeros(3), "test": [1, 2]}),
            {},
            "holds several data sets .'train'.; give one",
        ),
        (
            ("own_of_api:model", "own_of_api:data"),
            {"val": {"a": torch.zeros(3)}},
            r"given as val .* such as splits\['a'\]",
        ),
        (("own_of_api:model", DataLoader(["a", "b"])), {"loss": "mse"}, "DataLoader, whose order is its own"),
    ],
)
def test_what_no_worker_could_train_on_is_refused_in_a_sentence(own, given, data, sentence) -> None:
    with pytest.raises(capslog.CapslogError, match=sentence):
        capslog.train(*given, settings=CUTS, show=False, **data)


def test_a_dictionary_of_splits_in_second_place_is_not_read_as_settings(own) -> None:
    """Hugging Face's `DatasetDict` is a dict, and its splits were taken for keys of the config."""
    with pytest.raises(
        capslog.CapslogError, match=r"the dict given as dataset holds several data sets .'train', 'test'"
    ):
        capslog.train("own_of_api:model", {"train": own.data(), "test": own.data()})
