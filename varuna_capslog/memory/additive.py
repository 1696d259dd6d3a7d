"""The additive memory model of mCAP and CAPSlog: a stage's peak from the M_i and M_a of its layers.

    M_p(l, m) = M_i(l) + sum of M_a(k) for k = l+1 .. m        (CAPSlog, Sec. III-B2)

Planners build `StageCosts` from a profile. It holds for stages that keep one live graph, wherever they stand in the
pipeline and however many microbatches there are; `gap` says when that is not so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from varuna_capslog.errors import CapslogError
from varuna_capslog.profiles.record import Profile

__all__ = ["StageCosts", "gap", "stage_costs"]


@dataclass(frozen=True)
class StageCosts:
    """Peak bytes of every possible stage, kept as two lists of L whole numbers.

    The peak of layers first .. end-1 is head[first] + running[end-1]: `running[k]` sums M_a(1) .. M_a(k), and
    `head[l]` is M_i(l) - running[l], what a stage costs for beginning at layer l.
    """

    head: Sequence[int]
    running: Sequence[int]

    @classmethod
    def of_statistics(cls, isolated: Sequence[int], added: Sequence[int | None]) -> StageCosts:
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
        return cls([alone - before for alone, before in zip(isolated, running, strict=True)], running)

    @property
    def num_layers(self) -> int:
        """L, the number of layers."""
        return len(self.head)

    def stage_bytes(self, first: int, end: int) -> int:
        """Return M_p of the stage of layers first .. end-1, in bytes."""
        return self.head[first] + self.running[end - 1]

    def peaks(self, cuts: Sequence[int]) -> list[int]:
        """Return the peak bytes of each stage of a cut list."""
        return [self.stage_bytes(first, end) for first, end in zip(cuts, [*cuts[1:], self.num_layers], strict=True)]


def stage_costs(profile: Profile) -> StageCosts:
    """Return the costs of every stage of the profiled chain."""
    return StageCosts.of_statistics(profile.column("isolated_bytes"), profile.column("added_bytes"))


def gap(schedule: str, recompute: bool, stage_inputs: str) -> str | None:
    """Return why this model does not describe a schedule, as a sentence that names the model to use, or None.

    Recomputation with stage inputs on the host leaves one graph alive at a time in any schedule; otherwise the number
    of live graphs, or of inputs on the device, depends on the stage's position, which M_i and M_a do not know.
    """
    if recompute and stage_inputs == "host":
        return None
    cause = "without recomputation" if not recompute else "with stage inputs kept on the device"
    return (
        f"memory model 'additive' describes stages that keep one live graph (recomputation, stage inputs on the host), "
        f"but schedule '{schedule}' {cause} keeps several; use memory model '{schedule}' for numbers"
    )
