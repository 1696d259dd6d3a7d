"""Searches the largest batch or image size that fits, among candidate values. Imports no torch."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from varuna_capslog.memory.inflight import waiting
from varuna_capslog.schedules import RunShape

__all__ = [
    "IMAGE_STEP",
    "MOST_SAMPLES",
    "MOST_TOKENS",
    "TOKENS_STEP",
    "coarse_sizes",
    "enough_microbatches",
    "image_of",
    "largest_by_bytes",
    "microbatch_sizes",
    "microbatch_step",
]

IMAGE_STEP = 32
"""Pixels between candidate image sides: the backbones of detectors divide an image by it."""
MOST_SAMPLES = 1 << 16
"""Most samples of a microbatch: the end of the search where the samples of a step are not given."""
TOKENS_STEP, MOST_TOKENS = 64, 1 << 20
"""Tokens between candidate sequence lengths, and the end of their search where the model has no limit."""


def coarse_sizes(step: int, most: int) -> list[int]:
    """Return rising multiples of `step` up to `most`, which is the last: all multiples up to 32 steps, then multiples
    of 2, 4, 8, ... steps, so that each size is at most 1/16 above its predecessor.
    """
    sizes, size, gap = [], step, step
    while size < most:
        sizes.append(size)
        gap *= 2 if size >= 32 * gap else 1
        size += gap
    return [*sizes, most]


_STRAIGHT = 4
"""Number of values that the straight line chooses; after these, every second value halves the open range."""


def largest_by_bytes(values: Sequence[int], lack: Callable[[int], int], known: Mapping[int, int]) -> Iterator[int]:
    """Yield each tried value that fits and is larger than all before; the last is the largest of `values` (rising).

    Memory is nearly affine in the value, so the next value is where the straight line through two known lacks meets
    the capacity, kept between the largest value that fits and the smallest that does not. Assumes that every value
    above a value that does not fit does not fit either.

    Args:
        lack: value -> bytes that it lacks; 0 or less: it fits.
        known: lacks by value, of `values` or not, at least one; these values are not tried again.
    """
    points, tried = dict(known), 0
    low = max((bisect_right(values, value) - 1 for value in points if points[value] <= 0), default=-1)
    high = min((bisect_left(values, value) for value in points if points[value] > 0), default=len(values))
    if low >= 0:
        yield values[low]
    while high - low > 1:
        near = bisect_right(values, _crossing(points)) - 1
        halves = tried >= _STRAIGHT and tried % 2 == 1
        position = (low + high) // 2 if halves else min(max(near, low + 1), high - 1)
        value, tried = values[position], tried + 1
        points[value] = lack(value)
        if points[value] <= 0:
            low = position
            yield value
        else:
            high = position


def _crossing(points: Mapping[int, int]) -> float:
    """Return the value at which the straight line through the two points nearest to the capacity has lack 0; twice the
    largest value where the line does not rise.
    """
    fitting = sorted(value for value in points if points[value] <= 0)
    lacking = sorted(value for value in points if points[value] > 0)
    first, second = (sorted([*fitting[-2:], *lacking[:2]], key=lambda value: abs(points[value]))[:2] * 2)[:2]
    if fitting and lacking:
        first, second = fitting[-1], lacking[0]
    slope = (points[second] - points[first]) / (second - first) if second != first else 0.0
    return 2.0 * max(points) if slope <= 0 else first - points[first] / slope


def microbatch_sizes(minibatch_size: int, blocks: int) -> list[int]:
    """Microbatch sizes in samples, rising, that divide the samples of a step evenly among the blocks."""
    share = minibatch_size // blocks
    return [size for size in range(1, share + 1) if share % size == 0]


def microbatch_step(run: RunShape, devices: int) -> int:
    """Return the number that divides every candidate count of microbatches: the accumulation blocks, and with
    `interleaved`, whose rounds have as many microbatches as devices, also `devices` (ranks of all pipelines).
    """
    return math.lcm(run.num_blocks, devices) if run.schedule == "interleaved" else run.num_blocks


def enough_microbatches(run: RunShape, replicas: int, stages: int, step: int, one_memory: bool) -> int | None:
    """Return a number of microbatches, a multiple of `step`, with which every stage holds as much as with any larger
    number; None where a stage holds more with every further microbatch, or the plan's own limits are not known yet.

    Stages hold what the memory models count as waiting (`inflight.waiting`). The number is four times what brings
    every stage beyond its limit, and at least two microbatches in each block, so that a backward finds gradients: on a
    CPU, messages that are not yet confirmed add some KiB in the first rounds after the limit (1F1B on
    configs/tiny.yaml: 49 KiB with twice the number, 32 KiB with four times, none with 8 and 16 times).

    run: the whole step, over `replicas` pipelines of `stages` stages. step: a multiple of the run's blocks.
    one_memory: True if the device is the CPU, where tensors that wait on the host are in the same memory.
    """

    def held(count: int) -> object:
        shape = replace(run, num_microbatches=max(1, count // replicas), num_blocks=1)
        return waiting(shape, stages, one_memory)

    many = 4 * run.k * stages * replicas * step  # above every limit that is independent of the count
    if run.limits_by_plan or held(many) != held(2 * many):
        return None
    enough = next(count for count in range(step, many + 1, step) if held(count) == held(many))
    return max(4 * (enough + step), -(-2 * run.num_blocks // step) * step)


def image_of(side: int, aspect: Sequence[int] | None) -> list[int]:
    """Return [height, width] of the image whose longer side has `side` pixels.

    aspect: [height, width] of the ratio, rounded to multiples of IMAGE_STEP; None: a square.
    """
    height, width = aspect or (1, 1)
    shorter = max(IMAGE_STEP, round(side * min(height, width) / max(height, width) / IMAGE_STEP) * IMAGE_STEP)
    return [side, shorter] if height >= width else [shorter, side]
