"""The programs of the two ranks of a trimmed pipeline: the measured rank, and the one that plays its neighbour stages.

`trim` executes them; an estimate does so on fake tensors.
"""

from __future__ import annotations

from varuna_capslog.engine.layout import Layout
from varuna_capslog.schedules import Schedule, from_strings, insert_recompute

__all__ = ["HALVED_MICROBATCHES", "MEASURED_RANK", "MICROBATCHES", "NEIGHBOUR_RANK", "program"]

MEASURED_RANK, NEIGHBOUR_RANK = 1, 0
MICROBATCHES = 4
"""From the second one on all gradients are there; the last two then have as much in flight as in a long step."""
HALVED_MICROBATCHES = 3
"""Of a run that splits its backwards: the second finds all gradients, and the third stands between its halves."""


def program(
    count: int, around: tuple[bool, bool], recompute: bool, microbatches: int, halves: bool = False
) -> tuple[Layout, Schedule]:
    """Return stages, their ranks and both ranks' actions: the steady state of Varuna's schedule.

    Args:
        count: layers of the run. around: True for a stage before it, and for one behind.
        microbatches: at most 4. halves: split the backwards of the run; then there are 3 microbatches.

    A stage with another behind it has a second microbatch in flight while it recomputes and differentiates the first.
    The neighbour sends ahead as far as real neighbours would, so that as many receives are posted and sends in flight.
    Where backwards are split, a forward is between the halves: the activation that it receives proves that the gradient
    of the first half has arrived, so that the second half frees all that the microbatch still holds.
    """
    upstream, downstream = around
    if upstream and downstream:
        layout = Layout.pipelines((0, 1, 1 + count), count + 2, (NEIGHBOUR_RANK, MEASURED_RANK, NEIGHBOUR_RANK))
        rows = [
            "0F0 0F1 2F0 2B0 0F2 2F1 2B1 0B0 0F3 2F2 2B2 0B1 2F3 2B3 0B2 0B3",
            "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        ]
    elif downstream:
        layout = Layout.pipelines((0, count), count + 1, (MEASURED_RANK, NEIGHBOUR_RANK))
        rows = ["1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3", "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"]
    elif upstream:
        layout = Layout.pipelines((0, 1), count + 1, (NEIGHBOUR_RANK, MEASURED_RANK))
        rows = ["0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"]
    else:
        layout = Layout.pipelines((0,), count)
        rows = ["0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3"]
    if halves:
        rows = _halved_rows(*around)
    schedule = from_strings([[text for text in row.split() if int(text[-1]) < microbatches] for row in rows])
    return layout, insert_recompute(schedule) if recompute else schedule


def _halved_rows(upstream: bool, downstream: bool) -> list[str]:
    stage, neighbour = int(upstream), ""
    for number in range(HALVED_MICROBATCHES):
        neighbour += f"0F{number} " * upstream
        neighbour += f"{stage + 1}F{number} {stage + 1}B{number} " * downstream
        neighbour += f"0B{number} " * upstream
    measured = " ".join(f"{stage}{text}" for text in ("F0", "I0", "F1", "W0", "I1", "F2", "W1", "I2", "W2"))
    return [neighbour, measured] if neighbour else [measured]
