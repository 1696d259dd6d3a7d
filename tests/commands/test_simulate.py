"""`capslog simulate` and `capslog compare`: printed and written output, and the one-sentence error of every mistake."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from tests.planning.asking import plan as planned
from tests.planning.test_fastest_layerwise import profile_on
from varuna_capslog import cli
from varuna_capslog.planners import LAYERWISE, PLANNERS, WHOLE_RUN
from varuna_capslog.planning.registry import REGISTRY
from varuna_capslog.planning.verdict import fold_plan
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.conditions import UPDATE_RATE
from varuna_capslog.profiles.record import LayerProfile, Profile, read_profile, write_profile
from varuna_capslog.schedules import RunShape

LAYERS = 6


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    rows = tuple(
        LayerProfile(
            f"layer{n}",
            isolated_bytes=(900 if n < 2 else 500) * 2**20,
            added_bytes=300 * 2**20 if n else None,
            static_bytes=100 * 2**20,
            saved_bytes=50 * 2**20,
            boundary_bytes=2**20,
            parameter_bytes=2**20,
            forward_seconds=0.01 if n < 2 else 0.005,
            backward_seconds=0.02 if n < 2 else 0.01,
        )
        for n in range(LAYERS)
    )
    path = tmp_path / "profile.json"
    write_profile(path, Profile(rows, model="six", conditions={"microbatch_size": 2, UPDATE_RATE: 1e-10}))
    return path


@pytest.fixture
def plan(profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "plan.json"
    assert run("plan", "--profile", profile, "--devices", 3, "--capacity", "2GiB", "-o", path) == 0
    capsys.readouterr()
    return path


def run(*arguments: object) -> int:
    return cli._run([str(argument) for argument in arguments])


def sentence(capsys: pytest.CaptureFixture[str]) -> str:
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_help_needs_no_slow_module(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--help") == 0
    assert f"Usage: capslog {command}" in capsys.readouterr().out


def test_a_step_is_played_drawn_and_traced(
    profile: Path, plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    out = tmp_path / "out"
    flags = ("pipeline.bandwidth=1GiB/s", "pipeline.latency=0.1ms", "train.minibatch_size=8")
    assert run("simulate", "--profile", profile, "--plan", plan, *flags, "-o", out) == 0
    text = capsys.readouterr().out
    assert "varuna with recomputation, 4 microbatches" in text
    assert "samples/s" in text
    assert sorted(path.name for path in out.iterdir()) == ["perfetto.json", "simulation.json", "step.png", "step.svg"]
    assert imread(out / "step.png").shape[1] == 1600
    assert xml.etree.ElementTree.parse(out / "step.svg").getroot().tag.endswith("svg")
    trace = json.loads((out / "perfetto.json").read_text())
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X", "C", "s", "f"}
    simulation = json.loads((out / "simulation.json").read_text())
    assert simulation["step_seconds"] == trace["otherData"]["step_seconds"]
    assert simulation["peak_bytes"] == max(json.loads(plan.read_text())["stage_bytes"])
    link = {"bandwidth": 2**30, "latency_seconds": 0.0001, "copy_bandwidth": None, "node_devices": None}
    assert simulation["link"] == {**link, "shared": False, "host_bandwidth": None, "copies_beside": None}
    (sent,) = [event for event in trace["traceEvents"] if event["name"] == "activation 0" and event["pid"] == 0]
    assert sent["args"] == {"from_stage": 0, "to_stage": 1, "microbatch": 0}
    more_flags = ("--shared-links", "pipeline.host_bandwidth=1GB/s", "--copies-beside", "--json")
    assert run("simulate", "--profile", profile, "--plan", plan, *flags, *more_flags) == 0
    shared = printed(capsys)
    assert shared["link"] == {**link, "shared": True, "host_bandwidth": 1e9, "copies_beside": True}
    assert shared["step_seconds"] > simulation["step_seconds"]


def test_flags_change_what_is_played(profile: Path, plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ("simulate", "--profile", profile, "--plan", plan, "train.minibatch_size=12", "--json")
    seconds = {}
    for name, flags in {
        "plain": (),
        "gpipe": ("pipeline.schedule=gpipe", "pipeline.recompute=false"),
        "cores": ("--cores", 1),
        "slow": ("pipeline.bandwidth=10MiB/s",),
        "copy": ("pipeline.bandwidth=10MiB/s", "--copy-bandwidth", "10MiB/s"),
    }.items():
        assert run(*base, *flags) == 0
        seconds[name] = printed(capsys)["step_seconds"]
    assert seconds["gpipe"] < seconds["plain"] < seconds["slow"] < seconds["copy"]
    # One core does all the work one after the other: forwards, recomputations and backwards of 6 microbatches.
    work = 6 * (0.04 + 0.08) + 6 * 0.04
    assert 0.8 * work < seconds["cores"] <= work + 0.01


def test_a_config_is_profiled_and_planned_first(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import types

    measure = types.ModuleType("varuna_capslog.profiling.measure")
    measure.profile_config = lambda config, workers, progress, variants: read_profile(profile)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "varuna_capslog.profiling.measure", measure)
    config = tmp_path / "run.yaml"
    config.write_text("workload: a:b\ntrain: {minibatch_size: 8, microbatch_size: 2}\n")
    assert run("simulate", config, "pipeline.devices=3", "pipeline.schedule=1f1b", "--json") == 0
    value = printed(capsys)
    assert (value["schedule"], value["num_microbatches"], len(value["pipelines"][0]["ranks"])) == ("1f1b", 4, 3)
    assert run("compare", config, "--devices", 2, "--planners", "varuna,exact", "--json") == 0
    assert [len(row["cuts"]) for row in printed(capsys)] == [2, 2]


def test_compare_has_a_row_for_every_planner_and_says_why_one_cannot(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("CAPSLOG_MCAP_LIMIT", "3")  # of C(5, 2) = 10 cut lists
    monkeypatch.setitem(sys.modules, "skopt", None)
    out = tmp_path / "out"
    names = ("--planners", ",".join(REGISTRY))
    assert run("compare", "--profile", profile, "--devices", 3, "--capacity", "2GiB", "-o", out, *names) == 0
    text = capsys.readouterr().out
    rows = {row["planner"]: row for row in json.loads((out / "comparison.json").read_text())}
    assert list(rows) == list(REGISTRY)
    assert "10 cut lists" in rows["mcap-bf"]["reason"]
    assert "scikit-optimize" in rows["mcap-bo"]["reason"]
    assert rows["mcap-bo"]["cuts"] is None
    assert "mcap-bo: planner mcap-bo needs scikit-optimize" in " ".join(text.split())
    assert imread(out / "comparison.png").shape[1] == 1600
    for name in LAYERWISE:  # its rows are too few for the bytes of memory intervals
        assert name == "budget" or rows[name]["cuts"] is None, "budget takes the plan of another planner"
        assert "memory model 'ranks' needs" in rows[name]["reason"]
    for name in WHOLE_RUN:
        assert "memory model 'ranks' needs" in rows[name]["reason"] or "has no tensors" in rows[name]["reason"]
    for name in set(rows) - {"mcap-bf", "mcap-bo", *LAYERWISE, *WHOLE_RUN}:
        row = rows[name]
        assert row["margin_bytes"] == 2 * 2**30 - row["peak_bytes"]
        assert row["fits"] is True
        assert row["step_seconds"] > 0
        assert row["peak_bytes"] >= rows["exact"]["peak_bytes"]
        assert row["step_seconds"] >= rows["throughput"]["step_seconds"] * (1 - 1e-9)


def test_the_row_of_a_planner_is_what_plan_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The row of budget had a peak of 94.2 MiB where plan by budget had 53.2, since compare fixed another schedule."""
    path = tmp_path / "profile.json"
    write_profile(path, profile_on("cuda"))
    config = tmp_path / "run.yaml"
    config.write_text("workload: a:b\ntrain: {minibatch_size: 8, microbatch_size: 1}\npipeline: {planner: exact}\n")
    for source in ((), (config,)):
        wanted = (*source, "--profile", path, "--devices", 2, "--json")
        assert run("compare", *wanted, "--planners", "budget,dawnpiper,exact,pipedream") == 0
        for row in printed(capsys):
            assert run("plan", *wanted, "--planner", row["planner"], "--minibatch", 8) == 0
            reply = Plan.from_json(printed(capsys))
            peak = reply.peak_bytes or max(rank.bytes or 0 for rank in reply.ranks)
            assert (row["peak_bytes"], row["step_seconds"]) == (peak, pytest.approx(reply.step_seconds)), row["planner"]


@pytest.mark.parametrize("capacity", [240_000, 480_000])
def test_compare_marks_every_plan_that_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, capacity: int
) -> None:
    """Plans with ranks had no margin, so that 47.5 GiB stood unmarked in a table for devices of 16 GiB."""
    monkeypatch.setenv("COLUMNS", "120")
    profile, path, names = profile_on("cuda"), tmp_path / "profile.json", ["pipedream", "graphpipe"]
    write_profile(path, profile)
    words = ("--profile", path, "--devices", 3, "--minibatch", 8, "pipeline.schedule=1f1b", "pipeline.recompute=false")
    assert run("compare", *words, "--capacity", f"{capacity}B", "--planners", ",".join(names), "-o", tmp_path) == 0
    text = capsys.readouterr().out
    assert ("do not fit: pipedream, graphpipe" in text) == (capacity < 400_000)
    rows = {row["planner"]: row for row in json.loads((tmp_path / "comparison.json").read_text())}
    for name in names:
        answer = planned(profile, 3, name, capacity=capacity, run=RunShape(8, "1f1b", False))
        margin = capacity - max(rank.peak_bytes for rank in fold_plan(profile, answer, RunShape(8, "1f1b", False)))
        assert (rows[name]["margin_bytes"], rows[name]["fits"]) == (margin, margin >= 0), name
        assert (margin < 0) == (capacity < 400_000)


def test_compare_asks_mcap_bo_only_by_name_and_says_which_planner_it_asks(
    profile: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comparison stood still for 40 to 60 s without any output, because of the one planner that is slow by design."""
    calls: list[str] = []
    cuts = PLANNERS["exact"]
    monkeypatch.setitem(PLANNERS, "mcap-bo", lambda *question: calls.append("mcap-bo") or cuts(*question))
    assert run("compare", "--profile", profile, "--devices", 3, "--json") == 0
    captured = capsys.readouterr()
    rows = {row["planner"]: row for row in json.loads(captured.out)}
    assert calls == []
    assert list(rows) == list(REGISTRY)
    assert rows["mcap-bo"]["cuts"] is None
    assert "--planners mcap-bo" in rows["mcap-bo"]["reason"]
    names = [name for name in REGISTRY if name not in ("mcap-bo", "budget")]
    assert [line.split()[1] for line in captured.err.splitlines()] == [*names, "budget"]
    assert run("compare", "--profile", profile, "--devices", 3, "--planners", "exact,mcap-bo", "--json") == 0
    captured = capsys.readouterr()
    assert calls == ["mcap-bo"]
    assert captured.err == "asking exact (1 of 2)\nasking mcap-bo (2 of 2)\n"
    assert [row["planner"] for row in json.loads(captured.out) if row["cuts"]] == ["exact", "mcap-bo"]


def test_compare_leaves_out_long_searches_and_says_which_and_how_to_ask_them(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 48 layers on 8 devices the table took 26 processor seconds, 14 of them those of madpipe."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setitem(sys.modules, "skopt", None)
    words, left_out = ("compare", "--profile", profile, "--devices", 6, "-o", tmp_path), ["mcap-bo", "madpipe"]
    assert run(*words) == 0
    captured = capsys.readouterr()
    text = " ".join(captured.out.split())
    assert (
        "not asked, since their searches may take long for 6 layers on 6 devices: mcap-bo, madpipe; --planners" in text
    )
    assert not any(line.split()[1:2] == ["madpipe"] for line in captured.out.splitlines()), "it has no row of dashes"
    rows = json.loads((tmp_path / "comparison.json").read_text())
    assert [row["planner"] for row in rows] == list(REGISTRY)
    assert [row["planner"] for row in rows if not row["asked"]] == left_out
    assert not set(left_out) & {line.split()[1] for line in captured.err.splitlines()}
    assert run(*words, "--planners", "all", "--json") == 0
    assert [row["planner"] for row in printed(capsys) if not row["asked"]] == []


def test_compare_without_seconds_still_compares_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bytes.json"
    write_profile(path, Profile((LayerProfile("a", 5), LayerProfile("b", 5, 1), LayerProfile("c", 10, 2))))
    assert run("compare", "--profile", path, "--devices", 2, "--planners", "capslog,exact,throughput", "--json") == 0
    capslog, exact, throughput = printed(capsys)
    assert (capslog["peak_bytes"], exact["peak_bytes"]) == (10, 7)
    assert exact["step_seconds"] is None
    assert "forward_seconds" in exact["reason"]
    assert throughput["cuts"] is None


TRACE = "0,add,a\n0,add,b\n0,add,c\n60000,remove,b\n120000,add,d\n180000,remove,a\n"


def test_a_trace_is_replayed(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    out = tmp_path / "out"
    base = ("simulate", "--trace", trace, "--profile", profile, "--planner", "exact", "--minibatch", 16)
    assert run(*base, "--planned-pause", "2s", "--spot-price", 1, "--on-demand-price", 3, "-o", out) == 0
    captured = capsys.readouterr()
    assert "share of the ideal" in captured.out
    assert "2 s for a join or announced leave (notice 120 s)" in captured.err
    value = json.loads((out / "replay.json").read_text())
    assert [change["kind"] for change in value["changes"]] == ["start", "leave", "join"]
    assert value["paused_seconds"] == 4.0
    assert value["device_hours"] == pytest.approx((3 * 60 + 2 * 60 + 3 * 60) / 3600)
    assert value["on_demand_dollars_per_million"] == pytest.approx(
        3e6 * 3 / 3600 / value["on_demand_samples_per_second"]
    )
    assert imread(out / "replay.png").shape[1] == 1600
    assert run(*base, "--notice", "0s", "--devices", 2, "--duration", "90s", "--json") == 0
    shorter = printed(capsys)
    assert (shorter["duration_seconds"], shorter["devices"]) == (90.0, 2)
    assert [change["kind"] for change in shorter["changes"]] == ["start", "crash"]
    assert run(*base, "--notice", "0s", "--devices", "2x v100-16gb", "--duration", "90s", "--json") == 0
    assert printed(capsys)["devices"] == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["simulate"], "give a CONFIG file, or --profile FILE with --plan FILE"),
        (["simulate", "--profile", "P"], "needs --plan FILE, or --trace FILE"),
        (["simulate", "--profile", "P", "--plan", "/no/plan"], "/no/plan cannot be read"),
        (["simulate", "--profile", "O", "--plan", "L"], "a plan of the model six, the profile is of other"),
        (["simulate", "--profile", "P", "--plan", "L", "pipeline.bandwidth=1G"], "1GiB (1024)"),
        (["simulate", "--profile", "P", "--plan", "L", "pipeline.latency=soon"], "latency is 'soon'"),
        (["simulate", "--profile", "P", "--plan", "L", "pipeline.latency=20"], "pipeline.latency is 20, which means"),
        (["simulate", "--profile", "P", "--plan", "L", "pipeline.schedule=1f1"], "pipeline.schedule is"),
        (["simulate", "--profile", "P", "--plan", "L", "pipeline.stage_inputs=disk"], "stage_inputs is"),
        (["simulate", "--profile", "P", "--trace", "/no/trace"], "/no/trace cannot be read"),
        (["simulate", "--profile", "P", "--trace", "T", "--planner", "jiont", "--minibatch", "2"], "'joint'?"),
        (["simulate", "--profile", "P", "--trace", "T", "--minibatch", "3"], "a minibatch of 3 samples"),
        (["simulate", "--profile", "P", "--trace", "T", "--crash-pause", "-1s"], "crash-pause is '-1s'"),
        (
            ["simulate", "--profile", "P", "--trace", "T", "--devices", "t4, rtx4090"],
            "--trace rents devices of one kind",
        ),
        (
            ["simulate", "--profile", "P", "--trace", "T", "--devices", "2x t4", "--capacity", "1GiB"],
            "--capacity is gi",
        ),
        (["simulate", "--profile", "P", "--plan", "L", "model.name=x"], "model.name is of a model and its costs"),
        (["simulate", "--profile", "P", "--plan", "L", "train.minibatch_size=3"], "a minibatch of 3 samples is not a"),
        (["compare"], "give a CONFIG file, --profile FILE, --model"),
        (["compare", "--profile", "P"], "--devices N"),
        (["compare", "--profile", "P", "--devices", "7"], "7 devices but only 6 layers"),
        (["compare", "--profile", "P", "--devices", "2", "--planners", "exat"], "did you mean 'exact'?"),
        (["compare", "--profile", "P", "--devices", "2", "--capacity", "1GiB*3"], "pipeline.capacity lists 3 size(s)"),
    ],
)
def test_mistakes_end_in_one_sentence_and_status_2(
    arguments: list[str], expected: str, profile: Path, plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    other_profile = tmp_path / "other.json"
    other_profile.write_text(json.dumps(json.loads(profile.read_text()) | {"model": "other"}))
    files = {"P": profile, "O": other_profile, "L": plan, "T": trace}
    assert run(*[files.get(argument, argument) for argument in arguments]) == 2
    assert expected in sentence(capsys)


def test_a_config_with_replicas_says_that_one_of_them_is_played(profile, tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text(
        "workload: tests.faulty:workload\ndevice: cpu\n"
        "train: {max_steps: 1, minibatch_size: 4, microbatch_size: 2}\npipeline: {devices: 3, replicas: 2}\n"
    )
    assert run("simulate", config, "--profile", profile, "--json") == 0
    value = json.loads(capsys.readouterr().out)
    assert value["num_microbatches"] == 1
    assert any("pipeline.replicas=2: one replica is played" in note for note in value["notes"])
    assert run("simulate", config, "train.minibatch_size=16", "--profile", profile, "--json") == 0
    assert json.loads(capsys.readouterr().out)["num_microbatches"] == 4
    assert run("simulate", config, "pipeline.replicas=1", "--profile", profile, "--json") == 0
    assert not any("replica" in note for note in json.loads(capsys.readouterr().out)["notes"])


def test_a_replay_takes_only_accumulation_blocks_that_the_config_sets(profile, tmp_path, capsys):
    """Without the key a run has one block per replica; a replay once divided the config's blocks and left a device
    idle.
    """
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    config = tmp_path / "config.yaml"
    config.write_text(
        "workload: tests.faulty:workload\ndevice: cpu\n"
        "train: {max_steps: 1, minibatch_size: 12, microbatch_size: 2}\npipeline: {devices: 1}\n"
    )

    def rate(*changes: str) -> float:
        assert run("simulate", config, *changes, "--trace", trace, "--profile", profile, "--json") == 0
        return json.loads(capsys.readouterr().out)["on_demand_samples_per_second"]

    assert rate("pipeline.replicas=2") == rate()
    assert rate("train.accumulation_blocks=2") < rate()


def test_every_picture_names_model_devices_and_schedule(
    profile: Path, plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comparison, a step, a front and a replay were pictures of an unnamed model on unnamed devices."""
    titles: list[str] = []
    drawn = ("curves.draw_comparison", "curves.draw_front", "curves.draw_replay", "step.draw_simulation")
    for name in drawn:
        monkeypatch.setattr(f"varuna_capslog.reports.{name}", lambda path, title, *_, **__: titles.append(title))
    trace, question = tmp_path / "trace.csv", ("--profile", profile, "--devices", 3, "pipeline.schedule=1f1b")
    trace.write_text(TRACE)
    assert run("compare", *question, "--planners", "exact", "-o", tmp_path / "out") == 0
    assert run("front", *question, "--planner", "exact", "-o", tmp_path / "front.png") == 0
    assert run("plan", *question, "--planner", "exact", "-o", tmp_path / "plan.png") == 0
    assert run("simulate", "--profile", profile, "--plan", plan, "-o", tmp_path / "out") == 0
    assert run("simulate", "--trace", trace, *question[:2], question[-1], "--minibatch", 16, "-o", tmp_path / "o") == 0
    assert titles == [
        "Plans of six on 3 devices, schedule 1f1b, 12 microbatches",
        "Memory against step time of six on 3 devices, planner exact, schedule 1f1b, 12 microbatches",
        "One step of six on a pipeline of 3 devices, planner exact, schedule 1f1b with recomputation, 12 microbatches",
        "One step of six on a pipeline of 3 devices, planner exact, schedule varuna with recomputation, "
        "12 microbatches",
        "Replay of six on at most 3 devices, planner joint, schedule 1f1b, trace trace.csv",
    ]
