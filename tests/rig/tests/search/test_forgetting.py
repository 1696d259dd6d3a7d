"""State that the search over all orders forgets has no effect: worlds with the same key have the same future."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.rig.search.ground_truth import GroundTruth
from tests.rig.search.mail import MailWorld, Scenario
from tests.rig.search.places import make_job
from tests.sweeps import some
from varuna_capslog.membership import protocol

_TWO: dict[str, Any] = {"members": 2, "processes": 2, "job": make_job(2)}
_ALONE: dict[str, Any] = _TWO | {"steps": 1, "job": make_job(2, 0), "redundancy": 0}

SCENARIOS: Mapping[str, Mapping[str, Any]] = {
    "crash": {"faults": 1, "kinds": ("crash",), "steps": 1},
    "async": {"faults": 1, "kinds": ("crash",)} | _TWO | {"job": make_job(2, sync=False)},
    "2 crashes of 2": {"faults": 2, "kinds": ("crash",)} | _TWO,
    "hang": {"faults": 1, "kinds": ("hang",), "steps": 1} | _TWO,
    "cut": {"faults": 1, "kinds": ("cut",), "steps": 1} | _TWO,
    "stale": {"faults": 2, "kinds": ("crash", "hang"), "once": True, "stale": True} | _ALONE,
    "leave": {"faults": 0, "leaves": 1, "steps": 1},
    "leave with shadows": {"faults": 0, "leaves": 1} | _TWO | {"job": make_job(2, shadows=True)},
    "late": {"faults": 0, "late": 1} | _TWO,
    "damage": {"faults": 1, "kinds": ("damage",), "leaves": 1} | _TWO | {"job": make_job(2, 0, shadows=True)},
}


class Remembering(MailWorld):
    """A world that forgets only mail of which nothing can come; while that can be delivered, no time limit ends."""

    def tidy(self) -> None:
        idle = ("ask", "bye", "cas", "read")
        self.mail = frozenset(entry for entry in self.mail if entry[0] not in idle or self._matters(entry))

    def key(self) -> tuple[Any, ...]:
        return tuple(_frozen(value) for name, value in sorted(vars(self).items()) if name not in ("scenario", "job"))


def _frozen(value: Any) -> Any:
    """The same as something that can be looked up."""
    if isinstance(value, GroundTruth):
        value = vars(value)
    if isinstance(value, dict):
        return tuple(sorted(((key, _frozen(entry)) for key, entry in value.items()), key=lambda item: item[0]))
    return tuple(value) if isinstance(value, list) else value


def what_is_left(world: Remembering) -> MailWorld:
    """The same world as the search keeps it."""
    forgetful = world.copy()
    forgetful.__class__ = MailWorld
    forgetful.tidy()
    return forgetful


def futures_differ(scenario: Scenario) -> tuple[int, int, int]:
    """Goes through all worlds of a scenario; how many they are, as how many the search knows them, and how often
    worlds that are one to it go on differently.
    """
    first = Remembering(scenario, protocol.step, True)
    first.begin()
    names: dict[Any, int] = {}
    futures: dict[int, Any] = {}
    seen, stack, different = {first.key()}, [first], 0

    def name(world: MailWorld) -> int:
        return names.setdefault(world.key(), len(names))

    while stack:
        world = stack.pop()
        kept = what_is_left(world)
        me = name(kept)
        following = [(fault, world.after(action)) for action, fault in world.actions()]
        future = {(fault, name(what_is_left(after))) for fault, after in following}  # type: ignore[arg-type]
        of_kept = {(fault, name(kept.after(action))) for action, fault in kept.actions()}
        still = {(False, me)}  # an action that changes nothing leads nowhere
        told = (world.done(), future - still)
        different += told != futures.setdefault(me, told) or told != (kept.done(), of_kept - still)
        for _, after in following:
            key = after.key()
            if key not in seen:
                seen.add(key)
                stack.append(after)  # type: ignore[arg-type]
    return len(seen), len(futures), different


@pytest.mark.parametrize("name", some(SCENARIOS, 5))
def test_worlds_that_are_one_to_the_search_have_one_future(name: str) -> None:
    all_worlds, distinct, different = futures_differ(Scenario(**SCENARIOS[name]))
    assert different == 0
    assert distinct < all_worlds, "something was forgotten"
