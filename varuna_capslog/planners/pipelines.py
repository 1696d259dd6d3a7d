"""What a pipeline takes that a fleet may hold: bounds of all templates at once, and one template laid out.

`joint` asks for a template's bound first and lays out the few that are worth it. What a pipeline costs beyond its own
stages is counted here: the gradients of further blocks that wait, and their exchange with other pipelines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.memory import MEMORY_MODELS, NEVER, StageCosts
from varuna_capslog.memory.costs import raised
from varuna_capslog.planners.seconds import LayerSeconds, Link
from varuna_capslog.planners.templates import DeviceKind, Template, Templates, without
from varuna_capslog.planners.throughput import fastest_cuts
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

__all__ = ["Column", "Pipelines"]

_NARROW = 32
_WIDE = 128
"""Width of the beam that lays out a pipeline while the fleet is composed, and of those of the answer."""

_FEW_ORDERS = 10
"""Orders of the kinds that are all tried; of more, the one of the bound, and three others of what is laid out last."""


@dataclass(frozen=True)
class Column:
    """A template with its share of blocks, laid out: the kind of each stage, cuts, seconds and bytes of each stage."""

    kinds: tuple[int, ...]
    cuts: tuple[int, ...]
    step_seconds: float
    stage_bytes: tuple[int, ...]


class Pipelines:
    """Every pipeline that some of the devices could be, for one profile.

    run: the whole step, whose blocks the pipelines share out.
    """

    def __init__(
        self,
        profile: Profile,
        kinds: Sequence[DeviceKind],
        templates: Sequence[Template],
        memory: str,
        run: RunShape,
        link: Link,
    ) -> None:
        self.kinds, self.templates = list(kinds), list(templates)
        self.sizes = np.array(templates, dtype=np.int64)
        self.blocks, self.of_block = run.num_blocks, run.microbatches // run.num_blocks
        self.seconds = LayerSeconds.of_profile(profile, link)
        self._profile, self._memory, self._run, self._link = profile, memory, run, link
        weights = np.array([layer.parameter_bytes or 0 for layer in profile.layers], dtype=np.int64)
        self._parameter_bytes: NDArray[np.int64] = np.concatenate([[0], np.cumsum(weights)])
        self._of_share: dict[int, Templates] = {}
        self._columns: dict[tuple[int, int], Column | None] = {}
        self._wide: set[tuple[int, int]] = set()

    def _of_blocks(self, share: int) -> RunShape:
        """The step of a pipeline that runs so many of the blocks."""
        return replace(self._run, num_microbatches=share * self.of_block, num_blocks=share)

    def _costs(self, share: int) -> StageCosts:
        """The bytes of every stage of a pipeline with `share` blocks."""
        return MEMORY_MODELS[self._memory].stage_costs(self._profile, self._of_blocks(share))

    def _copy_bytes(self, share: int) -> NDArray[np.int64]:
        """[L, L + 1]: bytes of the gradients that wait beside the first block's, where a pipeline has `share` blocks.

        A single pipeline adds its blocks as they end, several keep all of theirs until the exchange.
        """
        copies = min(share, 2) - 1 if share == self.blocks else share - 1
        ranges = self._parameter_bytes[None, :] - self._parameter_bytes[:-1, None]
        return np.asarray(copies * np.maximum(ranges, 0), dtype=np.int64)

    def _exchange_seconds(self, share: int, stage_parameters: float) -> float:
        """What a stage with so many bytes of parameters waits for the gradients of the other pipelines' blocks."""
        if share == self.blocks or self._link.bandwidth is None:
            return 0.0
        return (self.blocks - share) * stage_parameters / self._link.bandwidth

    def bounds(self, share: int) -> NDArray[np.float64]:
        """Bounds of all templates with `share` blocks."""
        if share not in self._of_share:
            self._of_share[share] = Templates(
                self.templates, self.kinds, self._costs(share), self.seconds, self._of_blocks(share),
                self._copy_bytes(share),
            )  # fmt: skip
        # The stage with most parameters has at least an even part of them.
        least = self._exchange_seconds(share, float(self._parameter_bytes[-1])) / self.sizes.sum(axis=1)
        return self._of_share[share].seconds_of + least

    def stage_bytes(self, cuts: Sequence[int], share: int) -> NDArray[np.int64]:
        """Bytes of each stage of a cut list with `share` blocks."""
        costs = raised(self._costs(share), self._copy_bytes(share))
        return np.array(costs.peaks(cuts), dtype=np.int64)

    def column(self, number: int, share: int, wide: bool = False) -> Column | None:
        """A template with a share of blocks, laid out and simulated; None where no order tried fits.

        A bound must have been asked for this share. `wide` searches longer.
        """
        key = (number, share)
        if key not in self._columns or (wide and key not in self._wide):
            orders = dict.fromkeys(self._orders(number, share, wide))
            known = [self._columns[key]] if key in self._columns else []
            tried = [*known, *(self._laid_out(order, share, _WIDE if wide else _NARROW) for order in orders)]
            good = [one for one in tried if one is not None]
            self._columns[key] = min(good, key=lambda one: one.step_seconds) if good else None
            if wide:
                self._wide.add(key)
        return self._columns[key]

    def _orders(self, number: int, share: int, wide: bool) -> Iterator[tuple[int, ...]]:
        """Orders of a template's kinds that are worth laying out, that of the bound first."""
        order, _ = self._of_share[share].layout(self.templates[number])
        yield tuple(order)
        if _number_of_orders(self.templates[number]) <= _FEW_ORDERS:
            yield from _all_orders(self.templates[number])
        elif wide:
            yield from (tuple(order[::-1]), tuple(sorted(order)), tuple(sorted(order, reverse=True)))

    def _laid_out(self, order: Sequence[int], share: int, beam: int) -> Column | None:
        kinds = [self.kinds[kind] for kind in order]
        costs = raised(self._costs(share), self._copy_bytes(share))
        capacities = [NEVER - 1 if kind.capacity is None else kind.capacity for kind in kinds]
        run = self._of_blocks(share)
        speeds = [kind.speed for kind in kinds]
        best = fastest_cuts(costs, self.seconds, run, len(kinds), capacities, speeds, beam)
        if best is None:
            return None
        held = np.diff(self._parameter_bytes[[*best.cuts, costs.num_layers]])
        step = best.step_seconds + self._exchange_seconds(share, float(held.max()))
        return Column(tuple(order), best.cuts, step, tuple(costs.peaks(best.cuts)))


def _all_orders(template: Template) -> Iterator[tuple[int, ...]]:
    if not any(template):
        yield ()
    for kind in range(len(template)):
        if template[kind]:
            yield from ((kind, *rest) for rest in _all_orders(without(template, kind)))


def _number_of_orders(template: Template) -> int:
    return math.factorial(sum(template)) // math.prod(math.factorial(count) for count in template)
