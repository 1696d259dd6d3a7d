"""Values of a round survive their journey."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_capslog.membership.generation import Stamp
from varuna_capslog.membership.wire import Contribution, Proof, Vote, decode, encode

names = st.text(min_size=1, max_size=8)
changes = st.frozensets(st.tuples(st.sampled_from(["leave", "join"]), names), max_size=4)
stamps = st.builds(Stamp, st.integers(0, 10**9), st.integers(0, 10**6))
votes = st.builds(Vote, st.booleans(), changes, changes, st.booleans(), changes, st.booleans())
contributions = st.builds(
    Contribution,
    st.frozensets(st.tuples(st.integers(0, 100), stamps), max_size=6),
    names,
    st.integers(0, 1 << 45),
    stamps,
    st.tuples(st.integers(0, 9), stamps),
    st.frozensets(st.builds(Proof, st.integers(0, 100), stamps, st.booleans(), names), max_size=4),
)


@given(st.one_of(votes, contributions))
def test_values_arrive_as_they_left(value):
    assert decode(encode(value)) == value


def test_a_plain_vote_needs_no_ballot():
    assert encode(Vote()) == b""


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"held": []}'])
def test_what_is_no_value_is_refused(text):
    with pytest.raises((ValueError, KeyError, TypeError)):
        decode(text)
