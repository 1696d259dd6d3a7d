from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedules.cases import format_csv, parse_csv
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.schedules import (
    KINDS,
    Action,
    Schedule,
    from_strings,
    parse_action,
    placement_of,
    to_strings,
)

actions = st.builds(
    lambda stage, kind, microbatch: Action(stage, kind, None if kind == "U" else microbatch),
    st.integers(0, 99),
    st.sampled_from(sorted(KINDS)),
    st.integers(0, 9999),
)


def test_actions_print_as_the_contract_says() -> None:
    assert [str(a) for a in (Action(2, "F", 0), Action(0, "R", 3), Action(1, "U"))] == ["2F0", "0R3", "1U"]
    assert parse_action("12W345") == Action(12, "W", 345)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(actions, max_size=6), max_size=4))
def test_text_forms_round_trip(schedule: Schedule) -> None:
    assert from_strings(json.loads(json.dumps(to_strings(schedule)))) == schedule
    assert parse_csv(format_csv(schedule)) == schedule


def test_a_table_drawn_with_idle_cells_is_read() -> None:
    assert parse_csv("0F0, , 0B0\n, 1F0,1B0\n") == from_strings([["0F0", "0B0"], ["1F0", "1B0"]])


@pytest.mark.parametrize("text", ["", "F0", "0F", "0X1", "1U2", "0f1", "0F-1", " 0F1", "0F01", "0F1 1F1", "٣F1"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(CapslogError):
        parse_action(text)


def test_the_error_names_rank_and_position() -> None:
    with pytest.raises(CapslogError, match="rank 1, position 2: unknown kind of action 'Q'"):
        from_strings([["0F0"], ["1F0", "1B0", "1Q0"]])


def test_actions_that_make_no_sense_are_refused() -> None:
    for stage, kind, microbatch in ((0, "X", 0), (-1, "F", 0), (0, "F", -1), (0, "F", None), (0, "U", 0)):
        with pytest.raises(CapslogError):
            Action(stage, kind, microbatch)


def test_placement_is_read_from_the_actions() -> None:
    assert placement_of(from_strings([["0F0", "2F0"], [], ["1F0"]])) == [0, 2, 0]
    with pytest.raises(CapslogError, match=r"rank 1, position 0.*stage 0.*rank 0"):
        placement_of(from_strings([["0F0"], ["0B0"]]))
    with pytest.raises(CapslogError, match="stage 1 has no action"):
        placement_of(from_strings([["0F0", "2F0"]]))
