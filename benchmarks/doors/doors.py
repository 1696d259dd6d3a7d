"""One question through every door that can state it, and the front of each: see README.md."""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.planning.doors import (
    Answers,
    answers_about,
    answers_about_model,
    drawn,
    elastic,
    step_of_front,
    step_of_replanning,
)
from tests.start.test_ordinary import convolutions, transformer
from varuna_capslog.planning.registry import REGISTRY


def main() -> int:
    """Draws, asks, prints; exit status 1 if two doors differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=100, help="about profiles")
    parser.add_argument("--models", type=int, default=30, help="questions about models")
    parser.add_argument("--seed", type=int, default=1000)
    given = parser.parse_args()
    asked, differ = Counter[str](), Counter[str]()

    def count(door: str, where: str, same: bool) -> None:
        asked[door] += 1
        if not same:
            differ[door] += 1
            print(f"{where}: {door} differs")

    def compare(answers: Answers, where: str) -> None:
        expected = answers.pop("train")
        for door, answer in answers.items():
            count(door, where, answer == expected)

    fitted = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(given.seed, given.seed + given.questions):
            question, where = drawn(seed), f"question {seed}"
            answers = answers_about(question, Path(folder))
            started = answers["train"]
            step = started["step_seconds"] if started["fits"] is not False else None
            fitted += step is not None
            compare(answers, where)
            if elastic(question):
                count("replanning", where, _equal(step_of_replanning(question), step))
            if question.planner == "throughput" or REGISTRY[question.planner].shape == "intervals":
                count("front", where, _equal(step_of_front(question, Path(folder)), step))
        for number in range(given.models):
            model, sample = (transformer, convolutions)[number % 2](random.Random(number))
            compare(answers_about_model(number, model, sample, Path(folder)), f"model {number}")
    print(f"{given.questions} questions about profiles, {fitted} of them with a plan that fits; {given.models} models")
    print("| door | asked | differs from the start of a run |")
    print("|---|---|---|")
    for door, times in asked.items():
        print(f"| {door} | {times} | {differ[door]} |")
    return 1 if differ else 0


def _equal(seconds: float | None, others: float | None) -> bool:
    """Whether two steps are as long, but for the order of sums; or neither is there."""
    if seconds is None or others is None:
        return seconds is others
    return math.isclose(seconds, others, rel_tol=1e-12)


if __name__ == "__main__":
    sys.exit(main())
