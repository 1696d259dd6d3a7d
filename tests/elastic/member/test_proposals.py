"""The search for plans of generations that may follow, beside the training."""

from __future__ import annotations

from typing import Any

from tests.waiting import wait_until
from varuna_capslog.elastic.member.proposals import Proposals
from varuna_capslog.membership.generation import EMPTY


class Searching:
    """What `Proposals` uses of a member's work."""

    proposes = True

    def look_ahead(self, seats: Any) -> Any:
        raise LookupError("nobody expected this")


def test_a_search_that_fails_is_named_and_the_plan_is_searched_at_the_change(caplog) -> None:
    """The thread died without a word; whoever founds the next generation searches its plan then."""
    work: Any = Searching()
    unused: Any = None
    Proposals("m0", work, unused, unused).look_ahead(EMPTY.successor(["m0"]), [unused])
    wait_until(lambda: "look-ahead failed with LookupError: nobody expected this" in caplog.text)
