"""Measures how far `dawnpiper` and `vpipe` are from the best cuts, on random chains with synthetic bytes.

Prints the table of README.md. The best cuts are found by dynamic programming over all of them; each stage is treated as
the planner in question treats it, so that only the choice of the cuts is compared.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.planners.layered import chain_of
from varuna_capslog.planners.capuchin import treated_stage
from varuna_capslog.planners.dawnpiper import dawnpiper_stages
from varuna_capslog.planners.layerwise import Layerwise, StageChoice
from varuna_capslog.planners.vpipe import tail_treated_stage, vpipe_stages

Value = tuple[int, float]
"""Bytes lacking, and the seconds of the slowest stage."""

LAYERS = 32
KINDS: dict[str, tuple[Callable[..., list[StageChoice]], Callable[..., StageChoice]]] = {
    "dawnpiper": (dawnpiper_stages, treated_stage),
    "vpipe": (vpipe_stages, tail_treated_stage),
}


def drawn(dice: random.Random, stages: int) -> Layerwise:
    """Draw a chain under 1F1B, on devices with 1.1, 0.9 or 0.75 of the bytes that balanced stages would need."""
    saved = [dice.randint(20, 120) for _ in range(LAYERS)]
    in_flight = list(range(stages, 0, -1))
    usable = int(sum(saved) / sum(1 / count for count in in_flight) * dice.choice([1.1, 0.9, 0.75]))
    forward = [dice.uniform(0.5, 3) for _ in range(LAYERS)]
    return chain_of(forward, saved, in_flight, [usable] * stages, freed=[layer_bytes * 4 // 5 for layer_bytes in saved])


def best(chain: Layerwise, treat: Callable[..., StageChoice]) -> Value:
    """Return the best (lacking bytes, seconds) over all cuts."""

    @functools.cache
    def behind(stage: int, first: int) -> Value:
        remaining = chain.stages - stage - 1
        ends = range(first + 1, chain.num_layers - remaining + 1) if remaining else [chain.num_layers]
        outcomes = []
        for end in ends:
            choice = treat(chain, stage, first, end)
            lack, seconds = behind(stage + 1, end) if remaining else (0, 0.0)
            outcomes.append((max(lack, choice.lack), max(seconds, choice.seconds)))
        return min(outcomes)

    return behind(0, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=60, help="for each number of devices")
    count = parser.parse_args().instances
    print("| planner | devices | something fits | planner's fits | the best | longer on average | at most |")
    print("|---|---|---|---|---|---|---|")
    for name, (plan, treat) in KINDS.items():
        for stages in (2, 3, 4, 6, 8):
            fits, longer = 0, []
            for number in range(count):
                chain = drawn(random.Random(f"{stages} {number}"), stages)
                lack, seconds = best(chain, treat)
                if lack:
                    continue
                fits += 1
                choices = plan(chain)
                if not any(choice.lack for choice in choices):
                    longer.append(max(choice.seconds for choice in choices) / seconds - 1)
            equal = sum(excess < 1e-9 for excess in longer)
            mean = sum(longer) / max(1, len(longer))
            print(
                f"| {name} | {stages} | {fits} | {len(longer)} | {equal} | {100 * mean:.1f} % | "
                f"{100 * max(longer, default=0):.1f} % |"
            )


if __name__ == "__main__":
    main()
