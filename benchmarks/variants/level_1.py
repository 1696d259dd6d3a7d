"""Compares Collage's level 1 with every choice of variants of random tables, prices of neighbours included.

Once as printed, where a run in a joined variant may be split into patterns that do not know each other, and once with
such runs whole. Exit status 1 where the latter is wrong.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.planners.test_collage import priced_profile, smallest_sum
from varuna_capslog.planners.collage import patterns_of, placed, seconds_under

SAME = 1e-9


def main() -> int:
    """Print the table of README.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    arguments = parser.parse_args()
    rows: dict[str, list[tuple[bool, float]]] = {"as printed": [], "runs whole": []}
    for seed in range(arguments.first, arguments.first + arguments.tables):
        draw = random.Random(seed)
        profile = priced_profile(draw, draw.randrange(2, 6))
        least = smallest_sum(profile)
        for name, joined in (("as printed", []), ("runs whole", ["v0"])):
            placement = placed(profile.num_layers, profile.edges, patterns_of(profile), joined=joined)
            price = sum(seconds_under(profile, placement.chosen))
            rows[name].append((abs(price - placement.seconds) > SAME * price, price / least))
    print("| level 1 | tables | price is not its choice's | a cheaper choice exists | worst |\n|---|---|---|---|---|")
    for name, answers in rows.items():
        ratios = [ratio for _, ratio in answers]
        dearer = sum(ratio > 1 + SAME for ratio in ratios)
        cells = name, len(answers), sum(wrong for wrong, _ in answers), dearer, f"{max(ratios):.2f}"
        print(f"| {' | '.join(map(str, cells))} |")
    return any(wrong or ratio > 1 + SAME for wrong, ratio in rows["runs whole"])


if __name__ == "__main__":
    sys.exit(main())
