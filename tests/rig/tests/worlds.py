"""Machines without processes, moved by hand: test doubles for the rig's recovery and fault injection."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

from tests.rig.judge import Segment, Stepped
from tests.rig.machines.machines import Machines
from varuna_capslog.membership.generation import Generation


class FakeMachines:
    """At each turn the next function of `script` says which steps were applied. All calls are in `calls`, in order.

    Args:
        generations: members by generation number; the newest one trains.
    """

    def __init__(self, generations: dict[int, tuple[str, ...]], machines: Iterable[str] = ("a", "b")) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.generations = generations
        self.script: list[Callable[[], list[Stepped]]] = []
        self.by_name = dict.fromkeys(machines)
        self.target, self.replenish_at, self.replaces = 4, 0.0, True
        newest = max(generations)
        roster = SimpleNamespace(
            dead=set(), generation=Generation(newest, generations[newest]), members=list(generations[newest])
        )
        self.members = SimpleNamespace(
            roster=roster,
            asked={},
            of=lambda number: generations.get(number, ()),
            voters=lambda: sorted(generations[newest]),
            signal=lambda member, number: self.calls.append(("signal", member, int(number))),
        )
        self.records = SimpleNamespace(step=0, step_times=[], segment=Segment(), number=1)
        self.network = SimpleNamespace(
            disturb=lambda ways, delay: self.calls.append(("disturb", frozenset(ways), delay)),
            heal=lambda ways: self.calls.append(("heal", frozenset(ways))),
        )
        self.agenda = SimpleNamespace(later=lambda seconds, do: self.calls.append(("later", seconds, do)))
        self.store = SimpleNamespace(is_cluster=False)

    def turn(self) -> list[Stepped]:
        new_steps = self.script.pop(0)() if self.script else []
        self.records.step_times += [event.time for event in new_steps]
        self.records.segment.stepped += new_steps
        return new_steps

    def signal(self, name: str, number: int, everything: bool = False) -> None:
        self.calls.append(("signal machine", name, int(number), everything))

    def notice(self, member: str, source: str, urgent: bool = False) -> None:
        self.calls.append(("notice", member, source, urgent))

    @property
    def as_machines(self) -> Machines:
        return cast("Machines", self)


def stepped(member: str, generation: int, step: int, time: float) -> Stepped:
    return Stepped(member, generation, step, 0.0, 0.0, {}, time)
