"""Effects of links on packets, by a clock that the test sets."""

from __future__ import annotations

import pytest

from tests.rig.machines.links import Links, LinkShape
from varuna_capslog.base.errors import CapslogError

THERE, BACK = ("a", "b"), ("b", "a")


def test_a_packet_takes_its_time_on_the_line_and_its_delay():
    links = Links(LinkShape(delay_seconds=0.02, bytes_per_second=10_000))
    for number in (b"1", b"2"):
        links.send(100.0, "a", "b", number * 100)  # 10 ms each, one after the other
    links.send(100.0, "b", "a", b"3" * 100)  # another machine's line
    assert links.next_arrival() == pytest.approx(100.03)
    assert links.arrived(100.029) == []
    assert [packet[:1] for _, packet in links.arrived(100.031)] == [b"1", b"3"]
    assert links.next_arrival() == pytest.approx(100.04)
    assert links.arrived(100.041) == [("b", b"2" * 100)]
    assert links.next_arrival() is None
    assert (links.counts.carried, links.counts.carried_bytes) == (3, 300)


def test_what_does_not_fit_into_the_queue_is_dropped():
    links = Links(LinkShape(bytes_per_second=1000))
    for _ in range(5):
        links.send(0.0, "a", "b", bytes(100))  # 0.1 s each; the fourth would wait for 0.3 s
    assert len(links.arrived(9.0)) == 3
    assert links.counts.dropped == 2
    links.send(9.0, "a", "b", bytes(100))
    assert links.next_arrival() == pytest.approx(9.1), "a line that was idle owes nothing"


def test_the_share_that_gets_lost_is_what_was_asked_for():
    links = Links(LinkShape(loss=0.005), seed=3)
    for number in range(40_000):
        links.send(float(number), "a", "b", b"x")
    assert links.counts.lost == pytest.approx(200, abs=60)
    assert len(links.arrived(1e9)) == 40_000 - links.counts.lost


def test_ways_are_cut_and_delayed_one_by_one_and_healed():
    links = Links(LinkShape(delay_seconds=1.0))
    links.disturb([THERE])
    links.disturb([BACK], 5.0)
    links.send(0.0, *THERE, b"lost")
    links.send(0.0, *BACK, b"late")
    links.send(0.0, "a", "c", b"ordinary")
    assert links.arrived(1.0) == [("c", b"ordinary")]
    assert links.arrived(6.0) == [("a", b"late")]
    assert links.counts.cut == 1
    links.heal([THERE, BACK])
    links.send(10.0, *THERE, b"1")
    links.send(10.0, *BACK, b"2")
    assert len(links.arrived(11.0)) == 2


def test_shapes_as_people_write_them():
    assert LinkShape.parse("20ms", "0.5%", "100Mbit") == LinkShape(0.02, 0.005, 12_500_000)
    assert LinkShape.parse(None, None, None) == LinkShape()


@pytest.mark.parametrize(
    ("words", "message"),
    [((None, "all", None), "'all'"), ((None, "100%", None), "0% to 99%"), (("x", None, None), "'x'")],
)
def test_a_shape_that_cannot_be_read_is_named(words, message):
    with pytest.raises(CapslogError, match=message):
        LinkShape.parse(*words)
