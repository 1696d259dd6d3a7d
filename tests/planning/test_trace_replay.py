"""A toy trace worked out by hand, bounds that every replay keeps, and the reader's refusals."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planning.trace_replay import Deployment, Pauses, Prices, Replanner, TraceEvent, read_trace, replay
from varuna_capslog.profiles.record import LayerProfile, Profile
from varuna_capslog.schedules import RunShape


def linear(devices: int) -> Deployment | None:
    """10 samples/s for each device in pairs; one device is too few; planning takes half a second."""
    used = devices - devices % 2
    return Deployment(10.0 * used, used, 0.5) if devices >= 2 else None


def instant(devices: int) -> Deployment | None:
    """Return the same deployment without planning time."""
    deployment = linear(devices)
    return None if deployment is None else replace(deployment, search_seconds=0.0)


def events(*rows: tuple[float, str, str]) -> list[TraceEvent]:
    return [TraceEvent(*row) for row in rows]


def start(*nodes: str, at: float = 0.0) -> list[TraceEvent]:
    return [TraceEvent(at, "add", node) for node in nodes]


def test_a_trace_without_events_is_all_goodput() -> None:
    report = replay(start("a", "b", "c", "d"), linear, duration_seconds=100.0)
    assert report.share_of_ideal == 1.0
    assert report.goodput == 40.0
    assert report.samples == 4000.0
    assert (report.paused_seconds, report.stopped_seconds, report.idle_device_hours) == (0.0, 0.0, 0.0)
    assert [change.kind for change in report.changes] == ["start"]
    # Four devices for 100 s at 0.918 $/h, and the same on demand.
    assert report.spot_dollars_per_million == pytest.approx(1e6 * 4 * 0.918 / 3600 / 40)
    assert report.on_demand_dollars_per_million == pytest.approx(1e6 * 4 * 3.06 / 3600 / 40)


def test_a_toy_trace_by_hand() -> None:
    rows = start("a", "b", "c", "d", at=5.0) + events(
        (25.0, "remove", "a"), (25.0, "remove", "b"),  # t = 20: 4 -> 2 devices, announced: 1 s
        (35.0, "add", "e"),                            # t = 30: 3 devices, a pair in use as before: no pause
        (45.0, "add", "f"),                            # t = 40: 4 devices: 1 s
        (55.0, "remove", "c"), (55.0, "remove", "d"), (55.0, "remove", "e"),  # t = 50: one device: nothing fits
        (75.0, "add", "g"),                            # t = 70: 2 devices: restart, 4 s and half a second of planning
        (105.0, "remove", "g"),                        # t = 100: the end
    )  # fmt: skip
    report = replay(
        rows, linear, pauses=Pauses(planned=1.0, crash=8.0, restart=4.0, notice=2.0), prices=Prices(1.0, 3.0)
    )
    kinds = [(change.seconds, change.kind, change.devices, change.devices_used) for change in report.changes]
    assert kinds == [
        (0, "start", 4, 4), (20, "leave", 2, 2), (30, "none", 3, 2), (40, "join", 4, 4),
        (50, "stop", 1, 0), (70, "restart", 2, 2),
    ]  # fmt: skip
    # 20 s * 40, 9 + 10 s * 20, 9 s * 40, nothing, 25.5 s * 20.
    assert report.samples == pytest.approx(800 + 180 + 200 + 360 + 510)
    assert report.ideal_samples == pytest.approx(800 + 200 + 200 + 400 + 600)
    assert report.paused_seconds == pytest.approx(1 + 1 + 4.5)
    assert report.stopped_seconds == 20.0
    assert report.duration_seconds == 100.0
    assert report.goodput == pytest.approx(20.5)
    assert report.device_hours == pytest.approx((80 + 20 + 30 + 40 + 20 + 60) / 3600)
    assert report.idle_device_hours == pytest.approx((10 + 20) / 3600)
    assert report.spot_dollars_per_million == pytest.approx(1e6 * 250 / 3600 / 2050)
    assert report.on_demand_dollars_per_million == pytest.approx(1e6 * 4 * 3 / 3600 / 40)
    assert report.to_json()["changes"][5]["kind"] == "restart"


def test_without_notice_a_leave_is_a_crash_and_waits_for_the_plan() -> None:
    rows = start("a", "b", "c", "d") + events((50.0, "remove", "a"), (100.0, "add", "e"))
    crash = replay(rows, linear, pauses=Pauses(planned=1.0, crash=8.0, notice=0.0))
    assert [change.kind for change in crash.changes] == ["start", "crash"]
    assert crash.changes[1].pause_seconds == 8.5
    assert crash.samples == pytest.approx(50 * 40 + 41.5 * 20)
    # A notice that is too short for a planned leave does not count.
    short = replay(rows, linear, pauses=Pauses(planned=1.0, crash=8.0, notice=0.9))
    assert short.samples == crash.samples


def test_a_change_during_a_pause_does_not_shorten_it() -> None:
    rows = start("a", "b", "c", "d") + events(
        (10.0, "remove", "a"), (10.0, "remove", "b"), (12.0, "add", "x"), (12.0, "add", "y")
    )
    report = replay(rows, linear, pauses=Pauses(planned=1.0, crash=5.0, notice=0.0), duration_seconds=30.0)
    # The crash's pause ends at 15.5, the join's would at 13.
    assert report.paused_seconds == pytest.approx(5.5)
    assert report.samples == pytest.approx(10 * 40 + 14.5 * 40)


def test_nodes_beyond_the_limit_wait_unpaid_and_step_in() -> None:
    rows = start("a", "b", "c") + events((10.0, "remove", "a"), (20.0, "remove", "b"))
    report = replay(rows, linear, devices=2, pauses=Pauses(planned=0.0, notice=9.0), duration_seconds=20.0)
    assert [(change.kind, change.joined, change.left) for change in report.changes] == [
        ("start", 2, 0),
        ("leave", 1, 1),
    ]
    assert report.device_hours == pytest.approx(40 / 3600)
    assert report.samples == pytest.approx(400.0)


@pytest.mark.parametrize("seed", range(20))
def test_every_replay_keeps_its_bounds(seed: int) -> None:
    generator = random.Random(seed)
    present: list[str] = []
    rows: list[TraceEvent] = []
    for number in range(60):
        moment = float(generator.randrange(1, 5) * number)
        if rows:
            moment = max(moment, rows[-1].seconds)
        if present and generator.random() < 0.45:
            rows.append(TraceEvent(moment, "remove", present.pop(generator.randrange(len(present)))))
        else:
            present.append(f"n{number}")
            rows.append(TraceEvent(moment, "add", present[-1]))
    pauses = Pauses(generator.random() * 5, generator.random() * 9, generator.random() * 30, generator.random() * 5)
    report = replay(rows, linear, pauses=pauses)
    free = replay(rows, instant, pauses=Pauses(0.0, 0.0, 0.0))
    assert 0.0 <= report.samples <= report.ideal_samples == pytest.approx(free.samples)
    assert free.share_of_ideal == pytest.approx(1.0)
    assert report.device_hours == pytest.approx(free.device_hours)
    assert report.idle_device_hours <= report.device_hours
    assert report.paused_seconds + report.stopped_seconds <= report.duration_seconds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "holds no event"),
        ("0,add\n", "line 1: '0,add' is no event"),
        ("x,add,a\n", "line 1: 'x,add,a' is no event"),
        ("0,join,a\n", "unknown event 'join'"),
        ("0,add,a\n5,add,a\n", "line 2: add a, which is there already"),
        ("0,add,a\n5,remove,b\n", "line 2: remove b, which is not there"),
        ("5,add,a\n4,add,b\n", "4 ms come after 5 ms"),
    ],
)
def test_what_is_no_trace_is_refused(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(CapslogError, match=expected):
        read_trace(path)


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("0,add,node1\n\n1500, remove , node1\n")
    assert read_trace(path) == [TraceEvent(0.0, "add", "node1"), TraceEvent(1.5, "remove", "node1")]
    with pytest.raises(CapslogError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")


def test_impossible_questions_are_refused() -> None:
    with pytest.raises(CapslogError, match="the trace ends when it begins"):
        replay(start("a"), linear)
    with pytest.raises(CapslogError, match="pause crash is -1"):
        Pauses(crash=-1.0)
    with pytest.raises(CapslogError, match="price spot is nan"):
        Prices(spot=float("nan"))


# -- with real planners


def four_layers() -> Profile:
    rows = [
        LayerProfile(
            f"l{n}", 100, 50 if n else None, 40, 10, parameter_bytes=4, forward_seconds=1.0, backward_seconds=2.0
        )
        for n in range(4)
    ]
    return Profile(tuple(rows), conditions={"microbatch_size": 1})


def test_one_pipeline_uses_at_most_a_device_per_layer() -> None:
    plan = Replanner(four_layers(), 8, planner="exact", run=RunShape(schedule="gpipe", recompute=False))
    for devices, used in ((1, 1), (2, 2), (4, 4), (7, 4)):
        layout = plan(devices)
        assert layout is not None
        assert layout.devices_used == used
        # Equal stages: 8 samples in (8 + S - 1) slots of 3 * 4 / S seconds. 3 stages are not equal.
        assert layout.samples_per_second == pytest.approx(8 / ((8 + used - 1) * 12 / used))
    assert Replanner(four_layers(), 8, planner="exact", capacity=99)(4) is None
    assert Replanner(four_layers(), 8, planner="exact", capacity=150)(1) is None


def test_joint_plans_leave_no_device_idle() -> None:
    plan = Replanner(four_layers(), 8, planner="joint", capacity=400)
    rates = []
    for devices in range(1, 8):
        layout = plan(devices)
        assert layout is not None
        assert layout.devices_used <= devices
        rates.append(layout.samples_per_second)
    assert rates == sorted(rates)
    assert "pipelines of" in layout.description


def test_a_number_asked_before_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Replanner(four_layers(), 8, planner="exact", capacity=200)
    first, too_few = plan(2), plan(1)
    assert first is not None
    assert too_few is None
    monkeypatch.setattr("varuna_capslog.planning.trace_replay.solve", None)
    again = plan(2)
    assert again is not None
    assert replace(again, search_seconds=first.search_seconds) == first
    assert again.search_seconds < first.search_seconds
    assert plan(1) is None


def test_a_replanner_checks_its_question() -> None:
    with pytest.raises(CapslogError, match="a minibatch of 3 samples"):
        Replanner(Profile(four_layers().layers, conditions={"microbatch_size": 2}), 3)
    with pytest.raises(CapslogError, match="unknown planner 'jiont'"):
        Replanner(four_layers(), 8, planner="jiont")
