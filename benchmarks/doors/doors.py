"""Asks every entry point that can state a question for its plan and its front, and compares them: see README.md."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

import varuna_capslog as capslog
from tests.planning.doors import (
    Answers,
    answers_about,
    answers_about_model,
    drawn,
    elastic,
    equal_steps,
    step_of,
    step_of_front,
    step_of_replanning,
)
from tests.start.test_ordinary import Block
from varuna_capslog.planning.registry import REGISTRY
from varuna_capslog.plans.parts import MemoryInterval


def main() -> int:
    """Draw the questions, ask, and print the table; exit status 1 if two entry points differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=100, help="about profiles")
    parser.add_argument("--models", type=int, default=30, help="questions about models")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--fits", action="store_true", help="only the table of capslog.fit")
    args = parser.parse_args()
    if args.fits:
        compare_fits()
        return 0
    totals, differ = Counter[str](), Counter[str]()

    def count(door: str, where: str, same: bool) -> None:
        totals[door] += 1
        if not same:
            differ[door] += 1
            print(f"{where}: {door} differs")

    def compare(answers: Answers, where: str) -> None:
        expected = answers.pop("train")
        for door, answer in answers.items():
            count(door, where, answer == expected)

    fitted = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seed, args.seed + args.questions):
            question, where = drawn(seed), f"question {seed}"
            answers = answers_about(question, Path(folder))
            step = step_of(answers["train"])
            fitted += step is not None
            compare(answers, where)
            if elastic(question):
                count("replanning", where, equal_steps(step_of_replanning(question), step))
            if question.planner == "throughput" or REGISTRY[question.planner].shape == "intervals":
                count("front", where, equal_steps(step_of_front(question, Path(folder)), step))
        for number in range(args.models):
            compare(answers_about_model(number, Path(folder)), f"model {number}")
    print(f"{args.questions} questions about profiles, {fitted} of them with a plan that fits; {args.models} models")
    print("| door | asked | differs from the start of a run |")
    print("|---|---|---|")
    for door, times in totals.items():
        print(f"| {door} | {times} | {differ[door]} |")
    return 1 if differ else 0


def compare_fits() -> None:
    """Print the layers that `fit` and a plan for one device recompute within the same bytes."""
    torch.manual_seed(0)
    print("| rows | budget, bytes | fit: layers again | bytes | plan: layers again | bytes |")
    print("|---|---|---|---|---|---|")
    for rows in (4, 8, 12):
        model = nn.Sequential(nn.Embedding(500, 64), *(Block(64, True) for _ in range(4)), nn.Linear(64, 20))
        sample = torch.zeros(rows, 64, dtype=torch.long)
        most = capslog.fit(model, sample, budget="4GB").fits[0].peak_bytes
        for tenths in (9, 8, 7):
            budget = most * tenths // 10
            fitted = capslog.fit(model, sample, budget=budget).fits[0]
            one_block = {"train.accumulation_blocks": 1}
            plan = capslog.plan(
                model, sample, devices=1, capacity=budget, device="cpu", minibatch_size=rows, settings=one_block
            )
            assert plan.fits
            cells = [_again(fitted.intervals), fitted.peak_bytes, _again(plan.stages[0].memory or ()), plan.peak_bytes]
            print(f"| {rows} | {budget} | " + " | ".join(map(str, cells)) + " |")


def _again(intervals: Sequence[MemoryInterval]) -> str:
    return " ".join(str(layer) for interval in intervals for layer in range(interval.first, interval.end)) or "none"


if __name__ == "__main__":
    sys.exit(main())
