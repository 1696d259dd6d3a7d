"""`capslog lint`: what a layout means for a model, how it compares with our cuts, and what is illegal."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from matplotlib.image import imread

from tests.planning.test_fastest_layerwise import profile_on
from varuna_capslog import cli
from varuna_capslog.profiles.record import Divisible, Profile, read_profile, write_profile

BLOCKS = 6


def named(profile: Profile) -> Profile:
    """Return the profile with the layer names of a decoder."""
    names = ["embed", *(f"model.layers.{n}" for n in range(BLOCKS)), "lm_head"]
    layers = tuple(dataclasses.replace(layer, name=name) for layer, name in zip(profile.layers, names, strict=True))
    return dataclasses.replace(profile, layers=layers)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    write_profile(tmp_path / "profile.json", named(profile_on("cuda", BLOCKS + 2)))
    return tmp_path / "profile.json"


def _divisible(profile: Path, folder: Path) -> Path:
    """File of the same profile as an estimate whose layers can be divided over cards."""
    known = read_profile(profile)
    parts = Divisible(0.5, 0.4, 0.2, 0.2, 100, 100, 10, 400, 1000, 1e-3)
    layers = tuple(dataclasses.replace(layer, divisible=parts) for layer in known.layers)
    write_profile(folder / "divisible.json", dataclasses.replace(known, layers=layers, source="estimated"))
    return folder / "divisible.json"


def run(*words: object) -> int:
    return cli._run(["lint", *map(str, words)])


def test_a_layout_has_its_cuts_and_ours_beside_them(
    profile: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    flags = ("--profile", profile, "--devices", 2, "--minibatch", 8)
    assert run("Et|t*5L", *flags, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["system"], record["blocks"], record["faults"]) == ("megatron", [1, 5], [])
    assert record["layout"]["cuts"] == [0, 2]
    assert record["layout"]["schedule"] == record["ours"]["schedule"] == "1f1b"
    assert record["ours"]["step_seconds"] < record["layout"]["step_seconds"]
    given = ("pipeline.cuts=[0,2]", "pipeline.schedule=1f1b", "pipeline.recompute=false")
    assert cli._run(["plan", *map(str, flags), *given, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert [planned[key] for key in ("cuts", "peak_bytes", "step_seconds")] == [
        record["layout"][key] for key in ("cuts", "peak_bytes", "step_seconds")
    ]
    assert run("1,5", *flags) == 0
    text = capsys.readouterr().out
    assert "vllm layout of 2 ranks beside planner throughput" in text
    assert "schedule 1f1b; the layout fits; ours fits" in text
    assert "1 layer for multi-token prediction" not in text


def test_a_layout_may_be_longer_than_a_file_name(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = [["tok_embeddings", "layers.0"], [f"layers.{n}" for n in range(1, BLOCKS)]]
    text = json.dumps(stages) + 300 * " "
    assert run(text, "--profile", profile, "--devices", 2, "--minibatch", 8, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["system"], record["blocks"]) == ("torchtitan", [1, 5])
    (tmp_path / "layout").write_bytes(b"Et|tL\xff")
    assert run(tmp_path / "layout", "--profile", profile, "--devices", 2, "--minibatch", 8) == 2
    assert "it is not UTF-8 text" in capsys.readouterr().err


def test_chunks_go_round_the_ranks(profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "primus.yaml").write_text("decoder_pipeline_manual_split_list: [1, 2, 2, 1]\n")
    picture = tmp_path / "layout.png"
    flags = ("--profile", profile, "--devices", 2, "--minibatch", 8)
    assert run(tmp_path / "primus.yaml", *flags, "--plot", picture, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["blocks"] == [1, 2, 2, 1]
    assert [stage["layers"] for stage in record["layout"]["stages"]] == [[[0, 2]], [[2, 4]], [[4, 6]], [[6, 8]]]
    assert [stage["ranks"] for stage in record["layout"]["stages"]] == [[0], [1], [0], [1]]
    assert record["layout"]["schedule"] == record["ours"]["schedule"] == "interleaved"
    assert imread(picture).shape[1] == 1600


def test_a_layout_with_an_empty_chunk(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan says it by a rank with fewer stages; ours has as many as the layout's rounds."""
    flags = ("--profile", profile, "--devices", 2, "--minibatch", 8)
    assert run("Ett|tt||ttL", *flags, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["blocks"] == [2, 2, 0, 2]
    assert [stage["ranks"] for stage in record["layout"]["stages"]] == [[0], [1], [1]]
    assert [stage["layers"] for stage in record["layout"]["stages"]] == [[[0, 3]], [[3, 5]], [[5, 8]]]
    assert (record["layout"]["schedule"], len(record["ours"]["stages"])) == ("interleaved", 4)
    assert record["layout"]["step_seconds"] > record["ours"]["step_seconds"]
    assert run("Ett|tt||ttL", *flags) == 0
    assert "2+0" in capsys.readouterr().out
    assert run("Et*6||L", "--profile", profile, "--devices", 3, "--minibatch", 8) == 2
    assert "rank 1 of the layout holds no layer" in capsys.readouterr().err


def test_what_is_illegal_or_does_not_fit_ends_with_status_3(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--profile", profile, "--devices", 2, "--minibatch", 8)
    assert run("3,4", *flags) == 3
    assert capsys.readouterr().err == ("capslog: the vllm layout is illegal: it has 7 decoder blocks, the model 6\n")
    assert run("3,3", *flags, "--capacity", "200KiB") == 3
    assert "the layout does not fit: rank " in capsys.readouterr().err
    assert run("Et*3|mt*3L", *flags, "--json") == 3
    assert json.loads(capsys.readouterr().out)["faults"] == [
        "a layer for multi-token prediction (m) stands before a block (t)"
    ]
    assert run() == 2
    assert "no layout is given: capslog lint LAYOUT" in capsys.readouterr().err
    assert run("Et*3|t*3mL", *flags) == 0
    assert "1 layer for multi-token prediction (m) of the layout: the model here has none" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_layout_of_stages_that_are_divided_over_cards(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both plans are of one card of each stage; the cards of all stages are said."""
    divisible = _divisible(profile, tmp_path)
    flags = ("3,3", "--devices", 2, "--minibatch", 8, "--json")
    assert run(*flags, "--profile", divisible) == 0
    whole = json.loads(capsys.readouterr().out)["layout"]
    assert run(*flags, "--profile", divisible, "--parallel", "tensor=2,expert=4,data=2,zero=1") == 0
    captured = capsys.readouterr()
    layout = json.loads(captured.out)["layout"]
    assert layout["parallel"] == {"tensor": 2, "context": 1, "expert": 4, "data": 2, "zero": 1}
    assert layout["peak_bytes"] < whole["peak_bytes"]
    assert layout["num_microbatches"] == 4
    assert "4 cards for each device of the pipeline, 8 in all" in captured.err
    assert "1/4 of the rows (the mean), at worst all" in captured.err
    assert run(*flags, "--profile", profile, "--parallel", "tensor=2") == 2
    assert "known in estimates alone" in capsys.readouterr().err


def test_a_layout_has_the_bytes_and_seconds_of_the_plan_that_it_was_exported_from(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lint judges in one way: by the planner's own verdict on the cuts. Layouts with an empty chunk went another way,
    on which schedule 1f1b-star had no limits; the blocks of a second pipeline were those of other ranks.
    """
    divisible = _divisible(profile, tmp_path)
    flags = ("--devices", 2, "--minibatch", 16, "pipeline.recompute=false")
    for more in (
        ("pipeline.schedule=1f1b",),
        ("pipeline.schedule=interleaved",),
        ("pipeline.schedule=1f1b-star", "pipeline.stages_per_rank=2"),
        ("pipeline.schedule=interleaved", "pipeline.replicas=2", "pipeline.bandwidth=1MiB/s"),
        ("pipeline.schedule=1f1b", "--parallel", "tensor=2,expert=4,data=2,zero=1"),
        ("pipeline.schedule=interleaved", "--parallel", "tensor=2,expert=4,data=2,zero=1"),
    ):
        asked = ("--profile", divisible, *flags, *more)
        saved = tmp_path / "plan.json"
        assert cli._run(["plan", *map(str, asked), "--planner", "throughput", "-o", str(saved)]) == 0
        capsys.readouterr()
        assert cli._run(["export", str(saved), "--profile", str(divisible), "--to", "megatron"]) == 0
        layout = capsys.readouterr().out.strip()
        assert run(layout, *asked, "--json") == 0
        record = json.loads(capsys.readouterr().out)
        planned = json.loads(saved.read_text())
        for key in ("peak_bytes", "step_seconds", "ranks", "stages", "cuts"):
            assert record["layout"].get(key) == planned.get(key), (layout, key)


def test_an_empty_chunk_has_the_limits_of_its_schedule_and_each_pipeline_its_own_blocks(
    profile: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    flags = ("--profile", profile, "--devices", 2, "--minibatch", 16)
    assert run("Ett|tt||ttL", *flags, "pipeline.schedule=1f1b-star", "--json") == 0
    stages = json.loads(capsys.readouterr().out)["layout"]["stages"]
    assert [stage["in_flight"] for stage in stages] == [3, 2, 1]  # a period of 15 s, the last stage
    assert run("Ett|tt||ttL", *flags, "pipeline.replicas=2") == 0
    rows = [line.split("│")[1:3] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [["0", "2+0"], ["1", "2+2"], ["2", "2+0"], ["3", "2+2"]]


def test_hybrid_patterns(profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the letters of the profile, where it knows them; our cuts are exported as a pattern then."""
    known, hybrid = read_profile(profile), tmp_path / "hybrid.json"
    letters = {"hybrid_letters": "|M|-|M|*|-|M|"}
    write_profile(hybrid, dataclasses.replace(known, conditions={**known.conditions, **letters}))
    flags = ("--devices", 2, "--minibatch", 8, "--json")
    assert run("M-|M*-M", "--profile", hybrid, *flags) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["system"], record["blocks"], record["layout"]["cuts"]) == ("megatron", [2, 4], [0, 3])
    assert run("M-|M--M", "--profile", profile, *flags) == 0  # its letters are not known
    assert json.loads(capsys.readouterr().out)["layout"]["peak_bytes"] == record["layout"]["peak_bytes"]
    assert run("M-|M--M", "--profile", hybrid, *flags) == 3
    assert "it has the layers M-M--M, the model M-M*-M: they differ at layer 3" in capsys.readouterr().err
    (tmp_path / "plan.json").write_text(json.dumps(record["layout"]))
    assert cli._run(["export", str(tmp_path / "plan.json"), "--profile", str(hybrid), "--to", "megatron"]) == 0
    assert capsys.readouterr().out == "M-|M*-M\n"


def test_the_option_of_a_system_may_stand_before_its_layout(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such words were options that lint does not have; wrong options of lint itself still are."""
    flags = ("--profile", profile, "--devices", 2, "--minibatch", 8, "--json")
    for words in (
        ("--pipeline-model-parallel-layout", "Ett|ttttL"),
        ("--pipeline-model-parallel-layout Ett|ttttL",),
        ("--pipeline-model-parallel-layout=Ett|ttttL",),
        ("--decoder-first-pipeline-num-layers", "2", "--decoder-last-pipeline-num-layers", "4"),
        ("--decoder-pipeline-manual-split-list", "2", "4"),
    ):
        for line in ((*words, *flags), (*flags, *words, "pipeline.recompute=false")):
            assert run(*line) == 0, line
            assert json.loads(capsys.readouterr().out)["blocks"] == [2, 4]
    assert run("Ett|ttttL", *flags, "--devcies", 2) == 2
    assert capsys.readouterr().err == "capslog: there is no option --devcies; see capslog lint --help\n"
    assert run("Ett|ttttL", *flags, "--bandwidth", "1Gbit") == 2
    assert "--bandwidth is the key pipeline.bandwidth" in capsys.readouterr().err
    assert run("--devcies", 2, "Ett|ttttL", *flags) == 2
    assert "no system is known that writes a layout such as '--devcies 2'" in capsys.readouterr().err
