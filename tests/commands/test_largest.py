"""`capslog largest`: its answer against a plan for each value, and refused arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import varuna_capslog as capslog
from tests.commands import folders
from varuna_capslog import cli
from varuna_capslog.commands.largest import LargestFlags, _word_of
from varuna_capslog.plans.plan import read_plan

NETS = """
from torch import nn
from varuna_capslog.model.model_workload import ModelSection, ModelWorkload

def stack():
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

def pictures():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))

def with_pictures(config):
    height, width = config.profile.image_size or (64, 64)
    inputs = [f"x=float32[1,3,{height},{width}]"]
    section = ModelSection(factory="nets_of_largest:pictures", inputs=inputs)
    return ModelWorkload(section, config.train.microbatch_size)
"""
LLAMA = folders.LLAMA | {"max_position_embeddings": 200}
MODEL = ("--model", "nets_of_largest:stack", "--input", "x=float32[1,5120,64]")
CONFIG = """
workload: varuna_capslog.model.model_workload:workload
model: {factory: nets_of_largest:stack, inputs: ["x=float32[1,5120,64]"]}
train: {minibatch_size: 12}
profile: {source: estimated, device: cuda:t4}
"""


@pytest.fixture(autouse=True)
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nets_of_largest.py").write_text(NETS)
    (tmp_path / "stack.yaml").write_text(CONFIG)
    (tmp_path / "pictures.yaml").write_text(
        "workload: nets_of_largest:with_pictures\nprofile: {source: estimated, device: cuda:t4}"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def run(*arguments: str) -> int:
    return cli._run(["plan", *arguments])


def largest(*arguments: str) -> int:
    return cli._run(["largest", *arguments])


def asked(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    assert largest(*arguments, "--json") == status
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    lines = [line for line in captured.err.splitlines() if line.startswith("capslog: estimating ")]
    assert lines == [f"capslog: estimating {answer['key']}={trial['value']}" for trial in answer["tried"]]
    return answer


def test_the_largest_microbatch_divides_the_samples_and_its_plan_is_written(capsys):
    sizes = ("--capacity", "584MiB")
    answer = asked(capsys, "stack.yaml", "microbatch", *sizes, "-o", "plan.json")
    divisors = [size for size in range(1, 13) if 12 % size == 0]
    assert {trial["value"] for trial in answer["tried"]} < set(divisors)
    statuses = {}
    for size in (answer["largest"], divisors[divisors.index(answer["largest"]) + 1]):
        statuses[size] = run("stack.yaml", *sizes, f"train.microbatch_size={size}", "-o", f"{size}.json")
    assert list(statuses.values()) == [0, 3]
    alone, written = read_plan(Path(f"{answer['largest']}.json")), read_plan(Path("plan.json"))
    assert (written.cut_list, written.stage_bytes) == (alone.cut_list, alone.stage_bytes)
    assert (written.microbatch_size, written.num_microbatches) == (answer["largest"], 12 // answer["largest"])
    (best,) = [trial for trial in answer["tried"] if trial["value"] == answer["largest"]]
    assert best["peak_bytes"] == alone.peak_bytes
    assert best["samples_per_second"] == pytest.approx(12 / alone.step_seconds)
    for trial in answer["tried"]:
        assert trial["fits"] == (trial["value"] <= answer["largest"]) == (trial["lacking_bytes"] is None)


def test_a_model_keeps_its_number_of_microbatches(capsys):
    arguments = (*MODEL, "--devices", "2", "--device", "cuda:t4", "--capacity", "580MiB", "microbatch")
    assert largest(*arguments, "-o", "plan.json") == 0
    told = capsys.readouterr()
    written = read_plan(Path("plan.json"))
    assert f"train.microbatch_size={written.microbatch_size} is the largest that fits;" in " ".join(told.out.split())
    assert written.num_microbatches == 8
    assert "estimated for cuda:t4" in told.err


def test_minibatches_end_where_no_stage_has_more_in_flight(capsys):
    arguments = ("stack.yaml", "minibatch", "--capacity", "600MiB", "train.microbatch_size=4")
    answer = asked(capsys, *arguments, "pipeline.schedule=1f1b")
    assert answer["every_larger_fits"]
    assert "every larger multiple of 4: with schedule 1f1b" in answer["answer"]
    gpipe_answer = asked(
        capsys, *arguments, "train.minibatch_size=12", "pipeline.schedule=gpipe", "pipeline.stage_inputs=device"
    )
    assert not gpipe_answer["every_larger_fits"]
    assert gpipe_answer["largest"] % 4 == 0
    assert run("stack.yaml", "--capacity", "600MiB", *_gpipe(gpipe_answer["largest"])) == 0
    assert run("stack.yaml", "--capacity", "600MiB", *_gpipe(gpipe_answer["largest"] + 4)) == 3


def _gpipe(samples: int) -> tuple[str, ...]:
    sizes = ("train.microbatch_size=4", f"train.minibatch_size={samples}")
    return *sizes, "pipeline.schedule=gpipe", "pipeline.stage_inputs=device"


def test_the_largest_image_has_the_ratio_of_the_config(capsys):
    arguments = ("pictures.yaml", "profile.image_size=[64, 128]", "image-size", "--capacity", "540MiB")
    answer = asked(capsys, *arguments)
    assert all(abs(2 * height - width) <= 32 for height, width in (trial["value"] for trial in answer["tried"]))
    height, width = answer["largest"]
    assert run("pictures.yaml", "--capacity", "540MiB", f"profile.image_size=[{height}, {width}]") == 0
    assert run("pictures.yaml", "--capacity", "540MiB", f"profile.image_size=[{height + 32}, {width + 32}]") == 3


def test_one_capture_serves_every_size(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    captures, capture = [], capslog.Chain.from_module.__func__  # type: ignore[attr-defined]

    def counted(cls: type, *arguments: Any, **options: Any) -> Any:
        captures.append(arguments)
        return capture(cls, *arguments, **options)

    monkeypatch.setattr(capslog.Chain, "from_module", classmethod(counted))
    few_rows = (*MODEL[:-1], "x=float32[1,1024,64]")  # of which several microbatches fit
    answer = asked(capsys, *few_rows, "--devices", "1", "--device", "cuda:t4", "--capacity", "580MiB", "microbatch")
    assert len(answer["tried"]) > 1
    assert len(captures) == 1


@pytest.mark.parametrize("place", range(4))
def test_the_word_stands_anywhere(place: int) -> None:
    words = ["stack.yaml", "train.minibatch_size=60", "pipeline.devices=2"]
    words.insert(place, "microbatch")
    word, flags = _word_of(LargestFlags(config=Path(words[0]), overrides=words[1:]))
    assert (word, flags.config) == ("microbatch", Path("stack.yaml"))
    assert flags.overrides == ["train.minibatch_size=60", "pipeline.devices=2"]
    model = [word for word in words if word != "stack.yaml"]
    word, flags = _word_of(LargestFlags(model="a:b", config=Path(model[0]), overrides=model[1:]))
    assert (word, flags.config, len(flags.overrides or ())) == ("microbatch", None, 2)


def test_the_longest_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    Path("llama").mkdir()
    Path("llama", "config.json").write_text(json.dumps(LLAMA))
    wanted = ("sequence", "--hf", "llama", "--devices", "2", "--device", "cuda:t4", "--json")
    assert largest(*wanted) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["key"], answer["largest"]) == ("model.arguments.sequence", 200)
    assert answer["answer"].endswith("and the model takes no more tokens")


def test_nothing_fits(capsys):
    answer = asked(capsys, "stack.yaml", "microbatch", "--capacity", "10KiB", "-o", "no.json", status=3)
    assert answer["largest"] is None
    assert answer["tried"][0]["lacking_bytes"] > 0
    assert answer["answer"].startswith("not even train.microbatch_size=1 fits: rank 1 needs ")
    assert "too much" in answer["answer"]
    assert not Path("no.json").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("microbatch", "profile.device=cpu"), "there is no capacity; give --capacity SIZE, pipeline.capacity, --dev"),
        (("microbatches",), "unknown word of largest 'microbatches'; did you mean 'microbatch'?"),
        ((), "needs a word that says what grows: microbatch, minibatch, image-size, sequence"),
        (("sequence",), "give --hf FOLDER"),
        (("image-size",), "is profile.image_size, which the inputs of the workload"),
        (("microbatch", "--measure"), "estimates, and never measures; leave --measure out"),
        (("microbatch", "--pareto"), "--pareto is a command of its own: capslog front"),
        (("minibatch", "--minibatch", "8"), "leave --minibatch out"),
        (("microbatch", "--planner", "joint"), "choose another planner than joint"),
    ],
)
def test_what_is_refused_is_one_sentence_and_status_2(capsys, arguments, sentence):
    assert largest("stack.yaml", *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line
