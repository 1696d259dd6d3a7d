"""The page shows what the run's files say, in whatever state the run left them."""

from __future__ import annotations

import dataclasses
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.reports.page_reader import Page
from tests.reports.runs import CLASSES, make_profile, write_run
from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.plans.parts import PlanRank, PlanStage, Units
from varuna_capslog.plans.plan import Plan, write_plan
from varuna_capslog.profiles.record import Profile, SharedParameter, TensorRecord, read_profile, write_profile
from varuna_capslog.reports import changes, markup
from varuna_capslog.reports.markup import UNKNOWN, duration
from varuna_capslog.reports.page import write_comparison, write_report
from varuna_capslog.reports.run import read_run
from varuna_capslog.schedules import StageGraph, StageSeconds, schedule_of, simulate

GIB = 2**30


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan, Page]:
    """Return a complete run directory, its plan and the report's page."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    plan = write_run(run_dir)
    return run_dir, plan, Page(write_report(run_dir))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return a short run on two stages, to be damaged."""
    write_run(tmp_path / "run", num_layers=6, stages=2, steps=60, evaluations=2, microbatches=4)
    return tmp_path / "run"


def rewrite(path: Path, **changes: object) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file that are JSON, parsed without the library."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


# -- a run with everything ---------------------------------------------------------------------------------------------


def test_the_page_is_whole_and_stands_alone(whole: tuple[Path, Plan, Page]) -> None:
    run_dir, _, page = whole
    report = run_dir / "report" / "index.html"
    assert report.stat().st_size < 6e6
    assert [path.name for path in report.parent.iterdir()] == ["index.html"]
    assert not {name for name in page.attributes if name.startswith("on")}
    assert "link" not in page.tags
    assert len(page.sources) == 3
    assert all(source.startswith("data:image/jpeg;base64,") for source in page.sources)
    assert "default-src 'none'" in report.read_text(encoding="utf-8")[:400], "the browser refuses every request"
    assert list(page.texts) == [
        "results", "training", "evaluation", "predictions", "summary", "memory",
        "stages", "schedule", "layers", "events",
    ]  # fmt: skip
    counts = {section: len(plots) for section, plots in page.plots.items()}
    assert counts == {"training": 5, "evaluation": 1, "memory": 1, "schedule": 1, "layers": 1}


def test_every_figure_is_one_that_plotly_takes(whole: tuple[Path, Plan, Page]) -> None:
    """The library's own classes refuse unknown keys and values, which plotly.js ignores."""
    from plotly.graph_objects import Figure

    for plots in whole[2].plots.values():
        for plot in plots:
            Figure(plot)


def test_summary_tells_the_run(whole: tuple[Path, Plan, Page]) -> None:
    run_dir, plan, page = whole
    facts = page.facts("result-table") | page.facts("summary-table")
    by_step = {line["step"]: line for line in lines(run_dir / "metrics.jsonl")}
    assert facts["Model"] == "detr-resnet18"
    assert facts["Layers"] == "24"
    assert facts["Devices x replicas"] == "4 x 1 (cpu)"
    assert facts["Planner"].startswith("exact, found in ")
    assert facts["Cuts"] == str(list(plan.cuts))
    assert facts["Steps"] == "400"
    assert facts["Final loss"] == f"{by_step[400]['loss']:.4f}"
    total = sum(line["step_seconds"] for line in by_step.values())
    assert facts["Time in steps"].startswith(f"{int(total) // 60} min {round(total) % 60:02d} s, median step ")
    later = sum(line["step_seconds"] for step, line in by_step.items() if step > 1)
    start = f"{100 * 0.1 * 399 / later:.1f} % of the time in steps, on the rank that waited longest; more data.workers"
    assert facts["Waiting for data"].startswith(start), "the first step starts processes and does not count"
    best = max(lines(run_dir / "evaluations.jsonl"), key=lambda line: line["scores"]["AP"])
    scores = best["scores"]
    expected = f"{scores['AP']:.3f}, AP50 {scores['AP50']:.3f} at step {best['step']}"
    assert facts["Best AP"] == expected
    assert best["step"] != 400, "the last evaluation is not the best one, or the test shows nothing"
    assert "torch 2.11.0" in facts["Profile"]
    assert facts["Parameters"].startswith(f"{sum(10_000 + 1_000 * index for index in range(24)):,} (")
    assert "varuna-capslog " in facts["Report made with"]


def test_stages_name_their_layers(whole: tuple[Path, Plan, Page]) -> None:
    run_dir, plan, page = whole
    names = [layer["name"] for layer in json.loads((run_dir / "profile.json").read_text())["layers"]]
    shown = [text.split(", ") for text in page.column("stage-table", "names")]
    assert [name for row in shown for name in row] == names
    assert [names.index(row[0]) for row in shown] == list(plan.cuts)
    assert page.column("stage-table", "count") == [str(len(row)) for row in shown]


def test_peaks_predicted_beside_measured(whole: tuple[Path, Plan, Page]) -> None:
    run_dir, plan, page = whole
    rows = [line["peak_bytes"] for line in lines(run_dir / "metrics.jsonl") if "peak_bytes" in line]
    assert len(rows) == 2
    assert plan.stage_bytes is not None
    measured = [max(column) for column in zip(*rows, strict=True)]
    assert page.column("peak-table", "predicted [GiB]") == [f"{peak / GIB:.2f}" for peak in plan.stage_bytes]
    assert page.column("peak-table", "measured [GiB]") == [f"{peak / GIB:.2f}" for peak in measured]
    errors = [100 * (p - m) / m for p, m in zip(plan.stage_bytes, measured, strict=True)]
    assert page.column("peak-table", "error") == [f"{error:+.1f} %" for error in errors]
    assert page.column("peak-table", "capacity [GiB]") == ["4.00"] * 4
    assert "allocator events" in page.texts["memory"]


def test_step_is_simulated_from_the_profile(whole: tuple[Path, Plan, Page]) -> None:
    run_dir, plan, page = whole
    facts = page.facts("step-table")
    by_step = {line["step"]: line["step_seconds"] for line in lines(run_dir / "metrics.jsonl")}
    assert facts["Measured step (median)"] == f"{1000 * statistics.median(by_step.values()):.0f} ms"
    assert "8 microbatches" in facts["Schedule"]
    # The step is at least the busiest stage's work; its share of all stages' time is what the bubbles leave.
    layers = json.loads((run_dir / "profile.json").read_text())["layers"]
    work = [
        8 * sum(layer["forward_seconds"] * (2 - (stage == 3)) + layer["backward_seconds"] for layer in layers[a:b])
        for stage, (a, b) in enumerate(zip(plan.cuts, (*plan.cuts[1:], 24), strict=True))
    ]
    step = float(facts["Simulated step"].removesuffix(" s"))
    assert step > max(work)
    # the first stages keep the graph of the last microbatch where nothing came after its forward
    bubbles = float(facts["Bubble fraction"].removesuffix(" %"))
    assert bubbles == pytest.approx(100 * (1 - sum(work) / (4 * step)), abs=3)


def test_scores_and_classes(whole: tuple[Path, Plan, Page]) -> None:
    run_dir, _, page = whole
    evaluations = lines(run_dir / "evaluations.jsonl")
    best, last = evaluations[-2]["scores"], evaluations[-1]["scores"]
    assert page.column("score-table", "score") == ["AP", "AP50", "AP75", "AR_1"], "AP_small is unknown in this run"
    assert page.column("score-table", "best AP") == [f"{best[name]:.3f}" for name in ("AP", "AP50", "AP75", "AR_1")]
    assert page.column("score-table", "last") == [f"{last[name]:.3f}" for name in ("AP", "AP50", "AP75", "AR_1")]
    assert page.column("class-table", "class") == CLASSES, "names with signs of HTML are text"
    shown = page.column("class-table", "AP")
    assert shown[2] == "\N{EN DASH}"
    assert shown[0] == f"{best['per_class']['RBC']:.3f}"


def test_events_in_order(whole: tuple[Path, Plan, Page]) -> None:
    run_dir, _, page = whole
    events = lines(run_dir / "events.jsonl")
    assert page.column("event-table", "kind") == [event["kind"] for event in events]
    assert page.column("event-table", "step") == [str(event["step"]) for event in events]
    assert page.column("event-table", "time")[0] == "2025-07-20 08:26:40"
    assert "killed by SIGKILL" in page.texts["events"]


def test_drawn_predictions_are_in_natural_order(whole: tuple[Path, Plan, Page]) -> None:
    assert whole[2].texts["predictions"].split()[-3:] == ["sample-8", "sample-9", "sample-10"]


def test_a_sample_shows_one_box_of_an_object_under_a_threshold(small: Path) -> None:
    """Three to five boxes of one digit, with their names over one another, stood on each sample."""
    boxes = [((10, 10, 50, 50), 0.9), ((12, 10, 52, 50), 0.8), ((60, 10, 90, 50), 0.3)]
    record = {"width": 100, "height": 60, "jpeg": "/9j/4AAQ"}
    record["boxes"] = [{"box": box, "score": score, "name": f"<b>{score}"} for box, score in boxes]
    (small / "predictions" / "sample-8.boxes.json").write_text(json.dumps(record))
    (small / "predictions" / "sample-9.boxes.json").write_text(json.dumps(record | {"jpeg": '"><script>'}))
    page = Page(path := write_report(small))
    assert "<b>0.9 0.90" in page.texts["predictions"]
    assert "<b>0.8" not in page.texts["predictions"], "it overlaps the first one"
    assert "--score:0.300" in path.read_text(encoding="utf-8"), "under the slider's first position, but there"
    assert "oninput" in page.attributes
    assert page.sources[0] == "data:image/jpeg;base64,/9j/4AAQ"
    assert "sample-9.boxes.json is not as a run writes it (see jpeg), and left out" in page.texts["summary"]


def test_a_detector_has_precision_by_recall_and_confusion(small: Path) -> None:
    assert "detection-curves.json is missing" in Page(write_report(small)).texts["evaluation"]
    confusion = {"classes": ["a", "b"], "score": 0.5, "overlap": 0.5, "counts": [[3, 1, 0], [0, 2, 4], [5, 0, 0]]}
    record = {"AP": None, "recall": [0, 0.5, 1], "precision": {"a": [1, 0.5, 0], "b": None}, "confusion": confusion}
    files.write_json(small / "detection-curves.json", record)
    _, precision, matrix = Page(write_report(small)).plots["evaluation"]
    assert [trace["y"] for trace in precision["data"]] == [[1, 0.5, 0]] * 2, "the mean and the one known class"
    assert matrix["data"][0]["customdata"] == confusion["counts"]
    assert matrix["data"][0]["z"][1] == [0, 0.3333, 0.6667], "shares of the objects of class b"
    files.write_json(small / "detection-curves.json", record | {"recall": [0]})
    assert "not as a run writes it" in Page(write_report(small)).texts["evaluation"]


def test_two_runs_lie_over_one_another(small: Path) -> None:
    write_run(other := small.parent / "<other>", num_layers=6, stages=2, steps=30, evaluations=1, microbatches=4)
    path = write_comparison([read_run(small), read_run(other)])
    assert path == small / "report" / "comparison.html"
    page = Page(path)
    assert page.tables["comparison-table"][0] == ["", "run", "<other>"]
    steps = next(row for row in page.tables["comparison-table"] if row[0] == "Steps")
    assert steps[1:] == ["60", "30"]
    loss, *_ = page.plots["curves"]
    assert [(trace["name"], len(trace["y"])) for trace in loss["data"]] == [("run", 60), ("&lt;other&gt;", 30)]
    titles = [plot["layout"]["yaxis"]["title"]["text"] for plot in page.plots["curves"]]
    assert titles == ["loss", "AP", "AP50", "gradient norm", "learning rate", "samples/s"]


# -- what a crash, a resume or a new plan leaves behind ----------------------------------------------------------------


def test_a_repeated_step_counts_once_and_last(small: Path) -> None:
    """A resumed run wrote 30 steps twice; its page counted their seconds twice."""
    path = small / "metrics.jsonl"
    first = [{"step": step, "loss": 50.0, "step_seconds": 100.0, "parts": {}} for step in range(1, 6)]
    again = [{"step": step, "loss": 7.25, "step_seconds": 2.0, "parts": {}} for step in range(3, 6)]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*first, *again]))
    page = Page(write_report(small))
    facts = page.facts("result-table")
    assert facts["Steps"] == "5"
    assert facts["Final loss"] == "7.2500"
    assert facts["Time in steps"] == "3 min 26 s, median step 2.00 s"
    assert "went back" not in page.texts["summary"]


def test_a_resume_that_has_not_caught_up_is_told(small: Path) -> None:
    path = small / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (1, 2, 3, 4, 5, 2, 3)))
    page = Page(write_report(small))
    assert "The last line written is of step 3" in page.texts["summary"]
    assert "Steps 4 to 5 are shown" in page.texts["summary"]


def test_broken_lines_are_counted_and_left_out(small: Path) -> None:
    path = small / "metrics.jsonl"
    good = [
        json.dumps({"step": 1, "loss": 2.0}),
        json.dumps({"step": 2, "loss": None, "parts": None, "peak_bytes": "x"}),
    ]
    path.write_text("\n".join([good[0], '{"step": 2, "lo', json.dumps({"loss": 3.0}), good[1]]))
    page = Page(write_report(small))
    message = "1 line left out that a crash tore, or that are no objects; 1 line without step or kind left out"
    assert message in page.texts["summary"]
    assert page.facts("result-table")["Steps"] == "2"
    assert page.facts("result-table")["Final loss"] == "\N{EN DASH}"


def test_the_newest_plan_counts_and_only_its_peaks(small: Path) -> None:
    old = json.loads((small / "plan-0.json").read_text())
    new = old | {"cuts": [0, 2], "stage_bytes": [3 * GIB, 5 * GIB], "peak_bytes": 5 * GIB, "planner": "capslog"}
    new |= {"stage_seconds": None, "capacity_bytes": 6 * GIB}
    (small / "plan-9.json").write_text(json.dumps(old))
    (small / "plan-10.json").write_text(json.dumps(new))
    peaks = {1: (9, [9 * GIB, 9 * GIB]), 2: (10, [4 * GIB, 4 * GIB]), 3: (11, [2 * GIB, 5 * GIB])}
    rows = [
        {"step": step, "loss": 1.0, "generation": generation, "peak_bytes": peak, "step_seconds": generation}
        for step, (generation, peak) in peaks.items()
    ]
    (small / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = Page(write_report(small))
    assert page.facts("summary-table")["Cuts"] == "[0, 2]"
    assert page.facts("summary-table")["Planner"].startswith("capslog")
    assert page.column("peak-table", "measured") == ["4.00", "5.00"], "generation 9 ran under another plan"
    assert page.column("peak-table", "error") == ["-25.0 %", "+0.0 %"]
    assert page.facts("step-table")["Measured step (median)"] == "10.5 s"


def test_an_earlier_report_is_replaced(small: Path) -> None:
    assert "evaluation" in Page(write_report(small)).plots
    for name in ("notes.txt", "scores.png", "prediction-03.png"):
        (small / "report" / name).write_text("mine, or of an earlier version")
    (small / "evaluations.jsonl").unlink()
    shutil.rmtree(small / "predictions")
    page = Page(write_report(small))
    remaining = {path.name for path in (small / "report").iterdir()}
    assert remaining == {"index.html", "notes.txt"}
    assert "evaluations.jsonl is missing" in page.texts["evaluation"]
    assert "predictions/ is missing" in page.texts["predictions"]
    (small / "predictions").mkdir()
    (small / "predictions" / "sample.txt").write_text("Once <upon>\na time", encoding="utf-8")
    assert "<pre>Once &lt;upon&gt;\na time</pre>" in write_report(small).read_text(encoding="utf-8")


# -- less than everything ----------------------------------------------------------------------------------------------


def test_a_run_without_a_profile(small: Path) -> None:
    (small / "profile.json").unlink()
    page = Page(write_report(small))
    assert "profile.json is missing" in page.texts["layers"]
    assert "profile.json is missing" in page.texts["stages"]
    assert "every forward pass counts 1 and every backward pass 2" in page.texts["schedule"]
    assert "forward passes" in page.facts("step-table")["Simulated step"]
    assert "Measured / simulated" not in page.facts("step-table"), "seconds over units is no number"
    assert "layers" not in page.plots


def test_a_profile_without_seconds_gives_units(small: Path) -> None:
    """GPipe without recomputation, p stages, m microbatches: a step of (m + p - 1)(1 + 2), bubbles (p-1)/(m+p-1)."""
    write_profile(small / "profile.json", make_profile(6, times=False))
    rewrite(small / "plan-0.json", schedule="gpipe")
    config = (small / "config.yaml").read_text()
    (small / "config.yaml").write_text(config.replace("recompute: true", "recompute: false"))
    page = Page(write_report(small))
    facts = page.facts("step-table")
    assert facts["Simulated step"] == "15.0 forward passes of one stage"
    assert facts["Bubble fraction"] == "20.0 %"
    assert "no forward_seconds" in page.texts["schedule"]


@pytest.mark.parametrize("kept", ["config.yaml", "profile.json", "plan-0.json", "metrics.jsonl", "events.jsonl"])
def test_any_single_file_makes_a_page(small: Path, kept: str) -> None:
    for path in [*small.iterdir()]:
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != kept:
            path.unlink()
    page = Page(write_report(small))
    missing = {
        "config.yaml": "summary",
        "profile.json": "layers",
        "metrics.jsonl": "training",
        "events.jsonl": "events",
    }
    for name, where in missing.items():
        assert (f"{name} is missing" in page.texts[where]) == (name != kept)


def test_an_unreadable_file_is_named_where_it_is_missed(small: Path) -> None:
    rewrite(small / "plan-0.json", cuts=[0, 99])
    (small / "profile.json").write_text("{")
    page = Page(write_report(small))
    assert "no stage can begin at 99" in page.texts["stages"]
    assert "no stage can begin at 99" in page.texts["memory"]
    assert "not valid JSON" in page.texts["layers"]
    assert "memory" not in page.plots


def test_given_cuts_predict_nothing(small: Path) -> None:
    rewrite(small / "plan-0.json", stage_bytes=None, peak_bytes=None, planner=None, capacity_bytes=None, fits=None)
    page = Page(write_report(small))
    assert page.facts("summary-table")["Planner"].startswith("none, the cuts were given")
    assert "predicts no bytes" in page.texts["memory"]
    assert page.column("peak-table", "predicted") == ["\N{EN DASH}"] * 2
    assert page.column("peak-table", "error") == ["\N{EN DASH}"] * 2
    assert all(float(peak) > 0 for peak in page.column("peak-table", "measured"))


def test_stages_that_share_a_rank_get_no_error(small: Path) -> None:
    pieces = ((0, 1, 0), (1, 3, 1), (3, 5, 0), (5, 6, 1))
    stages = tuple(PlanStage(((a, b),), (rank,), memory=None, bytes=GIB) for a, b, rank in pieces)
    ranks = (PlanRank(capacity_bytes=8 * GIB), PlanRank(capacity_bytes=6 * GIB))
    plan = Plan(6, stages, Units(2, 1, 1), "gpipe", ranks=ranks, model="m")
    write_plan(small / "plan-1.json", plan)
    row = {"step": 2, "loss": 1.0, "generation": 1, "peak_bytes": [2 * GIB, 3 * GIB, 2 * GIB, 3 * GIB]}
    (small / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    page = Page(write_report(small))
    assert page.column("stage-table", "rank") == ["0", "1", "0", "1"]
    assert page.column("peak-table", "error") == ["\N{EN DASH}"] * 4
    assert page.column("peak-table", "capacity") == ["8.00", "6.00", "8.00", "6.00"]
    assert "Several stages share a rank" in page.texts["memory"]
    assert "stage.microbatch" in page.texts["schedule"]


ROUND_TRIP = [((0, 1), 0, None), ((1, 3), 1, None), ((3, 5), 0, None), ((5, 6), 1, None)]
SHARED_OUT = [((0, 3), 0, (0, 2, 3)), ((3, 4), 1, None), ((0, 3), 2, (1,)), ((4, 6), 0, (0, 2, 3)), ((4, 6), 2, (1,))]
"""Layers, rank and blocks of each stage."""


@pytest.mark.parametrize(("rows", "blocks"), [(ROUND_TRIP, None), (SHARED_OUT, 4)])
def test_a_plan_without_units_is_drawn_on_its_own_ranks_with_the_units_of_the_config(
    small: Path, rows: list[tuple[tuple[int, int], int, tuple[int, ...] | None]], blocks: int | None
) -> None:
    """Its stages were drawn as one pipeline with one rank each, whatever ranks and blocks the plan gave them."""
    stages = tuple(PlanStage((span,), (rank,), served, memory=None) for span, rank, served in rows)
    shown = []
    for units in (Units(4, 1, blocks or 1), Units(blocks=blocks)):
        write_plan(small / "plan-1.json", Plan(6, stages, units, "gpipe", model="m"))
        page = Page(write_report(small))
        assert "stage.microbatch" in page.texts["schedule"], "several stages share a rank"
        shown.append(page.facts("step-table"))
    assert shown[0] == shown[1]


def test_stages_of_several_pieces_are_shown_with_the_graph_of_the_profile(small: Path) -> None:
    """Layers 1 and 2 read layer 0, and 3 reads both; stage 0 holds the layers 0 and 2."""
    stages = (PlanStage(((0, 1), (2, 3)), (0,)), PlanStage(((1, 2),), (1,)), PlanStage(((3, 6),), (2,)))
    write_plan(small / "plan-1.json", Plan(6, stages, Units(2, 1, 1), "gpipe", routes="direct", model="m"))
    page = Page(write_report(small))
    assert page.column("stage-table", "layers") == ["0, 2", "1", "3-5"]
    assert "its stages are not one pipeline in the order of the layers" in page.texts["layers"]
    assert "it is not known which layers read from which; give a profile with tensors" in page.texts["schedule"]
    readers = ((1, 2), (3,), (3,), (4,), (5,), (6,))
    tensors = tuple(TensorRecord(f"t{writer}", 4, True, writer, read) for writer, read in enumerate(readers))
    profile = dataclasses.replace(read_profile(small / "profile.json"), tensors=tensors)
    write_profile(small / "profile.json", profile)
    page = Page(write_report(small))
    facts = page.facts("step-table")
    # By hand: stage 2 begins when stage 1, which waits for stage 0, has ended; stage 0 does not wait between F and F.
    assert facts["Most microbatches in flight"] == "2, 2, 2 (by stage)"
    forward = [sum(profile.layers[n].forward_seconds or 0 for n in stage.numbers) for stage in stages]
    backward = [sum(profile.layers[n].backward_seconds or 0 for n in stage.numbers) for stage in stages]
    seconds = StageSeconds(forward, backward)
    graph = StageGraph((0, 1, 2), ((0, 1, 2),) * 2, frozenset({(0, 1), (0, 2), (1, 2)}))
    expected = simulate(schedule_of("gpipe", graph), seconds, graph=graph).step_seconds
    assert facts["Simulated step"] == duration(expected)


def test_a_plan_that_does_not_fit_says_by_how_much(small: Path) -> None:
    shortfall = {"stage": 1, "bytes": 3 * GIB, "devices_that_fit": None}
    rewrite(small / "plan-0.json", fits=False, shortfall=shortfall)
    assert "stage 1 lacks 3 GiB" in Page(write_report(small)).texts["memory"]


def test_a_shared_parameter_counts_once(small: Path) -> None:
    layers = make_profile(6).layers
    profile = Profile(layers, conditions={"dtype": "torch.float32"}, shared=(SharedParameter("w", 4000, (1, 2, 5)),))
    write_profile(small / "profile.json", profile)
    unshared = sum(10_000 + 1_000 * index for index in range(6))
    assert Page(write_report(small)).facts("summary-table")["Parameters"].startswith(f"{unshared - 2000:,} (")


def test_the_conditions_of_a_profile_are_a_short_text(small: Path) -> None:
    """The row "Profile" of the quickstart's report showed the histogram of all input sizes, over many screens."""
    sizes = {"largest": {"images": [2, 3, 64, 64]}, "histogram": [[{"images": [2, 3, n, n]}, n] for n in range(999)]}
    conditions = {"dtype": "torch.float32", "sizes": sizes, "limits": ["long " * 99], "device_name": "x" * 5000}
    write_profile(small / "profile.json", Profile(make_profile(6).layers, conditions=conditions | {"data_digest": "d"}))
    text = Page(write_report(small)).facts("summary-table")["Profile"]
    assert text.startswith(
        "dtype torch.float32, sizes (largest (images [2, 3, 64, 64]), histogram of 999), limits of 1, "
    )
    assert (len(text) < 300, "digest" in text) == (True, False)


def test_scores_of_another_task(small: Path) -> None:
    rows = [{"step": step, "scores": {"accuracy": value, "loss": 1 - value}} for step, value in ((1, 0.5), (2, 0.25))]
    (small / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = Page(write_report(small))
    assert page.facts("result-table")["Best accuracy"] == "0.500 at step 1"
    assert "class-table" not in page.tables


# -- no report ---------------------------------------------------------------------------------------------------------


def test_a_missing_or_foreign_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CapslogError, match=r"nowhere is not a folder; give the run_dir of a training$"):
        write_report(tmp_path / "nowhere")
    (tmp_path / "holiday.txt").write_text("")
    with pytest.raises(CapslogError, match="holds no file of a run"):
        write_report(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.txt"], "nothing is written into a foreign folder"


def test_a_report_that_cannot_be_written_is_one_sentence(small: Path) -> None:
    (small / "report").write_text("a file where the folder belongs")
    with pytest.raises(CapslogError, match="report cannot be written"):
        write_report(small)


def test_importing_reports_is_quick_and_draws_nothing() -> None:
    code = "import sys, varuna_capslog.reports; print(sorted({'matplotlib', 'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=True)
    assert done.stdout.strip() == "[]"


def test_a_report_needs_no_torch(small: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from varuna_capslog.reports.page import write_report;"
        f"write_report(Path({str(small)!r})); print('torch' in sys.modules, 'matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "False False"


def test_read_lines_agree_with_the_library(small: Path) -> None:
    """The reference reader above (`lines`) and the library leave out the same torn line."""
    assert lines(small / "metrics.jsonl") == files.read_jsonl(small / "metrics.jsonl")


# -- a run whose members changed ---------------------------------------------------------------------------------------


@pytest.fixture
def changed(small: Path) -> Path:
    """Return the short run as an elastic one: two devices, one after a notice, two again after a loss and a join."""
    spans = {0: (1, 20), 1: (21, 30), 2: (31, 32), 3: (33, 60)}
    plan = files.read_json(small / "plan-0.json")
    for generation in (1, 2, 3):
        one_stage = {"cuts": [0], "stage_bytes": [sum(plan["stage_bytes"])], "stage_seconds": None}
        stored = plan if generation == 3 else plan | one_stage
        stored = (
            stored if generation == 3 else stored | {"peak_bytes": sum(plan["stage_bytes"]), "capacity_bytes": None}
        )
        files.write_json(small / f"plan-{generation}.json", stored)
    rows = []
    for generation, (first, last) in spans.items():
        for step in range(first, last + 1):
            stages = 1 if generation in (1, 2) else 2
            row = {"step": step, "loss": 9.0 / step, "generation": generation, "world_size": stages}
            if step == first + 4:
                row |= {"peak_bytes": [1000 * step + stage for stage in range(stages)], "peak_source": "test"}
            rows.append(json.dumps(row))
    (small / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    lost = "worker a-1 was killed by SIGKILL"
    events: list[dict[str, Any]] = [
        {"kind": "start", "step": 0, "why": ["2 members begin"], "cuts": [0, 3], "members": ["a-1", "a-2"]},
        {"kind": "notice", "step": 19, "member": "a-2", "deadline": 30.0, "source": "aws", "urgent": False},
        {"kind": "morph", "step": 21, "why": ["a-2 left"], "cuts": [0], "members": ["a-1"], "generation": 1}
        | {"pause_seconds": 0.04, "search_seconds": 0.001, "moved_bytes": 3 * 2**20},
        {"kind": "lost", "step": 30, "member": "a-1", "why": lost, "host": "a", "generation": 1},
        {"kind": "waiting", "why": "no device is left", "generation": 2},
        {"kind": "waiting", "why": "no device is left", "generation": 2},
        {"kind": "morph", "step": 31, "why": ["a-1 lost", "a-3 joined"], "cuts": [0], "members": ["a-3"]}
        | {"generation": 2, "pause_seconds": 0.21, "search_seconds": 0.001, "moved_bytes": 0},
        {"kind": "morph", "step": 33, "why": ["a-4 joined"], "cuts": [0, 3], "members": ["a-3", "a-4"]}
        | {"generation": 3, "pause_seconds": 0.05, "search_seconds": 0.002, "moved_bytes": 2**20},
        {"kind": "stop", "step": 60, "generation": 3},
    ]
    rows = [json.dumps({"time": 1.8e9 + 60 * place, "generation": 0} | event) for place, event in enumerate(events)]
    (small / "events.jsonl").write_text("\n".join(rows) + "\n")
    return small


def test_changes_of_the_devices_are_told_with_their_causes(changed: Path) -> None:
    page = Page(write_report(changed))
    assert len(page.plots["changes"]) == 1
    heading, *rows = page.tables["change-table"]
    column = {name: [row[place] for row in rows] for place, name in enumerate(heading)}
    assert column["what happened"] == [
        "2 members begin",
        "a-2 left (notice from aws, 30 s left)",
        "a-1 lost (was killed by SIGKILL); a-3 joined",
        "a-4 joined",
    ]
    assert column["step"] == ["1", "21", "31", "33"]
    assert column["devices"] == ["2", "1", "1", "2"]
    assert column["cuts"] == ["[0, 3]", "[0]", "[0]", "[0, 3]"]
    assert column["pause"] == [UNKNOWN, "40.0 ms", "210 ms", "50.0 ms"]
    assert column["moved"] == [UNKNOWN, "3 MiB", "0 B", "1 MiB"]
    short = "3 changes of the devices (1 with a device lost, 1 with a device left, 1 with a device joined), 300 ms"
    assert short in page.texts["changes"]
    assert short in page.texts["results"]
    assert page.texts["changes"].count("no device is left") == 1
    assert "A generation of a few steps is not measured" in page.texts["changes"]


def test_each_generation_shows_its_own_plan_and_peaks(changed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    bare = changes.plot_generations
    monkeypatch.setattr(changes, "plot_generations", lambda eras: drawn.extend(eras) or bare(eras))
    write_report(changed)
    stages = files.read_json(changed / "plan-0.json")["stage_bytes"]
    assert [(era.number, era.steps, era.change, era.predicted, era.measured) for era in drawn] == [
        (0, (1, 20), "", tuple(stages), (5000, 5001)),
        (1, (21, 30), "left", (sum(stages),), (25000,)),
        (2, (31, 32), "lost", (sum(stages),), None),
        (3, (33, 60), "joined", tuple(stages), (37000, 37001)),
    ]


def test_a_run_without_changes_has_no_such_section(whole: tuple[Path, Plan, Page]) -> None:
    assert "changes" not in whole[2].texts
    assert "Changes" not in whole[2].texts["results"]


def test_what_a_page_shows_of_a_run_cannot_drive_a_terminal() -> None:
    """A member called ESC]0;… stood in the page unchanged; a terminal that printed the page's source executed it."""
    assert markup.paragraph("\x1b[31m\u202e<b>") == r"<p>\x1b[31m\u202e&lt;b&gt;</p>"
    assert markup.preformatted("a\nb") == "<pre>a\nb</pre>"
