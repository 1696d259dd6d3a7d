"""A config is code: the commands run what a run's folder names only where this user started the run, or says --trust.

The folders are made up: no training is needed to open a stranger's run.
"""

from __future__ import annotations

import importlib
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from varuna_capslog import cli
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import Config, dump_config, load_config, section
from varuna_capslog.plans.plan import Plan, write_plan
from varuna_capslog.start.named_code import OFFERED, check_config, check_run, mark_run
from varuna_capslog.start.prepare import prepare_run

ROOT = Path(__file__).parents[2]
ORDINARY = "varuna_capslog.model.model_workload:workload"
HUGGING_FACE = "varuna_capslog.model.hugging_face:model"
OWN_DATA = "varuna_capslog.own_data:workload"


class Touch:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def write_run(folder: Path, **values: Any) -> Path:
    """A run's folder with a checkpoint by name, as a stranger may pack it."""
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    values = {"train": {"max_steps": 1}, "pipeline": {"devices": 1, "cuts": [0]}, "device": "cpu"} | values
    config = section(Config, values | {"run_dir": str(folder)}, "")
    (folder / "config.yaml").write_text(dump_config(config))
    write_plan(folder / "plan-0.json", Plan.of_cuts(2, [0]))
    return folder


def factory_run(folder: Path, factory: str = "os:mkdir", **arguments: Any) -> Path:
    return write_run(folder, workload=ORDINARY, model={"factory": factory, "arguments": arguments})


def handed_run(folder: Path, attack: Path) -> Path:
    path = folder / "handed.pkl"
    write_run(folder, workload=OWN_DATA, model={"factory": HUGGING_FACE}, data={"given": str(path)})
    path.write_bytes(pickle.dumps({"dataset": pickle.dumps(Touch(attack))}))
    return folder


def refusal(folder: Path) -> str | None:
    try:
        check_run(folder, load_config(folder / "config.yaml"))
    except CapslogError as error:
        return str(error)
    return None


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([*map(str, words)])
    return int(ended.value.code or 0)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's state folder, and a current folder without modules."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", str(Path.cwd()))])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "state" / "varuna-capslog" / "key"


@pytest.mark.parametrize(
    "words",
    [
        ["export", "RUN", "--to", "device-map"],
        ["export", "RUN", "--weights", "weights.safetensors"],
        ["export", "RUN/plan-0.json", "--to", "device-map", "--config", "RUN/config.yaml"],
        ["evaluate", "RUN"],
        ["predict", "RUN", "RUN/config.yaml"],
        ["train", "RUN/config.yaml"],
        ["train", "RUN/config.yaml", "model.name=changed", "--nproc", "1"],
        ["plan", "RUN/config.yaml"],
    ],
    ids=" ".join,
)
def test_a_strangers_run_does_not_run_his_code(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`capslog export RUN --to megatron` once ran `model.factory: os:system` of a folder that somebody had sent."""
    folder = factory_run(tmp_path / "run", path=str(tmp_path / "PWNED"))
    assert run(*(word.replace("RUN", str(folder)) for word in words)) == 2
    told = capsys.readouterr().err
    assert "model.factory=os:mkdir" in str(told)
    assert "--trust" in str(told)
    assert len(told.splitlines()) == 1
    assert not (tmp_path / "PWNED").exists()


def test_trust_runs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --trust the same command runs the factory, which here returns no model."""
    folder = factory_run(tmp_path / "run", path=str(tmp_path / "RUN"))
    assert run("export", folder, "--to", "device-map", "--trust") == 2
    assert "returned NoneType" in capsys.readouterr().err
    assert (tmp_path / "RUN").exists()


@pytest.mark.parametrize("attack", ["factory", "pickle"])
def test_a_report_of_a_strangers_run_is_made_of_its_data(
    attack: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`capslog report RUN` unpickled `data.given` as soon as the folder had a checkpoint. The page needs no code."""
    pytest.importorskip("matplotlib")
    make = handed_run if attack == "pickle" else lambda folder, path: factory_run(folder, path=str(path))
    folder = make(tmp_path / "run", tmp_path / "PWNED")
    assert run("report", folder) == 0
    told = capsys.readouterr()
    assert (folder / "report" / "index.html").exists()
    assert "report: " in told.out
    assert "no new sample predictions" in told.err
    assert "--trust" in told.err
    assert len(told.err.splitlines()) == 1
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize(
    "values",
    [
        {"workload": "detr_pipeline.task:subprocess.run"},
        {"workload": "varuna_capslog.base.functions:importlib.import_module"},
        {"workload": "varuna_capslog.base.functions:import_function"},
        {"workload": "varuna_capslog.base.files:write_text"},
        {"workload": "detr_pipeline.task:read_state_file"},
        {"workload": "detr_pipelinex:workload"},
        {"workload": "detr_pipeline\u0301:workload"},
        {"workload": ORDINARY, "model": {"factory": "varuna_capslog.own_data.handed:model"}},
        {"workload": ORDINARY, "model": {"factory": HUGGING_FACE, "arguments": {"x": [{"y": "os:system"}]}}},
        {"workload": OWN_DATA, "data": {"dataset": "varuna_capslog.own_data:TextFile", "arguments": {"os:system": 1}}},
        {"workload": OWN_DATA, "data": {"dataset": "varuna_capslog.own_data:TextFile", "loss": "os:system"}},
        {"workload": OWN_DATA, "data": {"given": "handed.pkl"}},
        {"workload": "detr_pipeline:workload", "train": {"optimizer": "os:system"}},
        {"workload": "detr_pipeline:workload", "train": {"optimizer_args": {"x": [["os:system"]]}}},
        {"workload": "detr_pipeline:workload", "train": {"loggers": ["os:system"]}},
        {"workload": "detr_pipeline:workload", "pipeline": {"transport": "os:system"}},
    ],
    ids=str,
)
def test_what_is_not_offered_is_asked_about(values: dict[str, Any], tmp_path: Path) -> None:
    """Every key that names code, names among arguments, and attributes that lead from our modules to others'."""
    try:
        folder = write_run(tmp_path / "run", **values)
    except CapslogError:  # not even a config
        return
    told = refusal(folder)
    assert "bears no mark" in str(told)
    assert "--trust" in str(told)


@pytest.mark.parametrize("name", ["tiny", "digits", "bccd", "bccd_rt_detr"])
def test_a_run_of_what_we_offer_needs_no_mark(name: str, tmp_path: Path) -> None:
    """Somebody else's DETR run can be evaluated as it is: all code is ours."""
    values = load_config(ROOT / "configs" / f"{name}.yaml").model_dump(mode="json")
    assert refusal(write_run(tmp_path / "run", **{key: values[key] for key in ("workload", "model", "data")})) is None


def test_what_is_offered_is_ours() -> None:
    """Nothing on the list leads through one of our modules to another package."""
    for name in sorted(OFFERED):
        module, _, attribute = name.partition(":")
        assert getattr(importlib.import_module(module), attribute).__module__.partition(".")[0] in (
            "varuna_capslog",
            "detr_pipeline",
        )


def test_a_run_started_here_is_not_asked_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands trust it in its folder and after a move; packed, unpacked elsewhere and edited, it is anybody's."""
    Path("mine.py").write_text(
        "from torch import nn\ndef model(width): return nn.Sequential(nn.Linear(width, 2), nn.Tanh())\n"
    )
    model = {"factory": "mine:model", "arguments": {"width": 4}, "inputs": ["input=float32[1,4]"]}
    folder, pipeline = tmp_path / "run", {"devices": 1, "cuts": [0]}
    values = {"workload": ORDINARY, "model": model, "pipeline": pipeline, "run_dir": str(folder), "device": "cpu"}
    prepare_run(section(Config, values, ""), show=False)
    check_config(folder / "config.yaml", ["train.max_steps=3"])
    assert run("export", folder, "--to", "device-map") == 0
    shutil.move(folder, tmp_path / "moved")
    assert run("export", tmp_path / "moved", "--to", "device-map") == 0
    config = tmp_path / "moved" / "config.yaml"
    config.write_text(config.read_text().replace("width: 4", "width: 5"))
    capsys.readouterr()
    assert run("export", tmp_path / "moved", "--to", "device-map") == 2
    assert "no longer, the run that you started" in capsys.readouterr().err


def test_handed_files_are_part_of_the_mark(tmp_path: Path) -> None:
    """A run with a data set that was handed over; its pickle is replaced afterwards."""
    folder = handed_run(tmp_path / "run", tmp_path / "PWNED")
    mark_run(folder)
    assert refusal(folder) is None
    (folder / "handed.pkl").write_bytes(pickle.dumps({"dataset": pickle.dumps(Touch(tmp_path / "OTHER"))}))
    told = refusal(folder)
    assert f"the pickle {folder / 'handed.pkl'}" in str(told)


def test_a_mark_is_of_one_run_and_one_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark that is copied, of another user's key, damaged, or a link proves nothing."""
    first, second = factory_run(tmp_path / "mine", path="a"), factory_run(tmp_path / "other", path="b")
    mark_run(first)
    mark = (first / "mark.json").read_text()
    for text in (mark, "{}", "[]", '{"mark": "\\ud800", "modules": {}}', "[" * 5000, mark.replace("null", '"x"')):
        (second / "mark.json").write_text(text)
        assert refusal(second) is not None
    (second / "mark.json").unlink()
    (second / "mark.json").symlink_to(first / "mark.json")
    assert refusal(second) is not None
    assert refusal(first) is None
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another"))
    mark_run(second)
    assert refusal(first) is not None


@pytest.mark.parametrize("fault", ["mode", "link", "short", "folder"])
def test_a_key_that_others_may_know_marks_nothing(fault: str, tmp_path: Path, state: Path) -> None:
    """The run trains all the same, and later commands ask and say why."""
    folder = factory_run(tmp_path / "run", path="a")
    mark_run(folder)
    assert state.stat().st_mode & 0o777 == 0o600
    assert refusal(folder) is None
    if fault == "mode":
        state.chmod(0o644)
    elif fault == "link":
        state.rename(tmp_path / "key")
        state.symlink_to(tmp_path / "key")
    elif fault == "short":
        state.write_text("short")
    else:
        state.unlink()
        state.mkdir(0o700)
    told = refusal(folder)
    assert str(state) in str(told)
    assert fault == "short" or "is a link, another user's, or readable by others" in str(told)
    (folder / "mark.json").unlink()
    mark_run(folder)
    assert not (folder / "mark.json").exists()


def test_without_a_home_there_is_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a home, as in a container, the run is not marked, and a command says what is missing."""
    monkeypatch.delenv("HOME")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    folder = factory_run(tmp_path / "run", path="a")
    mark_run(folder)
    assert [*Path().iterdir()] == []
    assert not (folder / "mark.json").exists()
    assert "neither XDG_STATE_HOME nor HOME" in str(refusal(folder))


def test_a_name_is_not_another_folders_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of one's own, looked at from a folder that somebody else filled with modules of the same name."""
    Path("mine.py").write_text("def model(): ...\n")
    folder = factory_run(tmp_path / "run", "mine:model")
    mark_run(folder)
    sys.path.remove(str(Path.cwd()))  # as in another process
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    assert refusal(folder) is None
    Path("mine.py").write_text("raise SystemExit\n")
    importlib.invalidate_caches()
    told = refusal(folder)
    assert f"{Path('mine.py').absolute()} of the current folder" in str(told)


def test_a_config_of_ones_own_is_not_asked_about(tmp_path: Path) -> None:
    """Naming a config to `train` is like starting a script. A pickle in it is asked about: nobody can read that."""
    folder = handed_run(tmp_path / "run", tmp_path / "PWNED")
    config = tmp_path / "own.yaml"
    config.write_text(f"workload: mine:workload\nrun_dir: {folder}\n")
    check_config(config, [])
    with pytest.raises(CapslogError, match=r"the pickle .*handed.pkl.*--trust"):
        check_config(config, [f"data.given={folder / 'handed.pkl'}"])
    shutil.copy(folder / "config.yaml", config)
    with pytest.raises(CapslogError, match="nobody can read in a pickle"):
        check_config(config, [])
    check_config(config, [], trust=True)
