"""Chooses a variant (kernel choice) for each layer, such that the fastest plan that fits has the shortest step.

A profile with rows of variants (`profiles/runs`) contains the profile of every choice, for which planner `budget` finds
the best cuts and memory intervals; so variants, cuts and intervals are compared by the same seconds and bytes.

State: a variant for each layer. Cost: bytes that the plan lacks, then its step, the number of layers that are not as
configured, and its peak. Bound: all forwards and backwards of a step spread evenly over the devices; a choice is not
planned for if its bound is no shorter than the best step. Up to `EVERY_CHOICE` choices are all planned for or ruled
out, in the order of their bounds. If there are more, layers whose names differ only in numbers form a family with one
variant, and variants that are worse than another in every number are left out. The search then changes one family at a
time, and last one family on one stage of the best plan.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.conditions import JOINED
from varuna_capslog.profiles.record import Observation, Profile
from varuna_capslog.profiles.runs import PLAIN, alternatives_of, under

__all__ = ["EVERY_CHOICE", "VariantChoice", "choose_variants"]

EVERY_CHOICE = 256
"""Largest number of choices that are all planned for or ruled out."""
MOST_WEIGHED = 40
"""Largest number of choices to plan for where there are more."""

PlanOf = Callable[[Profile], Plan]
"""Profile -> the best plan for it, judged, with its step where it fits."""


@dataclass(frozen=True)
class VariantChoice:
    """Best choice of variants, and its plan.

    chosen: layer -> variant, without the layers that stay as configured. plain: the best plan for the layers as
    configured. weighed: number of choices planned for. every: True if all others were ruled out by their bound.
    """

    chosen: Mapping[int, str]
    plan: Plan
    plain: Plan
    weighed: int
    every: bool


def choose_variants(profile: Profile, devices: int, calls: int, plan_of: PlanOf) -> VariantChoice:
    """Return the best choice of variants for a profile with rows of them; calls: microbatches of a step."""
    return _VariantSearch(profile, devices, calls, plan_of).best()


_Choice = tuple[str, ...]
"""Name of the variant of each layer."""


class _VariantSearch:
    def __init__(self, profile: Profile, devices: int, calls: int, plan_of: PlanOf) -> None:
        self._profile, self._plan_of = profile, plan_of
        alternatives, size = alternatives_of(profile), profile.num_layers
        self._names: list[tuple[str, ...]] = [(PLAIN, *alternatives.get(layer, ())) for layer in range(size)]
        self._rows: dict[tuple[int, str], Observation] = {}
        for row in profile.observations:
            if row.layers[1] - row.layers[0] == 1 and row.microbatch_size == profile.samples(1):
                self._rows.setdefault((row.layers[0], row.variant or PLAIN), row)
        self._share = calls / devices
        self._plans: dict[_Choice, tuple[tuple[float, ...], Plan]] = {}

    def best(self) -> VariantChoice:
        plain = (PLAIN,) * len(self._names)
        self._weigh(plain)
        exhaustive = math.prod(len(names) for names in self._names) <= EVERY_CHOICE
        if exhaustive:
            for choice in sorted(itertools.product(*self._names), key=self._bound):
                self._weigh(choice)
        else:
            self._by_families()
        best = self._best
        chosen = {layer: name for layer, name in enumerate(best) if name != PLAIN}
        return VariantChoice(chosen, self._plans[best][1], self._plans[plain][1], len(self._plans), exhaustive)

    @property
    def _best(self) -> _Choice:
        return min(self._plans, key=lambda choice: self._plans[choice][0])

    def _bound(self, choice: _Choice) -> float:
        layers = self._under(choice).layers
        return self._share * sum((layer.forward_seconds or 0.0) + (layer.backward_seconds or 0.0) for layer in layers)

    def _under(self, choice: _Choice) -> Profile:
        return under(self._profile, {layer: name for layer, name in enumerate(choice) if name != PLAIN})

    def _weigh(self, choice: _Choice) -> None:
        """Plan for a choice, unless none of its plans can be better than the best."""
        if choice in self._plans:
            return
        if self._plans:
            lack, step = self._plans[self._best][0][:2]
            if not lack and self._bound(choice) >= step:
                return
        plan = self._plan_of(self._under(choice))
        lack = float(plan.shortfall.bytes) if plan.shortfall is not None else float(plan.fits is False)
        step = math.inf if plan.step_seconds is None else plan.step_seconds
        changed = float(sum(name != PLAIN for name in choice))
        self._plans[choice] = (lack, step, changed, float(plan.peak_bytes or 0)), plan

    def _by_families(self) -> None:
        families: dict[object, list[int]] = {}
        for layer, variants in enumerate(self._names):
            key = re.sub(r"\d+", "#", self._profile.layers[layer].name), variants
            families.setdefault(key, []).append(layer)
        options = [(layers, self._undominated(layers)) for layers in families.values()]
        for sizes in (("forward_seconds", "backward_seconds"), ("peak_bytes",)):
            start = [PLAIN] * len(self._names)
            for layers, names in options:
                least = min(names, key=lambda name: sum(self._sum(layers, name, size) for size in sizes))
                for layer in layers:
                    start[layer] = least
            self._weigh(tuple(start))
        self._change((layers, name) for layers, names in options for name in names)
        stages = [set(stage.numbers) for stage in self._plans[self._best][1].stages]
        self._change(
            ([layer for layer in layers if layer in stage], name)
            for stage in stages
            for layers, names in options
            for name in names
        )

    def _change(self, changes: Iterable[tuple[Sequence[int], str]]) -> None:
        """Apply each change, (layers, variant), to the best choice so far, and plan for the result."""
        for layers, name in changes:
            if len(self._plans) >= MOST_WEIGHED:
                return
            choice = list(self._best)
            for layer in layers:
                choice[layer] = name
            self._weigh(tuple(choice))

    def _sum(self, layers: Sequence[int], name: str, size: str) -> float:
        return sum(float(getattr(self._rows[layer, name], size) or 0) for layer in layers)

    def _undominated(self, layers: Sequence[int]) -> list[str]:
        """Return the variants of a family that no other variant matches or beats in every number; of equal variants the
        first. Joined variants always stay, since they take less beside each other than alone.
        """
        names, joined = self._names[layers[0]], self._profile.conditions.get(JOINED, ())
        numbers = {name: [number for layer in layers for number in _numbers(self._rows[layer, name])] for name in names}
        return [
            name
            for place, name in enumerate(names)
            if name in joined
            or not any(
                all(a <= b for a, b in zip(numbers[rival], numbers[name], strict=True))
                and (numbers[rival] != numbers[name] or number < place)
                for number, rival in enumerate(names)
                if rival != name
            )
        ]


def _numbers(row: Observation) -> Iterator[float]:
    yield from (float(getattr(row, name) or 0) for name in ("forward_seconds", "backward_seconds", "peak_bytes"))
    yield from (float(getattr(row, name) or 0) for name in ("static_bytes", "saved_bytes", "transient_bytes"))
    if row.action_bytes is not None:
        yield from (float(size or 0) for size in vars(row.action_bytes).values() if not isinstance(size, bool))
