"""Judges a run by its members' records, the store's records, and an uninterrupted run of the plain engine.

A pure function of these: it does not know the injected faults, except for the network partitions, whose sides it
checks. One breach is a failed run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from varuna_capslog.membership.generation import Generation, Member, Stamp

__all__ = ["NetworkPartition", "Opened", "Segment", "Stepped", "Truth", "judge", "read_segment"]

_MOST = 20
_OPENINGS = 4
"""A group of two ranks that is being ended may be there when the next generations are opened; one that is there at
so many openings in a row was forgotten."""


@dataclass(frozen=True)
class Opened:
    """A member has begun a generation.

    Attributes:
        left: groups of two ranks in its process that are older than its last generation; counted with the stand-in for
            NCCL.
    """

    member: Member
    generation: int
    base: Stamp
    members: tuple[Member, ...]
    time: float
    left: int = 0


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
class NetworkPartition:
    """Period in which one side of the network could not hear the other; `away`: members cut off from the store."""

    begin: float
    end: float
    away: frozenset[Member]


@dataclass
class Segment:
    """The part of a run between two losses of the store.

    Attributes:
        first: step of the checkpoint that it began with.
        founded: every generation in the order of the log, with the time at which an observer had seen it.
        broken: generations that a member has aborted, by the log; not those that end by a vote. None where it was not
            observed.
    """

    first: int = 0
    opened: list[Opened] = field(default_factory=list)
    stepped: list[Stepped] = field(default_factory=list)
    founded: list[tuple[Generation, float]] = field(default_factory=list)
    broken: set[int] | None = None
    partitions: list[NetworkPartition] = field(default_factory=list)

    @property
    def records(self) -> dict[int, Generation]:
        """Records of generations that the store held, by number."""
        return {record.number: record for record, _ in self.founded}

    @property
    def bases(self) -> dict[int, Stamp]:
        """Base of each generation that a member has begun, by number."""
        return {opening.generation: opening.base for opening in self.opened}


@dataclass(frozen=True)
class Truth:
    """Results of the uninterrupted run: (loss, gradient norm) by step, and the names of its last weights by layer."""

    steps: Mapping[int, tuple[float, float]]
    weights: Mapping[str, str]


def read_segment(lines: Iterable[Mapping[str, Any]], segment: Segment) -> None:
    """Add the lines that watched members wrote."""
    for line in lines:
        if line["kind"] == "open":
            base, members = Stamp(*line["base"]), tuple(line["members"])
            opening = Opened(line["member"], line["generation"], base, members, line["time"], line.get("left", 0))
            segment.opened.append(opening)
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
    segments: Sequence[Segment],
    truth: Truth,
    weights: Mapping[str, str],
    last: int,
    settled_within: int = 1,
    redundancy: int | None = None,
) -> list[str]:
    """Sentences about all that is wrong with a run; empty for a correct run.

    Args:
        weights: as `truth.weights`, of the run's last checkpoint.
        last: the step that the run ended with.
        settled_within: the most steps that a change may take back: 1 with `sync`, 2 with `async`.
        redundancy: number of members that may be lost without going back to a checkpoint; None where copies may find no
            room.
    """
    breaches: list[str] = []
    digests: dict[tuple[int, str], str] = {}
    for number, segment in enumerate(segments):
        name = f"segment {number}: "
        breaches += [name + text for text in _equality(segment, truth, digests)]
        breaches += [name + text for text in _order(segment)]
        breaches += [name + text for text in _votes(segment)]
        breaches += [name + text for text in _fences(segment)]
        breaches += [name + text for text in _lineage(segment)]
        breaches += [name + text for text in _taken_back(segment, settled_within, redundancy)]
        breaches += [name + text for text in _sides(segment)]
        breaches += [name + text for text in _left_behind(segment)]
    breaches += _history(segments, last)
    for layer in sorted(set(truth.weights) | set(weights)):
        if truth.weights.get(layer) != weights.get(layer):
            breaches.append(f"the last weights of layer {layer} differ from the uninterrupted run's")
    return breaches if len(breaches) <= _MOST else [*breaches[:_MOST], f"and {len(breaches) - _MOST} more"]


def _equality(segment: Segment, truth: Truth, digests: dict[tuple[int, str], str]) -> Iterable[str]:
    """Check that every step that a member applied, also if taken back later, has the right numbers and states."""
    for step in segment.stepped:
        right = truth.steps.get(step.step)
        if right != (step.loss, step.grad_norm):
            yield (
                f"{step.member} applied step {step.step} of generation {step.generation} with loss {step.loss!r} and "
                f"gradient norm {step.grad_norm!r}; the uninterrupted run has {right}"
            )
        for layer, text in step.digests.items():
            if digests.setdefault((step.step, layer), text) != text:
                yield (
                    f"{step.member} has another state of layer {layer} after step {step.step} of generation "
                    f"{step.generation} than others"
                )


def _order(segment: Segment) -> Iterable[str]:
    """A member applies the steps of a generation one by one from its base, and never comes back to an older one; all
    members agree on base and members."""
    bases: dict[int, Opened] = {}
    newest: dict[Member, int] = {}
    next_step: dict[tuple[Member, int], int] = {}
    events: list[Opened | Stepped] = [*segment.opened, *segment.stepped]
    events.sort(key=lambda event: event.time)
    for event in events:
        if isinstance(event, Opened):
            first = bases.setdefault(event.generation, event)
            if (first.base, first.members) != (event.base, event.members):
                yield (
                    f"generation {event.generation} begins at {event.base} for {event.member}, "
                    f"at {first.base} for {first.member}"
                )
            if event.member not in event.members:
                yield f"{event.member} opened generation {event.generation} without being a member"
            next_step[(event.member, event.generation)] = event.base.step + 1
            newest[event.member] = max(newest.get(event.member, 0), event.generation)
        else:
            if event.generation < newest.get(event.member, 0):
                yield (
                    f"{event.member} applied step {event.step} of generation {event.generation} after it had begun "
                    f"generation {newest[event.member]}"
                )
            expected = next_step.get((event.member, event.generation))
            if event.step != expected:
                yield (
                    f"{event.member} applied step {event.step} of generation {event.generation}, but "
                    f"{'had not opened it' if expected is None else f'step {expected} was due'}"
                )
            next_step[(event.member, event.generation)] = event.step + 1


def _votes(segment: Segment) -> Iterable[str]:
    """A step needs the vote of every member of its generation, and a member that votes has made the step before.

    So two groups that share a member cannot both train, whatever the clocks say.
    """
    opened: dict[int, set[Member]] = defaultdict(set)
    made: dict[tuple[int, int], set[Member]] = defaultdict(set)
    members = {opening.generation: opening.members for opening in segment.opened}
    bases = segment.bases
    for opening in segment.opened:
        opened[opening.generation].add(opening.member)
    for step in segment.stepped:
        made[step.generation, step.step].add(step.member)
    for (generation, number), some in sorted(made.items()):
        if generation not in members:
            continue  # `_order` says so
        first = number == bases[generation].step + 1
        ready = opened[generation] if first else made.get((generation, number - 1), set())
        for member in sorted(set(members[generation]) - ready):
            yield (
                f"{min(some)} applied step {number} of generation {generation} without the vote of {member}, which had "
                f"{'not begun it' if first else f'not made step {number - 1}'}"
            )


def _fences(segment: Segment) -> Iterable[str]:
    """Generations never train at the same time, and only members of generations that the store has held train."""
    numbers = [generation.number for generation, _ in segment.founded]
    if numbers != sorted(set(numbers)):
        yield f"the log has generations in the order {numbers}"
    records = segment.records
    founded = {generation.number: seen for generation, seen in segment.founded}
    for began in segment.opened:  # the observer may have heard of it later than its members
        if began.generation in founded:
            founded[began.generation] = min(founded[began.generation], began.time)
            if began.members != records[began.generation].members:
                yield (
                    f"{began.member} began generation {began.generation} with {', '.join(began.members)}; "
                    f"the store has {', '.join(records[began.generation].members)}"
                )
    earliest: dict[int, float] = {}
    for number in sorted(founded, reverse=True):  # a newer generation comes after all older ones
        earliest[number] = min(founded[number], earliest.get(number + 1, founded[number]))
    late: dict[tuple[Member, int], int] = defaultdict(int)
    for step in segment.stepped:
        if step.generation not in records:
            yield f"{step.member} trained in generation {step.generation}, which the store has never held"
            continue
        if step.member not in records[step.generation].members:
            yield f"{step.member} trained in generation {step.generation} without being a member of it"
        if step.generation + 1 in earliest and step.time > earliest[step.generation + 1]:
            late[(step.member, step.generation)] += 1
    for (member, generation), steps in late.items():
        if steps > 1:
            yield f"{member} applied {steps} steps of generation {generation} after the next one was founded"


def _lineage(segment: Segment) -> Iterable[str]:
    """Check that the store's lineage is what happened, and that no member goes on from a step that was taken back."""
    bases = segment.bases
    told: set[tuple[int, Stamp]] = set()
    for record, _ in segment.founded:
        for generation, base in record.lineage:
            if bases.get(generation, base) != base and (generation, base) not in told:
                told.add((generation, base))
                yield (
                    f"generation {generation} began at {bases[generation]}, but by the record of generation "
                    f"{record.number} at {base}"
                )
        if record.number in bases and not record.continues(bases[record.number]):
            yield f"generation {record.number} began at {bases[record.number]}, which its record says was taken back"


def _taken_back(segment: Segment, settled_within: int, redundancy: int | None) -> Iterable[str]:
    """A change takes back at most the steps that were not settled; none where no member was lost and all had made the
    step, or the change was voted.

    Only a generation that may go back to a checkpoint loses settled steps, and only where more members were lost than
    the redundancy covers. Losses before generations that made no new copies (small motions) count too.
    """
    records = segment.records
    opened = {opening.generation: opening for opening in segment.opened}
    made: dict[int, dict[Member, int]] = defaultdict(dict)
    for step in segment.stepped:
        made[step.generation][step.member] = max(made[step.generation].get(step.member, 0), step.step)
    reached, source, trained = -1, 0, 0  # newest step, its generation, and the last generation that made a step
    protected, missed = set[Member](), set[Member]()  # members when copies were placed; those of them lost since
    for number in sorted(opened):
        base = opened[number].base.step
        between = [records[k] for k in range(trained + 1, number + 1) if k in records]
        before = opened[trained].members if trained in opened else ()
        if base < reached - settled_within:
            gone = protected - set(records[number].participants if number in records else before) | missed
            if not any(record.regress for record in between):
                yield (
                    f"generation {source} had reached step {reached}, but generation {number} went on from step {base}"
                )
            elif redundancy is not None and len(gone) <= min(redundancy, len(protected) - 1):
                yield (
                    f"generation {number} went back from step {reached} to {base}, though of generation {trained} only "
                    f"{', '.join(sorted(gone)) or 'nobody'} was lost"
                )
            reached, source = base, number
        elif trained in opened and between and all(set(before) <= set(record.participants) for record in between):
            last = [made[trained].get(member, 0) for member in before]
            voted = number == trained + 1 and segment.broken is not None and trained not in segment.broken
            if base < (max(last) if voted else min(last)):
                yield (
                    f"generation {number} went on from step {base}, though generation {trained} had made step "
                    f"{max(last)}, none of its members was lost and "
                    f"{'it ended by a vote' if voted else 'all of them had made more'}"
                )
        if made[number]:
            trained, newest = number, max(made[number].values())
            if number in records and records[number].copies is not None:
                missed |= protected - set(opened[number].members)
            else:
                protected, missed = set(opened[number].members), set()
            if newest > reached:
                reached, source = newest, number


def _sides(segment: Segment) -> Iterable[str]:
    """The side of a partition that cannot reach the store ends the vote under way, and trains no more."""
    members = {opening.generation: set(opening.members) for opening in segment.opened}
    for partition in segment.partitions:
        steps: dict[Member, int] = defaultdict(int)
        for step in segment.stepped:
            if not partition.begin < step.time < partition.end or step.member not in partition.away:
                continue
            if members.get(step.generation, set()) - partition.away:  # else all of them are on this side: see `_fences`
                steps[step.member] += 1
        for member, count in steps.items():
            if count > 1:
                yield f"{member} applied {count} steps while it was cut off from the rest and from the store"


def _left_behind(segment: Segment) -> Iterable[str]:
    """Check that no member keeps groups of two ranks of generations that have ended."""
    openings: dict[Member, list[Opened]] = defaultdict(list)
    for opening in sorted(segment.opened, key=lambda opening: opening.time):
        openings[opening.member].append(opening)
    for member, openings_of_member in openings.items():
        for last in range(_OPENINGS, len(openings_of_member) + 1):
            least = min(opening.left for opening in openings_of_member[last - _OPENINGS : last])
            if least > 0:
                yield (
                    f"{member} had {least} groups of older generations open at each of {_OPENINGS} openings, "
                    f"the last of generation {openings_of_member[last - 1].generation}"
                )
                break


def _history(segments: Sequence[Segment], last: int) -> Iterable[str]:
    """Check that, going back from the end, every step that counts was made exactly once."""
    wanted = last
    for number in range(len(segments) - 1, -1, -1):
        segment = segments[number]
        made = {(step.step, step.generation) for step in segment.stepped}
        if not segment.opened:
            if wanted > segment.first:
                yield f"segment {number}: nobody trained, yet the next one began with step {wanted}"
            wanted = segment.first if wanted > segment.first else wanted
            continue
        bases = segment.bases
        reaching = [generation for step_number, generation in made if step_number == wanted]
        stamp = Stamp(wanted, max(reaching)) if reaching else Stamp(wanted, 0)
        while stamp.step > segment.first:
            if (stamp.step, stamp.generation) not in made:
                yield f"segment {number}: nobody has applied step {stamp.step} of generation {stamp.generation}"
                break
            base = bases.get(stamp.generation)
            if base is None:
                yield f"segment {number}: nobody has begun generation {stamp.generation}"
                break
            stamp = base if stamp.step - 1 == base.step else Stamp(stamp.step - 1, stamp.generation)
            if stamp.step < base.step:
                yield f"segment {number}: generation {stamp.generation} began after the step that it went on from"
                break
        wanted = segment.first
    if wanted != 0:
        yield f"the history begins with step {wanted}"
