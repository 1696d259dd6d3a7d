"""Seconds of each stage of a step, with which a schedule is simulated."""

from __future__ import annotations

__all__ = ["StageSeconds"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.schedules.ordered import Piece
from varuna_capslog.schedules.stage_graph import Edge, StageGraph


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of each stage's actions and messages.

    forward, backward: per stage, of one microbatch.
    recompute: per stage; default: as long as the forward.
    bare_forward: per stage, of forwards that keep no graph, since a recomputation follows; default: as the others.
    backward_at_once: per stage, of backwards without an R; default `backward`.
    backward_again: per stage, of backwards that an R of the microbatch precedes, since other parts of the stage run
        again inside them (where the backward is split, inside I); default: as the others.
    transfer: of one message, by (stage that sends it, stage that takes it), or per stage for all edges to it, in either
        direction. A missing direction takes as long as the other one; default 0. Messages of one ordered pair of ranks
        go one after the other; see `simulate` for links that more messages share.
    handover: likewise, seconds of the sender's rank for sending one message (gloo copies into host memory and socket);
        the transfer begins with it and does not arrive before its end. Counts as idle time; default 0.
    other: per stage, for the kinds I, W, O, L and U (once per step); a schedule with a kind that has no seconds is
        refused.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    recompute: Sequence[float] | None = None
    bare_forward: Sequence[float] | None = None
    backward_again: Sequence[float] | None = None
    backward_at_once: Sequence[float] | None = None
    transfer: Sequence[float] | Mapping[Edge, float] | None = None
    handover: Sequence[float] | Mapping[Edge, float] | None = None
    other: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def check(self, num_stages: int) -> None:
        """Raise `CapslogError` for lists that do not have `num_stages` values, and values that are no seconds."""
        named = {"seconds of kind F": self.forward, "seconds of kind B": self.backward}
        named |= {f"seconds of kind {kind}": row for kind, row in self.other.items()}
        optional = {
            "seconds of kind R": self.recompute,
            "bare_forward_seconds": self.bare_forward,
            "backward_again_seconds": self.backward_again,
            "backward_at_once_seconds": self.backward_at_once,
        }
        for name, values in (named | {name: row for name, row in optional.items() if row is not None}).items():
            _check_times(name, values, num_stages)

    def at_speeds(self, speeds: Sequence[float]) -> StageSeconds:
        """Return the seconds on devices of these speeds, one per stage, relative to a device of speed 1.

        Computation is divided by the speed; messages and copies (O, L) do not change.
        """

        def divided(row: Sequence[float] | None) -> Sequence[float] | None:
            return None if row is None else [seconds / speed for seconds, speed in zip(row, speeds, strict=True)]

        return replace(
            self,
            forward=divided(self.forward) or (),
            backward=divided(self.backward) or (),
            recompute=divided(self.recompute),
            bare_forward=divided(self.bare_forward),
            backward_again=divided(self.backward_again),
            backward_at_once=divided(self.backward_at_once),
            other={kind: row if kind in "OL" else divided(row) or () for kind, row in self.other.items()},
        )

    def of(self, work: Piece) -> float:
        """Return the seconds of one action."""
        kind, stage = work.kind, work.stage
        if kind == "F":
            return (self.forward if work.keeps else self.bare_forward or self.forward)[stage]
        if kind == "R":
            return (self.recompute or self.forward)[stage]
        seconds = self.backward[stage] if kind == "B" else self.other[kind][stage]
        if kind in "BI":
            inside = self.backward_at_once if work.keeps else self.backward_again
            seconds += (inside or self.backward)[stage] - self.backward[stage]
        return seconds

    def of_messages(self, graph: StageGraph) -> tuple[dict[Edge, float], dict[Edge, float]]:
        """Return transfer and handover seconds of a message by (stage that sends it, stage that takes it), in both
        directions of every edge.
        """
        named = (("transfer_seconds", self.transfer), ("handover_seconds", self.handover))
        transfer, handover = (_of_messages(name, values, graph) for name, values in named)
        return transfer, handover


def _check_times(name: str, values: Sequence[float], length: int) -> None:
    if len(values) != length:
        raise CapslogError(f"{name}: {len(values)} values where the schedule needs {length}; give one per stage")
    for index, value in enumerate(values):
        if not 0.0 <= value < float("inf"):
            raise CapslogError(f"{name}[{index}] is {value}; give a finite number of seconds, 0 or more")


def _of_messages(
    name: str, values: Sequence[float] | Mapping[Edge, float] | None, graph: StageGraph
) -> dict[Edge, float]:
    """Return seconds of a message by (stage that sends it, stage that takes it), for both directions of every edge."""
    if isinstance(values, Mapping):
        ways = [way for edge in graph.edges for way in (edge, edge[::-1])]
        of_way = {way: values.get(way, values.get(way[::-1], 0.0)) for way in ways}
        _check_times(name, list(of_way.values()), len(of_way))
        return of_way
    row = [0.0] * len(graph.ranks) if values is None else values
    _check_times(name, row, len(graph.ranks))
    return {way: row[edge[1]] for edge in graph.edges for way in (edge, edge[::-1])}
