"""The cuts of stages that go round the ranks: equality with all cut lists, and seconds and steps of long chains.

A small chain has 6 to 12 layers, 2 ranks and 2 or 3 stages on each; the oracle plays every cut list. A long one has 66
to 126 layers (dense ones first, a heavy head, a third of all a bit longer or shorter), 16 ranks and 4 stages on each;
the rival moves random cuts for a minute, keeping what is shorter. Prints rows for README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from varuna_capslog.planning.chunks import chunk_bound
from varuna_capslog.planning.cuts import going_round
from varuna_capslog.planning.playing import with_step_seconds
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.solve import solve
from varuna_capslog.profiles.record import LayerProfile, Profile
from varuna_capslog.schedules import RunShape


def chain(draw: random.Random, size: int) -> Profile:
    """Return layers of a few kinds, as models have them: dense ones in front, a heavy last one, equal ones between."""
    dense, head, block = draw.uniform(0.4, 1.2), draw.uniform(0.5, 5.0), draw.uniform(0.8, 1.2)
    front = draw.randrange(0, min(4, size - 1))
    seconds = [dense] * front + [block] * (size - front - 1) + [head]
    seconds = [row * draw.uniform(0.9, 1.1) if draw.random() < 1 / 3 else row for row in seconds]
    rows = (
        LayerProfile(
            f"layer{number}",
            isolated_bytes=100,
            added_bytes=60 if number else None,
            static_bytes=20,
            saved_bytes=30,
            boundary_bytes=4,
            parameter_bytes=4,
            forward_seconds=row,
            backward_seconds=2 * row,
        )
        for number, row in enumerate(seconds)
    )
    return Profile(tuple(rows), conditions={"microbatch_size": 1})


def problem_of(profile: Profile, ranks: int, chunks: int, microbatches: int) -> Problem:
    run = RunShape(microbatches, "interleaved", recompute=False, microbatch_size=1)
    return dataclasses.replace(Problem.of(profile, ranks, run=run), stages_per_rank=chunks)


def step_of(problem: Problem, cuts: tuple[int, ...]) -> float:
    """Return the played step of a cut list."""
    plan = going_round(dataclasses.replace(problem, cuts=cuts), "throughput")
    seconds = with_step_seconds(problem.profile, plan, problem.share, problem.link).step_seconds
    assert seconds is not None
    return seconds


def small(chains: int, first: int) -> None:
    slower, begun = 0, time.perf_counter()
    for seed in range(first, first + chains):
        draw = random.Random(seed)
        size, chunks = draw.randint(6, 12), draw.choice([2, 3])
        problem = problem_of(chain(draw, size), 2, chunks, 2 * draw.randint(2, 4))
        answer = solve(problem, "throughput").step_seconds
        lists = itertools.combinations(range(1, size), 2 * chunks - 1)
        best = min(step_of(problem, (0, *cuts)) for cuts in lists)
        slower += answer is None or answer > best * (1 + 1e-9)
    print(
        f"small: {chains} chains, {slower} slower than the best of all cut lists, {time.perf_counter() - begun:.0f} s"
    )


def searched(problem: Problem, cuts: tuple[int, ...], draw: random.Random, seconds: float) -> float:
    """Return the shortest step that random moves of one to three cuts find, from the given cuts on."""
    best, until = step_of(problem, cuts), time.process_time() + seconds
    while time.process_time() < until:
        near = list(cuts)
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(1, len(near))
            near[place] += draw.choice([-1, 1])
        bounds = [*near, problem.profile.num_layers]
        if any(end <= start for start, end in itertools.pairwise(bounds)):
            continue
        step = step_of(problem, tuple(near))
        if step < best:
            best, cuts = step, tuple(near)
    return best


def long(chains: int, first: int, seconds: float) -> None:
    took, gaps, slower, gains = [], [], 0, []
    for seed in range(first, first + chains):
        draw = random.Random(seed)
        size = draw.randint(66, 126)
        problem = problem_of(chain(draw, size), 16, 4, 64)
        begun = time.process_time()
        answer = solve(problem, "throughput").step_seconds
        took.append(time.process_time() - begun)
        assert answer is not None
        even = tuple(round(stage * size / 64) for stage in range(64))
        rival = searched(problem, even, draw, seconds)
        gaps.append(answer / chunk_bound(problem) - 1)
        slower += answer > rival * (1 + 1e-9)
        gains.append(rival / answer)
        print(
            f"  {size} layers: {took[-1]:.1f} s, {100 * gaps[-1]:.1f} % above the bound, rival / ours {gains[-1]:.3f}"
        )
    print(
        f"long: {chains} chains, {statistics.median(took):.1f} s (most {max(took):.1f}), median gap "
        f"{100 * statistics.median(gaps):.1f} % (most {100 * max(gaps):.1f}), {slower} slower than the rival"
    )


def sizes(counts: list[int]) -> None:
    """Search alone, on 16 ranks with 4 stages each; below 64 layers some ranks have 3, an empty chunk of others."""
    for size in counts:
        problem = problem_of(chain(random.Random(size), size), 16, 4, 64)
        if (missing := 64 - size) > 0:
            problem = dataclasses.replace(problem, stages_per_rank=(4,) * (16 - missing) + (3,) * missing)
        begun = time.process_time()
        answer = solve(problem, "throughput").step_seconds
        took = time.process_time() - begun
        assert answer is not None
        print(f"| {size} | {took:.1f} | {100 * (answer / chunk_bound(problem) - 1):.1f} % |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=int, default=100)
    parser.add_argument("--long", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60, help="of the rival's search")
    parser.add_argument("--first", type=int, default=0, help="seed of the first chain")
    parser.add_argument("--layers", type=int, nargs="*", help="measure the search of chains of these sizes alone")
    args = parser.parse_args()
    if args.layers:
        sizes(args.layers)
        return
    small(args.small, args.first)
    long(args.long, args.first, args.seconds)


if __name__ == "__main__":
    main()
