"""A trace of preemptions as a run sees it, and the run's share of the ideal steps: both computed by hand."""

from __future__ import annotations

import pytest

from tests.rig.judge import Opened, Segment, Stepped
from tests.rig.preemptions import Rent, goodput, rents
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.membership.generation import Generation, Stamp
from varuna_capslog.planning.trace_replay import TraceEvent


def events(*lines):
    return [TraceEvent(float(seconds), kind, node) for seconds, kind, node in lines]


TRACE = events(
    (100, "add", "n1"),
    (100, "add", "n2"),
    (160, "add", "n3"),  # waits for a place
    (220, "remove", "n1"),  # n3 takes its place
    (280, "remove", "n2"),
    (340, "remove", "n3"),
    (400, "add", "n4"),
)


def test_a_run_of_two_devices_rents_nodes_in_their_order_and_faster():
    assert rents(TRACE, 2, 60.0, None) == [
        Rent(0.0, ("n1", "n2"), (), 2),
        Rent(2.0, ("n3",), ("n1",), 2),
        Rent(3.0, (), ("n2",), 1),
        Rent(4.0, (), ("n3",), 0),
        Rent(5.0, ("n4",), (), 1),
    ]


def test_a_larger_run_sees_the_joins_and_a_shorter_one_ends_where_told():
    assert rents(TRACE, 9, 1.0, 120.0) == [
        Rent(0.0, ("n1", "n2"), (), 2),
        Rent(60.0, ("n3",), (), 3),
        Rent(120.0, (), ("n1",), 2),
    ]


def test_a_node_that_goes_before_its_turn_is_never_rented():
    trace = events((0, "add", "n1"), (1, "add", "n2"), (2, "remove", "n2"), (3, "add", "n3"), (4, "remove", "n1"))
    assert rents(trace, 1, 1.0, None) == [Rent(0.0, ("n1",), (), 1), Rent(4.0, ("n3",), ("n1",), 1)]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_a_pace_that_is_none_is_refused(scale):
    with pytest.raises(CapslogError, match="scale"):
        rents(TRACE, 2, scale, None)


def segment(*made):
    """`made`: (generation, members, [(step, time), ...]); every member writes each step, later members later."""
    run = Segment()
    for number, members, steps in made:
        run.founded.append((Generation(number, members), steps[0][1]))
        for late, member in enumerate(members):
            run.opened.append(Opened(member, number, Stamp(steps[0][0] - 1, 0), members, steps[0][1]))
            run.stepped += [Stepped(member, number, step, 0.0, 0.0, {}, at + 0.01 * late) for step, at in steps]
    return run


def test_goodput_of_a_run_that_lost_one_of_two():
    """Two members make a step per second, one a step per 2 s; the change costs 3 s, step 5 is made twice."""
    run = segment(
        (1, ("a", "b"), [(step, 100.0 + step) for step in range(1, 6)]),
        (2, ("a",), [(step, 100.0 + 2 * step) for step in range(5, 10)]),
    )
    account = goodput(run, [(100.0, 2), (105.0, 1)], 119.0)
    assert account.rates == {2: pytest.approx(1.0), 1: pytest.approx(0.5)}
    assert account.steps == 9
    assert account.ideal_steps == pytest.approx(5 * 1.0 + 14 * 0.5)
    assert account.share == pytest.approx(9 / 12)
    assert account.lost_seconds == pytest.approx(19.0 * 3 / 12)


def test_an_unusual_step_within_a_generation_is_lost_time_too():
    times = [1.0, 2.0, 3.0, 7.0, 8.0, 8.5, 9.5]
    run = segment((1, ("a",), [(step, at) for step, at in enumerate(times, 1)]))
    account = goodput(run, [(0.0, 1)], 9.5)
    assert (account.steps, account.ideal_steps, account.lost_seconds) == (7, pytest.approx(9.5), pytest.approx(2.5))


def test_steps_outside_the_span_do_not_count():
    run = segment((1, ("a",), [(step, float(step)) for step in range(1, 21)]))
    account = goodput(run, [(5.0, 1)], 15.0)
    assert (account.steps, account.ideal_steps, account.share) == (10, pytest.approx(10.0), pytest.approx(1.0))


def test_numbers_of_devices_that_nobody_trained_with_are_never_flattered():
    """3 devices never trained together: they would be no slower than 2. One is as fast as the next larger number."""
    run = segment((1, ("a", "b"), [(step, float(step)) for step in range(1, 11)]))
    account = goodput(run, [(0.0, 3), (4.0, 2), (6.0, 1), (8.0, 0)], 10.0)
    assert account.ideal_steps == pytest.approx(8.0)
    assert account.steps == 10


def test_more_devices_are_never_taken_for_slower():
    run = segment(
        (1, ("a",), [(step, float(step)) for step in range(1, 6)]),
        (2, ("a", "b"), [(step, 5.0 + 2.0 * (step - 5)) for step in range(6, 11)]),
    )
    assert goodput(run, [(0.0, 1), (5.0, 2)], 15.0).ideal_steps == pytest.approx(15.0)


def test_a_run_of_single_steps_gives_no_rate():
    run = segment((1, ("a",), [(1, 1.0), (2, 2.0)]))
    with pytest.raises(CapslogError, match="slower"):
        goodput(run, [(0.0, 1)], 3.0)
