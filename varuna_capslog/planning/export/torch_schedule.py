"""A plan's order of work as `torch.distributed.pipelining` reads it."""

from __future__ import annotations

from collections.abc import Iterable

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planning.export.stage_line import run_of
from varuna_capslog.plans.parts import scheduled
from varuna_capslog.plans.plan import Plan
from varuna_capslog.schedules import KINDS, RunShape, from_strings, to_strings

__all__ = ["torch_csv"]

_TORCH_KINDS = "FBIW"


def torch_csv(plan: Plan, run: RunShape, edges: Iterable[tuple[int, int]] | None = None) -> str:
    """The lists of actions as `torch.distributed.pipelining` reads them from a file, one line per rank.

    Its multi-stage schedules load it with `_load_csv(FILE, format="compute_only")` and add the messages themselves.

    run: what the plan leaves to the config.
    edges: (layer that writes a tensor, layer that reads it), for a plan with routes "direct".

    Raises CapslogError for a plan whose microbatches are not known, and for what torch's schedules do not have: several
    ways through the stages, stages that hand on to others than the next one, recomputation and offloading as actions.
    """
    if len(plan.paths()) > 1:
        raise CapslogError(
            f"the plan has {len(plan.paths())} ways through its stages, but a schedule of torch has one pipeline; "
            "export a plan of one pipeline, and replicate it with torch's data parallelism"
        )
    graph = plan.stage_graph(edges)
    others = [edge for edge in graph.edges if edge[1] != edge[0] + 1]
    if others:
        sender, receiver = others[0]
        raise CapslogError(
            f"routes is {plan.routes!r} and stage {sender} hands on to stage {receiver}, but in a schedule of torch "
            "each stage hands on to the next one; export a plan whose stages are a line"
        )
    if plan.actions is not None:
        rows = from_strings(plan.actions)
    else:
        run = run_of(plan, run)
        rows = scheduled(run.schedule, plan.stages, graph, run)
    rows = [[action for action in row if action.kind != "U"] for row in rows]
    for rank, row in enumerate(rows):
        for action in row:
            if action.kind not in _TORCH_KINDS:
                raise CapslogError(
                    f"rank {rank}: torch's schedules have no {KINDS[action.kind]} ({action}); export a plan of a "
                    "schedule without it, such as 1f1b with pipeline.recompute=false"
                )
    return "".join(",".join(row) + "\n" for row in to_strings(rows))
