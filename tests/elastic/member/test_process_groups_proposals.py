"""The search for plans of generations that may follow, beside the training."""

from __future__ import annotations

from typing import Any

from tests.waiting import wait_until
from varuna_capslog.elastic.member.process_groups import Proposals
from varuna_capslog.membership.generation import EMPTY


class Searching:
    """Part of a member's work that `Proposals` uses."""

    proposes = True

    def look_ahead(self, seats: Any) -> Any:
        raise LookupError("nobody expected this")


def test_a_search_that_fails_is_named_and_the_plan_is_searched_at_the_change(caplog) -> None:
    """Regression: the thread died silently. The founder of the next generation searches its plan then."""
    work: Any = Searching()
    unused: Any = None
    Proposals("m0", work, unused, unused).look_ahead(EMPTY.successor(["m0"]), [unused])
    wait_until(lambda: "look-ahead failed with LookupError: nobody expected this" in caplog.text)
