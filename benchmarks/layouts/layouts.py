"""Published layouts beside our cuts for the same ranks, chunks and schedule, judged by an evaluator of its own.

For each row our planner is asked twice: for the shortest step with the published layout's peak as the memory of every
rank, and for the smallest peak with a step that is not longer than the layout's. The evaluator plays both by the costs
in `costs.json`, which were fixed before (`costs.py`): plain or interleaved 1F1B in Megatron's order, messages free,
every activation kept. It shares no code with planner and fold. Writes a line per row and rate as it comes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from costs import COSTS, RATES, costs_of, divided_by
from rows import ROWS, Row

from varuna_capslog.memory.costs import Headroom
from varuna_capslog.planning.export import names_in
from varuna_capslog.planning.layouts import count_blocks, faults_of_cuts, layout_cuts, read_layout
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.solve import solve
from varuna_capslog.planning.verdict import fold_plan
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile, read_profile
from varuna_capslog.schedules import RunShape

MICROBATCHES = 64
SAME = 1e-4
"""Relative differences up to this size are rounding."""


# -- The evaluator: event play and bytes of its own


@dataclass(frozen=True)
class Layer:
    """Costs of a layer for a microbatch: seconds, bytes."""

    forward: float
    backward: float
    static: int
    saved: int
    working: int


def layers_of(costs: Sequence[Sequence[Any]], rate: int) -> list[Layer]:
    """Return the layers of a card. rate: place in `RATES`."""
    return [Layer(*row[3][rate], *row[2]) for row in costs for _ in range(row[0])]


def order_of(rank: int, ranks: int, chunks: int, microbatches: int) -> list[tuple[str, int, int]]:
    """Return the calls of a rank, (F or B, microbatch, chunk), in Megatron's order of (interleaved) 1F1B."""
    total, group = microbatches * chunks, ranks * chunks

    def call(number: int, backward: bool) -> tuple[str, int, int]:
        chunk = number % group // ranks
        microbatch = number // group * ranks + number % ranks
        return ("B", microbatch, chunks - 1 - chunk) if backward else ("F", microbatch, chunk)

    warm = ranks - 1 - rank if chunks == 1 else 2 * (ranks - 1 - rank) + (chunks - 1) * ranks
    warm = min(warm, total)
    calls = [call(number, False) for number in range(warm)]
    for number in range(warm, total):
        calls += [call(number, False), call(number - warm, True)]
    return calls + [call(number, True) for number in range(total - warm, total)]


@dataclass(frozen=True)
class Stage:
    """Sums over a stage's layers. building: most bytes in a forward or backward beside what was there before."""

    forward: float
    backward: float
    static: int
    saved: int
    building: int

    @classmethod
    def of(cls, layers: Sequence[Layer]) -> Stage:
        saved = most = 0
        for layer in layers:
            saved += layer.saved
            most = max(most, saved + layer.working)
        forward, backward = (sum(getattr(layer, name) for layer in layers) for name in ("forward", "backward"))
        return cls(forward, backward, sum(layer.static for layer in layers), saved, most)


def judged(layers: Sequence[Layer], cuts: Sequence[int], ranks: int) -> tuple[float, int]:
    """Return the seconds of a step, and the bytes of the fullest rank."""
    bounds, chunks = [*cuts, len(layers)], len(cuts) // ranks
    stages = [Stage.of(layers[first:end]) for first, end in pairwise(bounds)]
    orders = [order_of(rank, ranks, chunks, MICROBATCHES) for rank in range(ranks)]
    done: dict[tuple[str, int, int], float] = {}
    places, clocks = [0] * ranks, [0.0] * ranks
    held = [sum(stage.static for stage in stages[rank::ranks]) for rank in range(ranks)]
    peaks, moved = list(held), True
    while moved:
        moved = False
        for rank in range(ranks):
            while places[rank] < len(orders[rank]):
                kind, microbatch, chunk = orders[rank][places[rank]]
                number = chunk * ranks + rank
                before = number - 1 if kind == "F" else number + 1
                needs = [("F", microbatch, number)] if kind == "B" else []
                if 0 <= before < len(stages):
                    needs.append((kind, microbatch, before))
                if any(need not in done for need in needs):
                    break
                stage = stages[number]
                begin = max([clocks[rank], *(done[need] for need in needs)])
                clocks[rank] = begin + (stage.forward if kind == "F" else stage.backward)
                done[kind, microbatch, number] = clocks[rank]
                if kind == "B":
                    held[rank] -= stage.saved
                peaks[rank] = max(peaks[rank], held[rank] + stage.building)
                if kind == "F":
                    held[rank] += stage.saved
                places[rank] += 1
                moved = True
    assert all(place == len(order) for place, order in zip(places, orders, strict=True)), "the order is impossible"
    return max(clocks), max(peaks)


# -- The plans


def cuts_of(row: Row, profile: Profile) -> list[int]:
    """Return the first layer of each stage of the published layout."""
    names = names_in(profile)
    layout = read_layout(row.layout, count_blocks(names), row.ranks, None, names.num_predictions)
    faults = [*layout.faults, *faults_of_cuts(layout, names)]
    if faults:
        raise SystemExit(f"row {row.number}, {row.layout}: {'; '.join(faults)}")
    return layout_cuts(layout, names)


def alike(layers: Sequence[Layer], others: Sequence[Layer]) -> bool:
    """Return True where these are the same costs, but for last digits of bytes, in which estimates may differ."""
    pairs = zip(map(dataclasses.astuple, layers), map(dataclasses.astuple, others), strict=True)
    return all(math.isclose(*both, rel_tol=5e-3) for pair in pairs for both in zip(*pair, strict=True))


def firsts_of(plan: Plan) -> list[int]:
    return [stage.layers[0][0] for stage in plan.stages]


def smallest(problem: Problem, theirs: Plan, fast: Plan) -> Plan | None:
    """Return the plan of the smallest peak whose step is not longer than the layout's, among the fastest plans within
    limits of memory. The limit is bisected between 70 % of the fast plan's peak and that peak, to a thousandth, or a
    hundredth for several stages on each rank. None where the fast plan is longer.
    """
    device, wanted = Headroom.of(problem.profile).device, (theirs.step_seconds or 0.0) * (1 + SAME)
    high = fast.peak_bytes or 0
    if not fast.fits or (fast.step_seconds or 0.0) > wanted:
        return None
    low, best, part = int(0.7 * high), fast, 1e-3 if problem.stages_per_rank == 1 else 1e-2
    while high - low > part * high:
        limit = (low + high) // 2
        plan = solve(problem.with_capacity(device(limit)), "throughput", weighs_others=False)
        if plan.fits and (plan.step_seconds or 0.0) <= wanted:
            best, high = plan, min(limit, plan.peak_bytes or limit)
        else:
            low = limit
    return best


def compared(row: Row, place: int, folder: Path, at_equal_step: bool = True) -> dict[str, Any]:
    """Return the row at one rate: theirs, ours at equal peak (`fast`) and at equal step (`small`), each as cuts,
    seconds and bytes by the evaluator, seconds and bytes by our play and fold, and processor seconds of the search.
    """
    costs, rate = json.loads(COSTS.read_text())[row.model], RATES[place]
    profile = read_profile(folder / f"{row.model}-{rate}.json")
    profile, layers = divided_by(profile, row.parallel), layers_of(costs["cards"][row.parallel], place)
    if not alike(layers, [Layer(*seconds, *sizes) for _, sizes, seconds in costs_of(profile)]):
        raise SystemExit(f"{row.model}-{rate}.json has other costs than costs.json; make it again with costs.py")
    cuts = cuts_of(row, profile)
    size = int(profile.conditions["microbatch_size"])
    run = RunShape(MICROBATCHES, "1f1b" if len(cuts) == row.ranks else "interleaved", False, microbatch_size=size)
    problem = dataclasses.replace(Problem.of(profile, row.ranks, run=run), stages_per_rank=len(cuts) // row.ranks)
    theirs = solve(dataclasses.replace(problem, cuts=tuple(cuts)), "throughput")
    line: dict[str, Any] = dataclasses.asdict(row) | {"rate": rate, "chunks": len(cuts) // row.ranks}

    def told(plan: Plan, seconds: float) -> dict[str, Any]:
        firsts = firsts_of(plan)
        step, peak = judged(layers, firsts, row.ranks)
        facts = {"cuts": firsts, "step": step, "peak": peak, "our_step": plan.step_seconds, "our_peak": plan.peak_bytes}
        return facts | {"fits": plan.fits, "seconds": round(seconds, 2)}

    begun = time.process_time()
    line["theirs"] = told(theirs, 0.0)
    # the least capacity in which the layout is judged to fit: by the model of stages, and by the fold of each rank
    peak = max(theirs.peak_bytes or 0, *(rank.peak_bytes for rank in fold_plan(profile, theirs, run)))
    limited = problem.with_capacity(Headroom.of(profile).device(peak))
    assert solve(dataclasses.replace(limited, cuts=tuple(cuts)), "throughput").fits
    fast = solve(limited, "throughput", weighs_others=False)
    line["fast"] = told(fast, time.process_time() - begun)
    begun = time.process_time()
    small = smallest(problem, theirs, fast) if at_equal_step else None
    line["small"] = None if small is None else told(small, time.process_time() - begun)
    return line


# -- The tables


def percent(ours: float, theirs: float) -> str:
    return f"{100 * (ours / theirs - 1) + 0.0:+.1f}".replace("-0.0", "+0.0")


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return README.md's table: for each row the three rates, from 0.4 to 0.7."""
    text = (
        "| row | model | ranks x chunks | theirs | theirs [s] | equal peak: step | peak | equal step: peak | step |\n"
    )
    text += "|---" * 9 + "|\n"
    for number, row in enumerate(ROWS):
        mine = sorted((line for line in lines if line["place"] == number), key=lambda line: line["rate"])
        if not mine:
            continue
        layout = re.sub(r"decoder_(first|last)_pipeline_num_layers: ", r"\1 ", row.layout).replace("|", "\\|")
        layout = layout.removeprefix("decoder_pipeline_manual_split_list: ")
        cells = [row.number, row.model, f"{row.ranks} x {mine[0]['chunks']}", layout]
        cells.append(", ".join(f"{line['theirs']['step']:.3f}" for line in mine))
        for name, first in (("fast", "step"), ("small", "peak")):
            for key in (first, "peak" if first == "step" else "step"):
                cells.append(
                    ", ".join(
                        "-" if line[name] is None else percent(line[name][key], line["theirs"][key]) for line in mine
                    )
                )
        text += "| " + " | ".join(cells) + " |\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the profiles that costs.py writes")
    parser.add_argument("--answers", type=Path, default=COSTS.with_name("answers.jsonl"), help="lines are added to it")
    parser.add_argument("--places", type=int, nargs="*", default=list(range(len(ROWS))), help="of rows in rows.ROWS")
    parser.add_argument("--equal-peak", action="store_true", help="ask for the step at equal peak alone")
    parser.add_argument("--rates", type=float, nargs="*", default=list(RATES))
    args = parser.parse_args()
    done = [json.loads(text) for text in args.answers.read_text().splitlines()] if args.answers.exists() else []
    for number in args.places:
        for place, rate in enumerate(RATES):
            if rate not in args.rates or any(line["place"] == number and line["rate"] == rate for line in done):
                continue
            if not (args.folder / f"{ROWS[number].model}-{rate}.json").exists():
                continue
            line = {"place": number} | compared(ROWS[number], place, args.folder, not args.equal_peak)
            done.append(line)
            with args.answers.open("a") as stream:
                stream.write(json.dumps(line) + "\n")
    print(table(done))


if __name__ == "__main__":
    main()
