"""Divisors of a stage in another system: their text, and what they refuse."""

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.parallel import Divisors


def test_the_text_and_the_object_are_read_alike():
    divisors = Divisors.of("tensor=4, expert=8,data=2,zero=1")
    assert divisors == Divisors.of({"tensor": 4, "expert": 8, "data": 2, "zero": 1}) == Divisors(4, 1, 8, 2, 1)
    assert Divisors.of(divisors.describe()) == divisors
    assert divisors.cards == 8
    assert Divisors.of(None) is Divisors.of("tensor=1") is None


def test_experts_are_shared_among_the_cards_of_a_stage():
    with pytest.raises(CapslogError, match=r"parallel.expert is 8, which does not divide the 12 cards"):
        Divisors.of("tensor=4,data=3,expert=8")


@pytest.mark.parametrize("text", ["tensor", "tensor=x", "tensor=2,tensor=2", "pipeline=2", "zero=4", "tensor=0"])
def test_other_texts_are_refused(text):
    with pytest.raises(CapslogError, match="parallel"):
        Divisors.of(text)
