"""Additive memory model of mCAP and CAPSlog: a stage's peak from the M_i and M_a of its layers.

    M_p(l, m) = M_i(l) + sum of M_a(k) for k = l+1 .. m        (CAPSlog, Sec. III-B2)

The bytes that the device's libraries keep (`ActionBytes.lasting_bytes`, 0 where unknown) count once: they are
subtracted from the peaks of M_i and M_a, and every stage adds the maximum of its layers. The model holds for stages
with one live graph, at any place in the pipeline and for any number of microbatches (`gap`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import numpy as np

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.composition import lasting, lasting_of_ranges, observed
from varuna_capslog.memory.costs import Bytes, RangeCosts, StageCosts, only_ranges, raised
from varuna_capslog.memory.inflight import model_of
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

__all__ = ["AdditiveCosts", "gap", "stage_costs"]


@dataclass(frozen=True)
class AdditiveCosts(StageCosts):
    """Peak bytes of every possible stage, in two lists of L whole numbers: head[first] + running[end-1] is the peak of
    layers first .. end-1, where `running[k]` sums M_a(1) .. M_a(k), and `head[l]` is M_i(l) - running[l].
    """

    head: Sequence[int]
    running: Sequence[int]
    position_free: ClassVar[bool] = True

    @classmethod
    def of_statistics(cls, isolated: Sequence[int], added: Sequence[int | None]) -> AdditiveCosts:
        """Make the costs from M_i and M_a in bytes; `added[0]` is not read, since no layer precedes layer 0."""
        if not isolated or len(isolated) != len(added):
            raise CapslogError(
                f"{len(isolated)} M_i and {len(added)} M_a; there must be one of each per layer, at least one"
            )
        if sum(isolated) + sum(abs(part or 0) for part in added) >= 1 << 60:
            raise CapslogError(
                "the M_i and M_a sum to more than 1 EiB, beyond what a search can add up; check their unit, bytes"
            )
        running = list(accumulate((part or 0 for part in added[1:]), initial=0))
        return cls([size - before for size, before in zip(isolated, running, strict=True)], running)

    @property
    def num_layers(self) -> int:
        """L, the number of layers."""
        return len(self.head)

    def stage_bytes(self, first: int, end: int, stage: int = 0, stages: int = 1) -> int:
        """Return M_p of layers first .. end-1, in bytes."""
        return self.head[first] + self.running[end - 1]

    def matrix(self, stage: int = 0, stages: int = 1) -> Bytes:
        """Return the bytes of every stage, [L, L + 1]; see `costs.StageCosts`."""
        return only_ranges(np.array(self.head, dtype=np.int64)[:, None] + np.array([0, *self.running], dtype=np.int64))


def stage_costs(profile: Profile, run: RunShape) -> AdditiveCosts | RangeCosts:
    """Return the costs of every stage of the profiled chain; the run does not change them."""
    isolated, added = profile.column("isolated_bytes"), profile.column("added_bytes")
    if not lasting(profile.observations).any():
        return AdditiveCosts.of_statistics(isolated, added)
    single, pair = map(lasting, observed(profile, "additive", "recompute"))
    short_lived = [size - kept for size, kept in zip(isolated, single, strict=True)]
    more = [size - rise for size, rise in zip(added[1:], (pair - single[:-1]).tolist(), strict=True)]
    return raised(AdditiveCosts.of_statistics(short_lived, [None, *more]), lasting_of_ranges(single, pair))


def gap(model: str, run: RunShape) -> str | None:
    """Return why a model of one live graph does not describe a run, naming the model to use; None where it does.
    Recomputation with stage inputs on the host keeps one graph alive in any schedule. Otherwise the number of live
    graphs, or of inputs on the device, depends on the stage's position, on which M_i and M_a do not depend.
    """
    if run.recompute and run.stage_inputs == "host":
        return None
    cause = "without recomputation" if not run.recompute else "with stage inputs kept on the device"
    return (
        f"memory model '{model}' describes stages that keep one live graph (recomputation, stage inputs on the host), "
        f"but schedule '{run.schedule}' {cause} keeps several; use memory model '{model_of(run.schedule)}' for numbers"
    )
