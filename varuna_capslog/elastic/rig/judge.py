"""Judges a run by what its members wrote down, the store's records, and an uninterrupted run of the plain engine.

A pure function of these: it knows nothing of how the run was disturbed, but for the partitions whose sides are watched.
One breach is a failed run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from varuna_capslog.elastic.generation import Generation, Member, Stamp

__all__ = ["Opened", "Partition", "Segment", "Stepped", "Truth", "judge", "read_segment"]

_MOST = 20


@dataclass(frozen=True)
class Opened:
    """A member has begun a generation."""

    member: Member
    generation: int
    base: Stamp
    members: tuple[Member, ...]
    time: float


@dataclass(frozen=True)
class Stepped:
    """A member has applied a step; `digests` name the states of its own layers after it."""

    member: Member
    generation: int
    step: int
    loss: float
    grad_norm: float
    digests: Mapping[str, str]
    time: float


@dataclass(frozen=True)
class Partition:
    """One side of the network could not hear the other: `away` is the one without the store."""

    begin: float
    end: float
    away: frozenset[Member]


@dataclass
class Segment:
    """The part of a run between two losses of the store.

    Attributes:
        first: step of the checkpoint that it began with.
        founded: every generation in the order of the log, with the time at which an observer had seen it.
    """

    first: int = 0
    opened: list[Opened] = field(default_factory=list)
    stepped: list[Stepped] = field(default_factory=list)
    founded: list[tuple[Generation, float]] = field(default_factory=list)
    partitions: list[Partition] = field(default_factory=list)


@dataclass(frozen=True)
class Truth:
    """What the uninterrupted run says: (loss, gradient norm) by step, and the names of its last weights by layer."""

    steps: Mapping[int, tuple[float, float]]
    weights: Mapping[str, str]


def read_segment(lines: Iterable[Mapping[str, Any]], segment: Segment) -> None:
    """Adds the lines that watched members left."""
    for line in lines:
        if line["kind"] == "open":
            found = Opened(
                line["member"], line["generation"], Stamp(*line["base"]), tuple(line["members"]), line["time"]
            )
            segment.opened.append(found)
        elif line["kind"] == "step":
            segment.stepped.append(
                Stepped(
                    line["member"],
                    line["generation"],
                    line["step"],
                    line["loss"],
                    line["grad_norm"],
                    line["digests"],
                    line["time"],
                )
            )


def judge(
    segments: Sequence[Segment], truth: Truth, weights: Mapping[str, str], last: int, settled_within: int = 1
) -> list[str]:
    """What is wrong with a run, in sentences; nothing for one that is as it should be.

    Args:
        weights: as `truth.weights`, of the run's last checkpoint.
        last: the step that it ended with.
        settled_within: the most steps that a change may take back: 1 with `sync`, 2 with `async`.
    """
    found: list[str] = []
    digests: dict[tuple[int, str], str] = {}
    for number, segment in enumerate(segments):
        name = f"segment {number}: "
        found += [name + text for text in _equality(segment, truth, digests)]
        found += [name + text for text in _order(segment)]
        found += [name + text for text in _fences(segment, settled_within)]
        found += [name + text for text in _sides(segment)]
    found += _history(segments, last)
    for layer in sorted(set(truth.weights) | set(weights)):
        if truth.weights.get(layer) != weights.get(layer):
            found.append(f"the last weights of layer {layer} differ from the uninterrupted run's")
    return found if len(found) <= _MOST else [*found[:_MOST], f"and {len(found) - _MOST} more"]


def _equality(segment: Segment, truth: Truth, digests: dict[tuple[int, str], str]) -> Iterable[str]:
    """Every step that anybody ever applied, also those taken back later, has the right numbers and states."""
    for one in segment.stepped:
        right = truth.steps.get(one.step)
        if right != (one.loss, one.grad_norm):
            yield (
                f"{one.member} applied step {one.step} of generation {one.generation} with loss {one.loss!r} and "
                f"gradient norm {one.grad_norm!r}; the uninterrupted run has {right}"
            )
        for layer, text in one.digests.items():
            if digests.setdefault((one.step, layer), text) != text:
                yield (
                    f"{one.member} has another state of layer {layer} after step {one.step} of generation "
                    f"{one.generation} than others"
                )


def _order(segment: Segment) -> Iterable[str]:
    """A member applies the steps of a generation one by one from its base; all members agree on base and members."""
    bases: dict[int, Opened] = {}
    next_step: dict[tuple[Member, int], int] = {}
    events: list[Opened | Stepped] = [*segment.opened, *segment.stepped]
    events.sort(key=lambda one: one.time)
    for one in events:
        if isinstance(one, Opened):
            first = bases.setdefault(one.generation, one)
            if (first.base, first.members) != (one.base, one.members):
                yield (
                    f"generation {one.generation} begins at {one.base} for {one.member}, "
                    f"at {first.base} for {first.member}"
                )
            if one.member not in one.members:
                yield f"{one.member} opened generation {one.generation} without being a member"
            next_step[(one.member, one.generation)] = one.base.step + 1
        else:
            expected = next_step.get((one.member, one.generation))
            if one.step != expected:
                yield (
                    f"{one.member} applied step {one.step} of generation {one.generation}, but "
                    f"{'had not opened it' if expected is None else f'step {expected} was due'}"
                )
            next_step[(one.member, one.generation)] = one.step + 1


def _fences(segment: Segment, settled_within: int) -> Iterable[str]:
    """Generations never train side by side, and what was settled stays."""
    numbers = [generation.number for generation, _ in segment.founded]
    if numbers != sorted(set(numbers)):
        yield f"the log has generations in the order {numbers}"
    records: dict[int, tuple[Generation, float]] = {
        generation.number: (generation, seen) for generation, seen in segment.founded
    }
    late: dict[tuple[Member, int], int] = defaultdict(int)
    newest: dict[int, int] = {}
    for one in segment.stepped:
        if one.generation not in records:
            yield f"{one.member} trained in generation {one.generation}, which the store has never held"
            continue
        if one.member not in records[one.generation][0].members:
            yield f"{one.member} trained in generation {one.generation} without being a member of it"
        newest[one.generation] = max(newest.get(one.generation, 0), one.step)
        if one.generation + 1 in records and one.time > records[one.generation + 1][1]:
            late[(one.member, one.generation)] += 1
    for (member, generation), steps in late.items():
        if steps > 1:
            yield f"{member} applied {steps} steps of generation {generation} after the next one was founded"
    bases = {one.generation: one.base for one in segment.opened}
    for generation, step in newest.items():
        after = min((number for number in bases if number > generation), default=None)
        between = [records[number][0] for number in range(generation + 1, (after or 0) + 1) if number in records]
        if after is None or any(record.regress for record in between):
            continue
        if step > bases[after].step + settled_within:
            yield (
                f"generation {generation} had reached step {step}, but generation {after} went on from step "
                f"{bases[after].step}"
            )


def _sides(segment: Segment) -> Iterable[str]:
    """The side of a partition that cannot reach the store ends the vote under way, and trains no more."""
    members = {one.generation: set(one.members) for one in segment.opened}
    for partition in segment.partitions:
        steps: dict[Member, int] = defaultdict(int)
        for one in segment.stepped:
            if not partition.begin < one.time < partition.end or one.member not in partition.away:
                continue
            if members.get(one.generation, set()) - partition.away:  # else all of them are on this side: see `_fences`
                steps[one.member] += 1
        for member, count in steps.items():
            if count > 1:
                yield f"{member} applied {count} steps while it was cut off from the rest and from the store"


def _history(segments: Sequence[Segment], last: int) -> Iterable[str]:
    """Going back from the end, every step was made exactly once in what counts."""
    wanted = last
    for number in range(len(segments) - 1, -1, -1):
        segment = segments[number]
        made = {(one.step, one.generation) for one in segment.stepped}
        if not segment.opened:
            if wanted > segment.first:
                yield f"segment {number}: nobody trained, yet the next one began with step {wanted}"
            wanted = segment.first if wanted > segment.first else wanted
            continue
        bases = {one.generation: one.base for one in segment.opened}
        reaching = [generation for step, generation in made if step == wanted]
        stamp = Stamp(wanted, max(reaching)) if reaching else Stamp(wanted, 0)
        while stamp.step > segment.first:
            if (stamp.step, stamp.generation) not in made:
                yield f"segment {number}: nobody has applied step {stamp.step} of generation {stamp.generation}"
                break
            base = bases[stamp.generation]
            stamp = base if stamp.step - 1 == base.step else Stamp(stamp.step - 1, stamp.generation)
            if stamp.step < base.step:
                yield f"segment {number}: generation {stamp.generation} began after the step that it went on from"
                break
        wanted = segment.first
    if wanted != 0:
        yield f"the history begins with step {wanted}"
