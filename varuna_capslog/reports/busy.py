"""The section on the work of each rank: the seconds that the plan's profile predicts beside those that were measured.

`page` calls it. Work is forwards, recomputations and backwards, without waiting, copies and the optimizer's update.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.playing import play
from varuna_capslog.reports import markup
from varuna_capslog.reports.markup import Markup
from varuna_capslog.reports.run import RunRecord
from varuna_capslog.reports.wording import UNKNOWN, duration, significant
from varuna_capslog.schedules import RunShape

__all__ = ["busy_parts"]


def busy_parts(run: RunRecord) -> list[Markup]:
    """Return a table of the ranks; nothing where no rank's work was measured under the newest plan."""
    rows = [line.busy_seconds for line in run.steps_of_plan if line.busy_seconds]
    if not rows:
        return []
    alike = [row for row in rows if len(row) == len(rows[-1])]
    measured = [statistics.median(column) for column in zip(*alike, strict=True)]
    planned = _planned(run, len(measured))
    table, stages = [], {} if run.plan is None else _stages(run, len(measured))
    for rank, seconds in enumerate(measured):
        expected = planned.get(rank)
        ratio = significant(seconds / expected) if expected else UNKNOWN
        table.append([str(rank), stages.get(rank, ""), duration(expected), duration(seconds), ratio])
    headings = ["rank", "stages", "planned", "measured (median)", "measured / planned"]
    about = (
        "Seconds that each rank works in a step: forwards, recomputations and backwards, without waiting for others or "
        "for data. A rank whose last number is larger than the others' is slower than its plan; with "
        "elastic.rebalance=true a run gives it fewer layers."
    )
    return [markup.table("busy-table", headings, table), markup.paragraph(about)]


def _stages(run: RunRecord, ranks: int) -> Mapping[int, str]:
    """Return each rank's stages in the plan, by number; equal pipelines of a short plan follow one another."""
    assert run.plan is not None
    width, stages_of_rank = run.plan.num_ranks, dict[int, list[str]]()
    for stage, rank in enumerate(run.plan.placement()):
        for rank_of_copy in range(rank, ranks, width) if run.plan.short else (rank,):
            stages_of_rank.setdefault(rank_of_copy, []).append(str(stage))
    return {rank: ", ".join(stages) for rank, stages in stages_of_rank.items()}


def _planned(run: RunRecord, ranks: int) -> Mapping[int, float]:
    """Return the predicted seconds of each rank's work; empty where the profile cannot predict them."""
    if run.plan is None or run.profile is None or run.config is None or run.plan.num_microbatches is None:
        return {}
    shape = RunShape.of_config(run.config).settled()
    try:
        busy = play(run.profile, run.plan, None, None, shape.recompute, shape, Link()).busy_seconds
    except CapslogError:
        return {}
    width = run.plan.num_ranks
    return {rank: busy[rank % width] for rank in range(ranks) if run.plan.short or rank in busy}
