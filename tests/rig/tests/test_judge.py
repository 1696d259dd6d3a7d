"""The judge of chaos runs finds every kind of breach: a run written by hand passes, each change of it does not."""

from __future__ import annotations

import dataclasses

import pytest

from tests.rig.judge import NetworkPartition, Opened, Segment, Stepped, Truth, judge, read_segment
from varuna_capslog.membership.generation import Generation, Stamp

LOSS = {step: (1.0 / step, 0.5 / step) for step in range(1, 9)}
TRUTH = Truth(LOSS, {"stem": "w0", "head": "w1"})
WEIGHTS = {"stem": "w0", "head": "w1"}


def opened(member, generation, base, members, time):
    return Opened(member, generation, Stamp(*base), members, time)


def stepped(member, generation, step, time, layer):
    return Stepped(member, generation, step, *LOSS[step], {layer: f"state of {layer} after {step}"}, time)


def good_run():
    """a and b make 1..3 and a alone 4, of which b never hears; b dies; a goes on from 3, c joins for 6..8."""
    first = Generation(1, ("a", "b"))
    second = first.successor(("a",), base=Stamp(0, 0), reached=4)
    third = second.successor(("a", "c"), base=Stamp(3, 1), reached=5)
    run = Segment(0)
    run.founded = [(first, 0.0), (second, 5.0), (third, 8.0)]
    run.opened = [
        opened("a", 1, (0, 0), ("a", "b"), 0.5),
        opened("b", 1, (0, 0), ("a", "b"), 0.5),
        opened("a", 2, (3, 1), ("a",), 5.5),
        opened("a", 3, (5, 2), ("a", "c"), 8.5),
        opened("c", 3, (5, 2), ("a", "c"), 8.5),
    ]
    run.stepped = [
        stepped(member, 1, step, step, layer) for step in (1, 2, 3) for member, layer in (("a", "0"), ("b", "1"))
    ]
    run.stepped += [stepped("a", 1, 4, 4.5, "0")]
    run.stepped += [stepped("a", 2, step, step + 2.0, layer) for step in (4, 5) for layer in ("0",)]
    run.stepped += [
        stepped(member, 3, step, step + 3.0, layer) for step in (6, 7, 8) for member, layer in (("a", "0"), ("c", "1"))
    ]
    return run


def change(run, index, **values):
    run.stepped[index] = dataclasses.replace(run.stepped[index], **values)


def test_a_right_run_passes_with_the_step_that_was_taken_back():
    assert judge([good_run()], TRUTH, WEIGHTS, 8) == []


def wrong_loss(run):
    change(run, 6, loss=LOSS[4][0] + 1e-12)  # of a step that was taken back, even


def wrong_norm(run):
    change(run, -1, grad_norm=0.0)


def wrong_state(run):
    change(run, 7, digests={"0": "another state of 0 after 4"})  # the same step as it was made before


def doubled_step(run):
    run.stepped.append(stepped("c", 3, 8, 11.5, "1"))


def left_out_step(run):
    run.stepped = [event for event in run.stepped if event.step != 7]


def never_applied(run):
    run.stepped = [event for event in run.stepped if (event.step, event.generation) != (3, 1)]


def other_base(run):
    run.opened[4] = dataclasses.replace(run.opened[4], base=Stamp(4, 2))


def stranger(run):
    run.stepped.append(stepped("b", 2, 4, 6.0, "1"))


def unknown_generation(run):
    run.founded.pop()


def side_by_side(run):
    run.stepped += [stepped("b", 1, 4, 6.0, "1"), stepped("b", 1, 5, 7.0, "1")]


def lost_settled_step(run):
    change(run, 6, step=4)
    run.stepped.append(stepped("a", 1, 5, 4.6, "0"))


def both_sides(run):
    run.partitions = [NetworkPartition(0.9, 3.5, frozenset({"b"}))]


def without_a_vote(run):
    run.stepped.append(stepped("a", 1, 5, 4.6, "0"))  # b has not made step 4, so it cannot have voted on step 5


def without_a_member(run):
    run.stepped = [event for event in run.stepped if event.member != "c"]
    run.opened.pop()  # of c


def comes_back(run):
    change(run, 6, time=6.0)  # a has begun generation 2 at 5.5


def other_members(run):
    run.opened[3:] = [dataclasses.replace(opening, members=("a", "c", "d")) for opening in run.opened[3:]]


def seen_late(run):
    side_by_side(run)
    run.founded[1:] = [(record, 11.5) for record, _ in run.founded[1:]]


def other_past(run):
    run.founded[2] = (dataclasses.replace(run.founded[2][0], lineage=((1, Stamp(0, 0)), (2, Stamp(2, 1)))), 8.0)


def from_what_was_taken_back(run):
    run.opened[3:] = [dataclasses.replace(opening, base=Stamp(4, 1)) for opening in run.opened[3:]]


def idle_generation_between(run):
    """Step 3 was settled, since step 4 was made; generation 2 makes none, and generation 3 begins with step 2."""
    run.stepped = [event for event in run.stepped if event.generation == 1]
    run.opened[3:] = [dataclasses.replace(opening, base=Stamp(2, 1)) for opening in run.opened[3:]]
    run.stepped += [
        stepped(member, 3, step, step + 6.0, layer)
        for step in range(3, 9)
        for member, layer in (("a", "0"), ("c", "1"))
    ]


def nobody_lost(run):
    """Generation 2 is member a alone, which takes all its steps into generation 3."""
    run.opened[3:] = [dataclasses.replace(opening, base=Stamp(4, 2)) for opening in run.opened[3:]]
    run.stepped += [stepped("a", 3, 5, 8.6, "0"), stepped("c", 3, 5, 8.6, "1")]


def voted_change(run):
    """b leaves by a vote, with all its state; step 4 is lost all the same."""
    run.founded[1] = (dataclasses.replace(run.founded[1][0], leaving=("b",)), 5.0)
    run.broken = set()


def nobody_begins(run):
    del run.opened[3:]


def keeps_groups(run):
    run.opened += [
        dataclasses.replace(run.opened[4], time=8.6 + n / 10, left=groups) for n, groups in enumerate((2, 3, 1, 4))
    ]


def goes_back(run, redundancy, **values):
    """After step 4 generation 2 goes back to step 0."""
    record = dataclasses.replace(run.founded[1][0], regress=True, **values)
    run.founded[1:] = [(record, 5.0)]
    run.opened[2:] = [opened("a", 2, (0, 0), ("a",), 5.5)]
    run.stepped = [event for event in run.stepped if event.generation == 1]
    run.stepped += [stepped("a", 2, step, step + 5.5, "0") for step in range(1, 9)]
    return judge([run], TRUTH, WEIGHTS, 8, 1, redundancy)


@pytest.mark.parametrize(
    ("breach", "words"),
    [
        (wrong_loss, "loss"),
        (wrong_norm, "gradient norm"),
        (wrong_state, "another state of layer 0"),
        (doubled_step, "but step 9 was due"),
        (left_out_step, "but step 7 was due"),
        (never_applied, "nobody has applied step 3"),
        (other_base, "begins at"),
        (stranger, "without being a member"),
        (unknown_generation, "never held"),
        (side_by_side, "2 steps of generation 1 after the next one was founded"),
        (lost_settled_step, "had reached step 5, but generation 2 went on from step 3"),
        (both_sides, "cut off"),
        (without_a_vote, "step 5 of generation 1 without the vote of b, which had not made step 4"),
        (without_a_member, "step 6 of generation 3 without the vote of c, which had not begun it"),
        (comes_back, "step 4 of generation 1 after it had begun generation 2"),
        (other_members, "the store has a, c"),
        (seen_late, "2 steps of generation 1 after the next one was founded"),
        (other_past, "by the record of generation 3 at Stamp(step=2, generation=1)"),
        (from_what_was_taken_back, "which its record says was taken back"),
        (idle_generation_between, "generation 1 had reached step 4, but generation 3 went on from step 2"),
        (nobody_lost, "none of its members was lost and all of them had made more"),
        (voted_change, "generation 1 had made step 4, none of its members was lost and it ended by a vote"),
        (nobody_begins, "nobody has begun generation 3"),
        (keeps_groups, "c had 1 groups of older generations open at each of 4 openings"),
    ],
)
def test_every_breach_is_found(breach, words):
    run = good_run()
    breach(run)
    breaches = judge([run], TRUTH, WEIGHTS, 8)
    assert any(words in sentence for sentence in breaches), breaches


def test_one_vote_under_way_may_end_behind_a_cut_and_a_regress_may_go_back_farther():
    run = good_run()
    run.partitions = [NetworkPartition(2.5, 4.0, frozenset({"b"}))]
    assert judge([run], TRUTH, WEIGHTS, 8) == []
    assert goes_back(good_run(), None) == []


def test_a_run_goes_back_to_a_checkpoint_only_where_more_is_lost_than_the_redundancy_covers():
    assert goes_back(good_run(), 0) == []
    (breach,) = goes_back(good_run(), 1)
    assert "generation 2 went back from step 4 to 0, though of generation 1 only b was lost" in breach
    (breach,) = goes_back(good_run(), 0, leaving=("b",))
    assert "only nobody was lost" in breach


def test_losses_add_up_as_long_as_no_copies_were_made_anew():
    """a, b and c train; b is lost, a and c keep the copies that they have; then c is lost before others were made."""

    def run(copies):
        first = Generation(1, ("a", "b", "c"))
        second = dataclasses.replace(first.successor(("a", "c"), base=Stamp(0, 0), reached=2), copies=copies)
        third = second.successor(("a",), base=Stamp(2, 1), reached=4, regress=True)
        segment = Segment(0)
        segment.founded = [(first, 0.0), (second, 3.0), (third, 6.0)]
        segment.opened = [opened(member, 1, (0, 0), ("a", "b", "c"), 0.5) for member in "abc"]
        segment.opened += [opened(member, 2, (2, 1), ("a", "c"), 3.5) for member in "ac"]
        segment.opened.append(opened("a", 3, (0, 0), ("a",), 6.5))
        segment.stepped = [stepped(member, 1, step, step, "0") for step in (1, 2) for member in "abc"]
        segment.stepped += [stepped(member, 2, step, step + 1.0, "0") for step in (3, 4) for member in "ac"]
        return [text for text in judge([segment], TRUTH, WEIGHTS, 8, redundancy=1) if "went back" in text]

    assert run({}) == []
    assert len(run(None)) == 1


def test_what_async_may_take_back_is_counted_from_the_newest_step_of_all_generations():
    run = good_run()
    run.opened[2] = opened("a", 2, (2, 1), ("a",), 5.5)
    run.opened[3:] = [dataclasses.replace(opening, base=Stamp(1, 1)) for opening in run.opened[3:]]
    run.stepped = [event for event in run.stepped if event.generation == 1]
    run.stepped.append(stepped("a", 2, 3, 6.0, "0"))  # not as far as generation 1: step 2 is settled, whatever follows
    run.stepped += [
        stepped(member, 3, step, step + 7.0, layer)
        for step in range(2, 9)
        for member, layer in (("a", "0"), ("c", "1"))
    ]
    breaches = judge([run], TRUTH, WEIGHTS, 8, settled_within=2)
    assert "segment 0: generation 1 had reached step 4, but generation 3 went on from step 1" in breaches


def test_a_change_that_was_broken_off_may_take_back_a_step_that_not_all_have_made():
    run = good_run()
    voted_change(run)
    run.broken = {1}
    assert judge([run], TRUTH, WEIGHTS, 8) == []
    run.broken = None
    assert judge([run], TRUTH, WEIGHTS, 8) == []


def test_a_generation_that_is_wholly_behind_a_cut_goes_on_until_another_is_founded():
    run = good_run()
    run.partitions = [NetworkPartition(5.9, 7.9, frozenset({"a"}))]  # generation 2 is a alone
    assert judge([run], TRUTH, WEIGHTS, 8) == []
    run.partitions = [NetworkPartition(8.9, 11.5, frozenset({"a"}))]  # generation 3 is a and c
    assert any("a applied 3 steps while it was cut off" in text for text in judge([run], TRUTH, WEIGHTS, 8))


def test_last_weights_are_compared_by_layer():
    breaches = judge([good_run()], TRUTH, {"stem": "w0", "head": "other"}, 8)
    assert breaches == ["the last weights of layer head differ from the uninterrupted run's"]
    assert judge([good_run()], TRUTH, {"stem": "w0"}, 8)


def test_segments_must_meet():
    """The store was lost after step 3 had been made: the second segment goes on from a checkpoint of at most that."""
    first, second = Segment(0), Segment(3)
    first.founded = second.founded = [(Generation(1, ("a",)), 0.0)]
    first.opened = [opened("a", 1, (0, 0), ("a",), 0.5)]
    first.stepped = [stepped("a", 1, step, step, "0") for step in (1, 2, 3)]
    second.opened = [opened("a", 1, (3, 0), ("a",), 4.5)]
    second.stepped = [stepped("a", 1, step, step + 2, "0") for step in (4, 5)]
    assert judge([first, second], TRUTH, WEIGHTS, 5) == []
    first.stepped.pop()
    assert judge([first, second], TRUTH, WEIGHTS, 5) == ["segment 0: nobody has applied step 3 of generation 0"]


def test_lines_of_members_are_read():
    run = Segment()
    lines = [
        {"kind": "open", "member": "a", "generation": 1, "base": [0, 0], "members": ["a"], "ways": [[0]], "time": 1.0},
        {
            "kind": "step",
            "member": "a",
            "generation": 1,
            "step": 1,
            "loss": 1.0,
            "grad_norm": 0.5,
            "digests": {},
            "time": 2.0,
        },
        {"kind": "other", "member": "a", "time": 3.0},
    ]
    read_segment(lines, run)
    assert run.opened == [opened("a", 1, (0, 0), ("a",), 1.0)]
    assert run.stepped == [Stepped("a", 1, 1, 1.0, 0.5, {}, 2.0)]
